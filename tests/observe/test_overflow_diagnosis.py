"""The report on a skipped step names every place where a non-finite value was planted."""

import random
from functools import partial

import numpy
import pytest
import torch
import torch.nn.functional as F
from families import cases, family
from pool import on_ranks, run_on_ranks
from reference import batches, small_gpt
from small_engines import LARGE, Planted, assert_same_tensors, engine_of, gpt_engine, own_part, train_step
from torch import nn

import paramp
from paramp.scaling.overflow_report import NonFiniteGradient, Origin, OverflowReport, RankCoordinates

NAN, INF = float("nan"), float("inf")
SCALED = {"mode": "16-mixed", "init_scale": 2.0**10}
FOUR = {"size": 2, "microbatches": 4}
SHARDS = {"data": {"shard": 2}}


class Plant:
    """A hook on a module that spoils its output, or the gradient of that, in one of ``period`` calls."""

    def __init__(self, engine, name, microbatch, backward, value, period=None):
        config = engine.config
        self.calls, self.microbatch, self.backward, self.value = 0, microbatch, backward, value
        self.period = period or config.parallel.pipeline.num_microbatches * config.gradient_accumulation
        self.handle = engine.module.get_submodule(name).register_forward_hook(self)

    def __call__(self, module, inputs, output):
        self.calls += 1
        if (self.calls - 1) % self.period == self.microbatch:
            return Planted.apply(output, self.value, self.backward)
        return None


def window(engine):
    """One window of accumulation; its step's result."""
    for batch in batches(engine.config.gradient_accumulation):
        result = train_step(engine, *own_part(engine.context, *batch))
    return result


LAYOUTS = {  # ranks, configuration
    "one": (1, {"gradient_accumulation": 3}),
    "pp2-tp2": (4, {"parallel": {"pipeline": FOUR, "tensor": 2}}),
    "interleaved-tp2": (4, {"parallel": {"pipeline": FOUR | {"schedule": "interleaved-1f1b"}, "tensor": 2}}),
    "dp2-tp2-sp": (4, {"parallel": {"tensor": 2, "sequence_parallel": True, "pipeline": {"microbatches": 2}}}),
    "zbv": (2, {"parallel": {"pipeline": FOUR | {"schedule": "zbv"}}}),
    "dp2-zero": (2, {"parallel": {"zero": 1}, "gradient_accumulation": 2}),
    "fsdp2": (2, {"parallel": SHARDS | {"pipeline": {"microbatches": 2}}, "gradient_accumulation": 2}),
    "fsdp2-tp2": (4, {"parallel": SHARDS | {"tensor": 2}}),
    "fsdp2-pp2": (4, {"parallel": SHARDS | {"pipeline": FOUR}}),
}
PART = ["one", "zbv"]
PLACES = [  # layout, module, rank, microbatch of the window, whether in the backward, value
    ("one", "blocks.1.attention.out", 0, 2, False, NAN),
    ("one", "norm", 0, 1, True, INF),
    ("one", "blocks.3.mlp.up", 0, 0, False, LARGE),
    ("pp2-tp2", "blocks.2.norm1", 2, 3, True, NAN),
    ("pp2-tp2", "embedding", 1, 1, False, INF),
    ("interleaved-tp2", "blocks.1.mlp.down", 2, 3, False, LARGE),
    ("interleaved-tp2", "blocks.2.attention", 1, 0, True, NAN),
    ("dp2-tp2-sp", "blocks.0.norm2", 2, 0, False, NAN),
    ("dp2-tp2-sp", "blocks.3.attention.out", 1, 1, True, INF),
    ("zbv", "blocks.0", 0, 3, True, NAN),
    ("zbv", "blocks.3.mlp.down", 0, 1, False, NAN),
    ("zbv", "blocks.2.mlp.up", 1, 0, True, LARGE),
    ("dp2-zero", "blocks.2.mlp.down", 1, 1, False, NAN),
    ("dp2-zero", "blocks.1.norm1", 1, 0, True, INF),
    ("fsdp2", "blocks.1.norm1", 1, 3, True, INF),
    ("fsdp2", "blocks.3.mlp.up", 1, 2, False, LARGE),
    ("fsdp2-tp2", "blocks.1.mlp.up", 3, 0, False, INF),
    ("fsdp2-tp2", "blocks.0.norm2", 2, 0, True, NAN),
    ("fsdp2-pp2", "blocks.0.attention.qkv", 1, 2, False, NAN),
    ("fsdp2-pp2", "blocks.2.norm1", 3, 3, True, NAN),
]


