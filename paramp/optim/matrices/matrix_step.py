"""Which optimizers step whole matrices, of which each rank has shards, each on the rank that owns it; their step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from ...base.collectives import gather_objects
from ...base.dtensor import refusing_changes
from ...distributed.context import BATCH_ROLES, ParallelContext
from ...distributed.replicated_axes import replicated_axes
from ...scaling.copies_per_element import Role
from ..flat_buffer import FlatParam
from ..flat_weights import NO_GROUP, FlatWeights, OptimizerWeights
from ..user_changes.refused_changes import changed_in_step, check_stepped
from ..user_optimizer import SteppedInPlace
from .matrix_exchange import MatrixExchange, placeholder
from .needs_whole_matrices import needs_whole_matrices, steps_slices_alone

OTHERS: tuple[Role, ...] = ("replicate", "shard", "context", "tensor")
"""The roles of axes along which no rank has a stage or experts of its own."""


class MatrixStep:
    """The optimizer's own ``step()``, within ``state``, on each matrix's owner. The host reads whether to skip it.

    Owners hold the optimizer's state of their matrices. Masters stay where they are: the owner gets them with the
    gradients, and returns them stepped. Three all-to-alls a step. Matrices that stay are stepped where they are.
    """

    calls_optimizer = True

    def __init__(self, weights: OptimizerWeights, state: AbstractContextManager[None]) -> None:
        assert weights.exchange is not None
        self._optimizer = weights.optimizer
        self._weights = weights
        self._state = state
        self._exchange = weights.exchange
        staying = {param.name: param.stepped for param in self._exchange.stay if param.stepped is not None}
        self._in_place = SteppedInPlace(weights.optimizer, staying)
        self._stepped = weights.stepped()
        exchanged = ((repr(param.name), param.parameter) for param in self._exchange.params)
        self._written_over = [*weights.followed, *exchanged]

    @torch.no_grad()
    def __call__(self, divisor: torch.Tensor, skip: torch.Tensor, absent: Sequence[FlatParam]) -> None:
        """As :meth:`~paramp.optim.fused_step.FusedStep.__call__`."""
        check_stepped(self._optimizer, self._stepped)
        if bool(skip):  # the host waits
            self._weights.changes.postpone()
            return
        params, stay = self._exchange.params, self._exchange.stay
        gradients = dict(zip(stay, self._unscaled(stay, divisor), strict=True))
        if params:
            gradients |= self._exchange.to_owners(self._unscaled(params, divisor))
        with self.changing(compare=self._weights.changes.due):
            for param, stepped in self._exchange.pairs():
                gradient = gradients.pop(param)
                stepped.grad = None if param in absent else gradient.view(stepped.shape)
            try:
                with refusing_changes(self._written_over, changed_in_step):
                    self._optimizer.step()
            finally:
                for _, stepped in self._exchange.pairs():
                    stepped.grad = None

    @contextmanager
    @torch.no_grad()
    def changing(self, *, compare: bool = True) -> Iterator[None]:
        """A context in which the optimizer changes whole matrices on their owners; then the weights follow.

        All ranks that exchange matrices have to enter it. ``compare``: weights may have been changed in place.
        """
        if compare:
            self._weights.follow_changes()
        params, stay, owned = self._exchange.params, self._exchange.stay, self._exchange.owned
        masters = [param.buffer.masters.read(param.own_range, compare=False) for param in params]
        staying = [param.buffer.masters.read(param.own_range, compare=False) for param in stay]  # what is stepped
        if params:
            for param, value in self._exchange.to_owners(masters).items():
                owned[param].data = value
        try:
            with self._state:
                yield
            wholes = {param: stepped.detach() for param, stepped in owned.items()}
        finally:
            for stepped in owned.values():
                stepped.data = placeholder(stepped.shape, stepped.dtype, stepped.device)
        self._in_place.check()
        new = [torch.empty_like(master) for master in masters]
        if params:
            self._exchange.from_owners(wholes, new)
        for param, master in zip([*params, *stay], [*new, *staying], strict=True):
            param.buffer.masters.write(param.own_range, master)
        self._weights.gather_weights()

    def _unscaled(self, params: Sequence[FlatParam], divisor: torch.Tensor) -> list[torch.Tensor]:
        """What this rank holds of each gradient, divided by ``divisor``; in the dtype of the optimizer's state."""
        unscaled = []
        for param in params:
            gradient = param.stepped_gradient
            wide = torch.promote_types(gradient.dtype, torch.float32)  # in half precision the scale may overflow
            unscaled.append(gradient.to(wide).div(divisor).to(param.buffer.masters.dtype))
        return unscaled

    def state_loaded(self) -> None:
        """No action: nothing here depends on the optimizer's state."""


