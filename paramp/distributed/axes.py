"""Which mesh axes hold copies of a tensor, and which ranks lie along them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..base.dtensor import is_dtensor, local
from .collectives import broadcast_
from .context import PIPELINE_AXIS, ROLES, ParallelContext

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def num_replicas(tensor: torch.Tensor, context: ParallelContext | None) -> int:
    """How many ranks of the world hold each element of ``tensor``.

    A DTensor's placements say which axes of its mesh replicate it; over the context's other axes it is replicated too,
    except over ``pp``, where each rank has parameters of its own. A plain tensor has no mesh of its own.

    Raises:
        ValueError: a plain tensor in a world of several ranks, or a DTensor on a part of the world, and no context
            from which it is known what the other ranks hold.
    """
    axes, replicas = {}, 1
    if context is not None:
        axes = dict(zip(context.mesh.mesh_dim_names or (), context.mesh.mesh.shape, strict=True))
    if is_dtensor(tensor):
        mesh, world_size = tensor.device_mesh, dist.get_world_size()
        if context is None:
            root = mesh._get_root_mesh()
            if root.size() != world_size:
                raise ValueError(
                    f"a parameter lives on a mesh of {root.size()} ranks in a world of {world_size}; pass context=..., "
                    "so that it is known what the other ranks hold"
                )
            axes = dict(zip(root.mesh_dim_names or (), root.mesh.shape, strict=False))
        for size, placement in zip(mesh.mesh.shape, tensor.placements, strict=True):
            replicas *= size if placement.is_replicate() else 1
        for name in mesh.mesh_dim_names or ():
            axes.pop(name, None)
    elif context is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"a plain parameter in a world of {dist.get_world_size()} ranks: it is not known whether the other ranks "
            "hold copies or other parameters; call paramp.launch_from_torch(config) first, or pass context=..."
        )
    for name, size in axes.items():
        replicas *= 1 if name == PIPELINE_AXIS else size
    return replicas


def replicated_axes(tensor: torch.Tensor, context: ParallelContext) -> list[str]:
    """The axes of the context's mesh along which ranks hold the same part of ``tensor``.

    Those along which a DTensor is not sharded; but for ``pp``, where each rank has parameters of its own.
    """
    sharded = {PIPELINE_AXIS}
    if is_dtensor(tensor):
        placements = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
        sharded.update(name for name, placement in placements if not placement.is_replicate())
    return [name for name in context.mesh.mesh_dim_names or () if name not in sharded]


def ranks_along(context: ParallelContext, axes: Sequence[str], stages: Sequence[int] = ()) -> torch.Tensor:
    """The groups of ranks that differ in their coordinates on ``axes`` only.

    Args:
        axes: in the order of the mesh.
        stages: the pipeline ranks to take into account. Empty: all.

    Returns:
        2-dim int, groups x ranks of a group, both in the order of the mesh.
    """
    names, mesh = context.mesh.mesh_dim_names or (), context.mesh.mesh
    if stages:
        mesh = mesh.index_select(names.index(PIPELINE_AXIS), torch.tensor(stages))
    dims = [names.index(name) for name in axes]
    size = math.prod(mesh.shape[dim] for dim in dims)
    return mesh.movedim(dims, list(range(mesh.ndim - len(dims), mesh.ndim))).reshape(-1, size)


def broadcast_replicas(tensors: Iterable[torch.Tensor], context: ParallelContext) -> None:
    """Give every rank that holds a replica of one of ``tensors`` the first such rank's values, in place."""
    for tensor in tensors:
        for axis in replicated_axes(tensor, context):
            broadcast_(local(tensor), context.mesh.get_group(axis))


def tensor_mesh(context: ParallelContext) -> DeviceMesh:
    """The 1-dim mesh of this rank's tensor axis, over which plans shard layers."""
    return context.mesh[ROLES["tensor"][0]]
