"""Criteria that return ``(sum, count)``: the gradients, however large counts are, and errors for wrong counts."""

import copy
import math
import warnings
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from counting import Collectives
from pool import on_ranks, shared_folder
from reference import assert_trained
from torch import nn

import paramp
from paramp.engine.state.count_unit import _power_of_two, _unit_of

HUGE = 2.0**17
"""The factor by which counts differ: in fp16, gradients that are as much larger overflow, and others are 0."""


def two_layers(width=8):
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))


def weighted(output, target):
    """A weighted squared error; the last column of ``target`` has the weight of each sample, which is its count."""
    squares = (output - target[:, :-1]).square().mean(1)
    return (squares * target[:, -1].to(squares.dtype)).sum(), target[:, -1].sum()


def samples(weights, seed=2):
    """Inputs, and targets with ``weights``."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, len(weights), 4, generator=generator)
    return x, torch.cat([y, torch.tensor(weights)[:, None]], 1)


def engine_for(model, criterion=weighted, lr=0.1, **options):
    return paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=lr), criterion, **options)[0]


class Reference:
    """The same training in fp64, in one process, with the exact mean over all samples of a window."""

    def __init__(self, model, criterion=weighted, lr=0.1):
        self.model = copy.deepcopy(model).double()
        self._criterion = criterion
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)

    def step(self, x, y):
        self._optimizer.zero_grad()
        total, count = self._criterion(self.model(x.double()), y)
        (total / count).backward()
        self._optimizer.step()
        return float(torch.stack([parameter.grad.norm() for parameter in self.model.parameters()]).norm())

    def compare(self, engine, before, tolerance):
        """The engine's weights have moved as the reference's."""
        assert_trained(engine.full_state_dict(), self.model.state_dict(), before, of_way=tolerance)


# --------------------------------------------------------------------------------- counts unlike the target's elements


def mean_error(images, targets):
    """The squared error of each image's mean: a sum over the batch, and its size."""
    return (images.flatten(1).mean(1) - targets.flatten(1).mean(1)).square().sum(), torch.tensor(len(images))


@pytest.mark.parametrize("mode", ["16-mixed", "16-naive"])
def test_an_image_target_of_many_elements_with_a_small_count(mode):
    """884,736 elements; the gradient of each is some 1e-8 of the loss, and was 0 if divided by their number."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(3, 3, 1))
    x = torch.randn(8, 3, 192, 192)
    y = model(x).detach() + 0.005 * torch.randn(8, 1, 1, 1)
    assert y.numel() == 884_736
    reference, before = Reference(model, mean_error), copy.deepcopy(model.state_dict())
    with paramp.launch_from_torch({"precision": mode}):
        engine = engine_for(model, mean_error)
        for _ in range(2):
            engine.forward_backward(x, y)
            result = engine.step()
            assert result.stepped
            assert result.grad_norm == pytest.approx(reference.step(x, y), rel=0.1)
        reference.compare(engine, before, 0.1)


class Answering(nn.Module):
    """Its own loss, of labels under a keyword of their own: a sum of many elements, and how many."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 512)

    def forward(self, x, answers):
        output = self.linear(x)
        return {"output": output, "loss": ((output - answers).square().sum(), answers.numel())}


