"""Which optimizers step whole matrices, of which each rank has shards, each on the rank that owns it; their step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from ...base.collectives import gather_objects
from ...distributed.context import BATCH_ROLES, ParallelContext
from ...scaling.replica_counts import Role
from ..flat_buffer import FlatParam
from ..flat_weights import NO_GROUP, FlatWeights, OptimizerWeights
from .matrix_exchange import MatrixExchange, placeholder
from .whole_matrix_trial import needs_whole_matrices


class MatrixStep:
    """The optimizer's own ``step()``, within ``state``, on each matrix's owner. The host reads whether to skip it.

    Owners hold the optimizer's state of their matrices. Masters stay where they are: the owner gets them with the
    gradients, and returns them stepped. Three all-to-alls a step.
    """

    calls_optimizer = True

    def __init__(self, weights: OptimizerWeights, state: AbstractContextManager[None]) -> None:
        assert weights.exchange is not None
        self._optimizer = weights.optimizer
        self._weights = weights
        self._state = state
        self._exchange = weights.exchange

    @torch.no_grad()
    def __call__(self, grad_scale: torch.Tensor, found_inf: torch.Tensor, absent: Sequence[FlatParam]) -> None:
        """As :meth:`~paramp.optim.fused_step.FusedStep.__call__`."""
        skips = bool(found_inf)  # the host waits
        if skips:
            self._weights.changes.postpone()
        if skips or not self._exchange.params:
            return
        compare = self._weights.changes.due
        params = self._exchange.params
        masters = [param.buffer.masters.read(param.own_range, compare=compare) for param in params]
        gradients = self._exchange.to_owners(self._unscaled(grad_scale))
        values = self._exchange.to_owners(masters)
        for param, stepped in self._exchange.owned.items():
            stepped.data = values.pop(param)
            stepped.grad = None if param in absent else gradients.pop(param)
        try:
            with self._state:
                self._optimizer.step()
            wholes = {param: stepped.detach() for param, stepped in self._exchange.owned.items()}
        finally:
            for stepped in self._exchange.owned.values():
                stepped.grad, stepped.data = None, placeholder(stepped.shape, stepped.dtype, stepped.device)
        new = [torch.empty_like(master) for master in masters]
        self._exchange.from_owners(wholes, new)
        for param, master in zip(params, new, strict=True):
            param.buffer.masters.write(param.own_range, master)
        self._weights.gather_weights()

    def _unscaled(self, grad_scale: torch.Tensor) -> list[torch.Tensor]:
        """What this rank holds of each gradient, divided by ``grad_scale``; in the dtype of the optimizer's state."""
        unscaled = []
        for param in self._exchange.params:
            gradient = param.stepped_gradient
            wide = torch.promote_types(gradient.dtype, torch.float32)  # in half precision the scale may overflow
            unscaled.append(gradient.to(wide).div(grad_scale).to(param.buffer.masters.dtype))
        return unscaled

    def state_loaded(self) -> None:
        """No action: nothing here depends on the optimizer's state."""


def exchange_matrices(weights: FlatWeights, shapes: Mapping[str, torch.Size], context: ParallelContext) -> None:
    """Give an owner rank to each matrix of optimizers that need whole ones, where ranks have shards. A collective.

    Owners are among the ranks that together hold one replica of the shards, so nothing goes between replicas: they step
    the same matrices and get the same bits. Under ZeRO all data ranks have different parts, and owners are among all.

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
            one.exchange = MatrixExchange(params, shapes, group)
