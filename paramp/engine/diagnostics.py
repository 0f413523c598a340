"""What an engine reports: timelines, replicas, gradients, why a step was skipped; and its stop on divergence."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NoReturn

import torch

from ..base.errors import TrainingDiverged
from ..base.spans import Observer
from ..distributed.context import ParallelContext
from ..observe.grad_histogram import GradientHistogram, histogram_of
from ..observe.overflow_hooks import Tracer
from ..observe.overflow_trace import investigate, stages_by_parameter
from ..observe.replica_check import Difference, Replicas
from ..observe.timeline import Timeline, recording
from ..optim.flat_params import FlatWeights
from ..optim.loss_scaler import DistributedGradScaler
from ..optim.overflow_report import OverflowReport, find_gradients
from ..parallel.stage import Stages
from ..precision.policy import Precision
from .batch_runner import BatchRunner
from .loss_window import CheckedCriterion, LossWindow
from .step_result import StepCounters


class Diagnosed:
    """The part of an :class:`~paramp.Engine` that reports about it, which sets the attributes."""

    context: ParallelContext
    precision: Precision
    scaler: DistributedGradScaler
    observers: list[Observer]
    _stages: Stages
    _weights: FlatWeights
    _runner: BatchRunner
    _criterion: CheckedCriterion
    _losses: LossWindow
    _counters: StepCounters
    _replicas: Replicas

    @property
    def num_steps(self) -> int:
        """Optimizer steps made so far."""
        return self._counters.read()[0]

    @property
    def num_skipped(self) -> int:
        """Optimizer steps skipped for an overflow so far."""
        return self._counters.read()[1]

    @property
    def num_skipped_in_a_row(self) -> int:
        """Optimizer steps skipped one after the other, up to the last one."""
        return self._counters.read()[2]

    def recording(self) -> AbstractContextManager[Timeline]:
        """A context that records what every rank does in ``forward_backward`` and ``step`` inside, and when.

        Every rank enters and leaves it. The :class:`~paramp.observe.timeline.Timeline` is complete when it is left.
        """
        return recording(self.context, self.observers)

    def check_replicas(self) -> list[Difference]:
        """Compare what several ranks hold: weights, masters, optimizer state and the loss scale, bit for bit.

        Every rank calls it, and gets the same answer: nothing if all is well. It changes nothing. With
        ``check_replicas_every`` in the configuration, ``step`` compares by itself, and stops or repairs.
        """
        return self._replicas.check()

    def gradient_histogram(self) -> GradientHistogram:
        """Where the scaled gradients lie in the range of the mode's compute dtype, by their binary exponents.

        Call it on every rank between ``forward_backward`` and ``step``.
        """
        return histogram_of(self._weights, float(self.scaler.scale_tensor()), self.precision.compute)

    def diagnose_overflow(self) -> OverflowReport:
        """Why the last step was skipped: the module, microbatch, pass and rank of the first value that is not finite.

        Call it on every rank after ``step``, before the next batch. It runs the batches of the step again with hooks
        (:mod:`paramp.observe.overflow_trace`), which takes a few times as long as the step did, and leaves gradients of
        zero. Everything else is as it was, random streams and running statistics included, so that training goes on as
        if it had not been called. After a loop of ``engine(x)`` and ``backward`` the batches are not known, and the
        report is on the gradients alone.

        Raises:
            RuntimeError: no step was taken since the last batch, or it was not skipped.
        """
        batches, gradients = self._losses.batches, self._losses.gradients
        if batches.scale is None or not self.num_skipped_in_a_row:
            raise RuntimeError(
                "diagnose_overflow: no step was skipped; call it after one that was, before the next batch"
            )
        stages = stages_by_parameter(self._stages, self.context.local_stages)
        try:
            return investigate(
                batches,
                lambda scale: _run_again(self, scale),
                lambda: find_gradients(self._stages.module.named_parameters(), self.context, stages),
                gradients.complete,
            )
        finally:
            gradients.drop()


def _run_again(engine: Diagnosed, scale: torch.Tensor) -> Tracer:
    """Run the batches of the last window with hooks, from gradients of zero, at the loss scale ``scale`` (0-dim)."""
    runner, losses = engine._runner, engine._losses
    tracer = Tracer(engine._stages, engine.context.local_stages, engine.context)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        value, _ = losses.split(engine._criterion(output, target))
        tracer.see_loss(output, target, value)
        scaled = value * scale / losses.size
        tracer.see_scaled(scaled)
        return scaled

    losses.gradients.drop()
    engine.observers.append(tracer)
    try:
        with torch.enable_grad(), losses.batches.again() as calls, tracer:
            for call in calls:
                tracer.see_batch(call.x)
                runner.run(call.x, call.y, loss, backward=True)
                if (failure := runner.failure.take()) is not None:
                    tracer.failure = str(failure)
    finally:
        engine.observers.remove(tracer)
    return tracer


def stops_after_skip(counters: StepCounters, max_skipped: int | None) -> bool:
    """Whether training stops if the step to come is skipped too; never where ``max_skipped`` is None.

    That is known from the steps before, so that the host waits for a step only where it comes to this.
    """
    if max_skipped is None:
        return False
    _, _, in_a_row, at_floor = counters.read()
    return in_a_row >= max_skipped - 1 or at_floor > 0


def stop(engine: Diagnosed) -> NoReturn:
    """End the training after a skipped step, with the diagnosis; on every rank."""
    steps, skipped, in_a_row, at_floor = engine._counters.read()
    report: OverflowReport | str
    try:
        report = engine.diagnose_overflow()
    except Exception as error:  # the stop has to come all the same, and on every rank
        report = f"no diagnosis could be made: {type(error).__name__}: {error}"
    floor = " with the loss scale at its floor" if at_floor else ""
    raise TrainingDiverged(
        f"training stopped after optimizer step {steps + skipped}, because {in_a_row} steps in a row were "
        f"skipped{floor}: {report}",
        report,
    )