def exchange_matrices(weights: FlatWeights, shapes: Mapping[str, torch.Size], context: ParallelContext) -> None:
    """Give an owner rank to each matrix of optimizers that need whole ones, where ranks have shards. A collective.

    Owners are among the ranks that together hold one replica of the shards, so nothing goes between replicas: they step
    the same matrices and get the same bits. Under ZeRO all data ranks have different parts, and owners are among all.
    Stacks of matrices that an optimizer steps one by one stay where they are, if each rank has whole ones: experts.

    Raises:
        ConfigError: an optimizer steps one matrix depending on others, and ranks have different ones.
    """
    roles: list[Role] = [*(BATCH_ROLES if weights.is_partitioned else ())]
    roles += ["shard", "expert", "context"] if context.config.parallel.shard > 1 else []
    roles += ["tensor"] if context.tensor_axis.size > 1 else []
    if not (roles or context.axes_of("expert")) and context.stage_axis.size == 1:
        return
    own = [_needs(one, context) for one in weights.by_optimizer]
    tried = [tuple(map(any, zip(*ranks, strict=True))) for ranks in zip(*gather_objects(own), strict=True)]
    for one, (is_needed, over_experts) in zip(weights.by_optimizer, tried, strict=True):
        axes = context.axes_of(*roles, *(("expert",) if over_experts else ()))
        if not is_needed or not axes:
            continue
        group = context.make_group(f"matrices over {axes}", context.ranks_along(axes))
        assert group is not None
        stay = [] if over_experts else [param for param in one.params if _has_whole_experts(param, context)]
        params = [param for param in one.params if param.group != NO_GROUP and param not in stay]
        if params or not stay:
            one.exchange = MatrixExchange(params, shapes, group, axes, stay)


def _needs(weights: OptimizerWeights, context: ParallelContext) -> tuple[bool, bool]:
    """Whether an optimizer needs whole matrices, and whether also those that are shared along the expert axis."""
    if not needs_whole_matrices(weights.optimizer, context.device):
        return False, False
    experts = [
        param for param in weights.params if param.group != NO_GROUP and _is_sharded(param, ("expert",), context)
    ]
    if not all(_has_whole_experts(param, context) for param in experts):
        return True, True
    kinds = {(param.group, param.parameter.ndim) for param in experts}
    return True, not steps_slices_alone(weights.optimizer, kinds, context.device)


def _has_whole_experts(param: FlatParam, context: ParallelContext) -> bool:
    """Whether this rank steps slices along dim 0 of a stack of experts, each of them whole."""
    others = any(_is_sharded(param, (role,), context) for role in OTHERS)
    whole = param.own == (0, param.size) and not others
    return whole and param.group != NO_GROUP and _is_sharded(param, ("expert",), context)


def _is_sharded(param: FlatParam, roles: Sequence[Role], context: ParallelContext) -> bool:
    """Whether the ranks along the axes of ``roles`` have different shards of a parameter."""
    return not set(context.axes_of(*roles)).issubset(replicated_axes(param.parameter, context))
