"""The compiled step against torch's optimizers on fp64, and against the step that is not compiled.

A kernel takes seconds to compile. So most tests run the driver with the kernels' functions uncompiled.
"""

import contextlib
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from compiler import needs_compiler
from families import SEED, WHOLE, family, long
from pool import on_ranks
from reference import assert_trained
from torch import nn

import paramp
from paramp.optim.compiled import step as compiled
from paramp.optim.compiled.kernels import by_arithmetic, compiled_step, joined, left_over, step_function
from paramp.optim.fused_step import FusedStep
from paramp.parallel import compiled_blocks
from paramp.precision.master_residuals import join, split

# torch's own import of Inductor warns
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:compile.*run.* eagerly"),  # the model, which is not tested here
]
STEPS, OVERFLOW, EDIT = range(7), 2, 4


class Net(nn.Module):
    """Odd sizes, and a layer that is used in some steps only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.sometimes, self.last = nn.Linear(7, 13), nn.Linear(13, 13), nn.Linear(13, 3)
        self.use = False

    def forward(self, x):
        x = self.first(x)
        return self.last(self.sometimes(x) if self.use else x)


def groups(kind, **options):
    """Two groups that differ in their options, dealt out in turn so that neighbours are in different ones."""

    def make(parameters):
        own = list(parameters)
        return kind([{"params": own[::2], "lr": 0.02}, {"params": own[1::2], "weight_decay": 0.3}], lr=0.05, **options)

    return make


ADAMW = groups(torch.optim.AdamW)


def configuration(mode, masters=None, **others):
    precision = {"mode": mode} | ({"init_scale": 256.0, "growth_interval": 3} if mode.startswith("16-") else {})
    return {"precision": precision, "masters": masters, "clip_grad_norm": 0.5, "compile": True} | others


def train(config, make, steps=STEPS):
    """An engine after ``steps``, and torch's optimizer in fp64 on masters that started and were edited like its own.

    Step ``OVERFLOW`` has a gradient that is not finite; before ``EDIT`` a weight is changed behind autograd's back.
    """
    with paramp.launch_from_torch(config) as context:
        model = Net()
        exact = {name: nn.Parameter(value.detach().double()) for name, value in model.named_parameters()}
        if not context.config.precision.masters:  # they start from rounded weights
            exact = {
                name: nn.Parameter(one.to(context.config.precision.weights).double()) for name, one in exact.items()
            }
        engine, *_ = paramp.initialize(model, make(model.parameters()), F.mse_loss)
        reference = make(exact.values())
        for step in steps:
            run_step(engine, model, exact, reference, step)
        return engine, engine.full_state_dict(), exact, reference


def run_step(engine, model, exact, reference, step):
    for group, other in zip(engine.optimizer.param_groups, reference.param_groups, strict=True):
        group["lr"] = other["lr"] = 0.01 / (1 + step)
    if step == EDIT:
        name, weight = next(iter(engine.named_parameters()))
        weight.data[0, :3] = torch.tensor([0.5, -0.25, 0.0])
        followed = engine.full_state_dict()[name][0, :3]  # half a unit off in a remainder, which belongs to any weight
        torch.testing.assert_close(followed, torch.tensor([0.5, -0.25, 0.0]).to(followed), rtol=2.0**-8, atol=1e-7)
        exact[name].data[0, :3] = followed
    model.use = step in (1, 5)
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 7, generator=generator), torch.randn(8, 3, generator=generator)
    engine.forward_backward(x, y.to(torch.promote_types(model.first.weight.dtype, torch.float32)))
    if step == OVERFLOW:
        model.first.weight.grad[0, 0] = float("inf")
    scale = engine.scaler.get_scale()
    used = {name: one for name, one in engine.named_parameters() if model.use or not name.startswith("sometimes")}
    for name, one in exact.items():
        one.grad = used[name].grad.double() / scale if name in used else None
    result = engine.step()
    engine.zero_grad()
    assert result.stepped == (step != OVERFLOW)
    if result.stepped:
        nn.utils.clip_grad_norm_(exact.values(), 0.5)
        reference.step()


@pytest.fixture
def uncompiled(monkeypatch):
    """The compiled step with its functions as they are."""
    monkeypatch.setattr(compiled, "compiled_step", lambda variant, _: step_function(variant))
    monkeypatch.setattr(compiled_blocks, "why_not_inductor", lambda *_: None)


def check(config, make, close):
    engine, weights, exact, reference = train(config, make)
    assert isinstance(engine._optimizer_step.updates[0], compiled.CompiledStep)
    assert_trained(weights, exact, Net().state_dict(), **close)
    for group, other in zip(engine.optimizer.param_groups, reference.param_groups, strict=True):
        for stepped, one in zip(group["params"], other["params"], strict=True):
            assert engine.optimizer.state[stepped].get("step") == reference.state[one].get("step")


def test_an_optimizer_without_gradients_steps_nothing(uncompiled):
    """As on a stage that has none of its parameters."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers = [torch.optim.AdamW(layer.parameters(), lr=0.1) for layer in model]
    with paramp.launch_from_torch({"compile": True}):
        engine, *_ = paramp.initialize(model, optimizers)
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
    "adam": groups(torch.optim.Adam, amsgrad=True, maximize=True),
    "adam with a tensor": lambda parameters: torch.optim.Adam(list(parameters), lr=torch.tensor(0.01), fused=True),
    "sgd": groups(torch.optim.SGD, momentum=0.9, nesterov=True),
    "plain sgd": groups(torch.optim.SGD),
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
def test_the_function_steps_every_kind_of_master(uncompiled, mode, masters, close):
    check(configuration(mode, masters), ADAMW, close)


