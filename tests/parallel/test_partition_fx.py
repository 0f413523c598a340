"""Partitions of models that are not sequential, against a plain torch loop on the model itself."""

import functools
import operator
import random
import re
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from beside_plain import adamw, randn, seeded, train_both
from families import number, rarely
from pool import on_ranks
from small_engines import engine_of
from torch import is_tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from traceable import Decoder, Nested, UNet, build

import paramp
from paramp.distributed.rng import RandomStream, derive_seed
from paramp.parallel.partition import plan_stages
from paramp.parallel.partition_fx import TracedPartition
from paramp.precision.compute_context import default_dtype

PLANS = {
    UNet: {"*.up": "colwise", "*.down": "rowwise"},
    Nested: {"inside.*.up": "colwise", "inside.*.down": "rowwise"},
    Decoder: {
        **{f"blocks.*.{name}": "colwise" for name in ("query", "key", "value", "up")},
        **{f"blocks.*.{name}": "rowwise" for name in ("out", "down")},
    },
}
LAYOUTS = {
    "pp2": {"pipeline": {"size": 2, "microbatches": 4}, "data": 2},
    "pp4": {"pipeline": {"size": 4, "microbatches": 4}},
    "pp2-tp2": {"pipeline": {"size": 2, "microbatches": 2, "schedule": "gpipe"}, "tensor": 2},
}


def samples(kind, count):
    generator = torch.Generator().manual_seed(4)
    for length in (8, 8, 6, 8, 6)[:count]:
        if kind is Decoder:
            tokens = torch.randint(0, 20, (8, length + 1), generator=generator)
            yield tokens[:, :-1], tokens[:, 1:]
        else:
            yield tuple(torch.randn(8, length, 4, generator=generator) for _ in range(2))


def loss_of(output, target):
    return F.mse_loss(output, target) if target.is_floating_point() else F.cross_entropy(output.mT, target)


@pytest.mark.parametrize("layout", rarely(LAYOUTS, "pp2-tp2"))
@pytest.mark.parametrize("kind", PLANS)
@on_ranks(4)
def test_traced_models_follow_plain_torch(world, kind, layout):
    plain = build(kind)
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout], "clip_grad_norm": 1.0}) as context:
        engine = engine_of(build(kind), loss_of, adamw, plan=PLANS[kind] if context.tp.size > 1 else None)
        given = samples(kind, number(3, 5))
        train_both(context, engine, plain, given, loss_of, adamw, clip=1.0, atol=2e-5, still=["*.key.bias"])
        engine.eval()
        x, y = next(samples(kind, 1))
        torch.testing.assert_close(engine(x), plain(x).detach(), atol=2e-5, rtol=1e-5)
        assert engine.evaluate(x, y).item() == pytest.approx(loss_of(plain(x), y).item(), abs=1e-5)


def partition_of(model, *split):
    """The partition into two stages or more, and its stages."""
    partition = TracedPartition(model, 1 + len(split), [*split])
    return partition, partition.stages(plan_stages(partition.units, 1 + len(split), [*split]))


class Two(nn.Module):
    """Two layers on two stages, and what lies between them."""

    def __init__(self, between=lambda module, y: y):
        super().__init__()
        self.one, self.two, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.state = nn.BatchNorm1d(4)
        self.between = between

    def forward(self, x):
        return self.two(self.between(self, self.one(x)))


class Outer(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside, self.last = inside, nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.inside(x))


