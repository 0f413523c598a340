"""Criteria that return ``(sum, count)``: the gradients, however large counts are, and errors for wrong counts."""

import copy
import functools
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from beside_plain import randn, seeded
from counting import Collectives
from families import rarely
from layouts import sized_layouts
from pool import on_ranks, shared_folder
from reference import assert_trained
from small_engines import assert_same_tensors, engine_of, own_part, sgd, train_step
from torch import nn

import paramp
from paramp.precision.compute_context import default_dtype

HUGE = 2.0**17
"""The factor by which counts differ: in fp16, gradients that are as much larger overflow, and others are 0."""
RIGHT = object()
PLAN = {"0": "colwise", "1": "rowwise"}


def two_layers():
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), seed=5)


class Weighted:
    """A weighted squared error; the last column of ``target`` has the weight of each sample, which is its count.

    On the rank for which it is set with another count, as a mean, or failing.
    """

    count = RIGHT
    mean = fails = False

    def __call__(self, output, target):
        if self.fails:
            raise ArithmeticError("the loss is broken")
        if output.ndim == 3:  # of equal tokens
            output = output.mean(1)
        squares, weights = (output - target[:, :-1]).square().mean(1), target[:, -1]
        total, count = (squares * weights.to(squares.dtype)).sum(), weights.sum()
        if self.mean:
            return total / count
        return total, count if self.count is RIGHT else self.count


def samples(weights, seed=2):
    """Inputs, and targets with ``weights``."""
    x, y = randn(2, len(weights), 4, seed=seed)
    return x, torch.cat([y, torch.tensor(weights)[:, None]], 1)


class Reference:
    """The same training in fp64, in one process, with the exact mean over all samples of a window."""

    def __init__(self, model, criterion=None):
        self.start = copy.deepcopy(model.state_dict())
        self.model = copy.deepcopy(model).double()
        self._criterion = criterion or Weighted()
        self._optimizer = sgd(self.model.parameters())

    def step(self, x, y):
        """The norm of the gradients."""
        self._optimizer.zero_grad()
        total, count = self._criterion(self.model(x.double()), y)
        (total / count).backward()
        self._optimizer.step()
        return float(torch.stack([parameter.grad.norm() for parameter in self.model.parameters()]).norm())

    def compare(self, engine, tolerance):
        """The engine's weights have moved as these have."""
        assert_trained(engine.full_state_dict(), self.model.state_dict(), self.start, of_way=tolerance)


def run_window(context, engine, x, y, calls=1):
    """The result of a window of the batch, with this data rank's part of each call's."""
    engine.zero_grad()
    for rows in zip(x.chunk(calls), y.chunk(calls), strict=True):
        result = train_step(engine, *own_part(context, *rows))
    return result


# --------------------------------------------------------------------------------- counts unlike the target's elements


def sum_of_squares(output, answers):
    return (output - answers).square().sum(), answers.numel()


class Answering(nn.Linear):
    """Its own loss, of labels under a keyword of their own: a sum of many elements, and how many."""

    def forward(self, x, answers):
        output = super().forward(x)
        return {"output": output, "loss": sum_of_squares(output, answers)}


@pytest.mark.parametrize("mode", ["16-mixed", "16-naive"])
@pytest.mark.parametrize("loop", ["forward_backward", "backward"])
def test_labels_under_another_keyword_without_a_target(mode, loop):
    reference = Reference(seeded(nn.Linear, 4, 512), sum_of_squares)
    x, answers = randn(256, 4), randn(256, 512)
    with paramp.launch_from_torch({"precision": mode, "max_skipped_in_a_row": 1}):
        engine = engine_of(seeded(Answering, 4, 512), None, plan={})
        for _ in range(5):
            if loop == "forward_backward":
                engine.forward_backward({"x": x, "answers": answers})
            else:
                engine.backward(engine(x=x, answers=answers)["loss"])
            assert engine.step().stepped
            engine.zero_grad()
            reference.step(x, answers)
        reference.compare(engine, 0.01)


# ----------------------------------------------------------------------------------------------------- changing counts

