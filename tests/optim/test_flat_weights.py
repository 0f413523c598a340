"""The step over flat buffers against torch's own optimizers on separate tensors."""

import copy
import functools
import math
import re

import pytest
import small_mixture
import torch
import torch.nn.functional as F
from beside_plain import plain_step, randn, seeded, train_both
from counting import Operators
from pages import functions_of, read
from pool import on_ranks
from reference import assert_trained, local
from small_engines import assert_same_tensors, each_raises, engine_of, run_batch, sgd, train_step
from torch import nn
from torch.utils._pytree import tree_leaves

import paramp
from paramp.base import loop_block_sizes
from paramp.precision.compute_context import default_dtype
from paramp.precision.modes import PRESETS


class Net(nn.Module):
    """Odd sizes, a scalar, a parameter that is used when asked, and one that is never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(7, 13), nn.Linear(13, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.sometimes, self.never = nn.Linear(13, 13), nn.Linear(2, 2)
        self.use = False

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.use:
            x = x + self.sometimes(x)
        return self.second(x) * self.scale


def data(count, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((8, 7), (8, 3))
    return [tuple(torch.randn(size, generator=generator).to(dtype) for size in sizes) for _ in range(count)]


def grouped(kind, **options):
    """Two groups that differ in their options, dealt out in turn so that neighbours are in different ones."""

    def make(parameters):
        own = list(parameters)
        return kind([{"params": own[::2], "lr": 0.02}, {"params": own[1::2], "weight_decay": 0.3}], lr=0.05, **options)

    return make


def momentum_in_one_group(parameters):
    first, *others = parameters
    return torch.optim.SGD([{"params": others, "momentum": 0.9}, {"params": [first]}], lr=0.05)


def scheduled(parameters):
    optimizer = grouped(torch.optim.SGD)(parameters)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # which replaces its step()
    return optimizer


def stepping_twice(parameters):
    optimizer = grouped(torch.optim.SGD)(parameters)
    step = optimizer.step
    optimizer.step = lambda: (step(), step())
    return optimizer


adamw = functools.partial(torch.optim.AdamW, eps=1e-4)
OPTIMIZERS = {
    "adamw": grouped(torch.optim.AdamW),
    "adam": grouped(torch.optim.Adam, amsgrad=True, maximize=True),
    "sgd": grouped(torch.optim.SGD, momentum=0.9, nesterov=True),
    "plain sgd": grouped(torch.optim.SGD),
    "momentum in one group": momentum_in_one_group,
    "scheduled": scheduled,
    "stepping twice": stepping_twice,
    "dampened": grouped(torch.optim.SGD, momentum=0.9, dampening=0.5),
    "foreach": grouped(torch.optim.AdamW, foreach=True),
    "rmsprop": grouped(torch.optim.RMSprop, momentum=0.9),
}

KERNELS = {"adamw": "aten::_fused_adamw_", "adam": "aten::_fused_adam_"}
KERNELS |= dict.fromkeys(("sgd", "plain sgd", "momentum in one group", "scheduled"), "aten::_fused_sgd_")
"""Of torch; the others make their own step."""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_that_of_torchs_optimizer(name):
    """With clipping, the first step skipped, and a layer that has gradients in it and in some others only."""
    make, bad, used = OPTIMIZERS[name], (0, 4), (0, 2, 3, 5)
    model, ours, start = Net().double(), Net(), Net().state_dict()
    optimizer = make(model.parameters())
    with paramp.launch_from_torch({"clip_grad_norm": 0.5, "precision": "64-true"}):
        engine = engine_of(ours, optimizer=make(ours.parameters()))
        for step, (x, y) in enumerate(data(7, dtype=torch.float64)):
            model.use = ours.use = step in used
            engine.forward_backward(x, y)
            if step in bad:
                ours.second.weight.grad[0, 0] = float("nan")
            else:
                plain_step(model, optimizer, x, y, clip=0.5)
            with Operators() as operators:
                assert engine.step().stepped == (step not in bad)
            fused = [function.name() for function, _ in operators.calls if "_fused_" in function.name()]
            assert set(fused) == ({KERNELS[name]} if name in KERNELS else set())
            assert len(fused) < (7 if step in used else 5)  # the tensors that have gradients
        found, expected = dict(engine.named_parameters()), dict(model.named_parameters())
        assert_trained(found, expected, start, still="never", atol=1e-13)
        for group, theirs in zip(engine.optimizer.param_groups, optimizer.param_groups, strict=True):
            for one, other in zip(group["params"], theirs["params"], strict=True):
                if other.grad is not None:
                    state, expected = engine.optimizer.state.get(one, {}), optimizer.state.get(other, {})
                    assert state.keys() == expected.keys()
                    for key, value in expected.items():
                        torch.testing.assert_close(state[key], torch.as_tensor(value), atol=1e-12, rtol=1e-10, msg=key)


class Neighbours(nn.Module):
    """Equal weights, one after the other, of which a step uses some."""

    used = ()

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(7, dtype=torch.float64) for _ in range(3))

    def forward(self, x):
        return sum(x * self.weights[index] for index in self.used)


def test_neighbours_that_have_missed_other_steps_are_stepped_by_their_own_counts():
    """One misses two steps, the next one the second of them; the bias correction of both is then another one."""
    model, ours = Neighbours(), Neighbours()
    optimizer = torch.optim.AdamW(model.parameters())
    with paramp.launch_from_torch({"precision": "64-true"}):
        engine = engine_of(ours, optimizer=torch.optim.AdamW)
        for used, (x, _) in zip([(1, 2), (2,), (0, 1, 2), (0, 1, 2)], data(4, dtype=torch.float64), strict=True):
            model.used = ours.used = used
            plain_step(model, optimizer, x, x)
            assert train_step(engine, x).stepped
        for expected, found in zip(model.weights, ours.weights, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-13, rtol=0)


# ---------------------------------------------------------------------------------------------------- the buffers


def by_memory(parameters):
    """The sorted names of the parameters in each storage."""
    found = {}
    for name, parameter in parameters:
        found.setdefault(parameter.untyped_storage().data_ptr(), []).append(name)
    return sorted(sorted(names) for names in found.values())


@pytest.mark.parametrize("mode", PRESETS)
def test_every_trained_parameter_is_in_a_buffer_of_the_modes_dtype(mode):
    """Its gradient too, in another one."""
    with paramp.launch_from_torch({"precision": mode}):
        model = nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), Net(), nn.Linear(3, 16).requires_grad_(False))
        model.append(nn.Linear(16, 16))  # of which float8 takes the sizes
        given = dict(model.named_parameters())
        engine = engine_of(model)
        assert all(model.get_parameter(name) is one for name, one in given.items() if one.requires_grad)
        assert given["3.weight"].dtype is torch.float32  # a model that is not cast may share it
        kept = ["1.bias", "1.weight"] if mode == "O2" else []
        for name, parameter in model.named_parameters():
            assert parameter.dtype is (torch.float32 if name in kept else engine.precision.weights), name
        trained = sorted(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        expected = sorted(one for one in (kept, [name for name in trained if name not in kept]) if one)
        frozen = [["3.bias"], ["3.weight"]]
        assert by_memory(model.named_parameters()) == sorted(expected + frozen)
        for names in expected:  # each on a multiple of 64 elements
            places = [model.get_parameter(name).storage_offset() for name in names]
            assert not any((place - min(places)) % 64 for place in places)
        run_batch(engine, torch.ones(16, 7), torch.ones(16, 16))
        gradients = [(name, model.get_parameter(name).grad) for name in trained]
        assert by_memory(gradients) == expected
        stepped = [one for group in engine.optimizer.param_groups for one in group["params"]]  # masters, or weights
        in_order = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert by_memory(zip(in_order, stepped, strict=True)) == expected


@pytest.mark.parametrize("mode", ["O2", "16-naive", "bf16-true"])
@on_ranks(2)
def test_buffers_of_shards_that_are_masters_are_in_fp32(world, mode):
    with paramp.launch_from_torch({"precision": mode, "parallel": {"data": {"shard": 2}}}):
        engine = engine_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        dtypes = {buffer.weights.dtype for buffer in engine._weights.buffers}
    assert dtypes == {torch.bfloat16 if mode == "bf16-true" else torch.float32}


def test_a_buffer_has_one_optimizer_and_one_dtype_and_ends_once_it_is_long(monkeypatch):
    monkeypatch.setattr(loop_block_sizes, "BUCKET", 5)
    with paramp.launch_from_torch({"precision": "O2"}):  # batch norms are in fp32
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
        first, *others = model
        engine = engine_of(model, optimizer=[sgd(first.parameters()), sgd(nn.Sequential(*others).parameters())])
        # The first optimizer's; of the second, the batch norm's; and of its other ones 4 + 16 elements each.
        assert by_memory(engine.named_parameters()) == [[f"{index}.bias", f"{index}.weight"] for index in range(4)]


@pytest.mark.real_sizes
@pytest.mark.parametrize(
    ("mode", "options", "make"),
    [
        *((mode, {}, adamw) for mode in ("32-true", "64-true", "bf16-naive", "bf16-true")),
        ("16-naive", {"init_scale": 4.0}, adamw),
        ("bf16-true", {"rounding": "stochastic"}, adamw),
        *((mode, {}, make) for mode in ("32-true", "bf16-true") for make in (torch.optim.Adam, sgd)),
    ],
)
def test_temporaries_of_a_step_are_blocks(mode, options, make):
    """Of up to 4 MiB on a CPU; those of fp32 on a GPU are of up to 256 MiB, as computed."""
    assert 4 * loop_block_sizes.STEP_BLOCK["cuda"] == 256 * 2**20
    precision = {"mode": mode} | options
    with paramp.launch_from_torch({"precision": precision, "clip_grad_norm": 1.0}):
        engine = engine_of(nn.Linear(2**22, 1, bias=False), optimizer=make)
        run_batch(engine, torch.ones(1, 2**22), torch.ones(1, 1))
        known = {one.untyped_storage().data_ptr() for one in held_by(engine)}
        with Operators() as operators:
            assert engine.step().stepped
    made = [one for one in tree_leaves([found for _, found in operators.calls]) if torch.is_tensor(one)]
    made = [one.untyped_storage() for one in made]
    largest = max(one.nbytes() for one in made if one.data_ptr() not in known)
    assert 0 < largest <= 4 * 2**20  # a half-precision copy of the whole would have twice as many bytes


def held_by(engine):
    """Its weights, gradients, masters and state."""
    return [one for kind in kinds_held_by(engine) for one in kind]


def kinds_held_by(engine):
    """Its weights; gradients; masters, which may be the weights; and its optimizer's state."""
    parameters = [parameter for _, parameter in engine.named_parameters()]
    masters = [value for group in engine.optimizer.param_groups for value in group["params"]]
    masters += [stored for buffer in engine._weights.buffers for stored in buffer.masters.state]
    state = [value for state in engine.optimizer.state.values() for value in state.values()]
    kinds = (parameters, [one.grad for one in parameters], masters, state)
    return [[local(one) for one in kind] for kind in kinds]


