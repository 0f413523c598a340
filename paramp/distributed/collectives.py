"""Collectives over plain local tensors.

Callers pass local tensors, because a mix of plain tensors and DTensors on several meshes is normal under tensor and
pipeline parallelism, and torch's foreach functions, clipping and GradScaler reject such a mix or return wrong results.
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.library import Library

from ..base import sizes, trees
from ..base.scratch import Scratch
from ..base.torch_internals import expect

expect("torch._foreach_copy_", "torch.ops._c10d_functional", "torch.distributed.distributed_c10d")

_OF_TWO: dict[Any, Callable[..., torch.Tensor]] = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}
SWAP_TAG = 7
"""Of the messages by which two ranks sum."""


class _Received(threading.local):
    """Scratch memory for what arrives, one for each thread."""

    def __init__(self) -> None:
        self.scratch = Scratch()


_received = _Received()


@torch.no_grad()
def all_reduce_(tensor: torch.Tensor, group: dist.ProcessGroup | None = None, op: Any = dist.ReduceOp.SUM) -> None:
    """``dist.all_reduce`` (of the world, if ``group`` is None) without its checks, which cost as much as a small layer.

    In a group of one nothing is done. Two ranks send each other their tensors where that is faster than gloo's ring;
    the sums have the same bits, and a maximum is NaN where one of the two is.

    Args:
        tensor: plain, dense, any dtype; the same size and dtype on every rank.
        op: SUM or MAX.
    """
    group = group or dist.group.WORLD
    assert group is not None
    if group.size() == 1:  # a group of one may be gloo's, which would copy a GPU's tensor to the host
        return
    if not _is_faster_swapped(tensor, group):
        group.allreduce([tensor], op).wait()
        return
    combine, rank = _OF_TWO[op], group.rank()
    for own in tensor.view(-1).split(sizes.SWAP_PIECE):
        other = _received.scratch.like(str(own.dtype), own, own.dtype)
        _swap(own, other, group)
        combine(*((own, other) if rank == 0 else (other, own)), out=own)  # NaNs have the bits of the first


def _is_faster_swapped(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether the sum of ``tensor`` over ``group`` is that of two ranks over gloo, small, or in fp16.

    gloo's ring takes 0.45 ms on one machine for a few values, two messages 0.3 ms; for 1 MB of fp16, which gloo adds
    up without vector instructions, 2.0 and 1.0 ms. Larger sums in other dtypes are faster in the ring.
    """
    if group.size() != 2 or tensor.device.type != "cpu" or dist.get_backend(group) != "gloo":
        return False
    return tensor.nbytes <= sizes.SWAPPED or tensor.dtype is torch.float16