PP2 = {"pipeline": {"size": 2, "microbatches": 2}}
LAYOUTS = sized_layouts("1, dp2, dp2-zero1, fsdp2, tp2, pp2, dp4, pp2-dp2", microbatches=2)
LAYOUTS["zbv-dp2"] = 4, {"pipeline": {"size": 2, "microbatches": 4, "schedule": "zbv"}, "data": 2}
FACTORS = [1.0, HUGE, 1.0, 1.0, HUGE, HUGE, None, HUGE, HUGE, 1.0, None, None, 1.0, 1.0, HUGE]
"""What the counts of each window are multiplied by; None: a window of means."""
SCALES = [("16-mixed", 2.0**12, 1), ("16-naive", 2.0**12, 2), ("16-naive", 2.0**-7, 2), ("16-mixed", 2.0**-7, 1)]
"""Gradients of the first scale overflow if the unit is too small; those of the second are 0 if it is too large."""


@pytest.mark.parametrize("layout", rarely(LAYOUTS, "1", "dp2-zero1", "fsdp2", "zbv-dp2"))
@on_ranks(lambda layout: LAYOUTS[layout][0])
def test_the_unit_follows_counts(world, layout):
    """Windows whose counts change, ragged over samples, so over microbatches and data ranks too.

    Data ranks agree on the unit only in windows for which all of them expect counts: none waits for another.
    """
    for mode, init_scale, accumulation in SCALES[[*LAYOUTS].index(layout) % 2 :: 2]:
        precision = {"mode": mode, "init_scale": init_scale, "min_scale": 2.0**-20}
        config = {"parallel": LAYOUTS[layout][1], "precision": precision, "gradient_accumulation": accumulation}
        model = nn.Sequential(*two_layers(), *two_layers()) if "zbv" in layout else two_layers()
        reference = Reference(model)
        with paramp.launch_from_torch(config) as context:
            criterion = Weighted()
            engine = engine_of(model, criterion, plan=PLAN)
            for index, factor in enumerate(FACTORS):
                criterion.mean = factor is None
                weights = [1.0 if factor is None else factor * (1 + n % 5) for n in range(16 * accumulation)]
                x, y = samples(weights, seed=index)
                result = run_window(context, engine, x, y, accumulation)
                assert result.stepped, (index, result)
                assert result.grad_norm == pytest.approx(reference.step(x, y), rel=0.02), index
                assert engine.scaler.get_scale() == init_scale
            reference.compare(engine, 0.02)


FEW = {
    # None of the first microbatch, or of the first data rank, is counted.
    "none": ("16-mixed", 256.0, ([HUGE] * 8, [0.0] * 4 + [HUGE] * 4, [HUGE] * 8)),
    # Otherwise gradients of the others would be 32 times as large, and overflow.
    "few": ("16-naive", 2.0**13, ([320.0] * 8, [10.0] * 4 + [630.0] * 4, [320.0] * 8)),
}


@pytest.mark.parametrize("few", FEW)
@pytest.mark.parametrize(("parallel", "calls"), [(PP2, 1), ({"data": 2}, 1), ({"data": 2}, 2)])
@on_ranks(2)
def test_few_counts_or_none_of_a_microbatch_or_rank_do_not_change_the_unit(world, parallel, calls, few):
    """Nor after a load: the first stage of a pipeline, whose rank saves the unit, knows no counts itself."""
    mode, init_scale, windows = FEW[few]
    config = {"parallel": parallel, "precision": {"mode": mode, "init_scale": init_scale}}
    reference = Reference(two_layers())
    with paramp.launch_from_torch(config | {"gradient_accumulation": calls}) as context:
        folder = shared_folder()
        for number, weights in enumerate(windows):
            engine, (x, y) = engine_of(two_layers(), Weighted()), samples(weights)
            if number:
                engine.load(folder / str(number - 1))
            result = run_window(context, engine, x, y, calls)
            assert result.stepped
            assert result.grad_norm == pytest.approx(reference.step(x, y), rel=0.02)
            engine.save(folder / str(number))
        reference.compare(engine, 0.02)


def test_counts_are_as_exact_as_fp32():
    """Those that fp16 does not have too: 10,023 is 1.2235... of its unit."""
    model = two_layers()
    reference = Reference(model)
    with paramp.launch_from_torch({"gradient_accumulation": 2}):
        engine = engine_of(model, Weighted())
        x, y = samples([3.0, 10_007.0, 1.0, 12.0])
        for rows in (slice(0, 1), slice(1, 4)):
            train_step(engine, x[rows], y[rows])
        reference.step(x, y)
        reference.compare(engine, 1e-5)