BY_PAGE = functions_of("docs/memory.md")["bytes_a_parameter"]


def table_of_page():
    """By mode: bytes of weight, gradient, master, state, their sum, and the sum with the state in bf16."""
    lines = read("docs/memory.md").partition("| mode | weight |")[2].partition("\n\n")[0].splitlines()[2:]
    return {
        mode: [float(cell) if cell.isdigit() else 0.0 for cell in cells]  # none, or refused
        for modes, *cells in ([cell.strip() for cell in line.strip("| ").split("|")] for line in lines)
        for mode in re.findall(r"`([\w-]+)`", modes) or ["remainder"]
    }


LIKE = {"32-true": "32-true", "64-true": "64-true"}
LIKE |= dict.fromkeys(("16-mixed", "bf16-mixed", "fp8-mixed"), "mixed")
LIKE |= dict.fromkeys(("16-naive", "bf16-naive", "O2"), "naive")
LIKE |= dict.fromkeys(("16-true", "bf16-true", "O3", "transformer-engine", "transformer-engine-float16"), "true")
"""How the page names the row of a mode."""


@pytest.mark.real_sizes
@pytest.mark.parametrize("mode", LIKE)
def test_bytes_a_parameter(mode):
    """Those that docs/memory.md computes and has in its table."""
    table = table_of_page()
    assert LIKE.keys() == PRESETS.keys() == table.keys() - {"remainder"}
    for state in ("full", "bf16")[: 1 + (mode != "64-true")]:
        for remainder in (False, True)[: 1 + (LIKE[mode] == "naive")]:
            config = {"precision": mode, "optimizer_state": state} | ({"masters": "remainder"} if remainder else {})
            expected = BY_PAGE(LIKE[mode], bf16_state=state == "bf16", remainder=remainder)
            *kinds, full, with_bf16 = table["remainder" if remainder else mode]
            assert expected == (full if state == "full" else with_bf16)
            found = bytes_by_kind(config)
            assert sum(found) == pytest.approx(expected, rel=0.02)
            assert state == "bf16" or found == pytest.approx(kinds, rel=0.02, abs=0.02)