class Noisy(nn.Module):
    """Dropout in the glue and in modules, on both stages."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        first = self.drop(self.one(x))
        return F.dropout(self.drop(self.two(first)), 0.5, self.training) + first


@on_ranks(4)
def test_dropout_draws_from_the_stages_streams(world):
    outputs, x = [], torch.ones(2, 8)

    def record(output, target):
        outputs.append(output.detach().clone())
        return output.mean()

    config = {"parallel": {"pipeline": {"size": 2, "microbatches": 2, "split": ["two"]}, "data": 2}}
    with paramp.launch_from_torch(config) as context:
        engine = engine_of(seeded(Noisy), record)
        before = torch.get_rng_state()
        engine.forward_backward(x, x)
        assert torch.equal(before, torch.get_rng_state())
        assert len(outputs) == (2 if context.is_last_stage else 0)
        if context.is_last_stage:
            plain, expected = seeded(Noisy), []
            streams = [
                RandomStream(derive_seed(context.config.seed, "activations", stage, context.dp.rank), context.device)
                for stage in range(2)
            ]
            for part in x.chunk(2):
                with streams[0]:
                    first = F.dropout(plain.one(part), 0.5)
                with streams[1]:
                    expected.append(F.dropout(F.dropout(plain.two(first), 0.5), 0.5) + first)
            torch.testing.assert_close(torch.cat(outputs), torch.cat(expected))


class Branching(Two):
    def forward(self, x):
        y = self.one(x)
        return self.two(y) if y.sum() > 0 else y


def two_conditions(module, y):
    if y.dim() > 2 and y.shape[1] > 4:
        raise ValueError
    return y


def caught_by_itself(module, y):
    with suppress(ValueError):
        if y.shape[1] > 2:
            raise ValueError
    return y


def caught_by_its_caller(module, y):
    try:
        return few_rows(module, y)
    except ValueError:
        return y * 2


def few_rows(module, y):
    if module.training and y.shape[0] > 3:
        rows = y.shape[0]
        raise ValueError(f"{rows} rows")
    if not y.isfinite().all() or (y.shape[1] != 4):
        raise ValueError
    if y.dim() == 2:
        return y * 2
    raise ValueError


class Silent(Two):
    def forward(self, x):
        with torch.no_grad():
            y = self.one(x)
        return self.two(y)


class Moving(Two):
    """Moves a copy of a layer towards it, as a momentum encoder does."""

    def forward(self, x):
        for weight, copy in zip(self.one.parameters(), self.two.parameters(), strict=True):
            copy.data = copy.data * 0.9 + weight.data * 0.1
        return self.two(self.one(x))


class Penalized(Two):
    def forward(self, x):
        return self.two(self.one(x)) + sum(weight.square().sum() for weight in self.parameters())


class PenalizedInEvaluation(Two):
    def forward(self, x):
        y = self.two(self.one(x))
        return y if self.training else y * next(self.two.parameters()).norm()


class Skipping(Two):
    """Draws whether a layer runs, from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(3)

    def forward(self, x):
        x = self.one(x)
        return self.two(x) if self.rng.random() < 2.0 else x


class Keeping(Two):
    """Keeps a table that it computes of its first batch."""

    table = None

    def forward(self, x):
        self.calls = self.calls + 1 if hasattr(self, "calls") else 0
        self.last = x
        if self.table is None:
            self.table = self.last.mean(0)
        return self.two(self.one(x) * self.table)


def shifted_by_a_row(module, y):
    table = torch.zeros(4).clone()
    table[:] = next(module.two.parameters()).data[0]
    return y + table


def shifted_through_a_view(module, y):
    table = torch.zeros(4).clone()
    table[:2].copy_(next(module.two.parameters()).data[0, :2])
    return y + table


def silenced(module, y):
    with torch.no_grad():
        kept = reverse(y, 2.0)
    return y + kept


def changed_copy(module, y):
    table = torch.zeros(4).clone()
    table += y[0]
    return table


def scaled_without_gradients(module, y):
    with torch.no_grad():
        norm = next(module.two.parameters()).norm()
    return y * norm


class Drawing(Two):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return self.two(self.one(x) * self.draw())


class Noise:
    def __init__(self, generator):
        self.table = {"draw": [generator]}

    def __call__(self):
        return self.table["draw"][0].random()


OF_THE_FILE = np.random.default_rng(3)


def drawn_from_a_closure(generator):
    return lambda: torch.empty(4).normal_(generator=generator)


