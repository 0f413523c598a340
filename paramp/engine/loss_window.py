"""An accumulation window: its losses, the scaled value each backward starts from, and their mean over all ranks.

A microbatch's loss is multiplied by the loss scale and divided by the number of microbatches in the window
(microbatches x accumulation x data ranks), so that every later reduction is a plain sum. A criterion that returns
``(sum, count)`` is also divided by a power of two near the counts (:mod:`.state.count_unit`), and the step corrects for
the true total count: gradient = sum of gradients / sum of counts, whatever the counts of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.utils.hooks import RemovableHandle

from ..base.collectives import all_reduce_
from ..base.dtensor import full_tensor, is_dtensor
from ..base.errors import CheckpointError
from ..base.trees import map_tensors
from ..distributed.context import ParallelContext
from ..observe.replay import Window
from ..optim.flat_gradients import FlatGradients
from ..parallel.batches import Batch, loss_in
from ..precision.autocast import moved
from ..scaling.loss_scaler import DistributedGradScaler
from ..scaling.replicas import TiedParameter
from .compute_context import ComputeContext
from .reproducible.totals import ChunkTotals, terms_of
from .shared_failure import SharedFailure
from .state.count_unit import CountUnit, as_count, mixes_kinds

Loss = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""The mean over a microbatch, or ``(sum, count)``."""
Criterion = Callable[..., Loss]
OwnLoss = Callable[[Any, Batch], Loss | None]
"""The loss in a model's output for a microbatch; None if it has none."""


class CheckedCriterion:
    """The user's criterion, else the model's own loss, with checks of the losses."""

    def __init__(self, criterion: Criterion | None, own_loss: OwnLoss, compute: ComputeContext) -> None:
        self._criterion = criterion
        self._own_loss = own_loss
        self._compute = compute
        self._found: tuple[ReferenceType[torch.Tensor], torch.Tensor] | None = None

    @property
    def is_given(self) -> bool:
        """Whether ``initialize`` got a criterion."""
        return self._criterion is not None

    def of(self, output: Any, microbatch: Batch) -> Loss:
        """The loss of a microbatch, from the model's output and, if there is one, the target; as :meth:`__call__`."""
        if self._criterion is not None:
            return self(*((output,) if microbatch.target is None else (output, microbatch.target)))
        return _found(self._own_loss(output, microbatch))

    def find_count(self, output: Any, batch: Batch) -> None:
        """Remember the count of the model's own loss in ``output``, for :meth:`counted`; not the loss."""
        loss, self._found = loss_in(output), None
        if self._criterion is None and isinstance(loss, torch.Tensor):
            counted = self._own_loss(output, batch)
            if isinstance(counted, tuple):
                self._found = ref(loss), counted[1]

    def counted(self, loss: Any) -> Any:
        """``loss``; as ``(sum, count)`` if it is the mean in the output that :meth:`find_count` was given last."""
        if self._found is None or not isinstance(loss, torch.Tensor) or self._found[0]() is not loss:
            return loss
        count = self._found[1]
        return loss * count.to(loss.device), count

    def __call__(self, *args: Any, **kwargs: Any) -> Loss:
        """The loss of this rank's output and target, as plain 0-dim tensors; not reduced over ranks.

        Tensors in ``args`` and ``kwargs`` are moved to the device.

        Raises:
            ValueError: there is no criterion, or it returned neither one element nor ``(sum, count)``.
        """
        if self._criterion is None:
            return _found(self.counted(loss_in(args[0] if args else None)))
        args, kwargs = map_tensors(lambda tensor: moved(tensor, self._compute.device), (args, kwargs))
        with self._compute.sharded_loss():
            return _checked(self._criterion(*args, **kwargs))


def _found(loss: Any) -> Loss:
    """The model's own ``loss``, as :func:`_checked` returns it; a ValueError if it is None."""
    if loss is None:
        raise ValueError(
            "criterion: initialize got none, and the model's output has no loss; pass one as its third argument, "
            "or return a mapping or dataclass with a loss"
        )
    return _checked(loss)


def _checked(loss: Any) -> Loss:
    """``loss`` as plain 0-dim tensors, or a ValueError unless it is one element, or ``(sum, count)``.

    A count that is no number stays as it is, for :class:`CountUnit` to raise.
    """
    parts, expected = ([*loss], 2) if isinstance(loss, (tuple, list)) else ([loss], 1)
    if len(parts) != expected or not isinstance(parts[0], torch.Tensor) or parts[0].numel() != 1:
        raise ValueError(
            "criterion: expected a tensor of one element, or (sum, count) of two, got "
            + ", ".join(str(tuple(part.shape)) if isinstance(part, torch.Tensor) else repr(part) for part in parts)
        )
    value = full_tensor(parts[0]).reshape(()) if is_dtensor(parts[0]) or parts[0].ndim else parts[0]
    return (value, as_count(full_tensor(parts[1]))) if expected == 2 else value


