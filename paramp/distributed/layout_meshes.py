"""The meshes that the launch functions make for a layout: its axes, their sizes, and their process groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..config.layout import ParallelConfig
from .process_groups import ProcessGroups, family_along


class LayoutMeshes(NamedTuple):
    """Meshes of all ranks, as :class:`~paramp.distributed.context.ParallelContext` describes them."""

    mesh: DeviceMesh
    shard_mesh: DeviceMesh
    expert_mesh: DeviceMesh


def make_meshes(parallel: ParallelConfig, world_size: int, device: torch.device, groups: ProcessGroups) -> LayoutMeshes:
    """The meshes of the layout ``parallel``; every rank calls it. ``groups`` makes their process groups."""

    def of_sizes(sizes: Mapping[str, int]) -> DeviceMesh:
        ranks = torch.arange(world_size, device="cpu").view(*sizes.values())
        return _mesh_of(ranks, tuple(sizes), device, groups)

    mesh = of_sizes(_mesh_sizes(parallel, world_size))
    several = parallel.shard > 1 and parallel.expert * parallel.context.size > 1
    shard_mesh = of_sizes(_sharded_sizes(parallel, world_size)) if several else mesh
    both = parallel.shard > 1 and parallel.expert > 1 and parallel.context.size > 1
    return LayoutMeshes(mesh, shard_mesh, _expert_mesh(mesh, device, groups) if both else mesh)


def _mesh_sizes(parallel: ParallelConfig, world_size: int) -> dict[str, int]:
    """The axes of the mesh that the launch functions make, the slowest first, and their sizes."""
    size, shard, expert, context = (
        parallel.data_size(world_size),
        parallel.shard,
        parallel.expert,
        parallel.context.size,
    )
    data = {"dp": size} if shard == 1 else {"dp_replicate": size // shard, "dp_shard": shard}
    if expert > 1 and shard == 1:
        data = {"dp": size // expert, "ep": expert}
    elif expert > 1:
        data = {"dp_replicate": size // shard, "efsdp": shard // expert, "ep": expert}
    cp = {"cp": context} if context > 1 else {}
    return {"pp": parallel.pipeline.size, **data, **cp, "tp": parallel.tensor.size}


def _sharded_sizes(parallel: ParallelConfig, world_size: int) -> dict[str, int]:
    """As :func:`_mesh_sizes`, with all ranks that shard parameters on one axis."""
    size, shard = parallel.data_size(world_size), parallel.shard * parallel.context.size
    data = {"dp_replicate": size // parallel.shard, "dp_shard": shard}
    return {"pp": parallel.pipeline.size, **data, "tp": parallel.tensor.size}


def _expert_mesh(mesh: DeviceMesh, device: torch.device, groups: ProcessGroups) -> DeviceMesh:
    """``mesh`` with its ``efsdp`` and ``cp`` as one axis."""
    names = mesh.mesh_dim_names or ()
    efsdp, cp = names.index("efsdp"), names.index("cp")
    ranks = mesh.mesh.movedim(cp, efsdp + 1).flatten(efsdp, efsdp + 1)
    return _mesh_of(ranks, tuple(name for name in names if name != "cp"), device, groups, prefix="experts/")


def _mesh_of(
    ranks: torch.Tensor, names: tuple[str, ...], device: torch.device, groups: ProcessGroups, *, prefix: str = ""
) -> DeviceMesh:
    """The mesh of ``ranks`` with axes of these ``names``; ``prefix``: of the names of groups that are new."""
    along = []
    for dim, name in enumerate(names):
        family = family_along(ranks, [dim])
        along.append(cast(dist.ProcessGroup, groups.make(prefix + name, family[family[:, 0].argsort()])))
    return DeviceMesh.from_group(along, device.type, ranks, mesh_dim_names=names)