@pytest.mark.parametrize(
    ("model", "split", "message"),
    [
        (Branching(), None, r"Branching is not an nn\.Sequential.*_fx\.py:\d+ .*control flow.*into a submodule"),
        (Two(two_conditions), None, r"if y\.dim\(\) > 2 and .*control flow depends on a size or a value of a tensor"),
        (Two(caught_by_itself), None, r"if y\.shape\[1\] > 2.*control flow.*outside of try and with"),
        (Two(caught_by_its_caller), None, r"if module\.training and .*control flow.*outside of try and with"),
        (Silent(), None, r"inside torch\.no_grad"),
        (Two(silenced), None, r"inside torch\.no_grad"),
        (Two(lambda module, y: torch.as_tensor(y)), None, r"_fx\.py:\d+ .*torch\.as_tensor\(y\)"),
        (Moving(), None, r"it changes 'two\.weight', which it gets from parameters\(\) or the like, outside of its"),
        (
            Keeping(),
            None,
            r"it reads 'table' at test_partition_fx\.py:\d+, 'if self\.table .* does not keep for the next",
        ),
        (Two(changed_copy), None, r"it changes a tensor in place at test_.*'table \+= y\[0\]', which is a constant"),
        (PenalizedInEvaluation(), None, "it computes with parameters or buffers that it gets from"),
        *(
            (Two(between), None, "it computes with parameters or buffers that it gets from")
            for between in (
                scaled_without_gradients,
                lambda module, y: y * next(module.two.parameters()).detach(),
                lambda module, y: y * next(iter(module.state.buffers())).exp(),
                shifted_by_a_row,
                shifted_through_a_view,
                lambda module, y: y + torch.func.vmap(lambda row: row * 2)(next(module.two.parameters()))[0],
            )
        ),
        (Penalized(), None, r"square.*it computes with parameters or buffers that it gets from parameters\(\)"),
        (Two(), ["tow"], r"got 'tow', expected one of .*did you mean 'two'"),
        (Two(), ["never"], "got 'never', which the forward of Two does not call"),
        (Two(), ["one"], "leaves the stage before it empty"),
        (Two(), ["two", "one"], "leaves the stage before it empty"),
        (Outer(Two().eval()), ["inside.two"], "'inside' is in evaluation mode, the model in training mode"),
        (
            Outer(Skipping()),
            ["inside.two"],
            r"return self\.two\(x\) if .*random numbers from the Generator that module 'inside' holds, which",
        ),
    ],
)
def test_models_and_names_that_cannot_be_split(model, split, message):
    with pytest.raises(paramp.ConfigError, match=message):
        plan_stages(TracedPartition(model, 2, split).units, 2, split)
    assert torch.arange(3).tolist() == [0, 1, 2]
    assert model.training


class Scaled(Two):
    """The code between its modules changes a buffer in training, and divides by what ``used`` chooses."""

    def __init__(self, change, used):
        super().__init__()
        self.register_buffer("scale", torch.ones(2))
        self.change, self.used = change, used

    def forward(self, x):
        y = self.one(x)
        sent = self.change(self.scale, y.abs().max()) if self.training else self.scale.clone()
        return self.two(y) / self.used(self, sent)[0]


def in_place(scale, most):
    return scale.mul_(0.5).add_(most)


def own(module, sent):
    return module.scale


@pytest.mark.parametrize(
    ("change", "used", "is_refused"),
    [
        (in_place, own, True),
        (lambda scale, most: scale.data[1:].copy_(most), own, True),
        (lambda scale, most: torch.relu_(scale), own, True),
        (lambda scale, most: [scale, operator.setitem(scale, 0, most)][0], own, True),
        (lambda scale, most: operator.iadd(scale, most), own, True),
        (lambda scale, most: [scale, setattr(scale, "data", scale + most)][0], own, True),
        (lambda scale, most: scale * operator.iadd(scale.shape[0], 1), own, False),
        (in_place, lambda module, sent: sent if module.training else module.scale, True),
        (in_place, lambda module, sent: sent, False),
        (lambda scale, most: scale.mul(0.5).add_(most) * (scale & most), own, False),
        (lambda scale, most: scale.requires_grad_(False) * most, own, False),
    ],
)
def test_a_buffer_that_one_stage_changes_and_another_uses_is_refused(change, used, is_refused):
    """Each of them would have a copy of its own."""
    message = r"changes 'scale' in place at test_partition_fx\.py.*, and uses it on stages 0 and 1, each of which"
    with pytest.raises(paramp.ConfigError, match=message) if is_refused else nullcontext():
        partition_of(Scaled(change, used), "two")


@pytest.mark.parametrize(
    "change",
    [lambda scale, most: torch.add(scale, most.detach(), out=scale), lambda scale, most: scale.reshape(-1).add_(most)],
)
def test_a_buffer_that_one_stage_changes_and_another_uses_is_found_when_it_runs(change):
    with pytest.raises(paramp.ConfigError, match="split: 'scale': stage 0 of the pipeline changes it in place, and"):
        partition_of(Scaled(change, own), "two")[1][0](torch.ones(2, 4))


