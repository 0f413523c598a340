"""The losses of an accumulation window: the scaled value each backward starts from, and their mean over all ranks.

A microbatch's loss is multiplied by the loss scale and divided by the number of microbatches in the window
(microbatches x accumulation x data ranks), so that every later reduction is a plain sum. A criterion that returns
``(sum, count)`` is also divided by a power of two near the counts (:mod:`.count_unit`), and the step corrects for
the true total count: gradient = sum of gradients / sum of counts, whatever the counts of the ranks.
"""

from __future__ import annotations

import torch

from ..base.collectives import all_reduce_
from ..distributed.context import ParallelContext
from ..distributed.numerics import Numerics
from ..scaling.decision import mixes_kinds
from ..scaling.loss_scaler import DistributedGradScaler
from .compute_context import Loss
from .count_unit import CountUnit
from .shared_failure import SAME_KIND, SharedFailure

MEAN, COUNTED = "a mean", "(sum, count)"
"""The kinds of losses."""


class LossTotals:
    """What losses add up to on this rank: their sum, that of their weights, of those weights that are counts, and how
    many they are. A mean over a microbatch has weight 1."""

    def __init__(self, context: ParallelContext) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64, device=context.device)
        self._counts_here = context.counts_loss

    def add_(self, parts: torch.Tensor) -> None:
        """Add those of one loss, 1-dim float64 of 4 elements."""
        self._sums.add_(parts)

    def zero_(self) -> None:
        """Forget all losses."""
        self._sums.zero_()

    def terms(self) -> torch.Tensor:
        """This rank's terms of a sum over the world: zeros but on the one rank of a model group whose losses count."""
        return self._sums if self._counts_here else torch.zeros_like(self._sums)


class WindowLosses:
    """The losses of the current accumulation window on this rank.

    Attributes:
        size: microbatches in a window, over all data ranks.
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
        kind = COUNTED if isinstance(loss, tuple) else MEAN
        if self._kind not in (None, kind):
            raise ValueError(f"criterion: returned both {MEAN} and {COUNTED} {SAME_KIND}")
        self._kind = self.failure.kind = kind
        if kind == COUNTED or self.unit.is_used:
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
        if self.failure.is_shared and (totals is not None or not self.failure.is_delayed):
            self.failure.publish(failures, wait=True)
        return (summed[0] / summed[1]).float()
