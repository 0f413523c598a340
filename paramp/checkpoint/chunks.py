"""Chunks: the slices of a logical tensor that a rank holds, as checkpoints write and read them.

A slice is a rectangle of the whole tensor, with values of the same shape. A tensor-parallel shard is one slice. Under
ZeRO a rank has a range of elements of a flattened shard, with any start and end, which is a few slices::

    elements 5 to 9 of a 3 x 4 matrix
    . . . .
    . 5 6 7      the rest of a row, 1 x 3; then complete rows, if any
    8 9 . .      the beginning of a row, 1 x 2
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..base.dtensor import is_dtensor
from ..base.errors import CheckpointError
from ..base.torch_internals import take

Ints = tuple[int, ...]


@dataclass(frozen=True)
class TensorSlice:
    """A rectangle of a logical tensor."""

    offsets: Ints
    values: torch.Tensor
    """A view of this rank's storage, of the rectangle's shape."""

    @property
    def sizes(self) -> Ints:
        return tuple(self.values.shape)


@dataclass(frozen=True)
class Chunk:
    """The slices of one logical tensor that this rank holds."""

    name: str
    dtype: torch.dtype
    shape: Ints
    """The shape of the whole tensor."""
    slices: tuple[TensorSlice, ...]
    written: bool = True
    """Whether this rank writes the chunk, rather than another rank that holds a copy."""


def whole_chunk(name: str, values: torch.Tensor, *, written: bool = True) -> Chunk:
    """A chunk that covers a whole tensor: ``values``, of any shape and dtype."""
    return Chunk(name, values.dtype, tuple(values.shape), (TensorSlice((0,) * values.ndim, values),), written)


def ranges(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """The index of the rectangle at ``offsets``; indexing a tensor with it gives a view."""
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def flat_slices(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Ints, Ints]]:
    """Offsets and sizes of the rectangles that cover elements ``start`` to ``stop - 1`` of a row-major tensor.

    They are in the order of the elements, and the elements of each are contiguous.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the range of complete rows
    if first > last:  # the range is within one row
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
    elements: tuple[int, int] | None = None,
    written: bool = True,
) -> Chunk:
    """The chunk of a logical tensor with ``values`` in the layout of the parameter ``like``.

    Args:
        like: plain or a DTensor.
        values: of any dtype, in the shape of the local part of ``like``; with ``elements`` those from the first number
            to before the second in the flattened local part, 1-dim. The slices are views of it.
        shape: the shape of the whole tensor, if a tensor-parallel style stores one of its dims as two, such as fused
            query, key and value.

    Raises:
        CheckpointError: ``like`` is a partial sum.
    """
    whole = tuple(like.shape if shape is None else shape)
    if is_dtensor(like):
        local_shape_and_offset = take("torch.distributed.tensor._utils.compute_local_shape_and_global_offset")
        if any(placement.is_partial() for placement in like.placements):
            raise CheckpointError(f"{name}: its placements are {like.placements}, but a partial sum cannot be saved")
        part, base = local_shape_and_offset(like.shape, like.device_mesh, like.placements)
    else:
        part, base = tuple(like.shape), (0,) * like.ndim
    if not math.prod(whole):  # a tensor without elements is saved too
        return Chunk(name, values.dtype, whole, (TensorSlice((0,) * len(whole), values.reshape(whole)),), written)
    flat = values.reshape(-1)
    slices: list[TensorSlice] = []
    done = 0
    for offsets, sizes in flat_slices(part, *(elements or (0, math.prod(part)))):
        count = math.prod(sizes)
        place = tuple(a + b for a, b in zip(base, offsets, strict=True))
        slices += _folded(TensorSlice(place, flat[done : done + count].view(sizes)), like.shape, whole)
        done += count
    return Chunk(name, values.dtype, whole, tuple(slices), written)


def _folded(slice_: TensorSlice, shape: torch.Size, whole: Ints) -> list[TensorSlice]:
    """A slice of a tensor of ``shape`` as slices of the tensor of shape ``whole``, in which two dims are merged."""
    if shape == whole:
        return [slice_]
    dim = next(dim for dim in range(len(whole)) if shape[dim] != whole[dim])
    assert whole == (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]), (shape, whole)
    folded = []
    for index in range(slice_.sizes[dim]):  # only elements with the same index in the first of the dims are contiguous
        place = (slice_.offsets[dim] + index) * shape[dim + 1] + slice_.offsets[dim + 1]
        offsets = (*slice_.offsets[:dim], place, *slice_.offsets[dim + 2 :])
        folded.append(TensorSlice(offsets, slice_.values.select(dim, index)))
    return folded
