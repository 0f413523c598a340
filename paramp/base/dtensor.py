"""Local tensors of DTensors, and DTensors of local tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from .errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

__all__ = ["full_tensor", "is_dtensor", "local", "own_part", "version", "wrap"]


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
    """The DTensor whose local part is ``part``, on the mesh of ``like``; its placements and shape where not given."""
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
    """This rank's part of the plain ``whole``, a view, as ``like`` shares out a tensor of its shape.

    Raises:
        ConfigError: ``like`` has a placement that is no part of a whole, such as a partial sum.
    """
    from torch.distributed.tensor import Replicate, Shard

    part = whole
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            size, rank = like.device_mesh.size(axis), like.device_mesh.get_local_rank(axis)
            chunks = part.chunk(size, placement.dim)  # fewer than asked for, where there is not enough
            part = chunks[rank] if rank < len(chunks) else part.narrow(placement.dim, 0, 0)
        elif not isinstance(placement, Replicate):
            raise ConfigError(
                f"plan: {placement} says no part of a tensor that is yet to be filled; build it on the CPU"
            )
    return part
