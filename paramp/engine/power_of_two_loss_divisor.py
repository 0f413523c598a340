"""The unit of counts: what the sums of a window are divided by before their backward, if the criterion counts.

A criterion that returns ``(sum, count)`` gives gradients of sums, which may be some millions of times larger than those
of means: in fp16 they overflow, and divided by too much they are 0. So each sum is divided by a power of two, which
rounds nothing, near the mean count of the window's microbatches: before the step, gradients are those of the mean times
the loss scale, as with a criterion that returns means. The step then divides by the true total count.

All gradients that are added up need the same unit, and it has to be known before the first backward. So it follows the
counts of the first microbatch of a window, their mean over the data ranks, and those of the window before::

    a window has one microbatch on each data rank     the unit is its mean count
    more, and the first one's mean count is 1/64 of   the larger of that and the mean count of the window before, so
    the last window's or more                         that a short first microbatch changes nothing
    more, and it is less than 1/64                    its mean count

Everything is computed on the device. Only the last stage knows counts; the others see their ratio to the unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..base.collectives import all_reduce_
from ..base.errors import shown
from ..distributed.context import ParallelContext

Loss = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""The mean over a microbatch, or ``(sum, count)``."""
Criterion = Callable[..., Loss]
SPREAD = 64.0
"""What the counts of the microbatches of a window may differ by without changing its unit."""
LARGEST_COUNT = 2.0**53
"""Above it float64 does not hold each whole number."""


def as_count(count: Any) -> Any:
    """``count``, which a criterion returned beside a sum, as a 0-dim tensor if it is one number, else as it is.

    :class:`CountUnit` raises for what is no count, on every rank.
    """
    # torch has no int beyond int64, and would round a float to its default dtype.
    as_float = isinstance(count, float) or (isinstance(count, int) and abs(count) > LARGEST_COUNT)
    try:
        number = torch.as_tensor(count, dtype=torch.float64 if as_float else None)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return count
    return number.reshape(()) if number.numel() == 1 else count


