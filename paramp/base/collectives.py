"""Collectives over plain local tensors.

Callers pass local tensors, because a mix of plain tensors and DTensors on several meshes is normal under tensor and
pipeline parallelism, and torch's foreach functions, clipping and GradScaler reject such a mix or return wrong results.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from . import wait_for_gloo_at_exit  # noqa: F401  # processes with collectives end once gloo's threads rest
from .dtensor import as_real
from .torch_internals import expect

expect("torch._foreach_copy_", "torch.distributed.distributed_c10d", "torch.ops._c10d_functional")


@torch.no_grad()
def all_reduce_(tensor: torch.Tensor, group: dist.ProcessGroup | None = None, op: Any = dist.ReduceOp.SUM) -> None:
    """``dist.all_reduce`` (of the world, if ``group`` is None) without its checks, which cost as much as a small layer.

    In a group of one nothing is done.

    Args:
        tensor: plain, dense, any dtype; the same size and dtype on every rank.
        op: SUM or MAX.
    """
    group = group or dist.group.WORLD
    assert group is not None
    if group.size() > 1:  # a group of one may be gloo's, which would copy a GPU's tensor to the host
        group.allreduce([tensor], op).wait()


def largest_over_ranks(
    numbers: Sequence[int], device: torch.device, group: dist.ProcessGroup | None = None
) -> list[int]:
    """The largest of each of ``numbers`` over ``group``, or the world, by one all-reduce on ``device``."""
    largest = torch.tensor(numbers, dtype=torch.int64, device=device)
    all_reduce_(largest, group, dist.ReduceOp.MAX)
    return largest.tolist()


def is_distributed(group: dist.ProcessGroup | None = None) -> bool:
    """Whether ``group``, or the world, has several ranks; False without a world."""
    return dist.is_initialized() and dist.get_world_size(group) > 1


def sends_by_host(device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Whether a tensor of ``device`` goes to another rank from the host's memory: gloo sends none of CUDA reliably."""
    return device.type == "cuda" and dist.get_backend(group) == "gloo"


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


def sum_(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, dtype: torch.dtype | None = None) -> None:
    """Sum ``tensors`` over ``group`` in place: one all-reduce for each device and dtype.

    Args:
        tensors: plain, any dims and dtypes; the same on every rank.
        dtype: accumulation dtype, also of the parts of complex tensors, unless theirs is wider. None: the tensors' own.
    """
    if dist.get_world_size(group) == 1:
        return
    buckets: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        wide = tensor.dtype if dtype is None else dtype
        wide = torch.promote_types(wide, tensor.dtype) if tensor.is_complex() else wide
        buckets[tensor.device, wide].append(tensor)
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
"""``(own, whole, group=...)``: this rank's slice of the sum of ``whole``; 1-dim. ``own`` may be a view of it."""
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""``(whole, own, group=...)``: the slices ``own`` of every rank; 1-dim. ``own`` may be a view of this rank's."""


def start_reduce_scatter(
    whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None = None
) -> Callable[[], None]:
    """Sum ``whole`` over ``group`` into ``own``, this rank's slice of it; zero the rest. One reduce-scatter.

    Because of the zeros the caller can accumulate into ``whole`` and reduce it again.

    Args:
        whole: 1-dim, group size x slice size elements.
        own: 1-dim view of ``whole``.
        dtype: accumulation dtype, also of the parts of complex numbers, if theirs is not wider. None: as ``whole``.

    Returns:
        Waits for completion; do not touch ``whole`` before.
    """
    if whole.is_complex():
        whole, own = as_real(whole).view(-1), as_real(own).view(-1)
        dtype = None if dtype is None else torch.promote_types(dtype, whole.dtype)
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


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's ``value``, by rank; a collective of ``group``, or of the world. ``value`` must pickle."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def gather_different(value: Any, device: torch.device) -> list[Any]:
    """Every rank's ``value``, by rank; only this one if it has the same ``repr`` on every rank of the world.

    Gathering from thousands of ranks takes seconds, so digests are compared first, by one all-reduce on ``device``.
    """
    digest = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")
    highest, minus_lowest = largest_over_ranks([digest, -digest], device)
    return [value] if highest == -minus_lowest else gather_objects(value)


def first_difference_over_ranks(
    items: Sequence[Any], device: torch.device, end: Any = "nothing more"
) -> tuple[int, Any, Any] | None:
    """The first rank whose ``items`` are not rank 0's, and the first two that differ; None if there is none.

    A collective of the world, as :func:`gather_different`. ``end``: what stands past the end of a shorter list.
    """
    everyone = gather_different(items, device)
    for rank, theirs in enumerate(everyone):
        for first, other in zip_longest(everyone[0], theirs, fillvalue=end):
            if first != other:
                return rank, first, other
    return None


def gather_dtensors_over_gloo(key: str = "CUDA") -> torch.library.Library:
    """Let DTensors on GPUs be gathered over gloo, for ranks that share one, while the result is kept.

    The operator that DTensor calls reads the GPU's memory from the host under gloo, and the process dies (pytorch
    #152645). The plain all-gather copies through the host.
    """
    kernels: dict[str, Callable[..., Any]] = {
        "all_gather_into_tensor": _gather_dtensor,
        "all_gather_into_tensor_out": _gather_dtensor_into,
    }
    from .replaced_in_torch import replace_kernels  # which a scaler on its own does not load

    return replace_kernels(key, kernels, "_c10d_functional")


def _gather_dtensor(keys: Any, shard: torch.Tensor, group_size: int, group: Any) -> torch.Tensor:
    shard = shard.reshape(-1) if shard.ndim == 0 else shard
    out = shard.new_empty(shard.shape[0] * group_size, *shard.shape[1:])
    return _gather_dtensor_into(keys, shard, group_size, group, out=out)


def _gather_dtensor_into(
    _keys: Any, shard: torch.Tensor, _group_size: int, group: Any, *, out: torch.Tensor
) -> torch.Tensor:
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
    all_gather_single(out, shard.contiguous(), group=group)
    return out
