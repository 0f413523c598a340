"""Partitions of models that are not sequential, against a plain torch loop on the model itself."""

import random

import numpy as np
import pytest
import torch
from pool import on_ranks
from reference import rank_slice
from torch import nn
from torch.nn import functional as F
from traceable import Decoder, Nested, UNet, build

import paramp
from paramp.parallel.batches import Batch
from paramp.parallel.partition import plan_stages
from paramp.parallel.partition_fx import TracedPartition

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
    for length in (8, 8, 6, 8, 6, 8, 8, 6, 8, 8)[:count]:
        if kind is Decoder:
            tokens = torch.randint(0, 20, (8, length + 1), generator=generator)
            yield tokens[:, :-1], tokens[:, 1:]
        else:
            yield tuple(torch.randn(8, length, 4, generator=generator) for _ in range(2))


def loss_of(output, target):
    return F.mse_loss(output, target) if target.is_floating_point() else F.cross_entropy(output.mT, target)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", PLANS)
@on_ranks(4)
def test_traced_models_follow_plain_torch(world, kind, layout):
    reference = build(kind)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-3, eps=1e-5)
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout], "clip_grad_norm": 1.0}) as context:
        model = build(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
        engine, *_ = paramp.initialize(model, optimizer, loss_of, plan=PLANS[kind] if context.tp.size > 1 else None)
        for x, y in samples(kind, 5):
            plain.zero_grad()
            loss = loss_of(reference(x), y)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            plain.step()
            x, y = (rank_slice(t, context.dp.rank, context.dp.size) for t in (x, y))
            assert engine.forward_backward(x, y).item() == pytest.approx(loss.item(), abs=1e-5)
            assert engine.step().grad_norm == pytest.approx(norm.item(), rel=1e-4)
        weights = engine.full_state_dict()
        assert weights.keys() == reference.state_dict().keys()
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(weights[name], value, atol=2e-5, rtol=0, msg=name)
        engine.eval()
        x, y = next(samples(kind, 1))
        torch.testing.assert_close(engine(x), reference(x).detach(), atol=1e-5, rtol=1e-5)
        assert engine.evaluate(x, y).item() == pytest.approx(loss_of(reference(x), y).item(), abs=1e-5)


def test_dropout_between_modules_is_on_in_training_only():
    """Traced as it is in each mode: a forward that asks self.training is no control flow on values."""

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.two(F.dropout(self.one(x), 0.5, self.training))

    model = Dropping()
    partition = TracedPartition(model, 2, ["two"])
    stages = partition.stages(plan_stages(partition.units, 2, ["two"]))
    x = torch.ones(1, 64)
    for training in (True, False):
        for stage in stages:
            stage.train(training)
        torch.manual_seed(0)
        call, (handed_on,) = stages[0](x)
        torch.manual_seed(0)
        assert torch.equal(handed_on, F.dropout(model.one(x), 0.5, training))
        assert ((handed_on == 0).sum() > 16) == training
        assert torch.equal(stages[1]((call, (handed_on,))), model.two(handed_on))
    assert model.training


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
    config = {"parallel": {"pipeline": {"size": 2, "microbatches": 2, "split": ["two"]}, "data": 2}}
    with paramp.launch_from_torch(config) as context:
        torch.manual_seed(1)
        model = Noisy()
        x = torch.ones(2, 8)
        outputs = []

        def record(output, target):
            outputs.append(output.detach().clone())
            return output.mean()

        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), record)
        before = torch.get_rng_state()
        engine.forward_backward(x, x)
        assert torch.equal(before, torch.get_rng_state())
        if context.is_last_stage:
            from paramp.distributed.rng import RandomStream, derive_seed

            torch.manual_seed(1)
            reference = Noisy()

            streams = [
                RandomStream(derive_seed(context.config.seed, "activations", stage, context.dp.rank), context.device)
                for stage in range(2)
            ]
            expected = []
            for part in x.chunk(2):
                with streams[0]:
                    first = F.dropout(reference.one(part), 0.5)
                with streams[1]:
                    expected.append(F.dropout(F.dropout(reference.two(first), 0.5), 0.5) + first)
            torch.testing.assert_close(torch.cat(outputs), torch.cat(expected))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.one(x)
        return self.two(y) if y.sum() > 0 else y


class Silent(Branching):
    def forward(self, x):
        with torch.no_grad():
            y = self.one(x)
        return self.two(y)


class Straight(Branching):
    def forward(self, x):
        return self.two(self.one(x))