@pytest.mark.parametrize("agreeing", [True, False])
@pytest.mark.parametrize("masters", [None, "remainder"])
def test_every_change_of_a_weight_is_followed_without_a_warning(uncompiled, monkeypatch, masters, agreeing):
    """Of one element too, without an announcement; also in torch's kernels, in place of one that differs."""
    monkeypatch.setattr(compiled, "agrees", lambda *_: agreeing)
    with paramp.launch_from_torch(configuration("16-naive", masters)):
        model = nn.Linear(200, 200, bias=False)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=2.0**-12), F.mse_loss)
        for step in range(3):
            engine.forward_backward(torch.ones(1, 200), torch.ones(1, 200))
            engine.module.weight.data.view(-1)[20_000 + step] = 0.375
            with contextlib.nullcontext() if agreeing or step else pytest.warns(UserWarning, match="compile: "):
                engine.step()
            engine.zero_grad()
        engine.module.weight.data.fill_(0.375)  # which a sample would see
        engine.forward_backward(torch.ones(1, 200), torch.ones(1, 200))
        engine.step()
        followed = engine.full_state_dict()["weight"].view(-1)[20_000:20_003]
        torch.testing.assert_close(followed, torch.full((3,), 0.375), rtol=2.0**-10, atol=2.0**-11)


@pytest.mark.parametrize("compile", [True, False])
def test_a_zero_of_the_other_sign_keeps_its_master_only_in_the_compiled_step(uncompiled, compile):
    with paramp.launch_from_torch(configuration("16-naive", compile=compile)):
        model = nn.Linear(2, 1, bias=False)
        model.weight.data.fill_(-1e-9)  # which fp16 rounds to -0
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
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
        engine, *_ = paramp.initialize(model, kind(model.parameters(), lr=0.1), F.l1_loss)
        engine.forward_backward(torch.ones(2, 7), torch.ones(2, 3))
        model.first.bias.grad.zero_()
        model.last.weight.grad.zero_()
        assert engine.step().stepped
        assert engine.full_state_dict()["first.bias"][0] == -torch.inf