@pytest.mark.real_sizes
@on_ranks(2)
def test_bytes_a_parameter_of_parts(world):
    of_fp32 = ("32-true", "16-mixed", "bf16-mixed", "fp8-mixed")
    for mode in (*of_fp32, "16-naive", "bf16-naive", "O2", "bf16-true", "64-true"):
        for state in ("full", "bf16")[: 1 + (mode != "64-true")]:
            for parallel, parts in (({"data": {"shard": 2}}, {"shard": 2}), ({"zero": 1}, {"zero": 2})):
                config = {"precision": mode, "optimizer_state": state, "parallel": parallel}
                expected = BY_PAGE(LIKE[mode], **parts, bf16_state=state == "bf16")
                assert bytes_a_parameter(config) == pytest.approx(expected, rel=0.02)
    for parallel in ({"tensor": 2}, {"pipeline": {"size": 2, "microbatches": 2}}):
        found = bytes_a_parameter({"precision": "16-mixed", "parallel": parallel}, {"0": "colwise", "1": "rowwise"})
        assert found == pytest.approx(BY_PAGE("mixed") / 2, rel=0.02)
    config = {"parallel": {"zero": 1}, "precision": "16-naive", "masters": "remainder"}
    assert bytes_a_parameter(config) == pytest.approx(BY_PAGE("naive", zero=2, remainder=True), rel=0.02)