class StepGradients:
    """The gradients of this rank's weights, from their backward to the step; :attr:`flat` are their buffers.

    ``overflow``, 0-dim float32, is set to 1 by modules that hide an overflow from their gradients (float8).
    """

    def __init__(
        self, gradients: FlatGradients, ties: Sequence[TiedParameter], overflow: torch.Tensor, failure: SharedFailure
    ) -> None:
        self.flat = gradients
        self._ties = ties
        self._overflow = overflow
        self._failure = failure

    def complete(self) -> torch.Tensor:
        """Bring each gradient to its parameter's placements, and sum it over tied copies and data ranks.

        A gradient that a step cannot use is recorded as a failure of this rank.

        Returns this rank's flag, 0-dim float32: 1 if a non-finite gradient was then sharded, or cast to float8, so
        that the finite check would not find it.
        """
        found_inf = self._overflow.clone()
        self._overflow.zero_()
        try:
            self.flat.before_batch()  # parameters may have been replaced since the backward
            self.flat.check()
        except RuntimeError as error:
            self._failure.record(error)
        self.flat.collect(found_inf)
        self.flat.reduce()
        return found_inf

    def drop(self, *, overflow: bool = True) -> None:
        """Make all gradients zero, and forget an ``overflow`` that they hide."""
        self.flat.zero_grad()
        for tie in self._ties:
            tie.summed = None
        if overflow:
            self._overflow.zero_()


