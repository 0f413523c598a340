"""The optimizer's step: a decision equal on every rank, whether to skip it and the gradients' divisor; then the update.

Each rank makes one pass over its gradients. One small all-reduce over the world adds up the findings (two more agree on
the norm, if training is reproducible). On a GPU all values computed from it stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..base.collectives import all_reduce_
from ..base.errors import ConfigError
from ..distributed.context import ParallelContext
from ..optim.compiled.norm import sums_for
from ..optim.compiled.step import fused_step_for
from ..optim.flat_gradients import FlatGradients
from ..optim.flat_params import FlatWeights
from ..optim.fused_step import Step, choose_step
from ..optim.param_buffer import FlatParam
from ..optim.reproducible import squares as exact
from ..optim.user_optimizer import ONLY_THE_ENGINE_STEPS, StepGuard, replace_zero_grad
from ..scaling.grad_norm import clip_coefficient, count_zeros, norm_power
from ..scaling.loss_scaler import DistributedGradScaler
from .loss_window import LossWindow
from .state.count_unit import mixes_kinds
from .state.weight_averages import WeightAverages
from .step_result import StepCounters, StepResult


@dataclass(frozen=True)
class StepDecision:
    """The decision of a step, equal on all ranks; tensors on the device."""

    overflow: torch.Tensor
    """0-dim bool: a gradient is not finite on some rank, so the step is skipped on all ranks."""
    skip: torch.Tensor
    """0-dim bool: the step is skipped on all ranks: an overflow, a total count of 0, or a failure."""
    num_failed: torch.Tensor
    """0-dim float64: the number of ranks on which a batch failed or has an invalid count; more, if ranks have losses
    of different kinds."""
    divisor: torch.Tensor
    """0-dim float64: the divisor that unscales, averages and clips the gradients in one operation."""
    absent: list[FlatParam]
    """Parameters for which no data rank has a gradient; they are not stepped."""
    mean_count: torch.Tensor
    """0-dim float64: of all microbatches, in the window's unit; 0 or NaN if they have no counts."""
    values: torch.Tensor
    """1-dim float64: loss scale, 0 (stepped), 1 (overflow) or 2 (skipped), norm, number of zeros, mean loss."""


def decide_step(
    found_inf: torch.Tensor,
    scale: torch.Tensor,
    gradients: FlatGradients,
    losses: torch.Tensor,
    window_size: int,
    mean_factor: float,
    changed: torch.Tensor,
    first_names: Mapping[str, str],
    context: ParallelContext,
) -> tuple[StepDecision, torch.Tensor]:
    """Decide with all ranks on the step with ``gradients``; a collective of the world.

    Args:
        found_inf: 0-dim float32, from :meth:`~paramp.engine.loss_window.StepGradients.complete`.
        scale: 0-dim float32, the loss scale that the gradients carry.
        losses: 1-dim float64, from :meth:`~paramp.engine.loss_window.LossWindow.findings`.
        window_size: microbatches in the accumulation window, over all data ranks.
        mean_factor: the factor for gradients of means: more than 1 if the window was shortened.
        changed: 1-dim float64, from :meth:`~paramp.optim.changes.in_place.ChangedWeights.look`.
        first_names: for each name in the whole model the first name of the same parameter, which may be tied.

    Returns:
        The decision, and the number of ranks that found weights changed, 0-dim float64.
    """
    # Ranks with other parts of the batch or of the model may have gradients for other parameters.
    differ = context.batch_axis.size * context.stage_axis.size > 1
    presence = [gradients.presence(first_names)] if differ else []
    control = torch.cat([_local_findings(found_inf, gradients, context), losses, *presence, changed])
    if context.world_size > 1:
        all_reduce_(control)
    absent = _absent(gradients, first_names, control[NUM_SUMS:-1] if differ else None)
    arguments = window_size, mean_factor, context.config.clip_grad_norm, absent
    if context.device.type == "cpu":
        return _decide_on_host(control[:NUM_SUMS].tolist(), scale.item(), *arguments), control[-1]
    return _decide_on_device(control[:NUM_SUMS], scale, *arguments), control[-1]