class Asking(Two):
    """Asks of what class values are: an input, what a module returns, a number."""

    class Pair(nn.Module):
        def forward(self, x):
            return x, None

    class Opaque(Pair):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    def __init__(self, between):
        super().__init__(between)
        self.pair, self.opaque = self.Pair(), self.Opaque()
        self.kept = {"total": torch.zeros(())}

    def forward(self, x, mask=None):
        return super().forward(x) * (mask if torch.is_tensor(mask) else 0.5)


def changed_through_a_view(module, y):
    kept, first = y, y[:, :2]
    first *= 2
    y -= 1
    return kept * y


def changed_tensors_of_numbers(module, y):
    count, total, places, table = torch.zeros(1), torch.zeros(()), torch.arange(4.0), torch.zeros(2, 4)
    first, others = table[0], torch.arange(2)
    if others.tolist() != [0, 1]:
        return y
    for part in (y[0], y[1]):
        count += 1
        total += part.square().sum()
        first += part
    places += y.shape[1]
    table[1] = y[1].detach()
    copied = torch.zeros(2, 4).to(y.device)  # maybe no copy
    copied.copy_(y.detach())
    chosen = torch.eye(4).to_sparse()
    return torch.sparse.mm(chosen, (y / count * total + places + table.sum(0) + copied).t()).t()


def matched(module, y):
    match module.pair(y):
        case torch.Tensor():
            return y
        case tuple() as pair:
            y = pair[0] * 2
    match y.chunk(2, -1):
        case Sequence() as halves:
            return halves[1].repeat(1, 2)


@functools.singledispatch
def dispatched(value):
    return value[0]


dispatched.register(torch.Tensor, lambda value: value)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None


reverse = Reversed.apply


class ReversedLater(torch.autograd.Function):
    """The same, with a forward of its own, as ``torch.func`` asks for."""

    @staticmethod
    def forward(x, factor=1.0):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]
        ctx.save_for_backward(inputs[0] * 2)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient + ctx.saved_tensors[0], None


def with_other_data(module, y):
    y.data = y.data.round()
    return y


@pytest.mark.parametrize(
    "between",
    [
        lambda module, y: y * 2 if isinstance(y, torch.Tensor) else y[0],
        lambda module, y: y * 2 if isinstance(y.mT, torch.Tensor) and not isinstance(y, (Sequence, int)) else y,
        lambda module, y: first * 2 if isinstance(first := module.pair(y), torch.Tensor) else first[0],
        lambda module, y: y if isinstance(pair := module.opaque(y), (dict, type(None))) else pair[0] * 2,
        lambda module, y: y.chunk(2, -1)[1].repeat(1, 2) if isinstance(y.chunk(2, -1), (tuple, list)) else y,
        lambda module, y: y if isinstance(y.device.type, str) or isinstance(y.requires_grad, bool) else y * 1,
        lambda module, y: y * (y.shape[1].unsqueeze(0) if isinstance(y.shape[1], torch.Tensor) else y.shape[1]),
        lambda module, y: y * 2 if y.__class__ is torch.Tensor else y,
        lambda module, y: y * 2 if isinstance(y, (int, torch.FloatTensor)) else y,
        lambda module, y: y * 2 if isinstance(module.one.weight, nn.Parameter) else y,
        lambda module, y: y * 2 if is_tensor(y) else y,
        lambda module, y: tree_map_only(torch.Tensor, lambda one: one * 2, [y])[0],
        lambda module, y: torch.where(y > 0, y, 0.0),
        lambda module, y: y + next(module.parameters()).new_ones(4) * torch.ones_like(module.one.weight.float())[0],
        lambda module, y: y * torch.zeros_like(next(module.parameters()).float()).exp()[0],
        lambda module, y: y if isinstance(y, torch.fx.Proxy) or y.sum() < torch.inf else y * 2,
        matched,
        lambda module, y: reverse(y, 2.0) + Reversed.apply(y, 0.5),
        lambda module, y: reverse(y, 2.0) + Reversed.forward(SimpleNamespace(), y, 0.5) * 3,
        lambda module, y: y + torch.ones(4, dtype=torch.float64).to(next(module.parameters())),
        lambda module, y: ReversedLater.apply(y, 0.5) * ReversedLater.apply(torch.ones(4), 2.0),
        few_rows,
        changed_through_a_view,
        changed_tensors_of_numbers,
        lambda module, y: y * module.kept["total"].copy_(y.detach().sum()),
        with_other_data,
    ],
)
def test_classes_and_changes_in_place_are_those_of_one_process(between):
    model, x, mask = seeded(lambda: Asking(between)), randn(2, 4).requires_grad_(), randn(4)
    expected, (_, stages) = model(x, mask), partition_of(model, "two")
    gradient = torch.autograd.grad(expected.sum(), x)
    for first, second in (stages, deepcopy(stages)):  # copies have weights of their own
        found = second(first(x, mask=mask), mask=mask)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), x), gradient)
        with torch.no_grad():
            model.two.weight.zero_()