class Drawing(Branching):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return self.two(self.one(x) * self.draw())


@pytest.mark.parametrize(
    ("model", "split", "message"),
    [
        (
            Branching(),
            None,
            r"Branching is not an nn\.Sequential.*test_partition_fx\.py:\d+ .*control flow.*into a submodule",
        ),
        (Silent(), None, r"inside torch\.no_grad"),
        (Drawing(random.random), None, r"test_partition_fx\.py.*it draws random numbers from Python's random,"),
        (Drawing(np.random.rand), None, "random numbers from numpy,"),
        (Drawing(torch.empty(4).normal_), None, "random numbers from torch's generator,"),
        (Straight(), ["tow"], r"got 'tow', expected one of .*did you mean 'two'"),
        (Straight(), ["never"], "got 'never', which the forward of Straight does not call"),
        (Straight(), ["one"], "leaves the stage before it empty"),
        (Straight(), ["two", "one"], "leaves the stage before it empty"),
    ],
)
def test_models_and_names_that_cannot_be_split(model, split, message):
    with pytest.raises(paramp.ConfigError, match=message):
        plan_stages(TracedPartition(model, 2, split).units, 2, split)
    assert torch.arange(3).tolist() == [0, 1, 2]
    assert model.training


OF_THE_FILE = np.random.default_rng(3)


def drawn_from_a_closure(generator):
    return lambda: torch.empty(4).normal_(generator=generator)


class Noise:
    def __init__(self, generator):
        self.table = {"draw": [generator]}

    def __call__(self):
        return self.table["draw"][0].random()


class Skipping(Branching):
    """Draws whether a layer runs, from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(3)

    def forward(self, x):
        x = self.one(x)
        return self.two(x) if self.rng.random() < 2.0 else x


class Outer(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside, self.last = inside, nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.inside(x))


@pytest.mark.parametrize(
    ("draw", "source"),
    [
        (np.random.default_rng(3).random, "the Generator that Drawing holds"),
        (Noise(np.random.RandomState(3)), "the RandomState that Drawing holds"),
        (Noise(random.Random(3)), "the Random that Drawing holds"),
        (drawn_from_a_closure(torch.Generator()), "the Generator that Drawing holds"),
        (lambda: OF_THE_FILE.integers(9), r"test_partition_fx\.OF_THE_FILE"),
    ],
)
def test_random_numbers_of_generators_that_the_model_or_a_file_holds(draw, source):
    """They would be constants of the trace, with no state of a default generator moved."""
    with pytest.raises(paramp.ConfigError, match=rf"self\.draw\(\).*it draws random numbers from {source}, which"):
        TracedPartition(Drawing(draw), 2, ["two"])


def test_a_generator_of_an_opened_module_is_named_with_the_line():
    model = Outer(Skipping())
    before = model.inside.rng.bit_generator.state
    match = r"return self\.two\(x\) if .*random numbers from the Generator that module 'inside' holds, which"
    with pytest.raises(paramp.ConfigError, match=match):
        TracedPartition(model, 2, ["inside.two"])
    assert model.inside.rng.bit_generator.state == before


def test_a_module_that_is_not_traced_may_draw_as_it_likes():
    partition = TracedPartition(Outer(Skipping()), 2, ["last"])
    assert [name for name, _ in partition.units] == ["inside", "last"]


def test_random_numbers_of_torch_are_new_in_each_step():
    partition = TracedPartition(Drawing(lambda: torch.normal(0.0, 1.0, size=(4,))), 2, ["two"])
    first = partition.stages(plan_stages(partition.units, 2, ["two"]))[0]
    one, other = (first(torch.ones(1, 4))[1][0] for _ in range(2))
    assert not torch.equal(one, other)


class Tempered(Branching):
    temperature = 3.0

    def forward(self, x, y=None):
        x = self.two(self.one(x) * (2.0 * self.temperature))
        return x if y is None else x + y


def test_numbers_and_attributes_are_constants_of_the_trace():
    """Also of a trace that is made later, for other inputs."""
    model = Tempered()
    partition = TracedPartition(model, 2, ["two"])
    stages = partition.stages(plan_stages(partition.units, 2, ["two"]))
    x = torch.ones(1, 4)
    model.temperature = 5.0
    for stage in stages:
        stage.temperature = 5.0
    for inputs in ((x,), (x, x)):
        expected = model.two(model.one(x) * 6.0) + sum(inputs[1:])
        assert torch.equal(stages[1](stages[0](*inputs)), expected)


def test_a_module_that_is_opened_has_the_models_mode():
    """There is one graph of a mode: what is frozen in evaluation would drop out as in training."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.two(F.dropout(self.one(x), 0.5, self.training))

    model = Outer(Inner())
    model.inside.eval()
    with pytest.raises(paramp.ConfigError, match="'inside' is in evaluation mode, the model in training mode"):
        TracedPartition(model, 2, ["inside.two"])
    assert TracedPartition(model.eval(), 2, ["inside.two"]).opened == {"inside"}
    partition = TracedPartition(model.train(), 2, ["inside.two"])
    first = partition.stages(plan_stages(partition.units, 2, ["inside.two"]))[0]
    first.get_submodule("inside").eval()
    with pytest.raises(paramp.ConfigError, match="'inside' is in evaluation mode"):
        first(torch.ones(1, 4))


