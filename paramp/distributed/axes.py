"""Mesh axes along which a tensor is replicated, and the groups of ranks along mesh axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..base.dtensor import is_dtensor, local
from .collectives import broadcast_
from .context import ParallelContext
from .groups import family_along
from .mesh_roles import ROLES, Role

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def num_replicas(tensor: torch.Tensor, context: ParallelContext | None) -> int:
    """How many ranks of the world hold each element of ``tensor``.

    On the ranks of a DTensor's mesh, its placements determine the number, whatever the axes are called. Other ranks
    hold copies on other meshes, except those along axes where each rank has its own parameters. A plain tensor has a
    copy on each rank along the other axes.

    Raises:
        ValueError: there is no context, and the tensor is plain in a world of several ranks, or a DTensor on a part of
            the world, so that it is not known what the other ranks hold.
    """
    own = _own_axes(tensor, context)
    if is_dtensor(tensor):
        mesh = tensor.device_mesh
        copies = math.prod(mesh.size(axis) for axis, kind in enumerate(tensor.placements) if kind.is_replicate())
        return copies * (_num_peers(mesh, _root(mesh) if context is None else context.mesh, own) // mesh.size())
    if context is not None:
        return context.world_size // math.prod(context.mesh.size([*context.roles].index(name)) for name in own)
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"a plain parameter in a world of {dist.get_world_size()} ranks: it is not known whether the other ranks "
            "hold copies or other parameters; call paramp.ParallelContext.from_mesh(mesh) or "
            "paramp.launch_from_torch(config) first, or pass context=..."
        )
    return 1


def _own_axes(tensor: torch.Tensor, context: ParallelContext | None) -> tuple[str, ...]:
    """The axes along which each rank has a parameter of its own in place of ``tensor``; usual names if no context."""
    own: tuple[Role, ...] = ("stage",)
    if getattr(tensor, "allreduce", True) is False:  # how Megatron-Core and DeepSpeed mark experts
        own = ("stage", "expert")
    if context is not None:
        return context.axes_of(*own)
    return tuple(name for name, role in ROLES.items() if role in own)


def _root(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that ``mesh`` is a part of; it has to cover the world."""
    root, world_size = mesh._get_root_mesh(), dist.get_world_size()
    if root.size() != world_size:
        raise ValueError(
            f"a parameter is on a mesh of {root.size()} ranks in a world of {world_size}; pass context=..., "
            "so that it is known what the other ranks hold"
        )
    return root


def _num_peers(mesh: DeviceMesh, world: DeviceMesh, own: Sequence[str]) -> int:
    """How many ranks of ``world`` have the coordinates of one of ``mesh`` on the axes ``own``."""
    dims = [dim for dim, name in enumerate(world.mesh_dim_names or ()) if name in own]
    if (num_places := math.prod(world.size(dim) for dim in dims)) == 1:
        return world.size()
    by_place = world.mesh.movedim(dims, list(range(len(dims)))).reshape(num_places, -1)
    return int(torch.isin(by_place, mesh.mesh).any(dim=1).sum()) * by_place.shape[1]


def replicated_axes(tensor: torch.Tensor, context: ParallelContext) -> list[str]:
    """The axes of the context's mesh along which all ranks hold the same shard of ``tensor``, or all of it.

    Never those along which each rank has its own parameters.
    """
    own = _own_axes(tensor, context)
    axes = [(axis, name) for axis, name in enumerate(context.roles) if name not in own]
    if not is_dtensor(tensor):
        return [name for _, name in axes]
    ranks = tensor.device_mesh.mesh
    shards = torch.arange(ranks.numel()).view_as(ranks)
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            shards = shards.narrow(dim, 0, 1).expand_as(ranks)
    ranks, shards = ranks.flatten(), shards.flatten()
    # A rank of the tensor's mesh is in this rank's group along an axis if they differ in no other coordinate.
    mesh = context.mesh.mesh
    places = torch.stack(torch.unravel_index(mesh.flatten().argsort()[ranks], mesh.shape))
    differs = places != torch.tensor(context.mesh.get_coordinate()).view(-1, 1)
    in_group = differs.sum(dim=0) == differs
    return [name for axis, name in axes if shards[in_group[axis]].unique().numel() < 2]


def ranks_along(context: ParallelContext, axes: Sequence[str], stages: Sequence[int] = ()) -> torch.Tensor:
    """The groups of ranks whose coordinates differ on ``axes`` only.

    Args:
        axes: in the order of the mesh.
        stages: the pipeline ranks to include. Empty: all.

    Returns:
        2-dim int, groups x ranks of a group, both in the order of the mesh.
    """
    names, mesh = [*context.roles], context.mesh.mesh
    if stages:
        mesh = mesh.index_select(names.index(context.axes_of("stage")[0]), torch.tensor(stages))
    return family_along(mesh, [names.index(name) for name in axes])


def broadcast_replicas(tensors: Iterable[torch.Tensor], context: ParallelContext) -> None:
    """Broadcast each of ``tensors``, in place, from the first rank that holds a replica of it to the others."""
    for tensor in tensors:
        for axis in replicated_axes(tensor, context):
            broadcast_(local(tensor), context.group_along(axis))


def tensor_mesh(context: ParallelContext) -> DeviceMesh:
    """The 1-dim mesh of this rank's tensor axis, over which tensor plans shard layers."""
    return context.mesh[context.axes_of("tensor")]