@pytest.mark.parametrize(("dtype", "count"), [(torch.bfloat16, 1003.0), (torch.float16, 70_000.0)])
def test_a_float_is_not_rounded_to_the_default_dtype(dtype, count):
    x, y = randn(2, 8, 4)
    with paramp.launch_from_torch():
        engine = engine_of(two_layers(), lambda output, target: (F.mse_loss(output, target), count))
        with default_dtype(dtype):
            found = engine.evaluate(x, y)
        torch.testing.assert_close(found, F.mse_loss(engine.module(x), y).detach() / count, rtol=1e-6, atol=0)


def units(windows, **config):
    """The unit of each window, by the size of the gradients before its step, and whether that was made.

    A window is the weights of the four samples of each of its calls; None: a mean, whose unit is NaN. One with NaN
    fails, and is left out.
    """
    found = []
    with paramp.launch_from_torch(config) as context:
        criterion, model = Weighted(), two_layers()
        x, y = samples([1.0] * 4)
        one = torch.autograd.grad(criterion(model(x), y)[0], list(model.parameters()))
        engine = engine_of(model, criterion, functools.partial(torch.optim.SGD, lr=0.0))
        for weights in windows:
            criterion.mean = None in weights
            if math.nan in weights:
                with pytest.raises(ValueError, match="a count of nan"):
                    engine.forward_backward(*samples([math.nan] * 4))
                engine.zero_grad()
                continue
            for number, weight in enumerate(weights, 1):
                x, y = samples([1.0 if weight is None else weight] * 4)
                engine.forward_backward(x[:, None].repeat(1, 4, 1) if context.cp.size > 1 else x, y)
                if number < len(weights):
                    engine.step()
            norms = [nn.utils.get_total_norm(gradients) for gradients in (one, [p.grad for p in engine.parameters()])]
            factor = math.nan if criterion.mean else sum(weights) * engine.scaler.get_scale()
            # Gradients are averaged over data ranks, and a context rank has half of the tokens.
            unit = float(norms[0] / norms[1]) * factor / (len(weights) * context.batch_axis.size)
            found.append((unit, engine.step().stepped))
            engine.zero_grad()
    return found


BY_HAND = [
    # Of one microbatch: the power of two that is nearest to the count, 4 times the weight of a sample.
    {(2.0,): 8, (256.0,): 1024, (3.0,): 16, (2.8,): 8, (25_000.0,): 131_072, (0.001,): 2.0**-8},
    # Of two: not below the mean of the window before, unless the first count is less than 1/64 of it; 0 is none.
    {(2.0, 2.0): 8, (25_000.0, 25_000.0): 131_072, (256.0, 256.0): 1024, (4.0, 508.0): 1024, (3.75, 508.25): 1024}
    | {(2.0, 510.0): 8, (512.0, 512.0): 2048, (0.0, 512.0): 2048, (None, None): math.nan, (16.25, 16.25): 1024},
]


@pytest.mark.parametrize("windows", BY_HAND)
def test_the_unit_by_hand(windows):
    found = units(windows, gradient_accumulation=len(next(iter(windows))))
    assert [unit for unit, _ in found] == pytest.approx([*windows.values()], rel=1e-4, nan_ok=True)


@on_ranks(2)
def test_where_every_layout_has_the_same_bits_the_first_sample_alone_chooses_the_unit(world):
    """Sums over the mean count would round fp16 gradients of its own weights to multiples of 2**-24."""
    (x, y), found = samples([1.0, 2.0**12]), []
    x[0, 2:] = x[1, :2] = 0.0  # each sample has weights of its own
    precision = {"mode": "16-mixed", "init_scale": 1.0}
    for parallel in ({"tensor": 2}, {"data": 2}):
        config = {"parallel": parallel, "precision": precision, "reproducible": {"chunk": 1, "slices": 2}}
        with paramp.launch_from_torch(config) as context:
            engine = engine_of(two_layers(), Weighted(), functools.partial(torch.optim.SGD, lr=16.0), plan=PLAN)
            assert run_window(context, engine, x, y).stepped
            found.append(engine.full_state_dict())
    assert_same_tensors(*found)


