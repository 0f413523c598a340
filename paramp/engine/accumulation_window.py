"""The accumulation window: the calls of ``forward_backward`` and of ``step()`` that end in one step, and its losses.

It is a state machine: calls lead from one :class:`State` to another, and :data:`REFUSED` has the errors of those that
do not. It ends after ``gradient_accumulation`` calls of ``step()``, or with fewer (:meth:`AccumulationWindow.shorten`).

A microbatch's loss is multiplied by the loss scale and divided by the number of microbatches in the window
(microbatches x accumulation x data ranks x context ranks), so that every later reduction is a plain sum. A criterion
that returns ``(sum, count)`` is also divided by a power of two near the counts (:mod:`.power_of_two_loss_divisor`), and
the step corrects for the true total count: gradient = sum of gradients / sum of counts, whatever the counts of the
ranks.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ..base.collectives import all_reduce_
from ..base.errors import CheckpointError
from ..distributed.context import ParallelContext
from ..distributed.exact_mode_protocol import Numerics
from ..distributed.rng import random_states
from ..observe.recorded_window import RecordedBatch, WindowRecord
from ..optim.flat_gradients import FlatGradients
from ..parallel.expert_balance import StepCounts, restart_all
from ..parallel.microbatches import Batch
from ..pipeline.stage import Stages
from ..precision.capabilities import checks_inputs
from ..scaling.loss_scaler import DistributedGradScaler
from ..scaling.step_decision import mixes_kinds
from . import warn_of_user_backward
from .power_of_two_loss_divisor import CountUnit, Loss
from .shared_failure import SAME_KIND, SharedFailure
from .unstepped_batches import BY_HAND, CHANGED, NO_BACKWARD, UnsteppedBatches

MEAN, COUNTED = "a mean", "(sum, count)"
"""The kinds of losses."""


class LossTotals:
    """What losses add up to on this rank: their sum, that of their weights, of those weights that are counts, and how
    many they are. A mean has weight 1 for each microbatch that it is over."""

    def __init__(self, context: ParallelContext) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64, device=context.device)
        self._counted = self._sums if context.counts_loss else torch.zeros_like(self._sums)

    def add_(self, parts: torch.Tensor) -> None:
        """Add those of one loss, 1-dim float64 of 4 elements."""
        self._sums.add_(parts)

    def zero_(self) -> None:
        """Forget all losses."""
        self._sums.zero_()

    def terms(self) -> torch.Tensor:
        """This rank's terms of a sum over the world: zeros but on the one rank of a model group whose losses count."""
        return self._counted