@pytest.mark.parametrize(
    ("between", "kind"),
    [
        (lambda module, y: y if isinstance(y := module.opaque(y), torch.Tensor) else y[0], "tuple"),
        (lambda module, y: dispatched(module.opaque(y)), "tuple"),
        (lambda module, y: y if isinstance(y.double(), torch.FloatTensor) else -y, r"Tensor of torch\.float64"),
    ],
)
def test_a_class_that_tracing_cannot_tell_is_an_error_if_it_is_another(between, kind):
    _, (first, _) = partition_of(Asking(between), "two")
    with pytest.raises(paramp.ConfigError, match=rf"class of a {kind} at test_partition_fx\.py.* took for a Tensor"):
        first(torch.ones(2, 4))


class Telling(Two):
    """Reads what a module sets in its forward, on the stage of that or on the next one."""

    class Layer(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if isinstance(self.told, list):
                self.told.append(y.square().mean())
            else:
                self.told = y.square().mean() if self.told != 4 else int(y.shape[1])
            return y

    def __init__(self, told, *, is_late=False):
        super().__init__()
        self.one, self.is_late = self.Layer(4, 4), is_late
        self.one.told = told

    def told(self):
        return sum(self.one.told) if isinstance(self.one.told, list) else self.one.told

    def forward(self, x, *, deep=False):
        y = self.one(x)
        y = self.two(y if self.is_late else y * self.told())
        y = y * self.told() if self.is_late else y
        return self.never(y) if deep else y


READ = r"^parallel\.pipeline\.split: the code .* reads 'one\.told' at .*, which the forward of 'one' sets, and tracing"


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (lambda: Telling(0.0), {}, READ),
        (lambda: Telling([]), {}, READ),
        (lambda: Telling(torch.zeros(()), is_late=True), {}, READ),
        (lambda: Telling(torch.zeros(())), {}, None),
        (lambda: Telling(4), {}, None),
        (
            lambda: Telling(4),
            {"deep": True},
            r"inputs \(1 positional, deep\) a stage uses 'never' of Telling, which it",
        ),
        (
            lambda: Two(lambda _, y: y * torch.add(y.detach(), 1, out=torch.ones(2, 4))),
            {},
            r"alone is changed in place at test_",
        ),
    ],
)
def test_what_modules_set_and_inputs_choose_is_that_of_one_process_or_an_error(model, inputs, message):
    plain, x = seeded(model), randn(2, 4)
    with pytest.raises(paramp.ConfigError, match=message) if message else nullcontext():
        _, (first, second) = partition_of(seeded(model), "two")
        for _ in range(2):
            torch.testing.assert_close(second(first(x, **inputs), **inputs), plain(x, **inputs))


def test_a_trace_has_the_default_dtype_and_the_gradients_of_its_run():
    model = seeded(lambda: Two(lambda _, y: y * torch.linspace(0.5, 1, 4) if torch.is_grad_enabled() else y)).double()
    _, stages = partition_of(model, "two")
    with default_dtype(torch.float64):
        for training in (False, True):
            first, second = (stage.train(training) for stage in stages)
            with torch.inference_mode(not training), torch.set_grad_enabled(training):
                output = second(first(randn(2, 4).double()))
                torch.testing.assert_close(output, model(randn(2, 4).double()), atol=0, rtol=1e-12)


