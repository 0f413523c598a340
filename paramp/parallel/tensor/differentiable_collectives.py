"""Communication over the tensor axis within a forward; the backward of each exchange is its dual.

Layers compute on local tensors, and these functions carry what ranks exchange between them (Shoeybi et al. 2019,
section 3; Korthikanti et al. 2022, section 4.2). They take and return plain tensors (any dims, floating point), the
same on every rank of ``group``, which all call them::

    function           forward                     backward
    enter              -                           sum
    sum_over_ranks     sum                         -
    gather             gather                      this rank's slice
    own_slice          this rank's slice           gather
    gather_and_enter   gather                      sum, then this rank's slice
    sum_slices         sum, then this rank's slice gather
    on_first_rank      0 on all ranks but the first -
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.distributed as dist

from ...base.collectives import all_gather_single, all_reduce_, reduce_scatter_single
from ...base.dtensor import is_dtensor, wrap
from ...base.torch_internals import older_than, take

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

all_gather_tensor = take("torch.distributed._functional_collectives.all_gather_tensor")
all_reduce = take("torch.distributed._functional_collectives.all_reduce")
reduce_scatter_tensor = take("torch.distributed._functional_collectives.reduce_scatter_tensor")
wait_tensor = take("torch.distributed._functional_collectives.wait_tensor")

LOSES_GRADIENTS = older_than("2.12")
"""Whether torch compiles autograd functions to return every tensor of their forward beside the result. If one of them
is the result itself, as where the backend runs the graph as it is (``"eager"``), its gradient is lost: zeros, silently.
"""

_KEEPS_INPUTS = ContextVar("keeps_inputs", default=False)


@contextmanager
def keeping_inputs() -> Iterator[None]:
    """A context in which no sum is in place, for selective activation checkpointing, which keeps what is summed."""
    token = _KEEPS_INPUTS.set(True)
    try:
        yield
    finally:
        _KEEPS_INPUTS.reset(token)


Exchange: TypeAlias = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


def enter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``x``, which every rank has, for a computation that gives each rank a part of its gradient."""
    return _exchange(x, group, _keep, _sum)


def sum_over_ranks(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of ``x`` over the ranks, in place where ``x`` is contiguous."""
    return _exchange(x, group, _sum, _keep)


def gather(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """The slices ``x`` of all ranks, one after the other along ``dim``."""
    return _exchange(x, group, partial(_gather, dim=dim), partial(_slice, dim=dim))


def own_slice(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """This rank's slice along ``dim`` of ``x``, which every rank has; its size divides by that of ``group``."""
    return _exchange(x, group, partial(_slice, dim=dim), partial(_gather, dim=dim))


def gather_and_enter(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """As :func:`gather`, for a computation that gives each rank a part of the gradient of the whole."""
    return _exchange(x, group, partial(_gather, dim=dim), partial(_sum_slices, dim=dim))


def sum_slices(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """This rank's slice along ``dim`` of the sum of ``x`` over the ranks; its size divides by that of ``group``."""
    return _exchange(x, group, partial(_sum_slices, dim=dim), partial(_gather, dim=dim))


def on_first_rank(bias: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``bias``, which every rank has, as one term of a sum over the ranks: so it is added before that is rounded."""
    return _exchange(bias, group, _keep_on_first, _keep)


def local_shard(weight: DTensor, *, is_partial: bool = False) -> torch.Tensor:
    """The local tensor of ``weight``: a view, whose gradient is a DTensor.

    Args:
        is_partial: each rank's gradient is a part of a sum, as where it applies a replicated ``weight`` to its slice.
            Else the gradient has the placements of ``weight``.
    """
    if not is_dtensor(weight):  # a compiled block has the local tensors in the place of its parameters
        return weight
    return cast(torch.Tensor, _LocalShard.apply(weight, is_partial))


def _exchange(x: torch.Tensor, group: dist.ProcessGroup, forward: Exchange, backward: Exchange) -> torch.Tensor:
    return cast(torch.Tensor, _Exchange.apply(x, group, forward, backward))


class _Exchange(torch.autograd.Function):
    """``forward`` of a tensor, and ``backward`` of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, forward: Exchange, backward: Exchange) -> Any:
        ctx.others = group, backward, forward
        result = forward(x, group)
        if result is x:
            ctx.mark_dirty(x)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            group, backward, _ = ctx.others
            return backward(gradient, group), None, None, None
        return _exchange(gradient, *ctx.others), None, None, None


def _keep(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return x.view_as(x)


def _keep_on_first(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return x * float(group.rank() == 0)  # zeros (NaN, where it is not finite); compiled, the same graph on every rank


def _sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if torch.compiler.is_compiling() or _KEEPS_INPUTS.get():
        return _completed(all_reduce(x.contiguous(), "sum", group))
    dense = x.contiguous()
    all_reduce_(dense, group)
    return dense


def _gather(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    if torch.compiler.is_compiling():
        # Not along dim: for that torch 2.11 calls a function that breaks the graph.
        whole = _completed(all_gather_tensor(x.contiguous(), 0, group))
        return torch.cat(whole.chunk(group.size()), dim) if dim % x.ndim else whole
    size = group.size()
    whole = x.new_empty(size * x.numel())
    all_gather_single(whole, x.contiguous().view(-1), group=group)
    return torch.cat(list(whole.view(size, *x.shape)), dim)


def _slice(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    return x.chunk(group.size(), dim)[group.rank()].clone()


def _sum_slices(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return _completed(reduce_scatter_tensor(x.contiguous(), "sum", dim, group))
    slices = torch.stack(x.chunk(group.size(), dim))
    own = slices.new_empty(slices[0].numel())
    reduce_scatter_single(own, slices.view(-1), group=group)
    return own.view(slices.shape[1:])


def _completed(result: torch.Tensor) -> torch.Tensor:
    """The ``result`` of a collective, once it is there."""
    same = wait_tensor(result)
    return same.clone() if LOSES_GRADIENTS and torch.compiler.is_compiling() else same


def as_shards(shard: torch.Tensor, mesh: DeviceMesh, dim: int, size: int) -> DTensor:
    """The DTensor whose local tensor is ``shard``, sharded over ``mesh`` along ``dim``, which has ``size`` elements."""
    from torch.distributed.tensor import DTensor, Shard

    dim %= shard.ndim
    shape = torch.Size((*shard.shape[:dim], size, *shard.shape[dim + 1 :]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(shard, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)


class _LocalShard(torch.autograd.Function):
    """DTensor's ``to_local`` without the time (0.1 ms here) that it takes to find out the gradient's shape."""

    @staticmethod
    def forward(ctx: Any, weight: DTensor, is_partial: bool) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight, ctx.is_partial = weight, is_partial
        part = weight._local_tensor
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[Any, None]:
        if gradient is None:
            return None, None
        from torch.distributed.tensor import DTensor, Partial

        weight = ctx.weight
        if not ctx.is_partial and not torch.is_grad_enabled():
            # A copy, because DTensor's operators may write to it.
            return DTensor(gradient, copy.copy(weight._spec), requires_grad=False), None
        placements = [Partial()] if ctx.is_partial else weight.placements
        return wrap(gradient, weight, placements=placements), None
