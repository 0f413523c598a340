"""Gradients that are added up in one tree over the chunks of the global batch, of parameters that FSDP2 shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..base import sizes
from ..optim.flat_buffer import FlatParam
from .chunk_gradients import ChunkGradients, presence_of, without_absent
from .tree_sum import Terms, own_slice_of_sum, sum_over


class ShardedChunkGradients(ChunkGradients):
    """As :class:`ChunkGradients`: a chunk's gradients are whole, and of a call's each rank gets its shards.

    Units gather parameters as elsewhere, and reduce no gradients. So those of a chunk are the same as without them.
    """

    def _take(self, params: Sequence[FlatParam]) -> Terms:
        return [self._take_one(param) for param in params]

    def _take_one(self, param: FlatParam) -> torch.Tensor | None:
        if not param.reserved:  # it has no elements, and is not gathered
            return super()._take([param])[0]
        assert self.units is not None
        gradient = self.units.take_gradient(param.parameter)
        return None if gradient is None else gradient.float() + 0.0  # 0 for -0, as where gradients are added to zeros

    def _over_data_ranks(self, found: Terms, params: Sequence[FlatParam]) -> Terms:
        if not params:
            return found
        count, device = self._context.config.parallel.shard, self._context.device
        lengths = [*(param.reserved for param in params), len(params)]
        present = presence_of(found, device).expand(count, -1)
        shards = torch.cat([*map(self._shards, params, found), present], dim=1)
        own = torch.cat([self._own_shard(part) for part in shards.split(max(1, sizes.SUM_PIECE // count), dim=1)])
        *sums, counts = own.split(lengths)
        return without_absent([value[: param.size] for param, value in zip(params, sums, strict=True)], found, counts)

    def _shards(self, param: FlatParam, value: torch.Tensor | None) -> torch.Tensor:
        """All shards of a gradient, zeros if it is None, as rows; the last ones may be short."""
        rows = torch.zeros(self._context.config.parallel.shard, param.reserved, device=self._context.device)
        if value is not None:
            rows.view(-1)[: value.numel()] = value.reshape(-1)
        return rows

    def _own_shard(self, shards: torch.Tensor) -> torch.Tensor:
        """This rank's row of the sum of ``shards`` over data ranks, which are numbered along the mesh's axes."""
        context = self._context
        for name in reversed(context.axes_of("replicate", "shard")):
            group = context.group_along(name)
            if context.roles[name] == "replicate":
                shards = sum_over(shards, group)
            else:
                shards = own_slice_of_sum(shards, group, 0)
        return shards[0]
