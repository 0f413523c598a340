"""What one rank holds of a logical tensor: its local part, how many other ranks hold the same, and what is missing.

Everything above works on plain local tensors, because a mix of plain tensors and DTensors on several meshes is the
normal case under tensor and pipeline parallelism, and torch's own foreach functions, clipping and GradScaler refuse
it or answer wrongly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .errors import ConfigError
from .mesh import PIPELINE_AXIS, ParallelContext, TiedParameter

__all__ = [
    "align_gradients",
    "gather_parts",
    "local",
    "mark_tied_sums",
    "num_replicas",
    "own_part",
    "replicated_axes",
    "start_reducing_parts",
    "sum_",
    "sum_tied_gradients",
    "version",
    "wrap",
]


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


def replicated_axes(tensor: torch.Tensor, context: ParallelContext) -> list[str]:
    """The axes of the context's mesh along which ranks hold the same part of ``tensor``.

    Those along which a DTensor is not sharded; but for ``pp``, where each rank has parameters of its own.
    """
    sharded = {PIPELINE_AXIS}
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        sharded.update(
            name for name, placement in zip(names, tensor.placements, strict=True) if not placement.is_replicate()
        )
    return [name for name in context.mesh.mesh_dim_names or () if name not in sharded]


def align_gradients(parameters: Iterable[torch.Tensor], reduce_dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Bring each DTensor gradient to its parameter's placements, in ``.grad``.

    DTensor leaves gradients where the backward put them: vocabulary-parallel embeddings get replicated ones, norms
    under sequence parallelism get partial sums. Partial ones are summed together, one collective for each mesh axis
    and dtype; a replicated gradient of a sharded parameter is cut without any.

    Args:
        reduce_dtype: what sums are made in. None: the gradients' own dtype.

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
        sum_(pieces, mesh.get_group(axis), reduce_dtype)
    whole = []
    for parameter, gradient, reduced in misplaced:
        if reduced != cast(DTensor, parameter).placements:
            whole.append(local(gradient))
        summed = wrap(local(gradient), gradient, placements=reduced)
        parameter.grad = summed.redistribute(placements=cast(DTensor, parameter).placements)
    return whole


def sum_tied_gradients(
    context: ParallelContext, parameters: Iterable[torch.Tensor], reduce_dtype: torch.dtype | None = None
) -> None:
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
        sum_(gradients, group, reduce_dtype)
    mark_tied_sums(ties)


def mark_tied_sums(ties: Iterable[TiedParameter]) -> None:
    """Note that the gradients of ``ties`` hold their sums now; call again after scaling such a gradient in place."""
    for tie in ties:
        gradient = tie.parameter.grad
        tie.summed = None if gradient is None else (gradient, version(gradient))


def _is_summed(tie: TiedParameter) -> bool:
    gradient = tie.parameter.grad
    return tie.summed is not None and tie.summed[0] is gradient and tie.summed[1] == version(gradient)


def sum_(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, dtype: torch.dtype | None = None) -> None:
    """Replace plain ``tensors`` by their sums over ``group``, in place: one all-reduce for each device and dtype.

    Args:
        dtype: what the sums are made in. None: the tensors' own.
    """
    if dist.get_world_size(group) == 1:
        return
    buckets: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        buckets[tensor.device, tensor.dtype if dtype is None else dtype].append(tensor)
    for (_, wide), bucket in buckets.items():
        if len(bucket) == 1 and bucket[0].is_contiguous() and bucket[0].dtype is wide:
            dist.all_reduce(bucket[0], group=group)
            continue
        flat = torch.cat([tensor.reshape(-1).to(wide) for tensor in bucket])
        dist.all_reduce(flat, group=group)
        pieces = flat.split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(bucket, [piece.view_as(tensor) for piece, tensor in zip(pieces, bucket, strict=True)])


# torch 2.13 has new names for these two, and warns of the old ones; 2.11 knows the old ones only.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def start_reducing_parts(
    whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None = None
) -> Callable[[], None]:
    """Leave this rank's part ``own`` of ``whole``, a view of it, with the sum over ``group``, and the rest of ``whole``
    with zeros: so that what is added to it later can be summed in the same way. One reduce-scatter.

    Args:
        dtype: what the sums are made in. None: the tensors' own.

    Returns:
        A function that waits for it. Until then ``whole`` is not to be touched.
    """
    cast_ = dtype not in (None, whole.dtype)
    part = torch.empty_like(own, dtype=dtype) if cast_ else own  # in place, which both gloo and NCCL can
    work = _reduce_scatter(part, whole.to(dtype) if cast_ else whole, group=group, async_op=True)

    def finish() -> None:
        work.wait()
        if cast_:
            own.copy_(part)
        start = own.storage_offset() - whole.storage_offset()
        whole[:start].zero_()
        whole[start + own.numel() :].zero_()

    return finish


def gather_parts(whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill ``whole`` with the part ``own`` of every rank of ``group`` (None: the world); one all-gather.

    ``own`` may be a view of its place in ``whole``.
    """
    _all_gather(whole, own, group=group)