@family
@pytest.mark.parametrize("layout", cases("planted overflows", LAYOUTS, PART, 2))
@on_ranks(lambda layout: LAYOUTS[layout][0], cuda=True)
def test_planted_overflows_are_named(world, layout):
    with paramp.launch_from_torch({"precision": SCALED} | LAYOUTS[layout][1]) as context:
        engine = gpt_engine()
        assert window(engine).stepped
        with pytest.raises(RuntimeError, match="no step was skipped"):
            engine.diagnose_overflow()
        for _, name, rank, index, backward, value in filter(lambda place: place[0] == layout, PLACES):
            plant = Plant(engine, name, index, backward, value) if context.rank == rank else None
            assert window(engine).overflow
            origin = engine.diagnose_overflow().origin
            if plant is not None:
                plant.handle.remove()
            call, microbatch = divmod(index, context.config.parallel.pipeline.num_microbatches)
            found = (origin.module, origin.place.rank, origin.call, origin.microbatch, origin.during, origin.kind)
            during, kind = "backward" if backward else "forward", "NaN" if value != value else "inf"
            assert found == (name, rank, call, microbatch, during, kind), found
            axes = dict(origin.place.axes)
            assert context.rank != rank or axes == context.coordinates
            assert origin.place.stage in context.config.parallel.pipeline.stages_of(axes["pp"])
            assert window(engine).stepped


# ------------------------------------------------------------------------------------------------- kinds and messages


def test_for_an_overflow_of_scaled_gradients_the_report_advises_a_lower_rate_or_scale():
    scales, losses = [], []

    def criterion(logits, target):
        value = model.loss(logits, target)
        value.register_hook(lambda gradient: scales.append(gradient.item()))
        losses.append(value.item())
        return value

    with paramp.launch_from_torch({"precision": {"mode": "16-naive", "init_scale": 2.0**24, "hysteresis": 1}}):
        model = small_gpt(num_layers=1)
        engine = engine_of(model, criterion)
        assert window(engine).overflow
        report = engine.diagnose_overflow()
    assert scales == [2.0**24, 2.0**24, 1.0]  # of the step, and of its reruns
    assert engine.scaler.get_scale() == 2.0**23  # by then
    assert len(losses) == 3
    assert len({*losses}) == 1
    assert (report.scale, report.origin.during, report.origin.helped_by_scale) == (2.0**24, "backward", True)
    assert 0 < report.origin.largest <= torch.finfo(torch.float16).max
    assert str(report).startswith(f"backward overflow in {report.origin.module}: inf")
    assert "lower the learning rate or the initial scale" in str(report)


class Masked(nn.Module):
    """A mask of infinities that are meant, and one that cuts a hole into what overflows."""

    def __init__(self):
        super().__init__()
        self.mask = nn.Identity()
        self.scores, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.trap = False

    def forward(self, x):
        mask = self.mask(torch.full((4,), -INF).where(torch.arange(4) > 1, 0.0))
        x = self.last(torch.softmax(self.scores(x) + mask, dim=-1))
        if self.trap:
            x = torch.where(x < 50, x, torch.exp(x * 1e4)) + torch.where(x > 1e6, torch.sqrt(x - 1e9), 0.0)
        return x


