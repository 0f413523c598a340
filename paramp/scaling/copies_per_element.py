"""How many ranks hold each element of a parameter, and what a run says of its ranks.

A norm or a count over the world divides each element by its number of copies. A DTensor's placements tell how many
there are on its mesh; what holds on the other ranks, and for plain tensors, depends on the roles of the axes
(:data:`ROLES`), which a run's context knows (:class:`World`). Loops without a context need none if every parameter is a
DTensor on a mesh of the whole world.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from ..base.collectives import is_distributed
from ..base.dtensor import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Role: TypeAlias = Literal["stage", "replicate", "shard", "context", "expert", "tensor"]

ROLES: dict[str, Role] = {
    "pp": "stage",
    **dict.fromkeys(("dp", "ddp", "dp_replicate"), "replicate"),
    **dict.fromkeys(("dp_shard", "fsdp", "efsdp"), "shard"),
    "cp": "context",
    "ep": "expert",
    "tp": "tensor",
}
"""The role of an axis by its usual name."""


@dataclass(eq=False)
class TiedParameter:
    """A parameter that several pipeline stages hold a copy of, such as an embedding tied to the output layer.

    Its gradient is the sum over the copies. :attr:`summed` records the gradient that already holds this sum.
    """

    name: str
    """Its name in this rank's stage."""
    parameter: nn.Parameter
    """This rank's copy."""
    group: dist.ProcessGroup
    """The ranks that hold a copy and have this rank's coordinates on the other axes."""
    owner: bool
    """Whether norms and counts include this rank's copy."""
    summed: tuple[torch.Tensor, int] | None = None
    """The gradient that already holds the sum, and its version at that time (an in-place change increments it)."""


class World(Protocol):
    """What the scaler, the norm and reports have to know of a run: a :class:`paramp.ParallelContext`."""

    rank: int
    world_size: int
    device: torch.device
    ties: list[TiedParameter]
    pp: Any
    """The pipeline axis, with this rank's ``rank`` on it."""
    mesh: DeviceMesh

    @property
    def roles(self) -> Mapping[str, Role]:
        """The role of each axis of the mesh, by its name there, in the mesh's order."""

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate on each axis of the mesh, by the axis's name."""

    def axes_of(self, *roles: Role) -> tuple[str, ...]:
        """The names of the axes that have one of ``roles``, in the mesh's order."""


OPEN: list[Any] = []
"""The contexts that are open in this process, the latest last; they add and remove themselves."""


def current_world() -> World | None:
    """The latest context that is open; None if there is none."""
    return OPEN[-1] if OPEN else None


def num_replicas(tensor: torch.Tensor, context: World | None) -> int:
    """How many ranks of the world hold each element of ``tensor``.

    On the ranks of a DTensor's mesh, its placements determine the number, whatever the axes are called. Other ranks
    hold copies on other meshes, except those along axes where each rank has its own parameters. A plain tensor has a
    copy on each rank along the other axes.

    Raises:
        ValueError: there is no context, and the tensor is plain in a world of several ranks, or a DTensor on a part of
            the world, so that it is not known what the other ranks hold.
    """
    own = axes_of_own_parameters(tensor, context)
    if is_dtensor(tensor):
        mesh = tensor.device_mesh
        copies = math.prod(mesh.size(axis) for axis, kind in enumerate(tensor.placements) if kind.is_replicate())
        return copies * (_num_peers(mesh, _root(mesh) if context is None else context.mesh, own) // mesh.size())
    if context is not None:
        return context.world_size // math.prod(context.mesh.size([*context.roles].index(name)) for name in own)
    if is_distributed():
        raise ValueError(
            f"a plain parameter in a world of {dist.get_world_size()} ranks: it is not known whether the other ranks "
            "hold copies or other parameters; call paramp.ParallelContext.from_mesh(mesh) or "
            "paramp.launch_from_torch(config) first, or pass context=..."
        )
    return 1


def axes_of_own_parameters(tensor: torch.Tensor, context: World | None) -> tuple[str, ...]:
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