@pytest.mark.parametrize("axis", ["data", "context"])
@on_ranks(2)
def test_the_first_windows_of_counts_after_means_have_the_unit_of_the_last_counts(world, axis):
    """In one or two windows; then data ranks agree on one. Sums that overflow by it skip the step."""
    precision = {"mode": "16-naive", "init_scale": 2.0**10, "hysteresis": 1}
    weights = [None, 3.0, 48.0, 0.75, None, 48.0, 3.0, None, None, HUGE, HUGE]
    found = units([(weight,) for weight in weights], parallel={axis: 2}, precision=precision)
    # The units of counts of 12, 192 and 3 are 16, 256 and 4; that of the step that overflows, 16, is not to be seen.
    expected = [math.nan, 1.0, 16.0, 4.0, math.nan, 256.0, 256.0, *[math.nan] * 3, 2.0**19]
    assert [unit for unit, _ in found] == pytest.approx(expected, rel=0.01, nan_ok=True)
    assert [stepped for _, stepped in found] == [True] * 9 + [False, True]


@on_ranks(2)
def test_counts_after_a_window_that_failed_have_a_unit_of_their_own(world):
    """Also after a mean behind it, and after a first one."""
    for windows, expected in (((3.0, math.nan, None, 48.0), [16.0, math.nan, 256.0]), ((math.nan, 48.0), [256.0])):
        found = units([(weight,) for weight in windows], parallel={"data": 2})
        assert [unit for unit, _ in found] == pytest.approx(expected, rel=0.01, nan_ok=True)


class NameOfCpu(str):
    """The CPU, by a name that a unit of counts takes for a GPU."""

    type = "cuda"


@pytest.mark.parametrize("axis", ["data", "context"])
@on_ranks(2)
def test_data_ranks_exchange_two_numbers_in_windows_that_may_have_counts(world, axis):
    """In the first backward of each window; with means only in that of the first, or on a GPU of the first two. A step
    sends the same. So do context ranks, which also gather outputs, and try the first batch."""
    steps, (x, y) = [], randn(2, 4, 8, 4)
    counts, means, late_means = [[2], []] * 3, [[2], *[[]] * 5], [[2], [], [2], *[[]] * 3]
    for mean, on_gpu, expected in ((False, False, counts), (True, False, means), (True, True, late_means)):
        with paramp.launch_from_torch({"parallel": {axis: 2}, "gradient_accumulation": 2}):
            criterion = F.mse_loss if mean else lambda output, y: (F.mse_loss(output, y, reduction="sum"), y.numel())
            engine, sent = engine_of(two_layers(), criterion), []
            if on_gpu:
                engine._losses.unit._device = NameOfCpu("cpu")
            for _ in range(6):
                for call in (functools.partial(engine.forward_backward, x, y, return_loss=False), engine.step):
                    with Collectives() as collectives:
                        call()
                    is_tried = axis == "context" and not sent
                    sent.append([number for number in collectives.elements if number == 2 or not is_tried])
                    assert axis == "context" or collectives.counts.total() == len(collectives.elements)
        assert sent[::2] == expected
        steps.append(sent[1::2])
    assert steps[0] == steps[1] == steps[2]


# ------------------------------------------------------------------------------------------------------------- mistakes

INVALID = [
    (math.nan, "nan"),
    (torch.tensor(-3), "-3"),
    (math.inf, "inf"),
    (None, "None"),
    ("three", "'three'"),
    (torch.tensor([True, False]), r"\(2,\) of torch\.bool"),
    (torch.tensor(1j), r"\(\) of torch\.complex64"),
    (torch.tensor(2**53 + 2), r"9\.0072e\+15"),
    (2**70, r"1\.18059e\+21"),
    (10**5000, r"a value of the type int \(.*\)"),
]
"""Counts, and what an error says of them."""
LOOPS = {"dp2": ["loss", "no loss", "own loop", "unchecked"], "pp2": ["loss", "no loss"], "tp2": ["loss", "no loss"]}
"""By layout: with a loss returned or not, or calls of ``engine.criterion`` or of the criterion itself."""


def in_loop(engine, criterion, loop, x, y, *, steps):
    """A backward in one of :data:`LOOPS`, and a step."""
    if loop in ("loss", "no loss"):
        engine.forward_backward(x, y, return_loss=loop == "loss")
    else:
        engine.backward((engine.criterion if loop == "own loop" else criterion)(engine(x), y))
    return engine.step() if steps else None


