"""optimizer_state="bf16": its mean, the same bits in every layout, and checkpoints between layouts and formats."""

import copy
import functools

import pytest
import torch
from families import cases, family
from lamb import ScheduleFree
from layouts import layouts
from pool import run_on_ranks
from reference import batches, local, small_gpt
from small_engines import assert_same_tensors, engine_of, gradients_at, own_part, set_gradients, train_step
from torch import nn

import paramp
from paramp.checkpoint.open_checkpoint import OpenCheckpoint
from paramp.checkpoint.resharding import read_tensor
from paramp.compat.colossalai.amp.convert import convert_to_amp
from paramp.precision.stochastic_rounding import key_of, random_bits, rounded

BF16 = {"optimizer_state": "bf16", "seed": 7}
HALF = {"precision": "bf16-true", "rounding": "stochastic"}


def hooked(parameters, **options):
    optimizer = torch.optim.AdamW(parameters, **options)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


OWN_STEPS = {
    "foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "not fused": functools.partial(torch.optim.AdamW, fused=False),
    "step hook": hooked,
}


def second_moments(config, make):
    """AdamW's second moment of 4096 weights, all with the same gradients, after each step."""
    with paramp.launch_from_torch(config):
        adamw = functools.partial(make, lr=1e-4)
        engine = engine_of(nn.Linear(64, 64, bias=False), lambda output, _: output.mean(), adamw)
        found = []
        for value in [4.0] * 10 + [0.1] * 50:
            train_step(engine, torch.full((4, 64), 64 * value))
            (state,) = engine.optimizer.state.values()
            found.append(state["exp_avg_sq"].clone())
        return found


@pytest.mark.parametrize("make", [torch.optim.AdamW, *OWN_STEPS.values()], ids=["fused", *OWN_STEPS])
def test_the_second_moment_follows_the_fp32_one(make):
    exact, found = second_moments({}, make), second_moments({"optimizer_state": "bf16"}, make)
    assert (exact[0].dtype, found[0].dtype) == (torch.float32, torch.bfloat16)
    nearest = before = torch.zeros(())
    for after in (one[0, 0] for one in exact):
        change = after - before * 0.999
        nearest, before = (nearest * 0.999 + change).bfloat16().float(), after
    for step in (5, 20, 59):
        error = found[step].float().std() / 64
        assert (found[step].float().mean() - exact[step].mean()).abs() <= 3 * error
    # It stands still, because 0.001 of it is below half a unit in its last place.
    assert (nearest - exact[-1].mean()).abs() > 10 * error


def moments(beta, steps, power):
    """An average of normal numbers to ``power``: in fp32, rounded to nearest, and rounded stochastically.

    2-dim: of 4 standard deviations, whose squares lie within a binade, 500 elements each.
    """
    generator = torch.Generator().manual_seed(0)
    deviations = torch.tensor([1.0, 1.25, 1.5, 1.75]).sqrt()[:, None]
    exact, nearest, stochastic = (torch.zeros(4, 500) for _ in range(3))
    for _ in range(steps):
        value = (torch.randn(4, 500, generator=generator) * deviations) ** power
        exact.lerp_(value, 1 - beta)
        nearest.lerp_(value, 1 - beta).copy_(nearest.bfloat16())
        drawn = torch.randint(-(2**31), 2**31, (4, 500), generator=generator).int()
        stochastic.lerp_(value, 1 - beta).copy_(rounded(stochastic, drawn, torch.bfloat16))
    return exact, nearest, stochastic


def test_what_rounding_costs_moments_of_normal_gradients():
    """The figures of docs/precision.md."""

    def noise(exact, stochastic):
        return ((stochastic - exact).std(1) / exact.square().mean(1).sqrt()).mean()

    exact, nearest, stochastic = moments(0.999, 6000, 2)
    ratios = nearest.mean(1) / exact.mean(1)
    assert 1.4 < ratios.min() < ratios.max() < 2.2, ratios
    assert ratios.mean() == pytest.approx(1.7, abs=0.1)
    assert stochastic.mean() / exact.mean() == pytest.approx(1, abs=0.005)
    assert noise(exact, stochastic) == pytest.approx(0.043, abs=0.004)
    assert (exact.std(1) / exact.mean(1)).mean() == pytest.approx(0.032, abs=0.003)
    exact, _, stochastic = moments(0.95, 200, 2)
    assert noise(exact, stochastic) == pytest.approx(0.008, abs=0.001)
    assert (exact.std(1) / exact.mean(1)).mean() == pytest.approx(0.23, abs=0.02)
    exact, _, stochastic = moments(0.9, 100, 1)
    assert noise(exact, stochastic) == pytest.approx(0.005, abs=0.001)