def _swap(own: torch.Tensor, other: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Send ``own`` to the other rank of ``group``, and receive its ``own`` as ``other``; both dense."""
    peer = 1 - group.rank()
    received = group.recv([other], peer, SWAP_TAG)
    sent = group.send([own], peer, SWAP_TAG)
    received.wait()
    sent.wait()


@torch.no_grad()
def broadcast_(tensor: torch.Tensor, group: dist.ProcessGroup, src: int = 0) -> None:
    """Broadcast ``tensor`` in place, bit for bit, from the rank ``src`` of ``group``; one broadcast.

    gloo ignores strides and sends ``numel`` elements from the first one's address, so a contiguous copy is sent.
    Neither gloo nor NCCL supports every dtype, so bytes are sent.

    Args:
        tensor: plain, any dims and dtype, the same on every rank; any strides but those of ``expand()``, which makes
            a tensor that cannot be written to.
    """
    if dist.get_world_size(group) == 1 or tensor.numel() == 0:
        return
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    dist.broadcast(dense.view(-1).view(torch.uint8), group=group, group_src=src)
    if dense.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(dense)


def broadcast_tree(tree: Any, device: torch.device, group: dist.ProcessGroup, src: int = 0) -> Any:
    """The ``tree`` of tensors and other values of the rank ``src`` of ``group``, on every rank of it.

    Other values must pickle. Tensors are plain; on the other ranks they are on ``device``.
    """
    shapes = [trees.map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), tree)]
    dist.broadcast_object_list(shapes, group=group, group_src=src)
    if dist.get_rank(group) != src:
        tree = trees.map_tensors(lambda meta: torch.empty_like(meta, device=device), shapes[0])
    for tensor in trees.tensors(tree):
        broadcast_(tensor, group, src)
    return tree


def sum_(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, dtype: torch.dtype | None = None) -> None:
    """Sum ``tensors`` over ``group`` in place: one all-reduce for each device and dtype.

    Args:
        tensors: plain, any dims and dtypes; the same on every rank.
        dtype: accumulation dtype. None: the tensors' own.
    """
    if dist.get_world_size(group) == 1:
        return
    buckets: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        buckets[tensor.device, tensor.dtype if dtype is None else dtype].append(tensor)
    for (_, wide), bucket in buckets.items():
        if len(bucket) == 1 and bucket[0].is_contiguous() and bucket[0].dtype is wide:
            all_reduce_(bucket[0], group)
            continue
        flat = torch.cat([tensor.reshape(-1).to(wide) for tensor in bucket])
        all_reduce_(flat, group)
        chunks = flat.split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(bucket, [chunk.view_as(tensor) for chunk, tensor in zip(chunks, bucket, strict=True)])


# torch 2.13 has new names for these two and deprecates the old ones; 2.11 has only the old ones.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def start_reduce_scatter(
    whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None = None
) -> Callable[[], None]:
    """Sum ``whole`` over ``group`` into ``own``, this rank's slice of it; zero the rest. One reduce-scatter.

    Because of the zeros the caller can accumulate into ``whole`` and reduce it again.

    Args:
        whole: 1-dim, group size x slice size elements.
        own: 1-dim view of ``whole``.
        dtype: accumulation dtype. None: that of ``whole``.

    Returns:
        Waits for completion; do not touch ``whole`` before.
    """
    cast_ = dtype not in (None, whole.dtype)
    part = torch.empty_like(own, dtype=dtype) if cast_ else own  # in place, which gloo and NCCL support
    work = reduce_scatter_single(part, whole.to(dtype) if cast_ else whole, group=group, async_op=True)

    def finish() -> None:
        work.wait()
        if cast_:
            own.copy_(part)
        start = own.storage_offset() - whole.storage_offset()
        whole[:start].zero_()
        whole[start + own.numel() :].zero_()

    return finish


def all_gather_shards(whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill ``whole`` with the slices ``own`` of every rank of ``group`` (None: the world); one all-gather.

    Args:
        whole: 1-dim, group size x slice size elements.
        own: 1-dim; may be a view of this rank's slice of ``whole``.
    """
    all_gather_single(whole, own, group=group)


def reduce_scatter_shards(own: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``own`` with this rank's slice of the sum of ``whole`` over ``group``; one reduce-scatter.

    Args:
        own: 1-dim.
        whole: 1-dim, group size x slice size elements.
    """
    reduce_scatter_single(own, whole, group=group)


_gathers: Library | None = None


def gather_dtensors_over_gloo(dispatch_key: str = "CUDA") -> None:
    """Let DTensors on GPUs be gathered over gloo, for ranks that share one; once in a process.

    The operator that DTensor calls reads the GPU's memory from the host under gloo, and the process dies
    (pytorch #152645). The plain all-gather copies through the host.
    """
    global _gathers
    if _gathers is None:
        _gathers = Library("_c10d_functional", "IMPL")
        _gathers.impl("all_gather_into_tensor", _gather, dispatch_key)
        _gathers.impl("all_gather_into_tensor_out", _gather_out, dispatch_key)


def _gather(own: torch.Tensor, group_size: int, group: Any) -> torch.Tensor:
    own = own.reshape(-1) if own.ndim == 0 else own
    return _gather_out(own, group_size, group, out=own.new_empty(own.shape[0] * group_size, *own.shape[1:]))


def _gather_out(own: torch.Tensor, _group_size: int, group: Any, *, out: torch.Tensor) -> torch.Tensor:
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
    all_gather_single(out, own.contiguous(), group=group)
    return out


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's ``value``, by rank; a collective of ``group``, or of the world. ``value`` must pickle."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def equal_everywhere(value: Any, device: torch.device) -> bool:
    """Whether ``value`` has the same ``repr`` on every rank of the world, by its digest; one all-reduce.

    Unlike a gathering of the values, it costs the same in a world of thousands. ``device``: of this rank.
    """
    digest = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")
    bounds = torch.tensor([digest, -digest], device=device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    highest, minus_lowest = bounds.tolist()
    return bool(highest == -minus_lowest)
