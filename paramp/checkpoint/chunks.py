"""What a rank holds of a logical tensor, as boxes of it: the form that checkpoints take and give.

A box is a rectangle of the whole tensor, and its values a tensor of the same shape. A tensor-parallel shard is one box.
Under ZeRO a rank has a stretch of a flattened shard, which begins and ends anywhere: a few boxes::

    rows 0 .. 3 of a matrix, elements 5 to 13 of 4 x 4
    . . . .
    . 5 6 7      the rest of a row      1 x 3
    8 9 . .      whole rows, if any; and the beginning of one
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..base.errors import CheckpointError

__all__ = ["Chunk", "TensorSlice", "chunk_of", "flat_slices"]

Ints = tuple[int, ...]


@dataclass(frozen=True)
class TensorSlice:
    """A rectangle of a logical tensor."""

    offsets: Ints
    values: torch.Tensor
    """A view of what this rank holds, of the rectangle's shape."""

    @property
    def sizes(self) -> Ints:
        return tuple(self.values.shape)


@dataclass(frozen=True)
class Chunk:
    """What this rank holds of one logical tensor."""

    name: str
    dtype: torch.dtype
    shape: Ints
    """Of the whole tensor."""
    slices: tuple[TensorSlice, ...]
    written: bool = True
    """Whether this rank is the one, of those that hold the same, that writes it."""


def flat_slices(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Ints, Ints]]:
    """Offsets and sizes of the rectangles that elements ``start`` to ``stop - 1`` of a row-major tensor make up.

    They come in the order of the elements, and each one's elements lie one after the other.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # of whole rows
    if first > last:  # all of it within one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < stop:
        yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[tuple[Ints, Ints]]:
    for offsets, sizes in flat_slices(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)


def chunk_of(
    name: str,
    like: torch.Tensor,
    values: torch.Tensor,
    *,
    shape: Sequence[int] | None = None,
    own: tuple[int, int] | None = None,
    written: bool = True,
) -> Chunk:
    """The piece of a logical tensor that ``values`` is, which is laid out as the parameter ``like``.

    Args:
        like: plain or a DTensor.
        values: as the local part of ``like``; or, with ``own``, the elements from the first to before the second of the
            flattened local part.
        shape: that of the whole tensor, where a tensor-parallel style keeps it in another one (with a dim split in
            two).

    Raises:
        CheckpointError: ``like`` is a partial sum.
    """
    whole = tuple(like.shape if shape is None else shape)
    if isinstance(like, DTensor):
        if any(placement.is_partial() for placement in like.placements):
            raise CheckpointError(f"{name}: its placements are {like.placements}, a sum that nobody has made yet")
        part, base = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    else:
        part, base = tuple(like.shape), (0,) * like.ndim
    start, stop = own or (0, math.prod(part))
    flat = values.reshape(-1)
    slices: list[TensorSlice] = []
    done = 0
    for offsets, sizes in flat_slices(part, start, stop):
        count = math.prod(sizes)
        place = tuple(a + b for a, b in zip(base, offsets, strict=True))
        slices += _folded(TensorSlice(place, flat[done : done + count].view(sizes)), tuple(like.shape), whole)
        done += count
    return Chunk(name, values.dtype, whole, tuple(slices), written)


def _folded(slice_: TensorSlice, shape: Ints, whole: Ints) -> list[TensorSlice]:
    """``box`` of a tensor of ``shape`` as boxes of the one of the shape ``whole``, in which two dims are one."""
    if shape == whole:
        return [slice_]
    dim = next(dim for dim in range(len(whole)) if shape[dim] != whole[dim])
    assert whole == (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]), (shape, whole)
    folded = []
    for index in range(slice_.sizes[dim]):
        place = (slice_.offsets[dim] + index) * shape[dim + 1] + slice_.offsets[dim + 1]
        folded.append(
            TensorSlice((*slice_.offsets[:dim], place, *slice_.offsets[dim + 2 :]), slice_.values.select(dim, index))
        )
    return folded
