"""The compiled step against the step in torch's kernels, and the compiled norm against fp64.

A kernel takes seconds to compile. So most tests run the driver with the kernels' functions uncompiled.
"""

import contextlib
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from compiler import needs_compiler
from families import SEED, WHOLE, family, long, rarely
from pool import on_ranks
from reference import assert_trained
from small_engines import assert_same_tensors, engine_of, sgd, train_step
from test_flat_weights import Net, data, grouped
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import paramp
from paramp.base import loop_block_sizes
from paramp.optim.compiled import compiled_step as compiled
from paramp.optim.compiled.kernels import (
    FAMILIES,
    by_arithmetic,
    compiled_step,
    inductor_options,
    joined,
    left_over,
    step_function,
)
from paramp.optim.fused_step import FusedStep
from paramp.optim.remainder_masters import join, split
from paramp.parallel import compiled_blocks
from paramp.scaling.local_norm import LONG, norm_power

# torch's own import of Inductor warns
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:compile.*run.* eagerly"),  # the model, which is not tested here
]
STEPS, OVERFLOW, EDIT = range(7), 2, 4
STILL = ("never", "sometimes")


ADAMW = grouped(torch.optim.AdamW)


def configuration(mode, masters=None, **others):
    precision = {"mode": mode} | ({"init_scale": 256.0, "growth_interval": 3} if mode.startswith("16-") else {})
    return {"precision": precision, "masters": masters, "clip_grad_norm": 0.5, "compile": True} | others


def run(engine, steps):
    """Steps with gradients made by hand, at rates that fall; a layer has some in three steps only.

    Step ``OVERFLOW`` has a gradient that is not finite; before ``EDIT`` a weight is changed in place.
    """
    model = engine.module
    for step in steps:
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        if step == EDIT:
            with torch.no_grad():
                model.first.weight[0, :3] = torch.tensor([0.5, -0.25, 0.0])
        model.use = step in (1, 3, 5)
        (x, y), generator = data(1, seed=step)[0], torch.Generator().manual_seed(step)
        engine.forward_backward(x, y.to(torch.promote_types(model.first.weight.dtype, torch.float32)))
        for name, one in engine.named_parameters():
            gradient = torch.randn(one.shape, generator=generator) / 4 * engine.scaler.get_scale()
            if not name.startswith("never" if model.use else STILL):
                one.grad.copy_(gradient)
        if step == OVERFLOW:
            model.first.weight.grad[0, 0] = float("inf")
        assert engine.step().stepped == (step != OVERFLOW)
    return engine.full_state_dict()


def new_engine(make):
    model = Net()
    return engine_of(model, optimizer=make(model.parameters()))


def train(config, make, folder=None):
    """An engine after ``STEPS``, with a save and a load between, the whole model in the beginning, and in the end."""
    with paramp.launch_from_torch(config):
        engine = new_engine(make)
        start = engine.full_state_dict()
        if folder is not None:
            run(engine, STEPS[:3])
            engine.save(folder / "saved")
            engine = new_engine(make)
            engine.load(folder / "saved")
        return engine, start, run(engine, STEPS if folder is None else STEPS[3:])


@pytest.fixture
def uncompiled(monkeypatch):
    """The compiled step with its functions as they are."""
    replace_kernels(monkeypatch)


def replace_kernels(monkeypatch):
    monkeypatch.setattr(compiled, "compiled_step", lambda variant, _: step_function(variant))
    monkeypatch.setattr(compiled_blocks, "why_not_inductor", lambda *_: None)


def check(config, make, close, folder=None):
    """Weights and counts of steps are those of the step that is not compiled."""
    engine, start, weights = train(config, make, folder)
    assert isinstance(engine._optimizer_step.updates[0], compiled.CompiledStep)
    other, _, expected = train(config | {"compile": False}, make)
    for given in (start, weights, expected):
        if close is HALF:  # the roundings of one element do not average out
            del given["scale"]
    assert_trained(weights, expected, start, still="never", **close)
    for group, theirs in zip(engine.optimizer.param_groups, other.optimizer.param_groups, strict=True):
        for stepped, one in zip(group["params"], theirs["params"], strict=True):
            assert engine.optimizer.state[stepped].get("step") == other.optimizer.state[one].get("step")