def dtypes(states):
    return {value.dtype for state in states.values() for value in state.values() if value.ndim}


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, **options)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)


def muon_and_nadam(model):
    matrices = [value for name, value in model.named_parameters() if "mlp" in name and value.ndim == 2]
    rest = [value for value in model.parameters() if all(value is not matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices), torch.optim.NAdam(rest, eps=1e-4)]


MAKES = {
    "SGD": sgd,
    "AdamW": lambda model: adamw(model, amsgrad=True),
    "AdamW's own step": lambda model: adamw(model, foreach=True),
    "Muon": muon_and_nadam,
}
LAYOUTS = layouts("dp2, dp2 + zero1, fsdp2, tp2, pp2")
PART = ["dp2 + zero1", "fsdp2"]


def save(world, layout, make, path, load=None, steps=3, **config):
    """Save after steps with gradients made by hand; the second is skipped, as one is infinite."""
    with paramp.launch_from_torch({"parallel": layout} | BF16 | config) as context:
        model = small_gpt(num_layers=2)
        engine = engine_of(model, model.loss, MAKES[make](model))
        if load is not None:
            engine.load(load)
        for step, batch in enumerate(batches(steps)):
            engine.forward_backward(*own_part(context, *batch))
            set_gradients(engine, gradients_at(step))
            if step == 1:
                local(next(iter(engine.parameters())).grad).view(-1)[0] = float("inf")
            assert engine.step().stepped == (step != 1)
        assert engine.check_replicas() == []
        engine.save(path)


def tensors(path, prefixes=("model.", "optimizer.")):
    with OpenCheckpoint(path) as opened:
        return {name: read_tensor(opened, name) for name in opened.header.tensors if name.startswith(prefixes)}


def check_same(found, expected):
    assert_same_tensors(found, expected)
    assert {name: value.dtype for name, value in found.items()} == {name: one.dtype for name, one in expected.items()}


@pytest.mark.parametrize("config", [{}, HALF, {"precision": "bf16-naive", "masters": "remainder"}])
def test_state_is_rounded_by_the_index_of_its_element(config, tmp_path):
    """Against whole tensors: a hash of the seed, the step and the name is the only randomness."""
    save(None, {}, "SGD", tmp_path / "saved", **config)
    found, momenta = (
        tensors(tmp_path / "saved"),
        {name: torch.zeros_like(value) for name, value in gradients_at(0).items()},
    )
    for number, step in enumerate((0, 2)):
        for name, gradient in gradients_at(step).items():
            exact = (momenta[name] * 0.5 + gradient).view(-1)
            drawn = random_bits(torch.arange(len(exact)), (key_of(7, name) + 0x9E3779B1) % 2**32, torch.tensor(number))
            momenta[name] = rounded(exact, drawn, torch.bfloat16).float().view(gradient.shape)
    for name, momentum in momenta.items():
        stored = found[f"optimizer.{name}.momentum_buffer"]
        assert stored.dtype is torch.bfloat16
        assert torch.equal(stored.float(), momentum), name


@family
@pytest.mark.parametrize("make", cases("state layouts", [*MAKES], ["AdamW"], 1))
def test_every_layout_has_the_bits_of_one_process(make, tmp_path):
    """From the start, and from its checkpoint."""
    save(None, {}, make, tmp_path / "one")
    save(None, {}, make, tmp_path / "one, on", load=tmp_path / "one")
    run_on_ranks(2, __name__, "save_all", {"make": make, "folder": str(tmp_path)})
    for layout in cases("layouts of the state", [*LAYOUTS], PART, 2):
        for name in ("", ", on"):
            check_same(tensors(tmp_path / f"{layout}{name}"), tensors(tmp_path / f"one{name}"))


