"""Which optimizers step whole matrices, each on the rank that owns it.

Owners are among the ranks that together hold one replica of the shards, so nothing goes between replicas: they step the
same matrices and get the same bits. Under ZeRO all data ranks have different parts, and owners are among all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...base.collectives import gather_objects
from ...distributed.context import BATCH_ROLES, ParallelContext
from ...scaling.replica_counts import Role
from ..flat_weights import NO_GROUP, FlatWeights
from .matrix_exchange import MatrixExchange
from .whole_matrix_trial import needs_whole_matrices


def exchange_matrices(weights: FlatWeights, shapes: Mapping[str, torch.Size], context: ParallelContext) -> None:
    """Give an owner rank to each matrix of optimizers that need whole ones, where ranks have shards. A collective.

    Raises:
        ConfigError: an optimizer steps one matrix depending on others, and ranks have different ones.
    """
    roles: list[Role] = [*(BATCH_ROLES if weights.is_partitioned else ())]
    roles += ["shard"] if context.config.parallel.shard > 1 else []
    roles += ["tensor"] if context.tensor_axis.size > 1 else []
    if not roles and context.stage_axis.size == 1:
        return
    own = [needs_whole_matrices(one.optimizer, context.device) for one in weights.by_optimizer]
    tried = [any(ranks) for ranks in zip(*gather_objects(own), strict=True)]
    if not roles or not any(tried):
        return
    group = context.make_group("matrices", context.ranks_along(context.axes_of(*roles)))
    assert group is not None
    for one, is_needed in zip(weights.by_optimizer, tried, strict=True):
        if is_needed:
            params = [param for param in one.params if param.group != NO_GROUP]
            dtype_of = {param: buffer.masters.dtype for buffer in one.buffers for param in buffer.params}
            one.exchange = MatrixExchange(params, [dtype_of[param] for param in params], shapes, group)