def test_an_optimizer_without_gradients_steps_nothing(uncompiled):
    """As on a stage that has none of its parameters."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with paramp.launch_from_torch({"compile": True}):
        engine = engine_of(model, optimizer=[torch.optim.AdamW(layer.parameters(), lr=0.1) for layer in model])
        before = engine.full_state_dict()
        engine.backward(engine.module[0](torch.ones(1, 2)).sum())
        assert engine.step().stepped
        stepped = {name for name, value in engine.full_state_dict().items() if not torch.equal(value, before[name])}
        assert stepped == {"0.weight", "0.bias"}


CLOSE = {"rtol": 1e-5, "atol": 2e-6}
HALF = {"of_way": 0.1}
"""Weights and state that are themselves rounded to 16 bits in each step."""
OPTIMIZERS = {
    "adamw": ADAMW,
    "adam": grouped(torch.optim.Adam, amsgrad=True, maximize=True),
    "adam with a tensor": lambda parameters: torch.optim.Adam(list(parameters), lr=torch.tensor(0.01), fused=True),
    "sgd": grouped(torch.optim.SGD, momentum=0.9, nesterov=True),
    "plain sgd": grouped(torch.optim.SGD),
}
MODES = [
    ("32-true", None, CLOSE),
    ("64-true", None, {"rtol": 1e-9, "atol": 1e-9}),
    ("bf16-mixed", None, CLOSE),
    ("16-naive", None, CLOSE),
    ("bf16-naive", None, CLOSE),
    ("16-naive", "remainder", CLOSE),
    ("bf16-naive", "remainder", CLOSE),
    ("bf16-true", None, HALF),
]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_function_is_that_of_torchs_optimizer(uncompiled, name):
    check(configuration("32-true"), OPTIMIZERS[name], CLOSE)


@pytest.mark.parametrize(("mode", "masters", "close"), MODES)
def test_the_function_steps_every_kind_of_master(uncompiled, mode, masters, close, tmp_path):
    """A saved state continues."""
    check(configuration(mode, masters), ADAMW, close, tmp_path)


@pytest.mark.parametrize("agreeing", [True, False])
@pytest.mark.parametrize("masters", [None, "remainder"])
def test_every_change_of_a_weight_is_followed_without_a_warning(uncompiled, monkeypatch, masters, agreeing):
    """Of one element too, without an announcement; also in torch's kernels, in place of one that differs."""
    sizes = []

    def watched(variant, _):
        return lambda weight, *others: sizes.append(weight.numel()) or step_function(variant)(weight, *others)

    monkeypatch.setattr(compiled, "agrees", lambda *_: agreeing)
    monkeypatch.setattr(compiled, "compiled_step", watched)
    with paramp.launch_from_torch(configuration("16-naive", masters)):
        engine = engine_of(nn.Linear(200, 200, bias=False), optimizer=functools.partial(sgd, lr=2.0**-12))
        x, weight = torch.ones(1, 200), engine.module.weight.data
        for step in range(3):
            engine.forward_backward(x, x)
            weight.view(-1)[20_000 + step] = 0.375
            with contextlib.nullcontext() if agreeing or step else pytest.warns(UserWarning, match="compile: "):
                engine.step()
        weight.fill_(0.375)  # which a sample would see
        train_step(engine, x)
        followed = engine.full_state_dict()["weight"].view(-1)[20_000:20_003]
        torch.testing.assert_close(followed, torch.full((3,), 0.375), rtol=2.0**-10, atol=2.0**-11)
    if agreeing:  # beside remainders there are temporaries, of a block each
        assert (max(sizes) <= loop_block_sizes.STEP_BLOCK["cpu"]) == (masters == "remainder")


