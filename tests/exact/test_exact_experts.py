"""Mixtures of experts with ``reproducible=True``: the same bits wherever experts are."""

from functools import partial

import pytest
import torch
from beside_plain import seeded
from exact_tasks import TASKS, mixtures
from exact_training import EXPERT_LAYOUTS, Part, assert_same_bits, reference, trained, trained_in_modes
from families import SEED, WHOLE, cases, family, number
from mixtures import FAMILIES
from pool import on_ranks
from small_engines import engine_of, everywhere, own_part, train_step
from small_mixture import NUM_EXPERTS, PLAN, WIDTH, StackedExperts, layers, tokens
from torch import nn

import paramp
from paramp.config.reproducible import MODES
from paramp.models import MoEGPT

LAYOUTS = [*EXPERT_LAYOUTS, "tp2", "tp2 + sp", "dp2", "dp2 + zero1", "pp2", "fsdp2", "dp2·tp2"]
EVERYTHING = [(layout, mode) for layout in LAYOUTS for mode in MODES]
PART = [("ep2·tp2", "32-true")]
STEPS = number(4, 8)


@family
@pytest.mark.parametrize(("layout", "mode"), cases("exact experts", EVERYTHING, PART, 3))
def test_mixtures_have_the_same_bits(layout, mode):
    task = "mixtures of 4 layers" if "zero-bubble" in layout else "mixtures"
    expected = reference(task, mode, STEPS)
    assert expected["num_skipped"] >= 1 or not mode.startswith("16")
    assert expected["steps"][-1][-1]
    assert_same_bits(trained(task, mode, layout, Part(0, STEPS)), expected)


OTHERS = [(name, layout) for name in FAMILIES for layout in ("ep2", "ep4", "ep2·pp2", "fsdp2·ep2")]
OTHERS = [cell for cell in OTHERS if cell != ("OLMoE", "ep2·pp2")]  # transformers has no pipeline plan of it
OTHERS += [(name, "ep2·tp2") for name in ("Mixtral", "DeepSeek-V3", "OLMoE")]  # the plans of the others are refused
OTHERS += [("mixtures, checkpointed", "ep2")]


@family
@pytest.mark.parametrize(("task", "layout"), cases("exact families", OTHERS, [("Mixtral", "ep2")], 2))
def test_other_mixtures_have_the_same_bits(task, layout):
    pytest.importorskip("transformers")
    modes = {"32-true": 3} | ({"16-mixed": 4, "bf16-mixed": 3} if WHOLE or SEED else {})
    for mode, trace in trained_in_modes(task, modes, layout).items():
        assert_same_bits(trace, reference(task.partition(",")[0], mode, modes[mode]))


RESUMED = [
    (before, after, mode)
    for before, after in (("ep4", "1"), ("fsdp2·ep2", "ep2·tp2"), ("tp2", "ep2"), ("ep2·pp2", "dp2·ep2 + zero1"))
    for mode in ("16-mixed", "bf16-naive")
]


@family
@pytest.mark.parametrize(
    ("before", "after", "mode"), cases("exact experts resumed", RESUMED, [("ep4", "1", "16-mixed")], 1)
)
def test_a_run_that_was_stopped_goes_on_in_another_layout(before, after, mode, tmp_path):
    path, stop = str(tmp_path / "checkpoint"), STEPS // 2
    first = trained("mixtures", mode, before, Part(0, stop, save=path))
    expected = reference("mixtures", mode, STEPS)
    assert first["steps"] == expected["steps"][:stop]
    assert_same_bits(trained("mixtures", mode, after, Part(stop, STEPS, load=path)), expected)


