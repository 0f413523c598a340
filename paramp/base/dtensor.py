"""Local tensors of DTensors, and DTensors of local tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .errors import ConfigError

__all__ = ["local", "own_part", "version", "wrap"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of ``tensor`` that this rank holds: a DTensor's local tensor (shared storage), a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def version(tensor: torch.Tensor) -> int:
    """Grows with every in-place change of ``tensor``, or of its local part."""
    # autograd counts what it adds to a DTensor in the DTensor; what is done to the local part is counted there
    return tensor._version + (tensor._local_tensor._version if isinstance(tensor, DTensor) else 0)


def wrap(
    part: torch.Tensor,
    like: DTensor,
    *,
    placements: Sequence[Placement] | None = None,
    shape: torch.Size | None = None,
) -> DTensor:
    """The DTensor whose local part is ``part``, on the mesh of ``like``; its placements and shape where not given."""
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