class CountUnit:
    """The unit of the counts of the current accumulation window on this rank.

    Attributes:
        value: the unit, 0-dim float64, on the device: of this window, or of the last one until the next has a loss.
        is_used: whether there are counts, or data ranks that have to agree whether there are. Once True it stays so.
        sum_over_data_: sums a tensor over data ranks; FSDP2's units, whose order this collective is in, have their own.
    """

    def __init__(self, context: ParallelContext, *, first_rank: bool) -> None:
        """``first_rank``: the first count of the first data rank decides, which is the same in every layout."""
        self._context = context
        self._device = context.device
        self._first_rank = first_rank
        self.is_used = context.batch_axis.size > 1
        self.value = torch.ones((), dtype=torch.float64, device=self._device)
        self.sum_over_data_: Callable[[torch.Tensor], object] = partial(all_reduce_, group=context.batch_axis.group)
        self._usual = torch.zeros_like(self.value)  # the unit for the last window that had counts; 0: none had
        self._invalid = torch.zeros(2, dtype=torch.float64, device=self._device)  # 1 and the last invalid count
        self._chosen = False
        # Whether windows before had counts, so that data ranks agree on a unit in this one; None: not known yet.
        self._agrees: bool | None = None
        self._counted: bool | None = None  # whether this window has counts; None: it has no loss yet
        self._last: bool | None = None  # the same of the window before, if no rank failed

    def restart(self) -> None:
        """A window begins."""
        self._chosen = False
        self._counted = None

    def choose(self, loss: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None, size: int) -> None:
        """Choose :attr:`value` for a window by its first loss; the others are only checked.

        On the ranks of the last stage: a collective of the data ranks, unless windows before had no counts. The host
        never waits for a GPU.

        Args:
            loss: a mean, or ``(sum, count)``; None if a batch failed and has none, while other data ranks wait.
            size: microbatches in the window, over all data ranks.

        Raises:
            ValueError: its count is invalid.
        """
        count = self._checked(loss[1]) if isinstance(loss, tuple) else None
        if loss is not None:
            self._counted = count is not None
        if self._chosen or not self._context.is_last_stage:
            return
        self._chosen = True
        axis = self._context.batch_axis
        agrees = axis.size > 1 and self._agrees is not False
        if count is None and not agrees:
            return
        num_first = 1 if self._first_rank else axis.size
        first = torch.zeros(2, dtype=torch.float64, device=self._device)
        if loss is not None and axis.rank < num_first and (agrees or axis.size == 1):
            if count is not None:
                first[0] = count / num_first
            first[1].fill_(-1.0 if count is None else 1.0)  # an assignment would copy the number to a GPU
        if agrees:
            self.sum_over_data_(first)
            if self._device.type == "cpu" and self._agrees is None and first[1] != 0:  # 0: their batches have failed
                self._agrees = bool(first[1] > 0)
        self.value = _unit_of(first[0], self._usual, SPREAD if size > num_first else 1.0)

    def divide(self, loss: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum over the unit, to differentiate, and the count over the unit, float64; both 0-dim, on the device.

        Raises:
            ValueError: the count is invalid.
        """
        self.is_used = True  # also by an evaluation, whose counts may be invalid
        dtype = torch.promote_types(loss[0].dtype, torch.float32)  # which the unit does not overflow
        return loss[0].to(dtype) / self.value.to(dtype), self._checked(loss[1]) / self.value

    def follow(self, mean_count: torch.Tensor) -> None:
        """A window has ended.

        ``mean_count``: of its microbatches, over all ranks, in its unit, 0-dim float64; 0 or NaN if it had none.
        """
        # By the window before the last: if ranks differed in it, all of them have raised by now, also on GPUs.
        self._agrees = self._agrees if self._last is None else self._last
        self._last = self._counted
        mean = mean_count * self.value
        self._usual = torch.where((mean > 0) & mean.isfinite(), _power_of_two(mean), self._usual)

    def everywhere(self) -> float | None:
        """The unit for the counts of the last window that had any, on every rank, to be saved; None if none had.

        A collective of the world; the host waits.
        """
        usual = self._usual.clone() if self._context.is_last_stage else torch.zeros_like(self._usual)
        if self._context.world_size > 1:
            all_reduce_(usual, op=dist.ReduceOp.MAX)
        return float(usual) or None

    def load(self, usual: float | None) -> None:
        """Set what :meth:`everywhere` returned."""
        self._usual.fill_(usual or 0.0)
        self.is_used = self.is_used or bool(usual)

    # ------------------------------------------------------------------------------------------------------- checks

    def _checked(self, count: Any) -> torch.Tensor:
        """``count``, as :func:`as_count` returns it, as 0-dim float64 on the device; a ValueError if it is invalid.

        One on a GPU is checked there: the host does not wait for it, and :meth:`flag` reports it.
        """
        count = as_count(count)  # again, for that of engine.backward((sum, count))
        if not isinstance(count, torch.Tensor):
            raise self._error(shown(count))
        if count.ndim or count.is_complex():
            raise self._error(f"{tuple(count.shape)} of {count.dtype}")
        if count.requires_grad:
            raise self._error("a tensor that requires a gradient (a term of the loss?)")
        if count.device.type == "cpu":
            number = float(count.detach())
            if not 0 <= number <= LARGEST_COUNT:
                raise self._error(f"{number:g}")
            return torch.full((), number, dtype=torch.float64, device=self._device)
        return self._checked_on_device(count.detach().double())

    def _checked_on_device(self, count: torch.Tensor) -> torch.Tensor:
        is_valid = (count >= 0) & (count <= LARGEST_COUNT)
        self._invalid = torch.where(is_valid, self._invalid, torch.stack([torch.ones_like(count), count]))
        return count

    def flag(self) -> torch.Tensor:
        """1 if a count was invalid on this rank, else 0; 1-dim float64 of one element."""
        return self._invalid[:1]

    def error_of_flag(self) -> ValueError | None:
        """The error for a count that :meth:`flag` reported, once; else None.

        Called on every rank after a window that failed; the host waits.
        """
        self._last = None  # in a window that failed, ranks may have had losses of different kinds, or none
        flag, value = self._invalid.tolist()
        self._invalid = torch.zeros_like(self._invalid)
        return self._error(f"{value:g}") if flag else None

    def _error(self, count: str) -> ValueError:
        return ValueError(
            f"criterion: got (sum, count) with a count of {count} on {self._context.name_of(self._context.rank)}, "
            "expected a number from 0 to 2**53: how many elements the sum has"
        )


def _unit_of(first: torch.Tensor, usual: torch.Tensor, spread: float) -> torch.Tensor:
    """The unit of a window whose first counts have the mean ``first``, and ``usual`` in the window before; 0: none."""
    unit = _power_of_two(first)
    chosen = torch.where(unit * spread >= usual, torch.maximum(unit, usual), unit)
    otherwise = torch.where(usual > 0, usual, 1.0)
    return torch.where((first > 0) & first.isfinite(), chosen, otherwise)


def _power_of_two(number: torch.Tensor) -> torch.Tensor:
    """The power of two nearest to ``number`` as a ratio, exactly; NaN if it is 0, infinite or NaN."""
    mantissa = torch.frexp(number).mantissa  # from 0.5 up to 1
    return number / mantissa * torch.where(mantissa < math.sqrt(0.5), 0.5, 1.0)