NUM_SUMS = 8
"""Of all ranks: overflows, squares, zeros, losses, their weights, counts among these, number of losses, failures."""


def _decide_on_device(
    sums: torch.Tensor,
    scale: torch.Tensor,
    window_size: int,
    mean_factor: float,
    max_norm: float | None,
    absent: list[FlatParam],
) -> StepDecision:
    """The decision from the sums over the world, 1-dim float64, without a value that the host would wait for."""
    found_any, squares, zeros, loss, weight, count, num_losses, num_failed = sums.unbind()
    scale = scale.double()
    num_failed = num_failed + mixes_kinds(weight, count, num_losses)
    squares = squares + torch.where(found_any > 0, torch.inf, 0.0)  # under ZeRO an element may be another rank's
    overflow = ~squares.isfinite()
    uncounted = (num_losses > 0) & (weight == 0)  # all counts are 0, so there is no mean
    skip = overflow | uncounted | (num_failed > 0)
    # Means are already divided by their number in a whole window; sums are divided by their counts here.
    factor = torch.where(count > 0, window_size / count, mean_factor)
    norm = squares.sqrt() / scale * factor
    if max_norm is not None:
        factor = factor * clip_coefficient(norm, max_norm)
    divisor = scale / torch.where(overflow, 1.0, factor)
    values = torch.stack([scale, torch.where(overflow, 1.0, 2.0 * skip), norm, zeros, loss / weight])
    return StepDecision(overflow, skip, num_failed, divisor, absent, count / num_losses, values)


def _decide_on_host(
    sums: Sequence[float],
    scale: float,
    window_size: int,
    mean_factor: float,
    max_norm: float | None,
    absent: list[FlatParam],
) -> StepDecision:
    """:func:`_decide_on_device` in Python's numbers: on a CPU, a third of the time of torch's operations on them."""
    found_any, squares, zeros, loss, weight, count, num_losses, num_failed = sums
    num_failed += 0.5 < weight - count < num_losses - 0.5  # as mixes_kinds
    squares += math.inf if found_any > 0 else 0.0  # under ZeRO an element may be another rank's
    overflow = not math.isfinite(squares)
    skip = overflow or (num_losses > 0 and weight == 0) or num_failed > 0
    factor = window_size / count if count > 0 else mean_factor
    norm = _quotient(math.sqrt(squares), scale) * factor
    if max_norm is not None and (coefficient := max_norm / (norm + 1e-6)) < 1:
        factor *= coefficient
    kind = 1.0 if overflow else 2.0 * skip
    divisor = _quotient(scale, 1.0 if overflow else factor)
    numbers = [scale, kind, norm, zeros, _quotient(loss, weight), num_failed, divisor, _quotient(count, num_losses)]
    values = torch.tensor(numbers, dtype=torch.float64)
    overflows, skips = torch.tensor([overflow, skip])
    return StepDecision(overflows, skips, values[5], values[6], absent, values[7], values[:5])


def _quotient(dividend: float, divisor: float) -> float:
    """As torch divides: by 0 gives an infinite number or NaN."""
    return dividend / divisor if divisor else dividend * math.inf


def _local_findings(found_inf: torch.Tensor, gradients: FlatGradients, context: ParallelContext) -> torch.Tensor:
    """This rank's terms of the flag, the gradient's sum of squares and its number of zeros; float64, 3 elements."""
    zeros = torch.zeros((), dtype=torch.float64, device=context.device)
    if context.config.precision.log_num_zeros:
        zeros = count_zeros(*gradients.for_zero_count(), context.device)
    if context.config.reproducible:
        squares = _exact_squares(*gradients.for_norm(), context)
    else:
        squares = norm_power(*gradients.for_norm(), 2.0, context.device, sums_for(context))
    return torch.stack([found_inf.double(), squares, zeros])