class WindowLosses:
    """The losses of the current accumulation window on this rank.

    Attributes:
        size: microbatches in a window, over all data and context ranks.
        totals: of the window.
        unit: what sums and counts are divided by.
    """

    def __init__(
        self, scaler: DistributedGradScaler, failure: SharedFailure, numerics: Numerics, context: ParallelContext
    ) -> None:
        config = context.config
        self._scaler, self.failure, self.context = scaler, failure, context
        self.size = config.parallel.pipeline.num_microbatches * config.gradient_accumulation * context.batch_axis.size
        self.totals = LossTotals(context)
        self.unit = CountUnit(context, first_rank=numerics.counts_first_rank)
        failure.find_late = self.unit.error_of_flag
        self._kind: str | None = None
        self._one_loss = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64, device=context.device)
        self._no_failure = torch.zeros(1, dtype=torch.float64, device=context.device)

    def restart(self) -> None:
        """A window begins."""
        self.totals.zero_()
        if self.unit.is_used:
            self.unit.restart()
        self._kind = self.failure.kind = None

    def scaled(self, loss: Loss, times: int = 1) -> torch.Tensor:
        """Add ``loss`` so many times to the window; return the value that its one backward starts from, 0-dim.

        It is scaled, and divided so that the sum of the gradients over the window is their mean.

        Raises:
            ValueError: it has no gradient, an invalid count, or one where the window's other losses have none.
        """
        if not (loss[0] if isinstance(loss, tuple) else loss).requires_grad:
            raise ValueError(
                "criterion: got a loss without a gradient, expected one that depends on the model's output; do not "
                "detach it, and compute it in torch"
            )
        kind = COUNTED if isinstance(loss, tuple) else MEAN
        if self._kind not in (None, kind):
            raise ValueError(f"criterion: returned both {MEAN} and {COUNTED} {SAME_KIND}")
        self._kind = self.failure.kind = kind
        if kind == COUNTED or self.unit.is_used:
            self.unit.choose(loss, self.size)
        value, parts = self.split(loss)
        self.totals.add_(parts if times == 1 else parts * times)
        scaled = super(DistributedGradScaler, self._scaler).scale(value)  # ours also notes the call, for diagnose()
        return scaled / (self.size // times) if self.size > times else scaled

    def split(self, loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
        """The value of ``loss`` to differentiate, 0-dim, and what it adds to totals; a sum and count over the unit.

        Raises:
            ValueError: its count is invalid.
        """
        if not isinstance(loss, tuple):
            parts = self._one_loss.clone()
            parts[0].copy_(loss.detach())
            return loss, parts
        value, count = self.unit.divide(loss)
        return value, torch.stack([value.detach().double(), count, count, torch.ones_like(count)])

    def findings(self, totals: LossTotals | None = None) -> torch.Tensor:
        """This rank's terms of a sum over ranks, 1-dim float64: ``totals`` (None: the window's), and its failures."""
        failures = self.failure.flag() if self.failure.is_shared else self._no_failure
        if self.unit.is_used:
            failures = failures + self.unit.flag()
        return torch.cat([(self.totals if totals is None else totals).terms(), failures])

    def mean(self, totals: LossTotals | None = None) -> torch.Tensor:
        """The mean loss over the ``totals`` of all ranks (None: of the window so far), 0-dim float32.

        Raises:
            Exception: on every rank: a batch failed on one (:mod:`paramp.engine.shared_failure`).
        """
        summed = self.findings(totals)
        failures = summed[4]
        if self.context.world_size > 1:
            all_reduce_(summed)
            if totals is None:
                failures = failures + mixes_kinds(*summed[1:4])
        # The host would wait for the backward here. The step's own sum has the failure too, and its next call raises.
        if self.failure.is_shared and (totals is not None or not self.failure.num_failed.is_late):
            self.failure.publish(failures, wait=True)
        return (summed[0] / summed[1]).float()


class State(enum.Enum):
    """What the gradients are."""

    EMPTY = enum.auto()
    """There are none: they were dropped."""
    OPEN = enum.auto()
    """Of backwards since the last call of ``step()``."""
    CALLED = enum.auto()
    """Of earlier calls of ``step()`` only. The next call needs new ones, or changed ones, as in EMPTY and STEPPED."""
    STEPPED = enum.auto()
    """A step has used them."""
    BROKEN = enum.auto()
    """A batch or the step failed, and may have left a part of its gradients."""
    AVERAGED = enum.auto()
    """The model has averaged weights, for evaluations. Failures and drops do not end this state."""


INCOMPLETE = (
    "a batch of this step, or the step() itself, failed and left a part of its gradients; call engine.zero_grad(), "
    "which drops the gradients of the whole accumulation window, and start the window again"
)
APPLIED = (
    "engine.ema.applied(): the model has the averaged weights, with which there is no training, saving or loading of "
    "checkpoints; leave the `with` block before"
)
TRAINING = State.OPEN, State.CALLED, State.STEPPED
"""The states that a backward, a call of ``step()`` and a step lead to."""
REFUSED: Mapping[State, str] = {State.BROKEN: INCOMPLETE, State.AVERAGED: APPLIED}
"""Why none of these leads to its state from another one."""


class AccumulationWindow:
    """The current window on this rank.

    Attributes:
        state: what its gradients are.
        mean_factor: the factor from gradients of means, which are divided by the microbatches of a whole window, to
            those of the window that has ended; more than 1 if it was shortened.
        calls: the batches of the window, kept until the next one begins; None if a backward of an unknown one is in it.
        scale: the loss scale of the window's step, 0-dim; None before that step.
        losses: those of the window.
        counts: those of its tokens.
        foreign: notices backwards of the user's own.
    """

    def __init__(
        self,
        gradients: FlatGradients,
        losses: WindowLosses,
        stages: Stages,
        counts: Sequence[StepCounts],
        context: ParallelContext,
    ) -> None:
        self._gradients, self._failure = gradients, losses.failure
        self._stages, self._device = stages, context.device
        self.losses, self.counts = losses, counts
        self.calls: list[RecordedBatch] | None = []
        self.scale: torch.Tensor | None = None
        self.foreign = warn_of_user_backward.ForeignBackward(gradients)
        self.state, self.mean_factor = State.EMPTY, 1.0
        self._accumulation = context.config.gradient_accumulation
        self._length = self._accumulation  # calls of step() in this window; fewer after shorten()
        self._num_calls = 0  # those that were made
        self._failed = False  # whether a batch of the window failed, so that drop() drops an unfinished one
        self._before = State.EMPTY  # what preceded AVERAGED or BROKEN
        self._unstepped = UnsteppedBatches(losses.failure, context.is_main)
        # Until a step gradients carry the loss scale, or are terms of sums over ranks.
        self._unfinished = context.config.precision.scaling is not None or context.world_size > 1
        self._after_backward: list[int] = []
        self._in_forwards = checks_inputs(context.config.precision.float8, context.device, context.tensor_axis.size)

    def _go(self, state: State) -> None:
        """Enter ``state``; a RuntimeError if the present one refuses that."""
        if state in TRAINING and self.state in REFUSED:
            raise RuntimeError(REFUSED[self.state])
        if self.state is not State.AVERAGED:
            self.state = state

    def begin_batch(self, *, is_known: bool) -> None:
        """A batch begins; ``is_known``: to :meth:`begin_backward` too. Not a collective, which may be due elsewhere."""
        if self.state is State.OPEN or not self._unstepped.stepped:
            self._unstepped.begin_batch(self.state is State.OPEN, warn=is_known)

    def begin_backward(self, batch: Batch | None) -> None:
        """Prepare a backward of ``batch``, None if it is not known: drop the gradients of a past step."""
        if self.state is not State.AVERAGED:
            self._check_foreign_backward()
        if self.state in (State.STEPPED, State.BROKEN) and not self._num_calls:
            self.drop()
        self._go(State.OPEN)
        self._failed = False  # a forward that failed before has left nothing
        self._keep(batch)
        self._gradients.begin_window()

    def _keep(self, batch: Batch | None) -> None:
        """Keep a batch, and the states of random streams before it, so that it can run again bit for bit."""
        if self.scale is not None:
            self.calls, self.scale = [], None
        if batch is None:
            self.calls = None
        elif self.calls is not None:
            states = [stream.states for stream in self._stages.streams]
            self.calls.append(RecordedBatch(batch, random_states(self._device), states, len(self.calls)))

    def record(self) -> WindowRecord:
        """What runs the window again."""
        return WindowRecord(self._stages, self.calls, self.scale, self._device)

    @property
    def is_open(self) -> bool:
        """Whether it has gradients that no step has used yet."""
        return self.scale is None and (self.calls is None or len(self.calls) > 0)

    def end_backward(self) -> None:
        """A backward has ended: what changes gradients from here on until the step is not the engine."""
        if self._unfinished:
            self._after_backward = self._gradients.versions()

    def _are_all_changed(self) -> bool:
        """Whether several gradients, all of the window, were changed since; not seen of DTensors that torch clips."""
        versions = zip(self._gradients.versions(), self._after_backward, self._gradients.zeros.values(), strict=True)
        changed = [now != then for now, then, zero in versions if then != zero]
        return len(changed) > 1 and all(changed)

    @property
    def in_last_call(self) -> bool:
        """Whether the next call of ``step()`` ends the window."""
        return self._num_calls == self._accumulation - 1

    def shorten(self) -> bool:
        """Let the next :meth:`end_call` end the window, with the calls that were made; False if there were none.

        A backward since the last call counts as a call.
        """
        if self.state is State.AVERAGED and self._before not in (State.EMPTY, State.STEPPED):
            self._go(State.STEPPED)  # raises
        if self.state is State.CALLED:
            self._num_calls -= 1  # the last call is made again, as the window's last
            self.state = State.OPEN
        if self.state not in (State.OPEN, State.BROKEN):
            return False
        self._length = self._num_calls + 1
        return True

    def end_call(self, scale: torch.Tensor) -> bool:
        """Count a call of ``step()``; return whether it ends the window, whose gradients carry ``scale`` (0-dim).

        Raises:
            RuntimeError: there was no backward since the last call, or a batch or step failed and was not dropped.
        """
        state = State.STEPPED if self._num_calls + 1 >= self._length else State.CALLED
        if self.state is not State.AVERAGED:
            with self.failing():
                if self._failure.is_shared:
                    self._failure.check()
                self._check_foreign_backward()
        if self.state in (State.EMPTY, State.CALLED, State.STEPPED):  # changed by hand, on all ranks?
            self._failure.agree_in_step(RuntimeError(NO_BACKWARD) if self._gradients.are_unchanged() else None)
            if self._unfinished:
                self._unstepped.warn_of_gradients(BY_HAND, scale)
        elif self.state is State.OPEN and self._unfinished and self._are_all_changed():
            self._unstepped.warn_of_gradients(CHANGED, scale)
        self._go(state)
        self._num_calls += 1
        self._unstepped.stepped = True
        if state is State.CALLED:
            self._gradients.snapshot()
            return False
        self.mean_factor, self._length, self._num_calls = self._accumulation / self._length, self._accumulation, 0
        self.scale = scale
        return True

    def mean_loss(self) -> torch.Tensor:
        """The mean loss of the window so far (:meth:`WindowLosses.mean`)."""
        with self.failing():
            return self.losses.mean()

    def _check_foreign_backward(self) -> None:
        """Raise if a backward of the user's has accumulated gradients."""
        if self.foreign.handles:
            self.foreign.stop()
        if self.foreign.accumulated:
            self._failed = True
            raise RuntimeError(warn_of_user_backward.TEXT)

    def drop(self) -> None:
        """Drop losses and gradients; of an unfinished window, which a plain loop accumulates, only if it failed."""
        if self._num_calls == 0 or self._failed:
            # After a step, an overflow of a forward may be of one since then, whose backward is still to come.
            state = self._before if self.state in (State.AVERAGED, State.BROKEN) else self.state
            self._unstepped.dropped += self.state is State.OPEN
            self._gradients.drop(overflow=not self._in_forwards or state is not State.STEPPED)
            self.losses.restart()
            if self.is_open:
                self.calls = []
                restart_all(self.counts)
            self._num_calls, self._length, self._before = 0, self._accumulation, State.EMPTY
            self._failed = self.foreign.accumulated = False
            self._go(State.EMPTY)

    def restart(self) -> None:
        """Drop losses and gradients, also of an unfinished window."""
        self._num_calls = 0
        self.drop()

    @contextmanager
    def failing(self, *, incomplete: bool = True) -> Iterator[None]:
        """Record a failure inside as one of the window; ``incomplete``: it may leave a part of the gradients."""
        try:
            yield
        except BaseException:  # an interrupt too, after which a notebook goes on
            self._failed = True
            if incomplete and self.state is not State.BROKEN:
                averaged = self.state is State.AVERAGED
                self._before, self.state = (State.BROKEN, self.state) if averaged else (self.state, State.BROKEN)
                restart_all(self.counts)  # also if its step failed, for which the window has ended
            raise

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model has averaged weights inside: there is no backward and no step."""
        self.check_not_averaged()
        self._before, self.state = self.state, State.AVERAGED
        try:
            yield
        finally:
            self.state = self._before

    def check_not_averaged(self) -> None:
        """Raise a RuntimeError inside :meth:`averaged`, and on a rank that has failed alone."""
        self._failure.check_not_alone()
        if self.state is State.AVERAGED:
            raise RuntimeError(APPLIED)

    def check_ended(self) -> None:
        """Raise a CheckpointError within an accumulation window, whose gradients are not saved; or a past failure."""
        self._failure.check()
        if self._num_calls or self.is_open:
            raise CheckpointError(
                f"save: got a call in an accumulation window, after {self._num_calls} of {self._accumulation} calls of "
                "step(), whose gradients are not saved; save after the step that uses them"
            )

    def check_unstepped(self) -> None:
        """Raise a RuntimeError if a step was made since the last backward, and on a rank that has failed alone."""
        self._failure.check_not_alone()
        if self.scale is not None:
            raise RuntimeError("gradient_histogram(): a step was made; call it between forward_backward and step")