class LossWindow:
    """The current accumulation window on this rank.

    Attributes:
        size: microbatches in a window, over all data ranks.
        mean_factor: the factor from gradients of means, which are divided by ``size``, to those of the window that has
            ended; more than 1 after :meth:`shorten`.
        totals: 1-dim float64, on the device: the sum of the losses, of their weights, of those weights that are counts,
            and the number of losses. A mean over a microbatch has weight 1.
        unit: what sums and counts are divided by.
        gradients: the gradients of the window's losses.
        batches: the batches of the window, for a diagnosis of a skipped step.
        failure: what failed on this rank or another.
        failed: whether a batch of the window failed, so that :meth:`drop` drops it.
        paused: why neither a backward nor a step can be made now; None if they can.
    """

    def __init__(
        self,
        scaler: DistributedGradScaler,
        gradients: StepGradients,
        batches: Window,
        failure: SharedFailure,
        context: ParallelContext,
    ) -> None:
        self._accumulation = context.config.gradient_accumulation
        self._scaler = scaler
        self.failure = failure
        self._context = context
        self._device = context.device
        self._length = self._accumulation  # calls of step() in this window; fewer after shorten()
        self.mean_factor = 1.0
        self._num_calls = 0  # those that were made
        self._ended = False  # True if the gradients belong to a past step
        self._has_backward = False  # True after a backward since the last call of step()
        self.failed = False
        self.paused: str | None = None
        self._incomplete = False  # True if a failed batch left a part of its gradients
        self.in_backward = False  # True in a backward of the engine's
        self._handles: list[RemovableHandle] = []  # during a backward of the user's, and until the next call
        self._has_other = False  # True if it accumulated gradients
        self.gradients, self.batches = gradients, batches
        self.size = context.config.parallel.pipeline.num_microbatches * self._accumulation * context.batch_axis.size
        self.totals: torch.Tensor | ChunkTotals = self.no_losses()
        self._one_loss = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64, device=self._device)
        self.unit = CountUnit(failure, context)

    def no_losses(self) -> torch.Tensor:
        """The initial :attr:`totals`; also for losses outside the window."""
        return torch.zeros(4, dtype=torch.float64, device=self._device)

    # ------------------------------------------------------------------------------------------------ begin and end

    def begin_backward(self, batch: Batch | None) -> None:
        """Prepare a backward of ``batch``, None if it is not known: drop the gradients of a past step."""
        self.check_paused()
        self._check_source()
        if self._num_calls:
            self._check_complete()
        if self._ended or self._incomplete:
            self.drop()
        self._has_backward = True
        self.batches.add(batch)
        self.gradients.flat.begin_window()

    @property
    def in_last_call(self) -> bool:
        """Whether the next call of ``step()`` ends the window."""
        return self._num_calls == self._accumulation - 1

    def shorten(self) -> bool:
        """Let the window end at the next :meth:`end_call`, with the calls that were made. False if there were none.

        A backward since the last call counts as a call.
        """
        if not self._has_backward and self._num_calls:
            self._num_calls -= 1  # the last call is made again, as the window's last
            self._has_backward = True
        if self._has_backward:
            self._length = self._num_calls + 1
        return self._has_backward

    def end_call(self, scale: torch.Tensor) -> bool:
        """Count a call of ``step()``; return whether it ends the window, whose gradients carry ``scale`` (0-dim).

        Raises:
            RuntimeError: there was no backward since the last call, or a batch failed and was not dropped.
        """
        self.check_paused()
        with self.failing():
            self.failure.check()
            self._check_source()
        self._check_complete()
        if not self._has_backward:
            self._check_changed()
        self._has_backward = False
        self._num_calls += 1
        if self._num_calls < self._length:
            self.gradients.flat.snapshot()
            return False
        self.mean_factor, self._length = self._accumulation / self._length, self._accumulation
        self._num_calls, self._ended = 0, True
        self.batches.end(scale)
        return True

    def watch(self, output: torch.Tensor) -> None:
        """Notice a backward through ``output``, the model's, that is not the engine's."""
        if output.requires_grad:
            output.register_hook(self._notice)

    def _notice(self, _: torch.Tensor) -> None:
        if not self.in_backward and not self._handles:
            self._handles = self.gradients.flat.on_accumulation(self._notice_gradient)

    def _notice_gradient(self, _: torch.Tensor) -> None:
        self._has_other = True

    def _check_source(self) -> None:
        """Raise if a backward of the user's has accumulated gradients; ``torch.autograd.grad`` does not."""
        while self._handles:
            self._handles.pop().remove()
        if self._has_other:
            self.failed = True
            raise RuntimeError(
                "loss.backward() was called on an output of the engine: its gradients are neither scaled nor averaged "
                "over the accumulation window and the data ranks; call engine.zero_grad(), and engine.backward(loss) "
                "in its place"
            )

    def _check_changed(self) -> None:
        """Raise on every rank unless gradients were changed by hand on all ranks since the last call; a collective."""
        error = RuntimeError(
            "step(): no backward since the last step, so there are no gradients to step with; call "
            "engine.forward_backward(x, y), or engine.backward(engine.criterion(engine(x), y)), before each step"
        )
        self.failure.agree(error if self.gradients.flat.are_unchanged() else None)

    def drop(self) -> None:
        """Drop losses and gradients; of an unfinished window, which a plain loop accumulates, only if it failed."""
        if self._num_calls == 0 or self.failed:
            # After a step, an overflow is that of a forward since then, whose backward is still to come.
            self.gradients.drop(overflow=not self._ended)
            self.totals.zero_()
            self.batches.drop()
            self.unit.restart()
            self._num_calls, self._length = 0, self._accumulation
            self._ended = self._has_backward = self.failed = self._incomplete = self._has_other = False

    def restart(self) -> None:
        """Drop losses and gradients, also of an unfinished window."""
        self._num_calls = 0
        self.drop()

    @contextmanager
    def failing(self, *, incomplete: bool = True) -> Iterator[None]:
        """Record a failure inside as one of the window; ``incomplete``: it may leave a part of the gradients."""
        try:
            yield
        except Exception:
            self.failed, self._incomplete = True, self._incomplete or incomplete
            raise

    def _check_complete(self) -> None:
        if self._incomplete:
            raise RuntimeError(
                "a batch of this step failed and left a part of its gradients; call engine.zero_grad(), which drops "
                "the gradients of the whole accumulation window, and start the window again"
            )

    def check_paused(self) -> None:
        """Raise a RuntimeError while :attr:`paused`."""
        if self.paused is not None:
            raise RuntimeError(self.paused)

    def check_ended(self) -> None:
        """Raise a CheckpointError within an accumulation window, whose gradients are not saved; or a past failure."""
        self.failure.check()
        if self._num_calls or self.batches.is_open:
            raise CheckpointError(
                f"save: got a call in an accumulation window, after {self._num_calls} of {self._accumulation} calls of "
                "step(), whose gradients are not saved; save after the step that uses them"
            )

    # ------------------------------------------------------------------------------------------------------- losses

    def scaled(self, loss: Loss) -> torch.Tensor:
        """Add ``loss`` to the window; return the value that its backward starts from, 0-dim.

        It is scaled, and divided so that the sum of the gradients over the window is their mean.

        Raises:
            ValueError: it has no gradient, an invalid count, or one where the window's other losses have none.
        """
        if not (loss[0] if isinstance(loss, tuple) else loss).requires_grad:
            raise ValueError(
                "criterion: got a loss without a gradient, expected one that depends on the model's output; do not "
                "detach it, and compute it in torch"
            )
        self.unit.choose(loss, self.size)
        value, parts = self.split(loss)
        self.totals.add_(parts)
        scaled = self._scaler.scale(value)
        return scaled / self.size if self.size > 1 else scaled

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

    def findings(self, totals: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's terms of a sum over ranks, 1-dim float64: ``totals`` (None: the window's), and its failures.

        The totals are zeros except on the one rank of each model group whose losses count.
        """
        own = terms_of(self.totals if totals is None else totals, self._context)
        return torch.cat([own, self.failure.flag() + self.unit.flag()])

    def mean(self, totals: torch.Tensor | None = None) -> torch.Tensor:
        """The mean loss over the ``totals`` of all ranks (None: of the window so far), 0-dim float32.

        Raises:
            Exception: on every rank: a batch failed on one (:mod:`paramp.engine.shared_failure`).
        """
        summed = self.findings(totals)
        failures = summed[4]
        if self._context.world_size > 1:
            all_reduce_(summed)
            if totals is None:
                failures = failures + mixes_kinds(*summed[1:4])
        # The host would wait for the backward here. The step's own sum has the failure too, and its next call raises.
        if totals is not None or not self.failure.is_delayed:
            with self.failing() if totals is None else nullcontext():
                self.failure.publish(failures, wait=True)
        return (summed[0] / summed[1]).float()