def bytes_a_parameter(config, plan=None):
    return sum(bytes_by_kind(config, plan))


def bytes_by_kind(config, plan=None):
    """Of all that this rank holds after a step with AdamW, each storage once, over the whole model's parameters."""
    with paramp.launch_from_torch(config):
        model = nn.Sequential(nn.Linear(320, 512), nn.Linear(512, 320))  # multiples of 16, for float8
        count = sum(parameter.numel() for parameter in model.parameters())
        engine = engine_of(model, optimizer=adamw, plan=plan)
        train_step(engine, torch.ones(2, 320))
        seen, found = set(), []
        for kind in kinds_held_by(engine):
            storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kind}
            found.append(sum(size for pointer, size in storages.items() if pointer not in seen) / count)
            seen |= storages.keys()
        return found


# ------------------------------------------------------------------------------------- what the user does besides


@pytest.mark.parametrize("make", [torch.optim.AdamW, functools.partial(sgd, momentum=0.9)], ids=["adamw", "sgd"])
def test_the_optimizers_own_state_is_saved_and_loaded(make):
    """Bit by bit; one that was saved before the first step is zeros."""
    with paramp.launch_from_torch():
        engine, other = (engine_of(Net(), optimizer=make) for _ in range(2))
        for seed, one in enumerate((engine, other)):
            for step, (x, y) in enumerate(data(3, seed)):
                one.module.use = one is other or step == 1  # the counts of steps differ
                train_step(one, x, y)
        other.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
        other.module.load_state_dict(engine.module.state_dict())
        for one in (engine, other):
            one.module.use = True
            for x, y in data(3, seed=2):
                train_step(one, x, y)
        assert_same_tensors(other.full_state_dict(), engine.full_state_dict())
        engine.optimizer.load_state_dict(make(Net().parameters()).state_dict())
        assert not any(value.any() for state in engine.optimizer.state.values() for value in state.values())


@pytest.mark.parametrize(("kind", "option"), [(torch.optim.SGD, {"momentum": 0.9}), (adamw, {"amsgrad": True})])
def test_a_state_is_refused_for_an_option_that_no_group_had_in_the_beginning(kind, option):
    """Before it changes anything."""

    def make(parameters, *options):
        return kind([{"params": [one], **own} for one, own in zip(parameters, options, strict=True)], lr=0.1)

    ((name, value),), x = option.items(), torch.ones(4, 4)
    state = make(nn.Linear(4, 4).parameters(), {}, option).state_dict()
    with paramp.launch_from_torch():
        engine = engine_of(nn.Linear(4, 4), optimizer=lambda own: make(own, {}, {}))
        with pytest.raises(paramp.ConfigError, match=f"optimizer: got a state to load with {name}={value}, for which"):
            engine.optimizer.load_state_dict(state)
        assert train_step(engine, x).stepped
        engine = engine_of(nn.Linear(4, 4), optimizer=lambda own: make(own, option, {}))
        engine.optimizer.load_state_dict(state)
        assert train_step(engine, x).stepped