@pytest.mark.parametrize(("layout", "loop"), [(layout, loop) for layout, loops in LOOPS.items() for loop in loops])
@on_ranks(2)
def test_an_invalid_count_raises_on_every_rank(world, layout, loop):
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout][1], "precision": "16-mixed"}) as context:
        criterion, model = Weighted(), two_layers()
        reference = Reference(model)
        engine = engine_of(model, criterion, plan=PLAN)
        everywhere = layout == "tp2"  # tensor ranks compute the same loss
        x, y = samples([3.0] * 8)
        own = own_part(context, x, y)
        for wrong, text in INVALID:
            before = engine.full_state_dict()
            if everywhere or world.rank == 1:
                criterion.count = wrong
            rank = r"rank \d" if everywhere else r"rank 1 \("
            with pytest.raises(ValueError, match=rf"criterion: got \(sum, count\) with a count of {text} on {rank}"):
                in_loop(engine, criterion, loop, *own, steps=loop == "no loss")
            criterion.count = RIGHT
            engine.zero_grad()
            assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
            result = in_loop(engine, criterion, loop, *own, steps=True)
            assert result.grad_norm == pytest.approx(reference.step(x, y), rel=0.02)
        for right in (torch.tensor([[3.0]]), 2.0**53):
            criterion.count = right
            assert in_loop(engine, criterion, loop, *own, steps=True).stepped
            engine.zero_grad()


@pytest.mark.parametrize("layout", ["1", "dp2", "pp2"])
@on_ranks(lambda layout: LAYOUTS[layout][0])
def test_a_count_that_only_the_device_knows_skips_the_step_and_raises_at_the_next(world, layout):
    precision = {"mode": "16-mixed", "init_scale": 256.0}
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout][1], "precision": precision}) as context:
        criterion, model = Weighted(), two_layers()
        reference = Reference(model)
        engine = engine_of(model, criterion)
        engine._failure.is_shared = True
        engine._failure.num_failed._copied = mock.Mock()  # an event: the host reads the sum of all flags a step later
        unit = engine._losses.unit
        unit._checked = lambda count: unit._checked_on_device(torch.as_tensor(count).double())
        x, y = samples([3.0] * 8)
        last = world.size - 1
        criterion.count = math.nan if world.rank == last else RIGHT
        with pytest.raises(ValueError, match=rf"a count of nan on rank {last} \("):
            engine.evaluate(*own_part(context, x, y))
        for wrong, text in ((math.nan, "nan"), (-3, "-3"), (2.0**54, r"1\.80144e\+16")):
            before = engine.full_state_dict()
            criterion.count = wrong if world.rank == last else RIGHT
            result = run_window(context, engine, x, y)
            assert (result.stepped, result.overflow) == (False, False)
            assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
            criterion.count = RIGHT
            with pytest.raises(ValueError, match=rf"a count of {text} on rank {last} \("):
                run_window(context, engine, x, y)
            assert run_window(context, engine, x, y).grad_norm == pytest.approx(reference.step(x, y), rel=0.02)


@pytest.mark.parametrize("loop", ["loss", "no loss", "own loop"])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("data", rarely([2, {"shard": 2}], 2), ids=["dp2", "fsdp2"])
@on_ranks(2)
def test_a_mean_on_one_rank_beside_a_count_on_another(world, data, first, delayed, loop):
    """In the first window, in which ranks agree on a unit, and later; also if the host learns of it a step later."""
    parallel = {"data": data, "pipeline": {"size": 1, "microbatches": 4}}
    with paramp.launch_from_torch({"parallel": parallel, "precision": "16-mixed"}) as context:
        criterion, model = Weighted(), two_layers()
        reference = Reference(model)
        engine = engine_of(model, criterion)
        if delayed:
            engine._failure.is_shared = True
            engine._failure.num_failed._copied = mock.Mock()
        x, y = samples([3.0] * 8)

        def run(steps=True):
            engine.zero_grad()
            return in_loop(engine, criterion, loop, *own_part(context, x, y), steps=steps)

        mean, counted = r"a mean on rank 1 \(.*\)", r"\(sum, count\) on rank 0 \(.*\)"
        text = f"criterion: returned ({mean}, and {counted}|{counted}, and {mean}) in one accumulation window"
        for _ in range(0 if first else 3):
            assert run().grad_norm == pytest.approx(reference.step(x, y), rel=0.02)
        before = engine.full_state_dict()
        criterion.mean = world.rank == 1
        if delayed:
            assert not run().stepped
        with pytest.raises(ValueError, match=text):
            run(steps=delayed or loop == "no loss")  # else the batch, which returns a loss, raises
        assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
        criterion.mean = False
        for _ in range(3):
            assert run().grad_norm == pytest.approx(reference.step(x, y), rel=0.02)