@needs_compiler
@pytest.mark.parametrize(
    ("mode", "masters", "close"),
    [mode if mode[0] == "16-naive" else pytest.param(*mode, marks=[family, long]) for mode in MODES],
)
def test_the_compiled_step(mode, masters, close):
    """Nothing is compiled again: not for another learning rate, scale, step count, range or set of parameters."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    compiled_step.cache_clear()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        check(configuration(mode, masters), ADAMW, close)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


class Placed(nn.Module):
    """A parameter behind another one of ``size`` elements in their buffer."""

    def __init__(self, size):
        super().__init__()
        torch.manual_seed(5)
        self.weight, self.before = nn.Parameter(torch.randn(1000)), nn.Parameter(torch.ones(size))

    def forward(self, x):
        return (self.weight * x).sum() + 0 * self.before.sum()


@family
@needs_compiler
def test_compiled_an_element_has_the_same_bits_wherever_it_is():
    """As on a rank that has other parameters, or a part of this one."""
    found = []
    for size in (1, 100, 1000) if WHOLE or SEED else (1, 100):
        with paramp.launch_from_torch(configuration("16-naive") | {"clip_grad_norm": None}):
            model = Placed(size)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            engine, *_ = paramp.initialize(model, optimizer, lambda output, _: output)
            for step in range(3):
                x = torch.randn(1000, generator=torch.Generator().manual_seed(step))
                engine.forward_backward(x, x)
                assert engine.step().stepped
                engine.zero_grad()
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


@pytest.mark.parametrize(("mode", "masters"), [("16-naive", None), ("16-naive", "remainder"), ("32-true", None)])
def test_weights_stay_near_those_of_the_other_step(uncompiled, mode, masters):
    """The same arithmetic in another order: the masters differ by a few of their units."""
    _, weights, *_ = train(configuration(mode, masters), ADAMW)
    engine, others, *_ = train(configuration(mode, masters, compile=False), ADAMW)
    assert type(engine._optimizer_step.updates[0]) is FusedStep
    assert_trained(weights, others, Net().state_dict(), rtol=1e-5, atol=1e-6)


def test_saved_state_continues_in_either_step(uncompiled, tmp_path):
    """Bit for bit in the compiled one, and near it in the other."""
    folder = tmp_path / "state"

    def trained(steps, compile=True, saved=False):
        with paramp.launch_from_torch(configuration("16-naive", "remainder", compile=compile)):
            model = Net()
            engine, *_ = paramp.initialize(model, ADAMW(model.parameters()), F.mse_loss)
            if saved:
                engine.load(folder)
            for step in steps:
                engine.forward_backward(torch.full((2, 7), 0.5 + step), torch.zeros(2, 3))
                engine.step()
                engine.zero_grad()
            if len(steps) == 3 and not saved:
                engine.save(folder)
            return engine.full_state_dict()

    whole = trained(range(6))
    trained(range(3))
    resumed = trained(range(3, 6), saved=True)
    other = trained(range(3, 6), compile=False, saved=True)
    assert_trained(resumed, whole, Net().state_dict(), still="sometimes")
    assert_trained(other, whole, Net().state_dict(), rtol=1e-5, atol=1e-6, still="sometimes")


@pytest.mark.parametrize(
    "config", [{"precision": "bf16-true", "rounding": "stochastic"}, {"optimizer_state": "bf16"}], ids=str
)
def test_what_is_rounded_stochastically_is_stepped_by_torchs_kernels(uncompiled, config):
    def trained(compile):
        with paramp.launch_from_torch(config | {"compile": compile}):
            model = Net()
            engine, *_ = paramp.initialize(model, groups(torch.optim.AdamW, eps=1e-4)(model.parameters()), F.mse_loss)
            for step in range(3):
                engine.forward_backward(torch.full((2, 7), 0.5 + step), torch.zeros(2, 3))
                assert engine.step().stepped
                engine.zero_grad()
            return engine.full_state_dict()

    expected = trained(compile=False)
    for name, value in trained(compile=True).items():
        assert torch.equal(value, expected[name]), name


@on_ranks(2)
def test_under_zero_each_rank_steps_its_part(world):
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(compiled, "compiled_step", lambda variant, _: step_function(variant))
        patch.setattr(compiled_blocks, "why_not_inductor", lambda *_: None)
        warnings.filterwarnings("ignore", "compile.*run.* eagerly")
        weights = {}
        for zero in (0, 1):
            config = configuration("16-naive", "remainder", parallel={"zero": zero}) | {"clip_grad_norm": None}
            with paramp.launch_from_torch(config) as context:
                model = Net()
                engine, *_ = paramp.initialize(model, ADAMW(model.parameters()), F.mse_loss)
                for step in range(3):
                    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(2 * step + context.dp.rank))
                    engine.forward_backward(x, torch.ones(4, 3))
                    engine.step()
                    engine.zero_grad()
                assert isinstance(engine._optimizer_step.updates[0], compiled.CompiledStep)
                weights[zero] = engine.full_state_dict()
        assert_trained(weights[1], weights[0], Net().state_dict(), still="sometimes")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backends_that_make_no_kernels_leave_the_step_as_it_is(backend):
    with paramp.launch_from_torch({"compile": {"backend": backend}}):
        model = Net()
        engine, *_ = paramp.initialize(model, ADAMW(model.parameters()), F.mse_loss)
        assert type(engine._optimizer_step.updates[0]) is FusedStep


def test_a_kernel_that_drops_roundings_is_not_used(uncompiled, monkeypatch):
    def wrong(weight, master, *others):
        master.copy_(weight)

    monkeypatch.setattr(compiled, "compiled_step", lambda variant, _: wrong)
    with pytest.warns(UserWarning, match="differs from the uncompiled one"):
        _, weights, *_ = train(configuration("16-naive"), ADAMW)
    _, others, *_ = train(configuration("16-naive", compile=False), ADAMW)
    assert_trained(weights, others, Net().state_dict())


SCRIPT = """
import sys, torch, paramp
with paramp.launch_from_torch({}):
    model = torch.nn.Linear(3, 3)
    engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters()), torch.nn.functional.mse_loss)
    engine.forward_backward(torch.ones(2, 3), torch.ones(2, 3))
    engine.step()
sys.exit("torch._inductor.compile_fx" in sys.modules)  # torch.optim itself loads torch._dynamo
"""


def test_a_step_without_compile_loads_no_compiler():
    assert subprocess.run([sys.executable, "-c", SCRIPT], check=False).returncode == 0


def test_under_a_dispatch_mode_the_other_step_is_made(uncompiled, monkeypatch):
    """torch would never again run the compiled code after it was called under one."""
    from torch.utils.flop_counter import FlopCounterMode

    def refused(*_):
        raise AssertionError("called under a dispatch mode")

    monkeypatch.setattr(compiled, "compiled_step", lambda *_: refused)
    with FlopCounterMode(display=False):
        _, weights, *_ = train(configuration("16-naive"), ADAMW)
    _, others, *_ = train(configuration("16-naive", compile=False), ADAMW)
    assert_trained(weights, others, Net().state_dict())