@pytest.mark.parametrize("compile", [True, False])
def test_a_zero_of_the_other_sign_keeps_its_master_only_in_the_compiled_step(uncompiled, compile):
    with paramp.launch_from_torch(configuration("16-naive", compile=compile)):
        model = nn.Linear(2, 1, bias=False)
        model.weight.data.fill_(-1e-9)  # which fp16 rounds to -0
        engine = engine_of(model)
        engine.forward_backward(torch.zeros(1, 2), torch.zeros(1, 1))
        with torch.no_grad():
            engine.module.weight.zero_()
        assert engine.step().stepped
        master = -1e-9 if compile else 0.0
        torch.testing.assert_close(engine.full_state_dict()["weight"], torch.full((1, 2), master), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_infinite_weight_without_a_gradient_stays_as_it_is(uncompiled, kind):
    """As in a learned mask: without L2 decay, the gradient is not 0 times infinity."""
    with paramp.launch_from_torch({"compile": True}):
        model = Net()
        model.first.bias.data[0] = -torch.inf
        engine = engine_of(model, F.l1_loss, functools.partial(kind, lr=0.1))
        engine.forward_backward(torch.ones(2, 7), torch.ones(2, 3))
        model.first.bias.grad.zero_()
        assert engine.step().stepped
        assert engine.full_state_dict()["first.bias"][0] == -torch.inf


def gradient(size, dtype, factor=1.0):
    return (torch.randn(size, generator=torch.Generator().manual_seed(size)) * factor).to(dtype)


COMPILED = [(*case, "adamw") for case in MODES]
COMPILED += [("16-naive", "remainder", CLOSE, name) for name in ("adam", "sgd")] + [("32-true", None, CLOSE, "sgd")]


@needs_compiler
@pytest.mark.parametrize(("mode", "masters", "close", "name"), rarely(COMPILED, COMPILED[5]))
def test_the_compiled_step(mode, masters, close, name):
    """Nothing is compiled again: not for another learning rate, scale, step count, range or set of parameters."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    compiled_step.cache_clear()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        check(configuration(mode, masters), OPTIMIZERS[name], close)
    kernels = compiled_step.cache_info().misses
    assert counters["stats"]["unique_graphs"] == kernels == (1 if name == "adamw" else 2)  # by what groups set
    assert not counters["graph_break"]


def test_a_kernel_is_made_for_each_kind_of_weights_and_optimizer_once_it_is_needed(uncompiled, monkeypatch):
    made, counts, last = [], [], nn.Linear(4, 4)
    monkeypatch.setattr(compiled, "compiled_step", lambda variant, _: made.append(variant) or step_function(variant))
    with paramp.launch_from_torch({"precision": {"mode": "O2", "init_scale": 8.0}, "compile": True}):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), last)
        optimizers = [torch.optim.AdamW(model[:3].parameters()), torch.optim.SGD(last.parameters())]
        engine = engine_of(model, optimizer=optimizers)
        for trained in (False, True, True):
            last.requires_grad_(trained)
            assert train_step(engine, torch.randn(4, 4)).stepped
            counts.append(len(made))
    adamw, sgd = FAMILIES[torch.optim.AdamW], FAMILIES[torch.optim.SGD]
    expected = [(adamw, torch.float32), (adamw, torch.float16), (sgd, torch.float16)]
    assert [(one.family, one.weight) for one in made] == expected
    assert counts == [2, 3, 3]


class Placed(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.before, self.weight = nn.Parameter(torch.ones(size)), nn.Parameter(gradient(1000, torch.float32))

    def forward(self, x):
        return (self.weight * x).sum() + 0 * self.before.sum()


MOMENTUM = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)
PLACES = [(mode, masters, functools.partial(torch.optim.AdamW, lr=0.01)) for mode, masters, _ in MODES]
PLACES += [("16-naive", "remainder", MOMENTUM), ("bf16-mixed", None, functools.partial(torch.optim.Adam, lr=0.01))]


@needs_compiler
@pytest.mark.parametrize(("mode", "masters", "make"), rarely(PLACES, PLACES[5]))
def test_compiled_an_element_has_the_same_bits_wherever_it_is(mode, masters, make):
    """Behind parameters of other sizes in its buffer: as on a rank that has others, or a part of this one."""
    found = []
    for size in (1, 100, 1000) if WHOLE or SEED else (1, 100):
        with paramp.launch_from_torch(configuration(mode, masters) | {"clip_grad_norm": None}):
            engine = engine_of(Placed(size), lambda output, _: output, make)
            for step in range(3):
                assert train_step(engine, gradient(1000, torch.float32, 1.0 + step)).stepped
            assert isinstance(engine._optimizer_step.updates[0], compiled.CompiledStep)
            found.append(engine.full_state_dict()["weight"])
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_remainders_have_the_bits_of_the_other_step(dtype):
    """Of masters beside each number and tie, of those that are too large, and of infinities and NaN."""
    weights = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    masters = torch.cat([weights * factor for factor in (1.0, 1 + 2.0**-12, 1 - 2.0**-12, 1 + 2.0**-20, 1.0005)])
    weight, remainder = torch.empty_like(masters, dtype=dtype), torch.empty_like(masters, dtype=torch.int16)
    split(masters, weight, remainder)
    assert torch.equal(left_over(masters, dtype), remainder.int())
    assert torch.equal(joined(weight, remainder).view(torch.int32), join(weight, remainder).view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_are_rounded_without_a_cast_as_a_cast_does(dtype):
    """Each number, what is beside it, the ties and what is beside them, and numbers of any size."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    eps, up, down = torch.finfo(dtype).eps, torch.tensor(torch.inf), torch.tensor(-torch.inf)
    ties = (numbers[:-1].double() + numbers[1:].double()).div(2).float()
    overflow = torch.finfo(dtype).max * (1 + eps / 2 / (2 - eps))  # half a unit above the largest
    middle = torch.cat([numbers, ties, torch.tensor([overflow, -overflow])])
    generator = torch.Generator().manual_seed(0)
    of_any_size = torch.randint(-(2**31), 2**31, (2**18,), generator=generator).to(torch.int32).view(torch.float32)
    values = torch.cat([middle, torch.nextafter(middle, up), torch.nextafter(middle, down), of_any_size])
    torch.testing.assert_close(by_arithmetic(values, dtype), values.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "config", [{"precision": "bf16-true", "rounding": "stochastic"}, {"optimizer_state": "bf16"}], ids=str
)
def test_what_is_rounded_stochastically_is_stepped_by_torchs_kernels(uncompiled, config):
    make = grouped(torch.optim.AdamW, eps=1e-4)
    found = [train(config | {"compile": compile}, make)[-1] for compile in (True, False)]
    assert_same_tensors(*found)


@pytest.mark.parametrize("makes_kernels", [False, pytest.param(True, marks=[family, long, needs_compiler])])
@on_ranks(2)
def test_under_zero_each_rank_steps_its_part(world, makes_kernels):
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        if not makes_kernels:
            replace_kernels(patch)
        for message in ("compile.*run.* eagerly", ".*torch.jit.script_method.*"):
            warnings.filterwarnings("ignore", message)
        weights = []
        for zero in (0, 1):
            config = configuration("16-naive", "remainder", parallel={"zero": zero}) | {"clip_grad_norm": None}
            with paramp.launch_from_torch(config) as context:
                engine = new_engine(ADAMW)
                for step in range(3):
                    generator = torch.Generator().manual_seed(2 * step + context.dp.rank)
                    train_step(engine, torch.randn(4, 7, generator=generator), torch.ones(4, 3))
                assert isinstance(engine._optimizer_step.updates[0], compiled.CompiledStep)
                weights.append(engine.full_state_dict())
        assert_same_tensors(*weights)
        assert_trained(weights[1], weights[0], Net().state_dict(), still=STILL)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backends_that_make_no_kernels_leave_the_step_as_it_is(backend):
    with paramp.launch_from_torch({"compile": {"backend": backend}}):
        assert type(engine_of(Net(), optimizer=torch.optim.AdamW)._optimizer_step.updates[0]) is FusedStep


@pytest.mark.parametrize(("mode", "is_wrong"), [("16-naive", True), ("bf16-true", True), ("16-naive", False)])
def test_where_the_other_step_is_made(uncompiled, monkeypatch, mode, is_wrong):
    """For a kernel whose masters are as rounded as weights, or that is 5 % off; and under a dispatch mode.

    torch would never again run the compiled code after it was called under one.
    """

    def compiled_wrongly(variant, _):
        def kernel(weight, master, *others):
            assert is_wrong
            step_function(variant)(weight, master, *others)
            weight.mul_(1.05) if master is None else master.copy_(weight)

        return kernel

    monkeypatch.setattr(compiled, "compiled_step", compiled_wrongly)
    message = "differs from the uncompiled one"
    with pytest.warns(UserWarning, match=message) if is_wrong else FlopCounterMode(display=False):
        weights = train(configuration(mode), ADAMW)[-1]
    assert_same_tensors(weights, train(configuration(mode, compile=False), ADAMW)[-1])


def check_sums(sums):
    """Long and short gradients, whole blocks and not, and some whose squares overflow fp32.

    A block has the same bits wherever it is, so that the norm is the same however ranks divide the gradients.
    """
    weights = [1.0, 0.5, 0.25, 0.125]
    norm_of = functools.partial(norm_power, norm_weights=weights, norm_type=2.0, device=torch.device("cpu"), sums=sums)
    for dtype, factor in ((torch.float16, 1e3), (torch.bfloat16, 1e-3), (torch.bfloat16, 1e30)):
        given = [gradient(size, dtype, factor) for size in (LONG, LONG + 512 + 64, 64, LONG + 1)]
        expected = sum(weight * one.double().square().sum() for weight, one in zip(weights, given, strict=True))
        torch.testing.assert_close(norm_of(given), expected, rtol=1e-6, atol=0)
    given[1][-1] = torch.inf
    assert not norm_of(given).isfinite()
    given[1][-1], given[1][0] = 0, torch.nan
    assert not norm_of(given).isfinite()
    blocks = gradient(LONG, torch.bfloat16).view(-1, 512)
    assert torch.equal(torch.cat([sums(part) for part in blocks.split(5)]), sums(blocks))


def test_the_sums_are_those_of_fp64():
    check_sums(compiled.sums_of_squares)


@needs_compiler
def test_compiled_the_sums_are_those_of_fp64():
    from torch._dynamo.utils import counters

    compiled.compiled_sums.cache_clear()
    counters.clear()
    check_sums(compiled.compiled_sums(inductor_options({})))
    assert counters["stats"]["unique_graphs"] == 2  # one for each dtype


SIZES = [("bf16-naive", True, LONG), ("bf16-naive", False, LONG), ("bf16-naive", True, 64), ("bf16-mixed", True, LONG)]


@pytest.mark.parametrize(("mode", "compile", "size"), SIZES)
def test_the_engine_uses_them_for_long_half_precision_gradients(uncompiled, monkeypatch, mode, compile, size):
    calls = []

    def sums(rows):
        calls.append(rows.shape)
        return compiled.sums_of_squares(rows)

    monkeypatch.setattr(compiled, "compiled_sums", lambda _: sums)
    with paramp.launch_from_torch({"precision": mode, "compile": compile}):
        engine = engine_of(nn.Linear(size, 1, bias=False))
        engine.forward_backward(torch.ones(1, size), torch.ones(1, 1))
        with FlopCounterMode(display=False):  # under which nothing compiled may be called
            engine.step()
        assert not calls
        engine.forward_backward(torch.ones(1, size), torch.zeros(1, 1))
        expected = engine.module.weight.grad.double().norm()
        assert engine.step().grad_norm == pytest.approx(expected.item(), rel=1e-6)
    assert bool(calls) is (mode == "bf16-naive" and compile and size == LONG)
    assert {rows for _, rows in calls} <= {512}


def test_options_that_hold_lists_are_keys_of_a_cache():
    first, again, other = (inductor_options({"options": {"cpp.cxx": [None, name]}}) for name in ("g++", "g++", "c++"))
    assert {first: 1}[again] == 1
    assert first != other
    assert inductor_options({"backend": "eager"}) is None