def save_all(world, make, folder):
    for name in cases("layouts of the state", [*LAYOUTS], PART, 2):
        layout = LAYOUTS[name]
        save(world, layout, make, f"{folder}/{name}")
        save(world, layout, make, f"{folder}/{name}, on", load=f"{folder}/one")


@family
@pytest.mark.parametrize("make", cases("state formats", ["AdamW", "Muon"], ["Muon"], 1))
def test_a_checkpoint_loads_into_the_other_format(make, tmp_path):
    """fp32 is rounded to nearest, bf16 is widened; the state has the format also before the next step."""
    for saved, loaded in (("full", "bf16"), ("bf16", "full")):
        there, back = tmp_path / saved, tmp_path / f"{saved} as {loaded}"
        save(None, {}, make, there, optimizer_state=saved)
        save(None, {}, make, back, load=there, steps=0, optimizer_state=loaded)
        expected, dtype = tensors(there), {"full": torch.float32, "bf16": torch.bfloat16}[loaded]
        state = {name: value for name, value in expected.items() if name.startswith("optimizer.") and value.ndim}
        expected |= {name: value.to(dtype) for name, value in state.items()}
        check_same(tensors(back), expected)


LOADED = [("32-true", torch.optim.AdamW), ("32-true", torch.optim.Adagrad)]
LOADED += [("16-true", functools.partial(torch.optim.AdamW, eps=1e-4))]


@pytest.mark.parametrize(("mode", "make"), LOADED)
def test_state_that_the_user_loads_is_stored_in_bf16(mode, make):
    with paramp.launch_from_torch({"precision": mode} | BF16):
        engine = engine_of(nn.Linear(4, 4), optimizer=make)
        for _ in range(2):
            train_step(engine, torch.randn(2, 4), torch.zeros(2, 4))
            before = copy.deepcopy(engine.optimizer.state_dict())
            engine.optimizer.load_state_dict(before)
            after = engine.optimizer.state_dict()["state"]
            for index, state in before["state"].items():
                check_same(after[index], state)
            assert dtypes(after) == {torch.bfloat16}


REFUSED = {
    "ASGD keeps weights in its state": ("32-true", torch.optim.ASGD),
    "ScheduleFree keeps weights in its state": ("bf16-naive", ScheduleFree),
    "subtracts states": ("32-true", functools.partial(torch.optim.RMSprop, centered=True)),
    "Adafactor needs whole matrices": ("32-true", torch.optim.Adafactor),
    "foreach=True is set": ("bf16-true", functools.partial(OWN_STEPS["foreach"], eps=1e-4)),
    "fused=False or": ("bf16-true", functools.partial(OWN_STEPS["not fused"], eps=1e-4)),
    "it has step hooks": ("bf16-true", functools.partial(hooked, eps=1e-4)),
    "NAdam is not one of": ("16-true", functools.partial(torch.optim.NAdam, eps=1e-4)),
}


def test_what_cannot_be_rounded_is_refused():
    for message, (mode, make) in REFUSED.items():
        found = f"optimizer_state: got 'bf16', expected 'full'.*{message}"
        with paramp.launch_from_torch({"precision": mode} | BF16), pytest.raises(paramp.ConfigError, match=found):
            engine_of(nn.Linear(4, 4), optimizer=make)


def test_the_setting_is_checked():
    for message, options in {
        "got 'bf16', expected 'full', because 64-true": {"precision": "64-true", "optimizer_state": "bf16"},
        "got 'fp8', expected 'full'": {"precision": "32-true", "optimizer_state": "fp8"},
    }.items():
        with pytest.raises(paramp.ConfigError, match=f"optimizer_state: {message}"):
            paramp.Config(**options)
    mode = {"mode": "16-naive", "optimizer_state": "bf16"}
    assert paramp.Config(precision=mode).precision.optimizer_state == "bf16"
    model = nn.Linear(4, 4)
    with pytest.raises(paramp.ConfigError, match="optimizer_state: got 'bf16', expected 'full'"):
        convert_to_amp(model, torch.optim.AdamW(model.parameters()), None, mode)
