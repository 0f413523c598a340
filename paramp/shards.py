"""What one rank holds of a logical tensor: its local part, how many other ranks hold the same, and what is missing.

Everything above works on plain local tensors, because a mix of plain tensors and DTensors on several meshes is the
normal case under tensor and pipeline parallelism, and torch's own foreach functions, clipping and GradScaler refuse
it or answer wrongly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .errors import ConfigError
from .mesh import PIPELINE_AXIS, ParallelContext, TiedParameter

__all__ = [
    "align_gradients",
    "local",
    "mark_tied_sums",
    "num_replicas",
    "own_part",
    "sum_",
    "sum_tied_gradients",
    "wrap",
]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of ``tensor`` that this rank holds: a DTensor's local tensor (shared storage), a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


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
            pieces = part.chunk(size, placement.dim)  # fewer than asked for, where there is not enough
            part = pieces[rank] if rank < len(pieces) else part.narrow(placement.dim, 0, 0)
        elif not isinstance(placement, Replicate):
            raise ConfigError(
                f"plan: {placement} says no part of a tensor that is yet to be filled; build it on the CPU"
            )
    return part


def num_replicas(tensor: torch.Tensor, context: ParallelContext | None) -> int:
    """How many ranks of the world hold each element of ``tensor``.

    A DTensor says itself which axes of its mesh replicate it; over the context's other axes it is replicated too,
    except over ``pp``, where each rank has parameters of its own. A plain tensor has no mesh of its own.

    Raises:
        ValueError: a plain tensor in a world of several ranks, or a DTensor on a part of the world, and no context
            that tells what the other ranks hold.
    """
    axes: dict[str, int] = {}
    replicas = 1
    if context is not None:
        axes = dict(zip(context.mesh.mesh_dim_names or (), context.mesh.mesh.shape, strict=True))
    if isinstance(tensor, DTensor):
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
            replicas *= size if isinstance(placement, Replicate) else 1
        for name in mesh.mesh_dim_names or ():
            axes.pop(name, None)
    elif context is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"a plain parameter in a world of {dist.get_world_size()} ranks: nothing tells whether the other ranks "
            "hold copies or other parameters; call paramp.launch_from_torch(config) first, or pass context=..."
        )
    for name, size in axes.items():
        replicas *= 1 if name == PIPELINE_AXIS else size
    return replicas


def align_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Bring each DTensor gradient to its parameter's placements, in ``.grad``.

    DTensor leaves gradients where the backward put them: vocabulary-parallel embeddings get replicated ones, norms
    under sequence parallelism get partial sums. Partial ones are summed together, one collective for each mesh axis
    and dtype; a replicated gradient of a sharded parameter is cut without any.

    Returns:
        The local gradients that were cut, whole: an overflow in a part that this rank drops is an overflow too.
    """
    partial: dict[tuple[DeviceMesh, int], list[torch.Tensor]] = defaultdict(list)
    misplaced: list[tuple[torch.Tensor, DTensor, tuple[Placement, ...]]] = []
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
            continue
        if gradient.placements == parameter.placements:
            continue
        placements = list(gradient.placements)
        for axis, placement in enumerate(placements):
            if isinstance(placement, Partial):
                if placement.reduce_op not in ("sum", "avg"):
                    break  # left to DTensor's own redistribution below
                piece = local(gradient)
                if placement.reduce_op == "avg":
                    piece.div_(gradient.device_mesh.size(axis))
                partial[gradient.device_mesh, axis].append(piece)
                placements[axis] = Replicate()
        misplaced.append((parameter, gradient, tuple(placements)))
    for (mesh, axis), pieces in partial.items():
        sum_(pieces, mesh.get_group(axis))
    whole = []
    for parameter, gradient, reduced in misplaced:
        if reduced != cast(DTensor, parameter).placements:
            whole.append(local(gradient))
        summed = wrap(local(gradient), gradient, placements=reduced)
        parameter.grad = summed.redistribute(placements=cast(DTensor, parameter).placements)
    return whole


def sum_tied_gradients(context: ParallelContext, parameters: Iterable[torch.Tensor]) -> None:
    """Replace the gradient of each tied parameter among ``parameters`` by the sum over its copies.

    A gradient that already holds the sum is left alone. A copy without a gradient counts as zero.
    """
    wanted = {id(parameter) for parameter in parameters}
    ties = [tie for tie in context.ties if id(tie.parameter) in wanted and not _is_summed(tie)]
    by_group: dict[dist.ProcessGroup, list[torch.Tensor]] = defaultdict(list)
    for tie in ties:
        if tie.parameter.grad is None:
            tie.parameter.grad = torch.zeros_like(tie.parameter)
        by_group[tie.group].append(local(tie.parameter.grad))
    for group, gradients in by_group.items():
        sum_(gradients, group)
    mark_tied_sums(ties)


def mark_tied_sums(ties: Iterable[TiedParameter]) -> None:
    """Note that the gradients of ``ties`` hold their sums now; call again after scaling such a gradient in place."""
    for tie in ties:
        gradient = tie.parameter.grad
        tie.summed = None if gradient is None else (gradient, gradient._version)


def _is_summed(tie: TiedParameter) -> bool:
    gradient = tie.parameter.grad
    return tie.summed is not None and tie.summed[0] is gradient and tie.summed[1] == gradient._version


def sum_(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replace plain ``tensors`` by their sums over ``group``, in place: one all-reduce for each device and dtype."""
    if dist.get_world_size(group) == 1:
        return
    buckets: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        buckets[tensor.device, tensor.dtype].append(tensor)
    for bucket in buckets.values():
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.all_reduce(bucket[0], group=group)
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, group=group)
        pieces = flat.split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(bucket, [piece.view_as(tensor) for piece, tensor in zip(pieces, bucket, strict=True)])