@pytest.mark.parametrize(("parallel", "accumulation"), [({"data": 2}, 2), (PP2, 1)], ids=["dp2", "pp2"])
@on_ranks(2)
def test_a_mean_beside_a_count_in_another_microbatch(world, parallel, accumulation):
    class Alternating(Weighted):
        def __call__(self, output, target):
            found = super().__call__(output, target)
            self.mean = not self.mean and world.rank == 1
            return found

    with paramp.launch_from_torch({"parallel": parallel, "gradient_accumulation": accumulation}) as context:
        engine = engine_of(two_layers(), Alternating())
        with pytest.raises(ValueError, match=r"criterion: returned both a mean and \(sum, count\)"):
            run_window(context, engine, *samples([3.0] * 16), calls=accumulation)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("layout", ["pp2-dp2", "dp4"])
@on_ranks(4)
def test_a_criterion_that_fails_before_its_first_count_leaves_no_rank_waiting(world, layout, accumulation):
    """The others wait for its count to agree on the unit, in the first window and later."""
    config = {"parallel": LAYOUTS[layout][1], "precision": "16-mixed", "gradient_accumulation": accumulation}
    with paramp.launch_from_torch(config) as context:
        criterion, model = Weighted(), two_layers()
        reference = Reference(model)
        engine = engine_of(model, criterion)
        x, y = samples([3.0] * 16)
        for _ in range(3):
            criterion.fails = world.rank == 3
            with pytest.raises((ValueError, ArithmeticError, RuntimeError), match="the loss is broken"):
                engine.forward_backward(*own_part(context, x, y))
            criterion.fails = False
            result = run_window(context, engine, x, y, accumulation)
            assert result.grad_norm == pytest.approx(reference.step(x, y), rel=0.02)


# ------------------------------------------------------------------------------------------- steps without a gradient


@pytest.mark.parametrize("parallel", [{"data": 2}, {"pipeline": 2}], ids=["dp2", "pp2"])
@on_ranks(2)
def test_a_step_whose_gradient_has_underflowed_warns_at_the_next(world, parallel):
    precision = {"mode": "16-naive", "init_scale": 1.0, "min_scale": 1.0, "max_scale": 1.0}
    with paramp.launch_from_torch({"parallel": parallel, "precision": precision}):

        def step(factor):
            nonlocal size
            size = factor
            engine.zero_grad()
            return train_step(engine, x, y)

        size = 1.0
        engine = engine_of(two_layers(), lambda output, target: size * F.mse_loss(output, target))
        x, y = randn(2, 4, 4)
        assert step(1.0).grad_norm > 0
        result = step(1e-9)
        assert (result.stepped, result.grad_norm) == (True, 0)
        with pytest.warns(UserWarning, match=r"step 2 of SGD was made with a gradient whose norm is exactly 0") as seen:
            step(1e-9)
        assert len(seen) == 1
        for factor in (1e-9, 1.0, 1e-9):  # once only
            step(factor)
        with pytest.warns(UserWarning, match="step 6 of SGD"):
            step(1.0)


@pytest.mark.parametrize("mode", ["32-true", "16-naive"])
def test_a_step_whose_criterion_has_no_gradient_warns_at_the_next(mode):
    x, y = randn(2, 4, 4)
    with paramp.launch_from_torch({"precision": mode}):
        model = two_layers()
        optimizers = [sgd(model[0].parameters()), torch.optim.AdamW(model[1].parameters())]
        engine = engine_of(model, lambda output, target: 0 * F.mse_loss(output, target) + rest, optimizers)
        rest = 0.0  # a loss of 0, such as of a hinge whose margin is met, has no gradient that could underflow
        for _ in range(2):
            assert train_step(engine, x, y).grad_norm == 0
        rest = 1.0
        assert train_step(engine, x, y).grad_norm == 0
        engine.zero_grad()
        with pytest.warns(
            UserWarning, match="step 3 of SGD and AdamW was made with a gradient whose norm is exactly 0"
        ):
            train_step(engine, x, y)
