"""Relative distances between a tensor and what the tensor ranks have of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch


def relative(actual: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """``|| actual - expected || / max(|| expected ||, least)``, L2 norms of tensors of one shape.

    Elements where both have the end of the dtype's range, as masks do, are ignored. Infinite where one tensor has
    something that is not finite and the other has not.
    """
    limit = torch.finfo(expected.dtype).max
    masked = (actual == expected) & (expected.abs() >= limit)
    actual, expected = (tensor.double().masked_fill(masked, 0.0) for tensor in (actual, expected))
    difference, norm = float((actual - expected).norm()), max(float(expected.norm()), least)
    if difference == 0.0:
        return 0.0
    return difference / norm if norm and math.isfinite(difference) else math.inf


def distance_of_parts(parts: Sequence[torch.Tensor], whole: torch.Tensor, packed: Iterable[int]) -> float | None:
    """The relative distance of the tensor ranks' ``parts``, copies or shards, from ``whole``; None if they do not fit.

    Args:
        packed: as of :func:`joined`.
    """
    if all(part.shape == whole.shape for part in parts):
        return max(relative(part, whole) for part in parts)
    return min((relative(tensor, whole) for tensor in joined(parts, whole, packed)), default=None)


def joined(parts: Sequence[torch.Tensor], whole: torch.Tensor, packed: Iterable[int]) -> Iterator[torch.Tensor]:
    """The shards of ``whole`` joined in each way in which it may have been sharded.

    Args:
        packed: numbers of blocks that may lie side by side in the sharded dim, each of which is sharded: query, key and
            value in features; samples in a dim of samples x heads.
    """
    if any(part.ndim != whole.ndim for part in parts):
        return
    dims = [dim for dim in range(whole.ndim) if any(part.shape[dim] != whole.shape[dim] for part in parts)]
    if len(dims) != 1 or sum(part.shape[dims[0]] for part in parts) != whole.shape[dims[0]]:
        return
    (dim,) = dims
    yield torch.cat(list(parts), dim)
    sizes = {part.shape[dim] for part in parts}
    for count in packed:
        if len(sizes) == 1 and not min(sizes) % count:
            yield torch.cat([part.unflatten(dim, (count, -1)) for part in parts], dim + 1).flatten(dim, dim + 1)


def distance_of_numbers(actual: float, expected: float) -> float:
    """``| actual - expected | / | expected |``; infinite where one of them is not finite."""
    if not math.isfinite(actual) or not math.isfinite(expected):
        return math.inf
    return abs(actual - expected) / abs(expected) if expected else math.inf if actual else 0.0


def has_nan_or_inf(tensor: torch.Tensor) -> bool:
    """Whether an element is NaN or plus infinity; minus infinity alone may be a mask."""
    return bool((tensor.isnan() | tensor.isposinf()).any())


def rms(tensor: torch.Tensor) -> float:
    """The root mean square of a tensor of any shape; 0 if it is empty."""
    return float(tensor.norm(dtype=torch.float64)) / math.sqrt(max(tensor.numel(), 1))