@on_ranks(2)
def test_it_trains_as_plain_torch_does(world):
    """Equal bits alone would also be those of a mistake that every layout makes. The balance is each sample's."""
    batch = TASKS["mixtures"].batch(0)
    model, same = (seeded(partial(mixtures, dropout=0.0), seed=7) for _ in range(2))
    for x, y in zip(*batch, strict=True):
        (MoEGPT.loss(model(x[None]), y[None]) / 4).backward()
    with paramp.launch_from_torch({"reproducible": {"slices": 4}, "parallel": {"expert": 2}}) as context:
        engine = engine_of(same, MoEGPT.loss, partial(torch.optim.SGD, lr=1.0))
        engine.forward_backward(*(one.chunk(2)[context.dp.rank] for one in batch))
        engine.step()
        found = engine.full_state_dict()
    for name, parameter in model.named_parameters():
        way = parameter.detach() - found[name]
        torch.testing.assert_close(way, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


@on_ranks(2)
def test_tensor_ranks_have_whole_experts_and_compute_the_same(world):
    """Each expert's rows in one call, as in one process."""
    rows = []

    class Watched(StackedExperts):
        def forward(self, hidden, index, weights):
            output = super().forward(hidden, index, weights)
            rows.append((hidden.detach(), output.detach()))
            return output

    def with_watched_experts():
        model = layers()
        for layer in model:
            layer.experts.__class__ = Watched
        return model

    found, plan = [], PLAN | {"*.up": "colwise", "*.down": "rowwise"}
    for parallel in ({"tensor": 2}, {"data": 2}):
        with paramp.launch_from_torch({"reproducible": True, "parallel": parallel}):
            engine = engine_of(with_watched_experts(), plan=plan)
            rows.clear()
            engine.forward_backward(tokens(4), torch.zeros(4, WIDTH))
            found.append([*rows])
            weight = engine.module[0].experts.weight
            assert (type(weight), tuple(weight.shape)) == (nn.Parameter, (NUM_EXPERTS, WIDTH, WIDTH))
    assert len(found[0]) > 8
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    digests = everywhere([float(output.double().sum()) for _, output in found[0]])
    assert digests[0] == digests[1]


class Chosen(nn.Module):
    """Four experts that multiply with a number each, all chosen for each token, in an order of their own."""

    def __init__(self, factors):
        super().__init__()
        self.experts = StackedExperts()
        self.experts.weight.data = torch.eye(WIDTH) * torch.tensor(factors)[:, None, None]

    def forward(self, x):
        return self.experts(x, weights=torch.ones(len(x), 4), index=torch.tensor([[2, 0, 3, 1]]).expand(len(x), -1))


def summed(outputs, output, _):
    outputs.append(output)
    return output.sum()


@on_ranks(2)
def test_what_experts_return_is_added_in_the_order_of_the_experts(world):
    for precision, factors, expected in (
        ("32-true", [1e8, 1.0, -1e8, 1.0], 1.0),  # in a tree 0, and in that of the choice -1e8 + 1e8 + 1 + 1 = 2
        ("bf16-naive", [256.0, 1.0, 1.0, 0.0], 258.0),  # in bfloat16 each 1 would be lost
    ):
        outputs, config = [], {"reproducible": True, "precision": precision, "parallel": {"expert": 2}}
        with paramp.launch_from_torch(config):
            engine = engine_of(nn.Sequential(Chosen(factors)), partial(summed, outputs), plan=PLAN)
            engine.forward_backward(torch.ones(2, WIDTH), torch.ones(2, 1))
        assert all(output.eq(expected).all() for output in outputs)
        assert len(outputs) == 2


def check_gradients(num_choices, num_experts, parallel):
    """Those of mixtures whose routers choose among ``num_choices``, as in plain torch."""

    def build():
        model = layers()
        for layer in model:
            layer.router, layer.experts = nn.Linear(WIDTH, num_choices, bias=False), StackedExperts(num_experts)
        return model

    x, y, plain = tokens(), torch.zeros(16, WIDTH), build()
    nn.functional.mse_loss(plain(x), y).backward()
    with paramp.launch_from_torch({"reproducible": True, "parallel": parallel}) as context:
        engine = engine_of(build(), optimizer=partial(torch.optim.SGD, lr=1.0), plan=PLAN)
        engine.forward_backward(*own_part(context, x, y))
        engine.step()
        found = engine.full_state_dict()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parameter.detach() - found[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_an_index_past_the_last_expert_is_no_experts_in_one_process_too():
    """Plain torch's experts leave such rows out."""
    check_gradients(NUM_EXPERTS + 1, NUM_EXPERTS, {})


@on_ranks(4)
def test_data_ranks_that_shard_an_odd_number_of_experts_train_as_plain_torch_does(world):
    """Each has a part of the three experts, along their dim 1."""
    check_gradients(6, 6, {"data": {"shard": 4}, "expert": 2})


def hooked(model):
    model[1].experts.weight.register_hook(lambda gradient: gradient)


def tied(model):
    model[1].experts.weight = model[0].experts.weight


class Twice(nn.Sequential):
    def forward(self, x):
        return super().forward(super().forward(x))


@on_ranks(2)
def test_weights_whose_gradients_cannot_be_kept_apart_are_refused_by_name(world):
    with paramp.launch_from_torch({"reproducible": True, "parallel": {"expert": 2}}):
        for change in (hooked, tied):
            model = layers()
            change(model)
            with pytest.raises(paramp.ConfigError, match=r"[01].experts.weight, of experts .* is tied or has hooks"):
                engine_of(model, plan=PLAN)
        x = torch.randn(2, 8)
        engine = engine_of(Twice(*layers()), plan=PLAN)
        with pytest.raises(paramp.ConfigError, match=r"experts.weight', of experts that .* is used twice in a forward"):
            engine.forward_backward(x, x)
    model = Twice(*layers())
    for _ in range(2):
        with paramp.launch_from_torch({"reproducible": True}):  # each data rank has all experts
            assert train_step(engine_of(model, plan=PLAN), x).stepped
    model[0].experts.forward = lambda *inputs: 0
    own = pytest.raises(paramp.ConfigError, match=r"'0.experts' has a forward that was set on the object")
    with paramp.launch_from_torch({"reproducible": True}), own:
        engine_of(model, plan=PLAN)