class Given(Two):
    """Uses a keyword input on both stages."""

    def __init__(self, between):
        super().__init__(between)
        self.gate = nn.ReLU(inplace=True)

    def forward(self, x, *, scale):
        if self.between is None:  # changes it after its last use on another stage
            return self.two(self.one(x) + scale) * scale.clamp_(min=0)
        return self.two(self.one(x) + self.between(self, scale)) * scale


@pytest.mark.parametrize(
    ("between", "message"),
    [
        (lambda module, scale: scale.clamp_(min=0), r"\['scale'\]\" in place at test_partition_fx\.py.*stages 0 and 1"),
        (lambda module, scale: scale.reshape(-1).clamp_(min=0), r"^inputs\['scale'\]: stage 0 .* changes it"),
        (lambda module, scale: module.gate(scale), r"^inputs\['scale'\]: stage 0 .* changes it"),
        (lambda module, scale: scale.clamp(min=0), None),
        (None, None),
    ],
)
def test_a_keyword_input_that_one_stage_changes_and_another_uses_is_refused(between, message):
    x, scale = torch.ones(2, 4), torch.ones(4)
    with pytest.raises(paramp.ConfigError, match=message) if message else nullcontext():
        _, (first, second) = partition_of(Given(between), "two")
        second(first(x, scale=scale), scale=scale)


@pytest.mark.parametrize(
    ("draw", "source"),
    [
        (random.random, "Python's random,"),
        (np.random.rand, "numpy,"),
        (torch.empty(4).normal_, "torch's generator,"),
        (np.random.default_rng(3).random, "the Generator that Drawing holds, which"),
        (Noise(np.random.RandomState(3)), "the RandomState that Drawing holds, which"),
        (Noise(random.Random(3)), "the Random that Drawing holds, which"),
        (drawn_from_a_closure(torch.Generator()), "the Generator that Drawing holds, which"),
        (lambda: OF_THE_FILE.integers(9), r"test_partition_fx\.OF_THE_FILE, which"),
    ],
)
def test_random_numbers_of_generators_that_the_model_or_a_file_holds(draw, source):
    """They would be constants of the trace. Those of a generator of one's own move no state of a default one."""
    message = rf"test_partition_fx\.py.*self\.draw\(\).*it draws random numbers from {source}"
    with pytest.raises(paramp.ConfigError, match=message):
        TracedPartition(Drawing(draw), 2, ["two"])


class Extra(Two):
    """Calls two more layers with its optional input."""

    def __init__(self):
        super().__init__()
        self.three, self.four = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, extra=None):
        return self.two(self.one(x) if extra is None else self.one(self.three(x)) + self.four(extra))


def test_each_layer_that_the_forward_may_call_is_one_unit_in_the_order_of_the_calls():
    for model, names in ((Two(), ["one", "two"]), (Extra(), ["three", "one", "four", "two"])):
        assert TracedPartition(model, 2, None).units == [(name, model.get_submodule(name)) for name in names]


@pytest.mark.parametrize(("stages", "names"), [(2, ["inside", "last"]), (3, ["inside.0", "inside.1", "last"])])
def test_a_module_of_less_than_half_a_stage_is_opened_only_if_there_are_too_few(stages, names):
    """``last`` has 64 of 80 parameters, so that two stages are not equal: to open ``inside`` changes nothing."""
    model = Outer(nn.Sequential(nn.Linear(8, 1, bias=False), nn.Linear(1, 8, bias=False)))
    model.last = nn.Linear(8, 8, bias=False)
    assert [name for name, _ in TracedPartition(model, stages, None).units] == names


def test_a_stage_checks_what_the_model_asserts():
    _, (stage, _) = partition_of(build(UNet), "middle")
    with pytest.raises(AssertionError, match=r"traceable\.py:\d+ failed"):
        stage(torch.zeros(1, 17, 4))
    _, (first, second) = partition_of(Two(few_rows), "two")
    for wrong in (torch.zeros(4, 4), torch.full((2, 4), torch.nan), torch.zeros(2, 1, 4)):
        with pytest.raises(AssertionError, match=r"forward raises an error at .*test_partition_fx\.py:\d+"):
            second(first(wrong))


class Reshaping(Two):
    def forward(self, x):
        return self.two(self.one(x).view(-1, 7))