@pytest.mark.parametrize(
    ("precision", "end"), [("32-true", ""), ("16-mixed", ", and does so without loss scaling too")]
)
def test_infinities_of_masks_are_ignored(precision, end):
    torch.manual_seed(0)
    with paramp.launch_from_torch({"precision": precision}):
        model = nn.Sequential(Masked(), nn.Linear(4, 4))
        engine, x = engine_of(model), torch.randn(4, 4)
        plant = Plant(engine, "0.last", 0, True, NAN)
        assert train_step(engine, x).overflow
        report = engine.diagnose_overflow()
        assert (report.origin.module, report.origin.during) == ("0.last", "backward")
        plant.handle.remove()
        model[0].trap = True  # NaN in what is not selected: the loss is finite, and its derivative is not
        assert engine.forward_backward(x, x).isfinite()
        assert engine.step().overflow
        report = engine.diagnose_overflow()
    assert (report.kind, report.origin.module) == ("backward", "0")
    first = str(report).splitlines()[0]
    assert first.startswith("no scale helps: 0 produced NaN in the backward of microbatch 0")
    assert first.endswith(end)
    assert ("without loss scaling" in first) is bool(end)


class Holes(nn.Module):
    """It leaves out what is not finite, but only behind its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return torch.where(x.isfinite(), x * self.weight, 0.0)


def test_a_batch_with_holes_that_spoil_the_gradient_of_the_module_it_enters_is_named():
    x = torch.tensor([[1.0, INF, 1.0, 1.0]])
    with paramp.launch_from_torch({"precision": "32-true"}):
        engine = engine_of(Holes())
        assert engine.forward_backward(x, torch.zeros(1, 4)).isfinite()
        assert engine.step().overflow
        origin = engine.diagnose_overflow().origin
    assert (origin.module, origin.during) == ("the batch", "forward")


def test_overflows_outside_of_modules_are_named():
    spoilt = {"criterion": 0.0}
    good, bad, large = torch.ones(2, 4), torch.full((2, 4), NAN), torch.full((2, 4), 1e5)
    with paramp.launch_from_torch({"precision": "32-true"}):
        engine = engine_of(nn.Sequential(nn.Linear(4, 4)), lambda *pair: F.mse_loss(*pair) + spoilt["criterion"])
        for name, x, y, more in (
            ("the batch", bad, good, 0.0),
            ("the target", good, bad, 0.0),
            ("the criterion", good, good, NAN),
        ):
            spoilt["criterion"] = more
            engine.forward_backward(x, y)
            if more:  # a constant leaves the gradients finite
                engine.module[0].weight.grad.fill_(NAN)
            assert engine.step().overflow
            assert engine.diagnose_overflow().origin.module == name
        engine = engine_of(nn.Linear(4, 4), lambda output, _: Planted.apply(output, NAN, True).mean())
        assert train_step(engine, good, good).overflow
        origin = engine.diagnose_overflow().origin
        assert (origin.module, origin.during) == ("the criterion", "backward")
    with paramp.launch_from_torch({"precision": "16-mixed"}):
        for x, words in ((large, "the cast of the batch to the compute dtype"), (good * INF, "the batch")):
            engine = engine_of(nn.Linear(4, 4))
            assert train_step(engine, x, good).overflow
            report = engine.diagnose_overflow()
            assert f"{words} produced inf" in str(report)
            assert report.origin.helped_by_scale is None


def test_a_report_lists_five_gradients_experts_and_ranges_and_counts_the_others():
    place = RankCoordinates(0)
    gradients = tuple(
        NonFiniteGradient(name=f"{index}.weight", place=place, kind="NaN", count=1, size=1, largest=0.0)
        for index in range(8)
    )
    ranges = (3, 5), (7, 8), (9, 10), (12, 13), (14, 15), (20, 30), (40, 50)
    origin = Origin(
        during="forward",
        module="experts",
        place=place,
        kind="NaN",
        call=0,
        microbatch=1,
        largest=2.0,
        experts=(0, 2, 3, 4, 6, 7),
        positions=ranges,
    )
    assert str(OverflowReport(1.0, gradients, origin)).splitlines() == [
        "no scale helps: experts in experts 0, 2, 3, 4, 6, 1 more produced NaN in the forward of microbatch 1 on rank "
        "0, positions 3 to 4, 7, 9, 12, 14 and 2 more ranges of the sequence",
        "  the largest finite magnitude in it is 2",
        *(f"  gradient of {index}.weight on rank 0: NaN, 1 of 1 elements" for index in range(5)),
        "  gradients that are not finite and not shown: 3",
    ]


def linear(scale, **config):
    """An engine whose one weight gets a gradient of ``scale`` times the mean of x, in fp16."""
    config = {"precision": {"mode": "16-naive", "init_scale": scale}, "clip_grad_norm": None} | config
    context = paramp.launch_from_torch(config)
    model, still = nn.Sequential(nn.Linear(1, 1, bias=False)), partial(torch.optim.SGD, lr=0.0)
    return context, engine_of(model, lambda output, _: output.mean(), still)


def test_an_overflow_in_the_sum_over_microbatches_is_named():
    context, engine = linear(2.0**16, gradient_accumulation=2)
    with context:
        for _ in range(2):  # each gives half of 2**16 times 1.5, and fp16 ends below 2**16
            result = train_step(engine, torch.full((2, 1), 1.5))
        assert result.overflow
        report = engine.diagnose_overflow()
    found = (report.kind, report.origin.during, report.origin.parameter, report.origin.call, report.origin.kind)
    assert found == ("sum", "sum over microbatches", "0.weight", 1, "inf")
    assert str(report).startswith("overflow in the sum over microbatches: the gradient of 0.weight became inf when")
    assert "set grad_dtype to 'float32'" in str(report)


@pytest.mark.parametrize("parallel", [{}, {"zero": 1}, SHARDS], ids=["dp2", "zero1", "fsdp2"])
@on_ranks(2)
def test_an_overflow_in_the_sum_over_data_ranks_is_named(world, parallel):
    context, engine = linear(2.0**16, parallel=parallel)
    with context:
        assert train_step(engine, torch.full((2, 1), 1.5)).overflow
        report = engine.diagnose_overflow()
        assert (report.kind, report.origin.during, report.origin.parameter) == ("sum", "sum over ranks", "0.weight")
        assert str(report).startswith("overflow in the sum over ranks: the gradient of 0.weight is finite on each rank")
        assert "set reduce_dtype to 'float32'" in str(report)
        assert train_step(engine, torch.full((2, 1), 0.5)).stepped


def test_a_gradient_that_was_changed_by_hand_is_reported_as_finite_in_the_rerun():
    """Without forward_backward there is no rerun."""
    context, engine = linear(2.0)
    with context:
        engine.forward_backward(torch.ones(2, 1), torch.zeros(2, 1))
        engine.module[0].weight.grad.fill_(INF)
        assert engine.step().overflow
        report = engine.diagnose_overflow()
        assert report.kind == "gradients"
        assert [(found.name, found.count, found.size) for found in report.gradients] == [("0.weight", 1, 1)]
        assert "a rerun of the batch gave finite values" in str(report)
        engine.zero_grad()
        engine.backward(engine.criterion(engine(torch.ones(2, 1)), torch.zeros(2, 1)) * INF)
        assert engine.step().overflow
        report = engine.diagnose_overflow()
        assert (report.kind, report.origin) == ("gradients", None)
        assert "the module, microbatch and data rank are not known" in str(report)
        assert "call forward_backward(x, y)" in str(report)


SINGLE = {  # ranks, the bad one, configuration
    "pp2 zero-bubble": (2, 0, {"pipeline": FOUR | {"schedule": "interleaved-zero-bubble"}}),
    "fsdp2-pp2": (4, 3, SHARDS | {"pipeline": FOUR}),
    "fsdp2-tp2": (4, 3, SHARDS | {"tensor": 2}),
}


class OneWeight(nn.Linear):
    """Spoils its weight's gradient in one of ``period`` calls."""

    microbatch, period, calls = None, 1, 0

    def forward(self, x):
        self.calls += 1
        if (self.calls - 1) % self.period != self.microbatch:
            return super().forward(x)
        return F.linear(x, Planted.apply(self.weight, NAN, True), self.bias)