@pytest.mark.parametrize("mode", ["16-mixed", "16-naive"])
@pytest.mark.parametrize("loop", ["forward_backward", "backward"])
def test_labels_under_another_keyword_without_a_target(mode, loop):
    torch.manual_seed(5)
    model, plain = (Answering() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    plain.double()
    before, optimizer = copy.deepcopy(model.state_dict()), torch.optim.SGD(plain.parameters(), lr=0.1)
    x, answers = torch.randn(256, 4), torch.randn(256, 512)
    with paramp.launch_from_torch({"precision": mode, "max_skipped_in_a_row": 1}):
        engine = engine_for(model, None, plan={})
        for _ in range(5):
            if loop == "forward_backward":
                engine.forward_backward({"x": x, "answers": answers})
            else:
                engine.backward(engine(x=x, answers=answers)["loss"])
            assert engine.step().stepped
            engine.zero_grad()
            optimizer.zero_grad()
            total, count = plain(x.double(), answers)["loss"]
            (total / count).backward()
            optimizer.step()
        assert_trained(engine.full_state_dict(), plain.state_dict(), before, of_way=0.01)


# ----------------------------------------------------------------------------------------------------- changing counts

LAYOUTS = {
    "1": (1, {}),
    "dp2": (2, {"data": 2}),
    "zero1": (2, {"data": 2, "zero": 1}),
    "fsdp2": (2, {"data": {"shard": 2}}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": {"size": 2, "microbatches": 2}}),
    "dp4": (4, {"data": 4}),
    "pp2-dp2": (4, {"pipeline": {"size": 2, "microbatches": 2}, "data": 2}),
    "zbv-dp2": (4, {"pipeline": {"size": 2, "microbatches": 4, "schedule": "zbv"}, "data": 2}),
}
FACTORS = [1.0, HUGE, 1.0, 1.0, HUGE, HUGE, 1.0]
"""What the counts of each window are multiplied by."""


@on_ranks(2)
def test_a_window_of_counts_has_one_more_all_reduce_of_two_numbers(world):
    seen = {}
    for criterion in (mean_error, nn.functional.mse_loss):
        with paramp.launch_from_torch({"parallel": {"data": 2}, "gradient_accumulation": 2}):
            engine = engine_for(nn.Sequential(nn.Linear(4, 4)), criterion)
            for _ in range(2):
                with Collectives() as collectives:
                    for _ in range(2):
                        engine.forward_backward(torch.ones(2, 4), torch.ones(2, 4), return_loss=False)
                        engine.step()
                engine.zero_grad()
            seen[criterion] = Counter(collectives.elements)
    assert seen[mean_error] - seen[nn.functional.mse_loss] == Counter({2: 1})
    assert seen[nn.functional.mse_loss] <= seen[mean_error]


def follow_changing_counts(layout, mode, init_scale, accumulation):
    """Windows whose counts change, ragged over samples, so over microbatches and data ranks too."""
    precision = {"mode": mode, "init_scale": init_scale, "min_scale": 2.0**-20}
    config = {"parallel": layout, "precision": precision, "gradient_accumulation": accumulation}
    model = (
        two_layers()
        if layout.get("pipeline", {}).get("schedule") != "zbv"
        else nn.Sequential(*two_layers(), *two_layers())
    )
    reference, before = Reference(model), copy.deepcopy(model.state_dict())
    with paramp.launch_from_torch(config) as context:
        engine = engine_for(model, plan={"0": "colwise", "1": "rowwise"} if context.tp.size > 1 else None)
        for index, factor in enumerate(FACTORS):
            weights = [factor * (1 + sample % 5) for sample in range(16 * accumulation)]
            x, y = samples(weights, seed=index)
            for call in range(accumulation):
                rows = slice(call * 16, call * 16 + 16)
                own = slice(context.dp.rank, None, context.dp.size)
                engine.forward_backward(x[rows][own], y[rows][own])
                result = engine.step()
            engine.zero_grad()
            assert result.stepped, (index, result)
            assert result.grad_norm == pytest.approx(reference.step(x, y), rel=0.02), index
            assert engine.scaler.get_scale() == init_scale
        reference.compare(engine, before, 0.02)


@pytest.mark.parametrize("init_scale", [2.0**12, 2.0**-7])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("mode", ["16-mixed", "16-naive"])
def test_the_unit_follows_counts(mode, init_scale, accumulation):
    """Gradients of the first scale overflow if the unit is too small; those of the second are 0 if it is too large."""
    follow_changing_counts({}, mode, init_scale, accumulation)


@pytest.mark.parametrize("layout", [name for name, (size, _) in LAYOUTS.items() if size == 2])
@on_ranks(2)
def test_the_unit_follows_counts_on_two_ranks(world, layout):
    follow_changing_counts(LAYOUTS[layout][1], "16-mixed", 2.0**12, 1)
    follow_changing_counts(LAYOUTS[layout][1], "16-naive", 2.0**-7, 2)


@pytest.mark.parametrize("layout", [name for name, (size, _) in LAYOUTS.items() if size == 4])
@on_ranks(4)
def test_the_unit_follows_counts_on_four_ranks(world, layout):
    follow_changing_counts(LAYOUTS[layout][1], "16-naive", 2.0**12, 2)
    follow_changing_counts(LAYOUTS[layout][1], "16-mixed", 2.0**-7, 1)


@on_ranks(2)
def test_microbatches_and_ranks_whose_count_is_zero(world):
    """The first microbatch of a window is masked after the first window; then all of one data rank's."""
    for parallel in ({"pipeline": {"size": 2, "microbatches": 2}}, {"data": 2}):
        config = {"parallel": parallel, "precision": {"mode": "16-mixed", "init_scale": 256.0}}
        model = two_layers()
        reference, before = Reference(model), copy.deepcopy(model.state_dict())
        with paramp.launch_from_torch(config) as context:
            engine = engine_for(model)
            for weights in ([HUGE] * 8, [0.0] * 4 + [HUGE] * 4, [HUGE] * 8):
                x, y = samples(weights)
                engine.forward_backward(*(part.chunk(context.dp.size)[context.dp.rank] for part in (x, y)))
                result = engine.step()
                assert result.stepped
                assert result.grad_norm == pytest.approx(reference.step(x, y), rel=0.02)
            reference.compare(engine, before, 0.02)


def test_a_short_first_microbatch_does_not_change_the_unit():
    """Otherwise gradients of the longer ones would be 32 times as large, and overflow."""
    config = {"precision": {"mode": "16-naive", "init_scale": 2.0**13}, "gradient_accumulation": 2}
    model = two_layers()
    reference = Reference(model)
    with paramp.launch_from_torch(config):
        engine = engine_for(model)
        for weights in ([320.0] * 8, [10.0] * 4 + [630.0] * 4, [320.0] * 8):
            x, y = samples(weights)
            for rows in (slice(4), slice(4, 8)):
                engine.forward_backward(x[rows], y[rows])
                result = engine.step()
            assert result.stepped
            assert result.grad_norm == pytest.approx(reference.step(x, y), rel=0.02)


def test_counts_are_as_exact_as_fp32():
    """Those that fp16 does not have too: 10,023 is 1.2235... of its unit."""
    model = two_layers()
    reference, before = Reference(model), copy.deepcopy(model.state_dict())
    with paramp.launch_from_torch({"gradient_accumulation": 2}):
        engine = engine_for(model)
        x, y = samples([3.0, 10_007.0, 1.0, 12.0])
        for rows in (slice(0, 1), slice(1, 4)):
            engine.forward_backward(x[rows], y[rows])
            engine.step()
        reference.step(x, y)
        reference.compare(engine, before, 1e-5)


def test_means_and_counts_take_turns():
    """From window to window; within one it is an error."""
    model = two_layers()
    reference = Reference(model)
    counts = True

    def criterion(output, target):
        total, count = weighted(output, target)
        return (total, count) if counts else total / count

    with paramp.launch_from_torch({"precision": {"mode": "16-mixed", "init_scale": 2.0**12}}):
        engine = engine_for(model, criterion)
        for now in (True, False, False, True):
            counts = now
            x, y = samples([HUGE] * 8)
            engine.forward_backward(x, y)
            result = engine.step()
            assert result.stepped
            assert result.grad_norm == pytest.approx(reference.step(x, y), rel=0.02)


@on_ranks(2)
def test_means_and_counts_take_turns_on_two_data_ranks(world):
    """Ranks agree on the unit only in windows for which all of them expect counts: none waits for another.

    Their counts differ, so that units of their own would show in the sum of their gradients.
    """
    model = two_layers()
    reference = Reference(model)
    counts = True

    def criterion(output, target):
        total, count = weighted(output, target)
        return (total, count) if counts else total / count

    with paramp.launch_from_torch(
        {"parallel": {"data": 2}, "precision": {"mode": "16-mixed", "init_scale": 256.0}}
    ) as context:
        engine = engine_for(model, criterion)
        for now in (False, False, True, True, True, False, True, False, False):
            counts = now
            x, y = samples([3.0] * 4 + [30.0 if counts else 3.0] * 4)
            engine.forward_backward(*(part.chunk(2)[context.dp.rank] for part in (x, y)))
            assert engine.step().grad_norm == pytest.approx(reference.step(x, y), rel=0.02)


@pytest.mark.parametrize("counts", [True, False])
@on_ranks(2)
def test_data_ranks_exchange_two_numbers_in_windows_that_may_have_counts(world, counts):
    """In the first backward of each window; with means only in that of the first."""

    def criterion(output, target):
        total, count = weighted(output, target)
        return (total, count) if counts else total / count

    with paramp.launch_from_torch({"parallel": {"data": 2}, "gradient_accumulation": 2}):
        engine, (x, y), found = engine_for(two_layers(), criterion), samples([3.0] * 4), []
        for _ in range(3):
            for _ in range(2):
                with Collectives() as collectives:
                    engine.forward_backward(x, y, return_loss=False)
                found.append(collectives.elements)
                assert collectives.counts.total() == len(collectives.elements)
                engine.step()
    assert found == ([[2], []] * 3 if counts else [[2], *[[]] * 5])


@on_ranks(2)
def test_the_first_windows_of_counts_after_means_have_the_unit_of_the_last_counts(world):
    """In one or two windows; then data ranks agree on one. Sums that overflow by it skip the step."""
    precision = {"mode": "16-naive", "init_scale": 2.0**10, "hysteresis": 1}
    with paramp.launch_from_torch({"parallel": {"data": 2}, "precision": precision}):
        counts = False

        def criterion(output, target):
            total, count = weighted(output, target)
            return (total, count) if counts else total / count

        engine, found = engine_for(two_layers(), criterion), []
        for weight in (None, 3.0, 48.0, 0.75, None, 48.0, 3.0, None, None, HUGE, HUGE):
            counts = weight is not None
            x, y = samples([weight or 1.0] * 4)
            engine.forward_backward(x, y)
            unit = float(engine._losses.unit.value)
            found.append((unit if counts else None, engine.step().stepped))
            engine.zero_grad()
    # The units of counts of 12, 192 and 3 are 16, 256 and 4.
    assert found == [
        *((None, True), (1.0, True), (16.0, True), (4.0, True)),
        *((None, True), (256.0, True), (256.0, True)),
        *((None, True), (None, True), (16.0, False), (2.0**19, True)),
    ]


@pytest.mark.parametrize("after", [{"data": 2}, {"pipeline": {"size": 2, "microbatches": 2}}], ids=["dp2", "pp2"])
@on_ranks(2)
def test_a_masked_first_microbatch_after_a_load_has_the_unit_of_the_checkpoint(world, after):
    """The first stage of the pipeline, whose rank writes it, knows no counts itself."""
    before = {"pipeline": {"size": 2, "microbatches": 2}}
    model, other = two_layers(), two_layers()
    reference = Reference(model)
    precision = {"mode": "16-mixed", "init_scale": 256.0}
    with paramp.launch_from_torch({"parallel": before, "precision": precision}):
        folder = shared_folder()
        engine = engine_for(model)
        x, y = samples([HUGE] * 8)
        train(engine, x, y)
        reference.step(x, y)
        engine.save(folder / "saved")
    calls = 1 if "pipeline" in after else 2
    config = {"parallel": after, "precision": precision, "gradient_accumulation": calls}
    with paramp.launch_from_torch(config) as context:
        engine = engine_for(other)
        engine.load(folder / "saved")
        x, y = samples([0.0] * 4 + [HUGE] * 4)
        for call in range(calls):
            rows = [part.chunk(calls)[call].chunk(context.dp.size)[context.dp.rank] for part in (x, y)]
            engine.forward_backward(*rows)
            result = engine.step()
        assert result.stepped
        assert result.grad_norm == pytest.approx(reference.step(x, y), rel=0.02)


def test_the_unit_is_the_nearest_power_of_two():
    numbers = torch.logspace(-30, 30, 999, base=2, dtype=torch.float64)
    expected = torch.tensor([2.0 ** round(math.log2(number)) for number in numbers.tolist()], dtype=torch.float64)
    assert torch.equal(_power_of_two(numbers), expected)


@pytest.mark.parametrize(
    ("first", "usual", "spread", "expected"),
    [
        (8, 0, 1, 8),  # the first window
        (8, 1024, 1, 8),  # a window of one microbatch on each rank
        (100_000, 8, 64, 131072),
        (16, 1024, 64, 1024),
        (15, 1024, 64, 1024),
        (8, 1024, 64, 8),
        (2048, 1024, 64, 2048),
        (0, 1024, 64, 1024),
        (math.nan, 1024, 64, 1024),
        (math.inf, 0, 64, 1),
        (-4, 0, 1, 1),
    ],
)
def test_the_unit_by_hand(first, usual, spread, expected):
    first, usual = (torch.tensor(float(number), dtype=torch.float64) for number in (first, usual))
    assert _unit_of(first, usual, spread).item() == expected


# ----------------------------------------------------------------------------------------------------------- exact mode


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@on_ranks(2)
def test_the_exact_mode_has_the_same_bits_whatever_the_counts(world, kind):
    """At a scale at which gradients of fp16 are rounded to few bits, so that another unit would change them."""
    traces = []
    for parallel in ({"data": 2}, {"pipeline": 2}, {"tensor": 2}):
        precision = {"mode": "16-mixed", "init_scale": 2.0**-9, "min_scale": 2.0**-20}
        config = {"parallel": parallel, "precision": precision, "reproducible": {"chunk": 2, "slices": 2}}
        with paramp.launch_from_torch(config | {"gradient_accumulation": 2}) as context:
            model, plan = two_layers(), {"0": "colwise", "1": "rowwise"}
            engine, *_ = paramp.initialize(model, kind(model.parameters(), lr=0.1), weighted, plan=plan)
            trace = []
            for index, factor in enumerate((1.0, 1000.0, 1.0)):
                # Chunks differ: the first of the second data rank has another count than the first of all.
                x, y = samples([factor * (1 + 9 * (sample // 4)) for sample in range(16)], seed=index)
                for rows in (slice(8), slice(8, 16)):
                    own = [part[rows].chunk(context.dp.size)[context.dp.rank] for part in (x, y)]
                    loss = engine.forward_backward(*own)
                    result = engine.step()
                trace += [loss.item(), result.grad_norm, result.stepped]
            traces.append((trace, engine.full_state_dict()))
    for trace, state in traces[1:]:
        assert trace == traces[0][0]
        assert all(torch.equal(value, traces[0][1][name]) for name, value in state.items())
    assert traces[0][0][2::3] == [True] * 3


# ------------------------------------------------------------------------------------------------------------- mistakes


RIGHT = object()


class Wrong:
    """:func:`weighted`, but on the rank for which it is set with another count, as a mean, or failing."""

    count = RIGHT
    mean = fails = False

    def __call__(self, output, target):
        if self.fails:
            raise ArithmeticError("the loss is broken")
        total, count = weighted(output, target)
        if self.mean:
            return total / count
        return total, count if self.count is RIGHT else self.count


INVALID = [
    (math.nan, "nan"),
    (torch.tensor(-3), "-3"),
    (math.inf, "inf"),
    (None, "None"),
    ("three", "'three'"),
    (torch.tensor([True, False]), r"\(2,\) of torch\.bool"),
    (torch.tensor(1j), r"\(\) of torch\.complex64"),
    (torch.tensor(2**54), r"1\.80144e\+16"),
    (2**70, r"1\.18059e\+21"),
    (10**5000, r"a value of the type int \(.*\)"),
]
"""Counts, and what an error says of them."""


def last_rank_of(context):
    """The rank of the last stage on the last data rank."""
    return context.world_size - 1


def train(engine, x, y, calls=1, **options):
    for _ in range(calls):
        engine.forward_backward(x, y, **options)
        engine.step()


@pytest.mark.parametrize("returns_loss", [True, False])
@pytest.mark.parametrize("layout", ["dp2", "pp2", "tp2"])
@on_ranks(2)
def test_an_invalid_count_raises_on_every_rank(world, layout, returns_loss):
    config = {"parallel": LAYOUTS[layout][1], "precision": "16-mixed"}
    with paramp.launch_from_torch(config) as context:
        criterion, model = Wrong(), two_layers()
        reference = Reference(model)
        engine = engine_for(model, criterion, plan={"0": "colwise", "1": "rowwise"} if layout == "tp2" else None)
        everywhere = layout == "tp2"  # tensor ranks compute the same loss
        x, y = samples([3.0] * 8)
        own = [part.chunk(context.dp.size)[context.dp.rank] for part in (x, y)]
        for wrong, text in INVALID:
            before = engine.full_state_dict()
            if everywhere or context.rank == last_rank_of(context):
                criterion.count = wrong
            rank = r"rank \d" if everywhere else r"rank 1 \("
            with pytest.raises(ValueError, match=rf"criterion: got \(sum, count\) with a count of {text} on {rank}"):
                train(engine, *own, return_loss=returns_loss)
            criterion.count = RIGHT
            engine.zero_grad()
            assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
            engine.forward_backward(*own)
            assert engine.step().grad_norm == pytest.approx(reference.step(x, y), rel=0.02)


@pytest.mark.parametrize("checked", [True, False], ids=["engine.criterion", "the criterion"])
@on_ranks(2)
def test_an_invalid_count_in_a_loop_of_ones_own_raises_on_every_rank(world, checked):
    with paramp.launch_from_torch({"parallel": {"data": 2}}) as context:
        criterion, model = Wrong(), two_layers()
        reference = Reference(model)
        engine = engine_for(model, criterion)
        x, y = samples([3.0] * 8)
        own_x, own_y = (part.chunk(2)[context.dp.rank] for part in (x, y))
        for wrong, text in INVALID:
            criterion.count = wrong if context.rank == 1 else RIGHT
            loss = (engine.criterion if checked else criterion)(engine(own_x), own_y)
            with pytest.raises(ValueError, match=rf"criterion: got \(sum, count\) with a count of {text} on rank 1 \("):
                engine.backward(loss)
            engine.zero_grad()
        criterion.count = RIGHT
        engine.backward(engine.criterion(engine(own_x), own_y))
        assert engine.step().grad_norm == pytest.approx(reference.step(x, y), rel=1e-5)


class Delayed:
    """In place of a CUDA event."""

    def record(self): ...

    def synchronize(self): ...


@on_ranks(2)
def test_a_count_that_only_the_device_knows_skips_the_step_and_raises_at_the_next(world):
    """As on a GPU, where the host reads the sum of all flags a step later."""
    precision = {"mode": "16-mixed", "init_scale": 256.0}
    with paramp.launch_from_torch({"parallel": {"data": 2}, "precision": precision}) as context:
        criterion, model = Wrong(), two_layers()
        reference = Reference(model)
        engine = engine_for(model, criterion)
        engine._failure.is_shared = True
        engine._failure._copied = Delayed()
        unit = engine._losses.unit
        unit._checked = lambda count: unit._checked_on_device(torch.as_tensor(count).double())
        x, y = samples([3.0] * 8)
        own = [part.chunk(2)[context.dp.rank] for part in (x, y)]
        for wrong, text in ((math.nan, "nan"), (-3, "-3"), (2.0**54, r"1\.80144e\+16")):
            before = engine.full_state_dict()
            criterion.count = wrong if context.rank == 1 else RIGHT
            engine.forward_backward(*own)
            result = engine.step()
            assert (result.stepped, result.overflow) == (False, False)
            assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
            criterion.count = RIGHT
            engine.zero_grad()
            engine.forward_backward(*own)
            with pytest.raises(ValueError, match=rf"a count of {text} on rank 1 \("):
                engine.step()
            engine.zero_grad()
            engine.forward_backward(*own)
            assert engine.step().grad_norm == pytest.approx(reference.step(x, y), rel=0.02)


def test_a_count_that_only_the_device_knows_in_one_process():
    with paramp.launch_from_torch({"precision": "16-mixed"}):
        criterion = Wrong()
        engine = engine_for(two_layers(), criterion)
        engine._failure.is_shared = True
        engine._failure._copied = Delayed()
        unit = engine._losses.unit
        unit._checked = lambda count: unit._checked_on_device(torch.as_tensor(count).double())
        x, y = samples([3.0] * 8)
        criterion.count = -3
        engine.forward_backward(x, y)
        assert not engine.step().stepped
        engine.zero_grad()
        engine.forward_backward(x, y)
        with pytest.raises(ValueError, match=r"a count of -3 on rank 0 \("):
            engine.step()


@pytest.mark.parametrize("returns_loss", [True, False])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("first", [False, True])
@on_ranks(2)
def test_a_mean_on_one_rank_beside_a_count_on_another(world, first, delayed, returns_loss):
    """In the first window, in which ranks agree on a unit, and later; also if the host learns of it a step later."""
    with paramp.launch_from_torch({"parallel": {"data": 2}, "precision": "16-mixed"}) as context:
        criterion, model = Wrong(), two_layers()
        reference = Reference(model)
        engine = engine_for(model, criterion)
        if delayed:
            engine._failure.is_shared = True
            engine._failure._copied = Delayed()
        x, y = samples([3.0] * 8)
        own = [part.chunk(2)[context.dp.rank] for part in (x, y)]
        mean, counted = r"a mean on rank 1 \(.*\)", r"\(sum, count\) on rank 0 \(.*\)"
        text = f"criterion: returned ({mean}, and {counted}|{counted}, and {mean}) in one accumulation window"
        for _ in range(0 if first else 3):
            engine.forward_backward(*own)
            assert engine.step().grad_norm == pytest.approx(reference.step(x, y), rel=0.02)
        before = engine.full_state_dict()
        criterion.mean = context.rank == 1
        if delayed:
            engine.forward_backward(*own, return_loss=returns_loss)
            assert not engine.step().stepped
        with pytest.raises(ValueError, match=text):
            train(engine, *own, return_loss=returns_loss)
        engine.zero_grad()
        assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
        criterion.mean = False
        for _ in range(3):
            engine.forward_backward(*own)
            assert engine.step().grad_norm == pytest.approx(reference.step(x, y), rel=0.02)


@on_ranks(2)
def test_a_mean_beside_a_count_in_another_microbatch(world):
    for parallel, accumulation in (({"data": 2}, 2), ({"pipeline": {"size": 2, "microbatches": 2}}, 1)):
        config = {"parallel": parallel, "gradient_accumulation": accumulation}
        with paramp.launch_from_torch(config) as context:
            calls = 0

            def criterion(output, target):
                nonlocal calls
                calls += 1
                total, count = weighted(output, target)
                return (total, count) if calls % 2 or context.rank == 0 else total / count

            engine = engine_for(two_layers(), criterion)
            x, y = samples([3.0] * 8)
            with pytest.raises(ValueError, match=r"criterion: returned both a mean and \(sum, count\)"):
                train(engine, x, y, calls=accumulation)


@pytest.mark.parametrize("overlap", [1, 2])
@on_ranks(4)
def test_a_criterion_that_fails_before_its_first_count_leaves_no_rank_waiting(world, overlap):
    """The others wait for its count to agree on the unit, in the first window and later."""
    config = {"parallel": LAYOUTS["pp2-dp2"][1], "precision": "16-mixed", "gradient_accumulation": overlap}
    for parallel in (LAYOUTS["pp2-dp2"][1], {"data": 4}):
        with paramp.launch_from_torch(config | {"parallel": parallel}) as context:
            criterion, model = Wrong(), two_layers()
            reference = Reference(model)
            engine = engine_for(model, criterion)
            x, y = samples([3.0] * 16)
            own = [part.chunk(context.dp.size)[context.dp.rank] for part in (x, y)]
            for _ in range(3):
                criterion.fails = context.rank == last_rank_of(context)
                with pytest.raises((ValueError, ArithmeticError, RuntimeError), match="the loss is broken"):
                    engine.forward_backward(*own)
                criterion.fails = False
                engine.zero_grad()
                for _ in range(overlap):
                    engine.forward_backward(*own)
                    result = engine.step()
                assert result.grad_norm == pytest.approx(reference.step(x, y), rel=0.02)


# ------------------------------------------------------------------------------------------- steps without a gradient


def step(engine, x, y):
    engine.zero_grad()
    engine.forward_backward(x, y)
    return engine.step()


@pytest.mark.parametrize("parallel", [{"data": 2}, {"pipeline": 2}], ids=["dp2", "pp2"])
@on_ranks(2)
def test_a_step_whose_gradient_has_underflowed_warns_at_the_next(world, parallel):
    precision = {"mode": "16-naive", "init_scale": 1.0, "min_scale": 1.0, "max_scale": 1.0}
    with paramp.launch_from_torch({"parallel": parallel, "precision": precision}):
        tiny = 1e-9

        def criterion(output, target):
            return tiny * F.mse_loss(output, target)

        engine = engine_for(two_layers(), criterion)
        x, y = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(2))
        tiny = 1.0
        assert step(engine, x, y).grad_norm > 0
        tiny = 1e-9
        result = step(engine, x, y)
        assert (result.stepped, result.grad_norm) == (True, 0)
        with pytest.warns(UserWarning, match=r"step 2 of SGD was made with a gradient whose norm is exactly 0") as seen:
            step(engine, x, y)
        assert len(seen) == 1
        step(engine, x, y)  # once only
        tiny = 1.0
        step(engine, x, y)
        tiny = 1e-9
        step(engine, x, y)
        with pytest.warns(UserWarning, match="step 6 of SGD"):
            step(engine, x, y)


def test_gradients_of_zero_by_hand_and_skipped_steps_do_not_warn():
    with paramp.launch_from_torch({"precision": "16-mixed"}), warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = engine_for(two_layers())
        x, y = samples([0.0] * 4)
        for _ in range(3):
            assert not step(engine, x, y).stepped
        engine.zero_grad()
        for _ in range(3):
            for parameter in engine.parameters():
                parameter.grad = torch.zeros_like(parameter)
            assert engine.step().stepped
