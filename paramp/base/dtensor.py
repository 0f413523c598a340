"""Local tensors of DTensors, and DTensors of local tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from .errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Whether ``value`` is a DTensor. Does not import ``torch.distributed.tensor``: without it there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of ``tensor`` that this rank holds: a DTensor's local tensor (shared storage), a plain tensor itself."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def full_tensor(value: Any) -> Any:
    """A DTensor gathered whole, a collective of its mesh; any other value as it is."""
    return value.full_tensor() if is_dtensor(value) else value


def version(tensor: torch.Tensor) -> int:
    """Grows with every in-place change of ``tensor``, or of its local part."""
    # autograd counts what it adds to a DTensor in the DTensor; what is done to the local part is counted there
    return tensor._version + (tensor._local_tensor._version if is_dtensor(tensor) else 0)


def wrap(
    part: torch.Tensor,
    like: DTensor,
    *,
    placements: Sequence[Placement] | None = None,
    shape: torch.Size | None = None,
) -> DTensor:
    """The DTensor whose local part is ``part`` (any dims and dtype; not copied), on the mesh of ``like``.

    ``placements`` and ``shape`` are the DTensor's. None: those of ``like``.
    """
    from torch.distributed.tensor import DTensor

    logical = like if shape is None else torch.empty(shape, device="meta")
    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements if placements is None else placements,
        run_check=False,
        shape=logical.shape,
        stride=logical.stride(),
    )


def own_part(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of the plain ``whole``, a view, as ``like`` shards a tensor of its shape.

    Args:
        whole: any dims and dtype; the logical shape of ``like``.

    Raises:
        ConfigError: ``like`` has a placement that is no part of a whole, such as a partial sum.
    """
    from torch.distributed.tensor import Replicate, Shard

    part = whole
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            size, rank = like.device_mesh.size(axis), like.device_mesh.get_local_rank(axis)
            chunks = part.chunk(size, placement.dim)  # fewer chunks than ranks where the dim is short
            part = chunks[rank] if rank < len(chunks) else part.narrow(placement.dim, 0, 0)
        elif not isinstance(placement, Replicate):
            raise ConfigError(
                f"plan: {placement} neither shards nor replicates, so a weight that is filled later cannot have it; "
                "build the model on the CPU"
            )
    return part


def forget_sharding_decisions() -> None:
    """Empty DTensor's caches, before the process groups of a mesh are destroyed.

    The caches compare meshes by ranks and names alone, so that an entry made for this mesh would be taken for an equal
    mesh of a later launch, with process groups that are gone.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _collective_utils, _redistribute, _sharding_prop, debug

    def clear(owner: Any, name: str, method: str = "__call__") -> None:
        getattr(getattr(owner, name, None), method, lambda: None)()  # not every version of torch has each

    clear(debug, "_clear_sharding_prop_cache")
    # These hold meshes, and with each mesh its groups and their threads, which poll.
    clear(_redistribute, "clear_redistribute_planner_cache")
    clear(_redistribute, "_gen_transform_infos", "cache_clear")
    clear(_redistribute, "_gen_transform_infos_non_cached", "cache_clear")
    clear(getattr(_collective_utils, "MeshTopoInfo", None), "build_from_mesh", "cache_clear")
    clear(getattr(_sharding_prop, "ShardingPropagator", None), "_propagate_tensor_meta_cached", "cache_clear")
