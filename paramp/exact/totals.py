"""The losses of the chunks of an accumulation window."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..base.collectives import all_reduce_
from ..distributed.context import ParallelContext
from ..engine.losses import LossTotals
from .place import Place
from .tree_sum import tree_sum


class ChunkTotals(LossTotals):
    """The losses of a window, one by one until they are added up in a tree over the chunks of the global batch.

    They are added up when :meth:`terms` is called, a collective of the world.
    """

    def __init__(self, place: Place, context: ParallelContext) -> None:
        super().__init__(context)
        self._place = place
        self._context = context
        self._terms: dict[tuple[int, int], torch.Tensor] = {}
        self.num_chunks = 1
        """Chunks of a call, over all data ranks."""

    def add_(self, parts: torch.Tensor) -> None:
        """Add what the loss of the chunk that runs adds to the totals, 1-dim float64 of 4 elements."""
        self._terms[self._place.call, self._place.first_sample // self._place.chunk] = parts

    def of(self, call: int, chunk: int) -> torch.Tensor | None:
        """What the loss of a chunk added, of a backward of the window by its index; None if this rank has none."""
        return self._terms.get((call, chunk))

    def zero_(self) -> None:
        """Forget all losses."""
        self._terms.clear()

    def terms(self) -> torch.Tensor:
        """The totals on the first rank of the world, and zeros on the others. A collective of the world."""
        context, calls = self._context, self._place.call + 1
        each = torch.zeros(calls, self.num_chunks, 4, dtype=torch.float64, device=context.device)
        for (call, chunk), parts in self._terms.items() if context.counts_loss else ():
            each[call, chunk] = parts
        if context.world_size > 1:
            all_reduce_(each)  # exact: one rank has each term, the others zeros
        total = tree_sum([tree_sum(list(one)) for one in each])
        return total if dist.get_rank() == 0 else torch.zeros_like(total)