def test_a_name_inside_a_module_opens_it():
    model = build(Nested)
    split = ["inside.middle"]
    partition = TracedPartition(model, 2, split)
    assert partition.opened == {"inside"}
    stages = partition.stages(plan_stages(partition.units, 2, split))
    assert not any(name.startswith("inside.middle") for name, _ in stages[0].named_parameters())
    x, _ = next(samples(Nested, 1))
    torch.testing.assert_close(stages[1](stages[0](x)), model(x), atol=0, rtol=0)


def test_a_stage_checks_what_the_model_asserts():
    partition = TracedPartition(build(UNet), 2, ["middle"])
    stage = partition.stages(plan_stages(partition.units, 2, ["middle"]))[0]
    with pytest.raises(AssertionError, match=r"traceable\.py:\d+ failed"):
        stage(torch.zeros(1, 17, 4))


class Counting(Branching):
    """Hands on a number that depends on values, which no description made beforehand can hold."""

    def forward(self, x):
        total = x.sum().item()
        return self.two(self.one(x)) * total


class Opaque(Branching):
    class Wrapper(nn.Module):
        def forward(self, x):
            return {x}

    def __init__(self):
        super().__init__()
        self.wrapper = Opaque.Wrapper()

    def forward(self, x):
        wrapped = self.wrapper(self.one(x))
        return self.two(x) + wrapped.pop()


@on_ranks(4)
def test_what_cannot_travel_is_an_error(world):
    config = {"parallel": {"pipeline": {"size": 2, "split": ["two"]}, "data": 2}}
    for model, message in (
        (Opaque(), r"a stage returns set at \[1\]\[1\], expected tensors"),
        (Counting(), "the output of a stage changed"),
    ):
        with paramp.launch_from_torch(config) as context:
            engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
            if isinstance(model, Opaque):
                with pytest.raises(paramp.ConfigError, match=message):  # on every rank
                    engine.forward_backward(torch.ones(4, 4), torch.ones(4, 4))
            elif context.is_first_stage:
                _, (stage_output,) = engine._runner.pipeline._probe(Batch((torch.ones(2, 4),)))
                with pytest.raises(paramp.ConfigError, match=message):
                    stage_output.pack(engine.module(torch.full((2, 4), 2.0)), torch.device("cpu"))
            else:
                engine._runner.pipeline._probe(Batch((torch.ones(2, 4),)))


@on_ranks(4)
def test_a_style_for_a_module_that_is_opened_is_an_error(world):
    with paramp.launch_from_torch({"parallel": {"pipeline": 2, "tensor": 2}}):
        model = build(Nested)
        with pytest.raises(paramp.ConfigError, match=r"plan: 'inside' is split by the pipeline"):
            paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan={"inside": "sharded_random"})


@on_ranks(4)
def test_fixed_values_travel_unchanged_and_in_half_modes(world):
    """Tokens beyond fp16's integers, fp32 tables and masks reach the next stage exactly, in every compute dtype."""

    class Passing(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            large = torch.arange(70000, 70003)
            table = torch.full((3,), 1 / 3, dtype=torch.float64)
            y = self.two(self.one(x))
            return y + (large.sum() == 210003) * (table == 1 / 3).sum()

    for precision in ("16-naive", "16-mixed", "bf16-mixed"):
        parallel = {"pipeline": {"size": 2, "split": ["two"]}, "data": 2}
        with paramp.launch_from_torch({"parallel": parallel, "precision": precision}):
            torch.manual_seed(0)
            model = Passing()
            expected = model(torch.ones(4, 4)).detach()
            engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
            engine.eval()
            torch.testing.assert_close(engine(torch.ones(4, 4)), expected, atol=0.1, rtol=0)