def _exact_squares(
    gradients: Sequence[torch.Tensor], norm_weights: Sequence[float], context: ParallelContext
) -> torch.Tensor:
    """The sum of squares over the world on its first rank, and 0 on the others; a collective of the world."""
    largest = exact.largest(gradients, context.device)
    all_reduce_(largest, op=dist.ReduceOp.MAX)
    bins = exact.squares(gradients, norm_weights, largest)
    all_reduce_(bins)
    return exact.total(bins) if dist.get_rank() == 0 else torch.zeros_like(largest)


def _absent(
    gradients: FlatGradients, first_names: Mapping[str, str], num_present: torch.Tensor | None
) -> list[FlatParam]:
    """The parameters for which no rank has a gradient.

    ``num_present``, 1-dim float64: the number of ranks with one for each parameter; None if ranks do not differ.
    """
    absent = gradients.absent()
    if not absent or num_present is None:  # the host waits for the numbers only if they matter
        return absent
    present = dict(zip(dict.fromkeys(first_names.values()), num_present.tolist(), strict=True))
    return [param for param in absent if not present[first_names[param.name]]]


class OptimizerStep:
    """Makes the optimizers' steps, or skips them, with the gradients of ``losses``.

    Attributes:
        updates: for each optimizer the fused step, or its own.
    """

    def __init__(
        self,
        weights: FlatWeights,
        first_names: Mapping[str, str],
        scaler: DistributedGradScaler,
        losses: LossWindow,
        counters: StepCounters,
        averages: WeightAverages | None,
        context: ParallelContext,
    ) -> None:
        self._optimizers = [one.optimizer for one in weights.by_optimizer]
        self._changes = weights.changes
        self._first_names = first_names
        self._scaler = scaler
        self._losses = losses
        self._counters = counters
        self._averages = averages
        self._context = context
        self.updates: list[Step] = []
        problem = None
        try:
            self.updates += [choose_step(one, fused_step_for(context)) for one in weights.by_optimizer]
        except ConfigError as error:  # on some ranks only: others may step no parameter of that optimizer
            problem = error
        losses.failure.agree(problem)
        # After choose_step, which looks for the user's hooks.
        self._guards = [StepGuard(optimizer, ONLY_THE_ENGINE_STEPS) for optimizer in self._optimizers]
        for optimizer in self._optimizers:
            replace_zero_grad(optimizer, losses.drop)

    def make(self, scale: torch.Tensor) -> StepResult:
        """Step, or skip the step, with gradients that carry ``scale``, 0-dim float32; update scale and counters."""
        losses, precision = self._losses, self._context.config.precision
        self._counters.warn_if_vanished(self._optimizers)
        found_inf = losses.gradients.complete()
        window = losses.findings(), losses.size, losses.mean_factor
        given = *window, self._changes.look(), self._first_names, self._context
        decision, num_changed = decide_step(found_inf, scale, losses.gradients.flat, *given)
        losses.failure.publish(decision.num_failed)
        losses.unit.follow(decision.mean_count)
        self._changes.agree(num_changed)
        if self._averages is not None:
            self._averages.begin()
        for optimizer, update, guard in zip(self._optimizers, self.updates, self._guards, strict=True):
            with guard:
                update(decision.divisor, decision.skip.float(), decision.absent)
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers step even after a skipped step
        self._changes.end_step()
        if self._averages is not None:
            self._averages.move(decision.skip)
        self._scaler.update_from_flag(decision.overflow, ~decision.skip)
        # With gradients that were set by hand there is no loss, whose mean then is NaN.
        vanished = ~decision.skip & (decision.values[2] == 0) & ~decision.values[4].isnan()
        self._counters.add(decision.skip, decision.overflow, self._scaler.at_floor(), vanished)
        result = StepResult(decision.values, with_zeros=precision.log_num_zeros)
        if precision.verbose and self._context.is_main and self._scaler.get_scale() != result.loss_scale:
            print(f"paramp: loss scale changes from {result.loss_scale:g} to {self._scaler.get_scale():g}", flush=True)
        return result