def result_of(config, *values):
    """Of the step of one fp16 weight that gets the gradients ``values`` in turn, on each rank."""
    config = {"precision": {"mode": "16-naive", "init_scale": 1.0}, "gradient_accumulation": len(values)} | config
    with paramp.launch_from_torch(config) as context:
        terms = len(values) * context.dp.size
        engine = engine_of(nn.Linear(1, 1, bias=False), lambda output, target: (output * target).sum() * terms)
        return [train_step(engine, torch.ones(1, 1), torch.full((1, 1), value)) for value in values][-1]


def test_gradients_of_microbatches_add_up_in_fp32_where_asked():
    """In fp16, 1 more than 2048 is 2048 again."""
    for dtype, expected in (("float16", 2048.0), ("float32", 2051.0)):
        assert result_of({"grad_dtype": dtype}, 2048.0, 1.0, 1.0, 1.0).grad_norm == expected


@on_ranks(2)
def test_the_sum_over_data_ranks_is_made_in_the_dtype_asked_for(world):
    """Two gradients of 40000 are too much for fp16; their true sum is in fp32."""
    assert result_of({"grad_dtype": "float32", "reduce_dtype": "float16"}, 40000.0).overflow
    for reduced in ({"reduce_dtype": "float32"}, {}):  # else in the dtype of the gradients
        result = result_of({"grad_dtype": "float32"} | reduced, 40000.0)
        assert (result.overflow, result.grad_norm) == (False, 80000.0)


@on_ranks(2)
def test_the_sum_over_stages_is_made_in_the_dtype_asked_for(world):
    """Of a tied weight, which has a gradient of 40000 on each."""
    for reduced in ({"pp": "float16"}, {"pp": "float32"}, "float16", "float32"):
        config = {"precision": {"mode": "16-naive", "init_scale": 1.0}, "grad_dtype": "float32"}
        config |= {"reduce_dtype": reduced, "parallel": {"pipeline": {"size": 2, "microbatches": 2}}}
        with paramp.launch_from_torch(config):
            model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(2)))
            model[1].weight = model[0].weight
            nn.init.ones_(model[0].weight)
            engine = engine_of(model, lambda output, target: (output * target).sum())
            result = train_step(engine, torch.ones(2, 1), torch.full((2, 1), 40000.0))
            is_half = "float16" in str(reduced)
            assert (result.overflow, result.grad_norm == 80000.0) == (is_half, not is_half)


class Spectral(nn.Module):
    """A complex weight behind two layers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x):
        x = torch.fft.fft(self.down(torch.tanh(self.up(x)))) * self.filter
        return x.real + x.imag


@on_ranks(2)
def test_complex_weights_train_as_in_plain_torch(world):
    """Also in the parts of the sums that are real, in a dtype of real numbers."""
    for parallel, dtypes in (
        ({"data": 2}, {"grad_dtype": "float32"}),
        ({"data": 2}, {"reduce_dtype": "float64"}),
        ({"zero": 1}, {"reduce_dtype": "float64"}),
        ({"tensor": 2}, {}),
    ):
        with paramp.launch_from_torch({"parallel": parallel} | dtypes) as context:
            engine = engine_of(seeded(Spectral), plan={"up": "colwise", "down": "rowwise"})
            given = [(randn(8, 4, seed=step), randn(8, 4, seed=9)) for step in range(3)]
            train_both(context, engine, seeded(Spectral), given)


@on_ranks(2)
def test_a_rank_without_a_part_of_complex_weights_skips_a_step_as_the_others_do(world):
    """One kind of step gathers weights after an overflow, and the other does not."""
    with paramp.launch_from_torch({"parallel": {"zero": 1}}):
        engine = engine_of(seeded(Spectral))
        found = [train_step(engine, randn(8, 4), factor * randn(8, 4)).stepped for factor in (math.inf, 1.0, 1.0)]
        assert found == [False, True, True]
        calls = [update.calls_optimizer for update in engine._optimizer_step.updates]
    assert calls == [True]


@pytest.mark.real_sizes  # so that no buffer ends early
@on_ranks(2)
def test_experts_that_ranks_share_have_a_buffer_of_their_own(world):
    cases = [({"expert": 2}, [{False}, {True}]), ({"data": {"shard": 2}, "expert": 2}, [{False, True}])]
    for parallel, expected in cases:
        with paramp.launch_from_torch({"parallel": parallel}):
            engine = engine_of(small_mixture.layers(), plan=small_mixture.PLAN)
            found = [{"experts" in param.name for param in buffer.params} for buffer in engine._weights.buffers]
        assert sorted(found, key=str) == expected


@pytest.mark.parametrize("grad_dtype", [None, "float32"])
def test_other_optimizers_of_half_weights_get_unscaled_gradients(grad_dtype):
    """The scale is beyond fp16, and the optimizer is to have gradients of its own dtype."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    before = model.weight.detach().half().float()
    config = {"precision": {"mode": "O3", "init_scale": 2.0**18}, "clip_grad_norm": 0.01, "grad_dtype": grad_dtype}
    with paramp.launch_from_torch(config):
        optimizer = functools.partial(torch.optim.SGD, lr=1.0, foreach=True)
        engine = engine_of(model, lambda output, target: 0.1 * F.mse_loss(output, target), optimizer)
        assert train_step(engine, torch.ones(4, 4)).stepped
        moved = (engine.module.weight.float() - before).norm()
        assert 1e-4 < moved < 0.011


