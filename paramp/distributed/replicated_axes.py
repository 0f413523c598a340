"""The axes of the mesh along which a tensor is replicated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..base.collectives import broadcast_
from ..base.dtensor import is_dtensor, local
from ..scaling.copies_per_element import axes_of_own_parameters
from .context import Axis, ParallelContext


def replicated_axes(tensor: torch.Tensor, context: ParallelContext) -> list[str]:
    """The axes of the context's mesh along which all ranks hold the same shard of ``tensor``, or all of it.

    Never those along which each rank has its own parameters.
    """
    own = axes_of_own_parameters(tensor, context)
    axes = tuple((axis, name) for axis, name in enumerate(context.roles) if name not in own)
    if not is_dtensor(tensor):
        return [name for _, name in axes]
    replicated = tuple(dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate())
    known, key = context.replicated_axes, (tensor.device_mesh, replicated, axes)
    if key not in known:
        known[key] = _replicated_axes(*key, context)
    return [*known[key]]


def _replicated_axes(
    mesh: DeviceMesh, replicated: Sequence[int], axes: Sequence[tuple[int, str]], context: ParallelContext
) -> list[str]:
    """Those of ``axes``, of the context's mesh, along which a tensor is the same that is so along dims of ``mesh``."""
    ranks = mesh.mesh
    shards = torch.arange(ranks.numel()).view_as(ranks)
    for dim in replicated:
        shards = shards.narrow(dim, 0, 1).expand_as(ranks)
    ranks, shards = ranks.flatten(), shards.flatten()
    # A rank of the tensor's mesh is in this rank's group along an axis if they differ in no other coordinate.
    world = context.mesh.mesh
    places = torch.stack(torch.unravel_index(world.flatten().argsort()[ranks], world.shape))
    differs = places != torch.tensor(context.mesh.get_coordinate()).view(-1, 1)
    in_group = differs.sum(dim=0) == differs
    return [name for axis, name in axes if shards[in_group[axis]].unique().numel() < 2]


def batch_axis_of(tensor: torch.Tensor, context: ParallelContext) -> Axis:
    """The ranks with the same shard of ``tensor``, or all of it, and other samples: its gradient is summed over them.

    FSDP2, which shards parameters over these ranks too, sums the gradients itself.
    """
    experts = context.axes_of("expert")
    is_expert = bool(experts) and not set(experts).issubset(replicated_axes(tensor, context))
    return context.experts_axis if is_expert else context.batch_axis


def broadcast_replicas(tensors: Iterable[torch.Tensor], context: ParallelContext) -> None:
    """Broadcast each of ``tensors``, in place, from the first rank that holds a replica of it to the others."""
    for tensor in tensors:
        for axis in replicated_axes(tensor, context):
            broadcast_(local(tensor), context.group_along(axis))