def test_an_error_between_modules_names_the_line_and_not_the_node():
    _, (first, second) = partition_of(Reshaping(), "two")
    with pytest.raises(RuntimeError) as caught:
        second(first(torch.zeros(2, 4)))
    expected = r"shape '\[-1, 7\]' is invalid for input of size \d+ at test_partition_fx\.py:\d+, 'return self\.two"
    assert re.match(expected, str(caught.value)), caught.value
    assert "While executing" not in str(caught.value)


class Wrapper(nn.Module):
    def forward(self, x):
        return {x}


class Opaque(Two):
    def __init__(self):
        super().__init__()
        self.wrapper = Wrapper()

    def forward(self, x):
        wrapped = self.wrapper(self.one(x))
        return self.two(x) + wrapped.pop()


class Rotated(Two):
    """Halves of the first layer's output as complex numbers, which travel, with a gradient or without."""

    def __init__(self, *, detached=False):
        super().__init__()
        self.detached = detached

    def forward(self, x):
        y = self.one(x)
        pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)))
        pairs = pairs.detach() if self.detached else pairs
        return self.two(y * 0.5) + torch.view_as_real(pairs).flatten(-2)


TWO_STAGES = {"parallel": {"pipeline": {"size": 2, "split": ["two"]}}}


@pytest.mark.parametrize(
    ("model", "message"),
    [(Opaque, r"set at \[1\]\[1\], expected tensors"), (Rotated, r"torch\.complex64 tensor .* real ones")],
)
@on_ranks(2)
def test_what_cannot_travel_is_an_error(world, model, message):
    with (
        paramp.launch_from_torch(TWO_STAGES),
        pytest.raises(paramp.ConfigError, match=f"a stage returns (a )?{message}"),
    ):
        engine_of(model()).forward_backward(torch.ones(4, 4), torch.ones(4, 4))


@on_ranks(2)
def test_complex_numbers_without_a_gradient_travel(world):
    with paramp.launch_from_torch(TWO_STAGES) as context:
        model = seeded(lambda: Rotated(detached=True))
        train_both(context, engine_of(model), seeded(lambda: Rotated(detached=True)), [(randn(4, 4), randn(4, 4))] * 2)


class Viewing(Two):
    """Sends a tensor and a part of it, which is changed in place on the next stage."""

    def __init__(self, change, part=slice(2)):
        super().__init__()
        self.change, self.part = change, part

    def forward(self, x):
        y = self.one(x)
        halves, tail = y[:, self.part], y[:, 2:]
        z = self.two(x)[:, :2]
        return self.change(halves, z) * tail


@on_ranks(2)
def test_a_tensor_that_is_changed_in_place_where_a_view_of_it_is_a_copy(world):
    with paramp.launch_from_torch(TWO_STAGES) as context:
        with pytest.raises(paramp.ConfigError, match=r"a stage changes a tensor of shape \(2, 2\) in place, of which"):
            engine_of(Viewing(operator.iadd, slice(1, 3))).forward_backward(torch.ones(4, 4), torch.ones(4, 2))
        for change, part in ((operator.add, slice(1, 3)), (operator.iadd, slice(2))):  # no change; of another part
            plain, model = (seeded(lambda: Viewing(change, part)) for _ in range(2))  # noqa: B023
            train_both(context, engine_of(model), plain, [(randn(4, 4), randn(4, 2))] * 2)


class Passing(Two):
    def forward(self, x):
        large = torch.arange(70000, 70003)
        table = torch.full((3,), 1 / 3, dtype=torch.float64)
        y = self.two(self.one(x))
        return y + (large.sum() == 210003) * (table == 1 / 3).sum()


@pytest.mark.parametrize("precision", ["16-naive", "16-mixed", "bf16-mixed"])
@on_ranks(2)
def test_fixed_values_travel_unchanged_and_in_half_modes(world, precision):
    """Tokens beyond fp16's integers, fp32 tables and masks reach the next stage exactly, in every compute dtype."""
    with paramp.launch_from_torch(TWO_STAGES | {"precision": precision}):
        x = randn(4, 4)
        engine = engine_of(seeded(Passing)).eval()
        torch.testing.assert_close(engine(x), seeded(Passing)(x).detach(), atol=0.1, rtol=0)