@pytest.mark.parametrize("clips", [False, True])
def test_a_clip_of_torchs_gives_an_unused_parameter_a_gradient(clips):
    """Its gradient is zeros until the step, not None; after a change in place decay and momentum move it, as torch's.

    One layer is used in no step, another in the first one only.
    """
    make, plain = functools.partial(torch.optim.AdamW, weight_decay=0.5, eps=1e-4), Net()
    optimizer = make(plain.parameters())
    with paramp.launch_from_torch():
        engine = engine_of(Net(), optimizer=make)
        for used, (x, y) in zip((True, False), data(2), strict=True):
            plain.use = engine.module.use = used
            engine.zero_grad()
            optimizer.zero_grad()
            engine.forward_backward(x, y)
            F.mse_loss(plain(x), y).backward()
            assert torch.equal(engine.module.never.weight.grad, torch.zeros(2, 2))
            if clips:
                for one in plain.parameters():
                    one.grad = torch.zeros_like(one) if one.grad is None else one.grad
                for model in (plain, engine.module):
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            before = {name: value.clone() for name, value in engine.module.named_parameters()}
            assert engine.step().stepped
            optimizer.step()
            moved = [name for name, value in engine.module.named_parameters() if not torch.equal(value, before[name])]
            for name, value in plain.named_parameters():
                torch.testing.assert_close(engine.module.get_parameter(name), value, rtol=1e-5, atol=1e-6, msg=name)
        assert ("sometimes.weight" in moved, "never.weight" in moved) == (clips, clips)


NOT_FUSED = [
    (torch.float32, torch.optim.RMSprop, "RMSprop is not one of"),
    (torch.float32, functools.partial(torch.optim.AdamW, capturable=True), "it is differentiable or capturable"),
    (torch.float32, functools.partial(torch.optim.AdamW, differentiable=True), "it is differentiable or capturable"),
    (torch.complex64, torch.optim.AdamW, "it has complex parameters"),
    (torch.float32, stepping_twice, "its step.. is replaced"),
]


@pytest.mark.parametrize(("dtype", "make", "reason"), NOT_FUSED)
def test_remainders_need_the_fused_step_and_what_keeps_an_optimizer_from_it_is_said(dtype, make, reason):
    message = f"masters: got 'remainder', which needs torch's AdamW.*{reason}"
    model = nn.Linear(2, 2)
    model.further = nn.Parameter(torch.zeros(3, dtype=dtype))
    with paramp.launch_from_torch({"precision": "16-naive", "masters": "remainder"}):
        each_raises(paramp.ConfigError, {message: lambda: engine_of(model, optimizer=make)})


PAIR = {"0": "colwise", "1": "rowwise"}


def set_data(tensor):
    tensor.data = tensor.data.clone()


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"data": {"shard": 2}}])
@on_ranks(2)
def test_the_data_of_a_dtensor_is_not_replaced_in_silence(world, layout):
    """torch replaces nothing of it but an empty wrapper."""
    with paramp.launch_from_torch({"parallel": layout}):
        engine = engine_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), plan=PAIR if "tensor" in layout else None)
        x, weight = torch.ones(4, 4), engine.module.get_parameter("0.weight")
        for tensor in (lambda: weight, lambda: weight.grad):
            train_step(engine, x)
            engine.forward_backward(x, x)
            before = tensor().data
            set_data(tensor())
            each_raises(RuntimeError, {f"'0.weight' was {MOVED}": engine.step})
            tensor().data = before
            engine.zero_grad()
        assert train_step(engine, x).stepped