@pytest.mark.parametrize("layout", SINGLE)
@on_ranks(lambda layout: SINGLE[layout][0])
def test_an_overflow_in_the_gradient_of_a_single_weight_is_named(world, layout):
    """In the split backward, where gradients of weights are computed apart; before they are summed into shards."""
    _, bad, parallel = SINGLE[layout]
    with paramp.launch_from_torch({"parallel": parallel}) as context:
        engine = engine_of(nn.Sequential(*(OneWeight(4, 4) for _ in range(4))), plan={"1": "colwise", "2": "rowwise"})
        microbatches, x = context.config.parallel.pipeline.num_microbatches, torch.ones(8, 4)
        for microbatch in {0, microbatches - 1}:
            assert train_step(engine, x).stepped
            if world.rank == bad:
                layer = engine.module.get_submodule("2")
                layer.microbatch, layer.period, layer.calls = microbatch, microbatches, 0
            assert train_step(engine, x).overflow
            report = engine.diagnose_overflow()
            if world.rank == bad:
                layer.microbatch = None
            origin = report.origin
            assert (report.kind, origin.parameter, origin.module) == ("weight gradient", "2.weight", "2"), report
            assert (origin.microbatch, origin.place.rank) == (microbatch, bad)
            assert {found.name for found in report.gradients} == {"2.weight"}


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.reentrant = reentrant

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.second, self.first(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_overflows_under_activation_checkpointing_are_named(reentrant):
    with paramp.launch_from_torch({"precision": "32-true"}):
        for backward in (True, False):
            engine = engine_of(nn.Sequential(Checkpointed(reentrant), nn.Linear(4, 4)))
            Plant(engine, "0.second.0", 0, backward, NAN, period=1)  # in the recomputation, too
            assert train_step(engine, torch.ones(2, 4)).overflow
            origin = engine.diagnose_overflow().origin
            assert (origin.module, origin.during) == ("0.second.0", "backward" if backward else "forward")


# ----------------------------------------------------------------------------------- training goes on as it would have


class Stateful(nn.Module):
    """Running statistics, dropout, and a buffer that is replaced, by numbers of Python's and NumPy's streams too."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.dropout = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + random.random() + numpy.random.rand()
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


def train_with(config, diagnosed):
    """Weights, running statistics, results and random numbers of a run in which the third window overflows."""
    random.seed(5)
    numpy.random.seed(5)
    with paramp.launch_from_torch(config) as context:
        adamw = partial(torch.optim.AdamW, lr=0.01)
        engine = engine_of(nn.Sequential(*(Stateful() for _ in range(4))), optimizer=adamw)
        results = []
        for index in range(5):
            generator = torch.Generator().manual_seed(10 * index + context.dp.rank)
            for _ in range(context.config.gradient_accumulation):
                x = torch.randn(8, 8, generator=generator)
                result = train_step(engine, x, x * 1e30 if index == 2 and context.dp.rank == 0 else x)
            results.append((result.stepped, result.loss_scale, result.grad_norm if result.stepped else None))
            torch.rand(3)  # the default stream is not where the window left it
            if diagnosed and result.overflow:
                assert engine.diagnose_overflow().kind != "unknown"
        return engine.full_state_dict(), results, torch.rand(3)


@pytest.mark.parametrize("parallel", [None, {"pipeline": FOUR | {"schedule": "zbv"}}, {"zero": 1}, SHARDS], ids=str)
@on_ranks(lambda parallel: 1 if parallel is None else 2)
def test_training_continues_bit_equal_after_a_diagnosis(world, parallel):
    config = {"precision": {"mode": "16-naive", "init_scale": 16.0}, "parallel": parallel}
    if parallel is None:
        config = {"precision": SCALED, "gradient_accumulation": 2, "clip_grad_norm": 1.0}
    expected, actual = train_with(config, diagnosed=False), train_with(config, diagnosed=True)
    assert [stepped for stepped, *_ in actual[1]] == [True, True, False, True, True]
    assert actual[1] == expected[1]
    assert torch.equal(actual[2], expected[2])
    assert_same_tensors(actual[0], expected[0])


def fails(x):
    """Where dropout leaves none of four numbers, once in 16 samples."""
    return not F.dropout(torch.ones_like(x), 0.5).count_nonzero()


class Rare(nn.Linear):
    """Fails by chance."""

    def __init__(self, fails=fails):
        super().__init__(4, 4)
        self.fails = fails

    def forward(self, x):
        return super().forward(x) * (NAN if self.fails(x) else 1.0)


def draw_again(world, parallel, steps, fails=fails):
    """The reports after steps with an overflow."""
    config = {"precision": "32-true", "max_skipped_in_a_row": None, "parallel": parallel}
    with paramp.launch_from_torch(config) as context:
        plan = {"0": "colwise_gather"} if context.tp.size > 1 else None
        engine, found = engine_of(nn.Sequential(nn.Linear(4, 4), Rare(fails)), plan=plan), []
        x = torch.ones(context.stage_axis.size, 4)
        for _ in range(steps):
            if train_step(engine, x).overflow:
                found.append(engine.diagnose_overflow())
    return found


@pytest.mark.parametrize("parallel", [{}, {"pipeline": {"size": 2, "microbatches": 2}}, {"tensor": 2}, SHARDS], ids=str)
def test_the_rerun_draws_the_same_random_numbers(parallel):
    """Of dropout; in one process also from torch's stream itself."""
    ranks, steps = (2, 80) if parallel else (1, 160)
    reports = run_on_ranks(ranks, __name__, "draw_again", {"parallel": parallel, "steps": steps})
    for found in reports if parallel else [*reports, draw_again(None, {}, 60, lambda _: torch.rand(()) < 1 / 8)]:
        assert len(found) > 3
        assert {report.origin and report.origin.module for report in found} == {"1"}


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_the_rerun_may_draw_others_from_pythons_and_numpys_streams(draw):
    """And says so if it is finite then."""
    random.seed(5)
    numpy.random.seed(5)
    found = draw_again(None, {}, 60, lambda _: draw() < 1 / 8)
    unknown = [report for report in found if report.origin is None]
    assert len(unknown) > 1
    assert all("the model is not deterministic" in report.unknown for report in unknown)


def test_the_rerun_of_each_call_draws_its_masks_in_the_exact_mode():
    config = {"reproducible": {"chunk": 1, "slices": 1}, "gradient_accumulation": 2, "max_skipped_in_a_row": None}
    with paramp.launch_from_torch(config):
        engine, found = engine_of(nn.Sequential(nn.Linear(4, 4), Rare())), set()
        for _ in range(40):
            train_step(engine, torch.ones(2, 4))
            if train_step(engine, torch.ones(2, 4)).overflow:
                origin = engine.diagnose_overflow().origin
                found.add((origin.module, origin.call))
    assert found == {("1", 0), ("1", 1)}


# ------------------------------------------------------------------------------------------------------------ stopping


def steps_until_stopped(step):
    """How many steps were skipped until training stopped, and its message; None if it goes on after 20."""
    for index in range(20):
        try:
            assert step().overflow
        except paramp.TrainingDiverged as error:
            return index + 1, error
    return None, None


@on_ranks(2, cuda=True)
def test_training_stops_after_many_skipped_steps(world):
    config = {"parallel": {"pipeline": 2}, "precision": SCALED, "max_skipped_in_a_row": 3}
    with paramp.launch_from_torch(config, device=world.device) as context:
        engine, bad = gpt_engine(num_layers=2), context.rank == 1
        assert window(engine).stepped
        plant = Plant(engine, "blocks.1.mlp", 1, False, NAN) if bad else None
        assert window(engine).overflow
        assert engine.num_skipped_in_a_row == 1
        if bad:
            plant.handle.remove()
        assert window(engine).stepped
        assert engine.num_skipped_in_a_row == 0
        plant = Plant(engine, "blocks.1.mlp", 1, False, NAN) if bad else None
        skipped, error = steps_until_stopped(lambda: window(engine))
        assert (skipped, engine.num_skipped_in_a_row, engine.num_skipped, engine.num_steps) == (3, 3, 4, 2)
        assert str(error).startswith(
            "training stopped after optimizer step 6, because 3 steps in a row were skipped: no scale helps: "
            "blocks.1.mlp produced NaN in the forward of microbatch 1 on rank 1 (pp 1, dp 0, tp 0, stage 1)"
        )
        assert error.report.origin.module == "blocks.1.mlp"
        assert engine.full_state_dict()  # what is to be saved is there
        if bad:
            plant.handle.remove()
        assert window(engine).stepped  # whoever goes on all the same may


@pytest.mark.parametrize(
    ("scaling", "most", "expected"),
    [
        ({"init_scale": 4.0, "min_scale": 1.0, "hysteresis": 1}, 50, 3),  # 4, 2, then 1 does not help either
        ({"init_scale": 2.0, "min_scale": 2.0, "hysteresis": 1}, 50, 2),
        ({"init_scale": 4.0, "min_scale": 4.0, "max_scale": 4.0}, 5, 5),  # a scale that stays has no floor to reach
        ({"init_scale": 4.0, "min_scale": 1.0}, None, None),
        ({"init_scale": 4.0, "min_scale": 1.0}, 1, 1),
        ({}, 50, 18),  # the mode's own, of which two overflows in a row make the first change
    ],
)
def test_training_stops_at_the_floor_of_the_scale(scaling, most, expected):
    with paramp.launch_from_torch({"precision": {"mode": "16-naive"} | scaling, "max_skipped_in_a_row": most}):
        engine = engine_of(nn.Linear(4, 4))
        stopped, error = steps_until_stopped(lambda: train_step(engine, torch.full((2, 4), NAN)))
        assert stopped == expected
        assert ("with the loss scale at its floor: no scale helps: the batch" in str(error)) == (expected in (2, 3, 18))


# ----------------------------------------------------------------------------------------------- the scaler by itself


@on_ranks(2)
def test_a_stand_alone_scaler_names_parameters_and_ranks(world):
    scaler = paramp.DistributedGradScaler(init_scale=8.0)
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        model[1].weight.grad = torch.tensor([[3.0, INF]]) if world.rank == 1 else torch.ones(1, 2)
        if world.rank == 0:
            model[0].bias.grad[0] = NAN
        report = scaler.diagnose(model.named_parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.step(optimizer)
        scaler.update()
        with pytest.raises(
            RuntimeError, match=r"diagnose: update\(\) was called since .* after step\(optimizer\) or unscale"
        ):
            scaler.diagnose(model.named_parameters())
        for begin in (lambda: scaler.scale(torch.ones(())) if world.rank else None, lambda: scaler.unscale_(optimizer)):
            begin()  # of the next batch, on a rank that has the loss; or on every rank
            assert scaler.diagnose(model.named_parameters()).scale == 4.0
            scaler.step(optimizer)
            scaler.update(4.0)
    places = [RankCoordinates(rank, (("pp", 0), ("dp", 0), ("tp", rank)), 0) for rank in (0, 1)]
    found = [(one.name, one.place, one.kind) for one in report.gradients]
    assert found == [("0.bias", places[0], "NaN"), ("1.weight", places[1], "inf")]
    second = report.gradients[1]
    assert (second.count, second.size, second.largest, report.scale) == (1, 2, 3.0, 8.0)
    assert "gradient of 1.weight on rank 1 (pp 0, dp 0, tp 1, stage 0): inf, 1 of 2 elements" in str(report)
    assert str(report).endswith("the largest finite magnitude in the others is 3")