def deal(engine):
    """The parameters to the groups in the opposite order."""
    groups = engine.optimizer.param_groups
    tensors = [one for group in groups for one in group["params"]]
    for group in groups:
        group["params"] = [tensors.pop() for _ in group["params"]]


MOVED = "moved after initialize"
ADDED = {"params": list(nn.Linear(2, 2).parameters())}
REFUSED = [
    (lambda engine: engine.module.double().float(), MOVED),
    (lambda engine: set_data(engine.module.weight), MOVED),
    (lambda engine: set_data(engine.module.weight.grad), MOVED),
    (lambda engine: engine.optimizer.register_step_post_hook(print), "step hooks were registered after initialize"),
    (lambda engine: setattr(engine.optimizer, "step", print), r"its step\(\) was replaced after initialize"),
    (lambda engine: engine.optimizer.param_groups[-1].update(momentum=0.9), "needs 'momentum_buffer' in its state"),
    (lambda engine: engine.optimizer.param_groups[-1].update(dampening=0.5), "dampening was set after initialize"),
    (lambda engine: engine.optimizer.add_param_group(ADDED), "param groups were given other parameters"),
    (deal, "param groups were given other parameters"),
]


@pytest.mark.parametrize("make", [sgd, momentum_in_one_group])
@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_would_pass_the_step_by_is_an_error(change, message, make):
    with paramp.launch_from_torch():
        engine = engine_of(nn.Linear(4, 4), optimizer=make)
        engine.forward_backward(torch.ones(4, 4), torch.ones(4, 4))
        change(engine)
        each_raises(RuntimeError, {message: engine.step})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [{"data": 2}, {"tensor": 2}])
@on_ranks(2)
def test_a_parameter_that_is_frozen_on_one_rank_only_is_named_there(world, layout, dtype):
    """Of the others the step is not wrong by itself; they end with the rank that raises."""
    with paramp.launch_from_torch({"parallel": layout}):
        engine = engine_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), plan=PAIR if "tensor" in layout else None)
        x, bias = torch.ones(4, 4), engine.module.get_parameter("0.bias")
        bias.requires_grad_(False)  # on all, as a schedule of freezing does
        assert train_step(engine, x).stepped
        bias.requires_grad_(world.rank == 0)
        engine.forward_backward(x, x)
        with default_dtype(dtype):
            if world.rank == 0:
                assert engine.step().stepped
            else:
                with pytest.raises(RuntimeError, match=r"'0\.bias' on rank 1 .* requires_grad was changed"):
                    engine.step()


def layers(*, tied):
    four = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    if tied:
        four[3].weight = four[0].weight
    return four


FROZEN_IN_A_WINDOW = {
    "dp2": ({"data": 2}, "3.bias", 1),
    "tp2": ({"tensor": 2}, "1.bias", 1),
    "tied over stages": ({"pipeline": {"size": 2, "microbatches": 2}}, "0.weight", 0),
}
"""Under tensor parallelism it is replicated; the tied one has another name on the stage that does not freeze it."""


@pytest.mark.parametrize("layout", FROZEN_IN_A_WINDOW)
@on_ranks(2)
def test_one_that_is_frozen_on_one_rank_only_in_a_window_is_named_there(world, layout):
    """It has a gradient on every rank."""
    parallel, name, rank = FROZEN_IN_A_WINDOW[layout]
    with paramp.launch_from_torch({"parallel": parallel, "gradient_accumulation": 2}):
        model, x = layers(tied=layout == "tied over stages"), torch.ones(4, 4)
        engine = engine_of(model, plan=PAIR if layout == "tp2" else None)
        assert not train_step(engine, x).stepped
        assert train_step(engine, x).stepped
        engine.zero_grad()
        train_step(engine, x)
        if world.rank == rank:
            dict(engine.named_parameters())[name].requires_grad_(False)
        engine.forward_backward(x, x)
        if world.rank == rank:
            with pytest.raises(RuntimeError, match=rf"'{re.escape(name)}' on rank .* requires_grad was changed"):
                engine.step()
        else:
            engine.step()
