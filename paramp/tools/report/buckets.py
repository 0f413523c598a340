"""Long series in few points: buckets of consecutive steps, each with its lowest, mean and highest value."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST = 1000
"""The most buckets of a series."""
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Buckets:
    """A series in buckets, which all have :attr:`width` steps. No value is left out: the extremes show each spike."""

    width: int
    first: Array
    """The first step of each bucket that has values, 1-dim, as all arrays."""
    last: Array
    low: Array
    mean: Array
    high: Array
    """Of the finite values; NaN where there are none."""
    missing: Array
    """How many values of the bucket are not finite."""


def width_of(first: float, last: float, most: int = MOST) -> int:
    """The number of steps in a bucket, so that the steps from ``first`` to ``last`` make at most ``most`` of them."""
    return max(1, int(-(-(last - first + 1) // most)))


def in_buckets(steps: Array, values: Array, start: float, width: int) -> Buckets:
    """``values`` at ``steps``, 1-dim each, in any order, in buckets of ``width`` steps from the step ``start`` on."""
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    index = (steps - start) // width
    begins = np.flatnonzero(np.diff(index, prepend=-1.0))
    if not len(begins):
        nothing = np.empty(0)
        return Buckets(width, nothing, nothing, nothing, nothing, nothing, nothing)
    finite = np.isfinite(values)
    count = np.add.reduceat(finite.astype(np.float64), begins)
    total = np.add.reduceat(np.where(finite, values, 0.0), begins)
    low = np.minimum.reduceat(np.where(finite, values, np.inf), begins)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), begins)
    empty = count == 0
    mean = np.where(empty, np.nan, total / np.maximum(count, 1))
    missing = np.add.reduceat((~finite).astype(np.float64), begins)
    first, last = steps[begins], steps[[*(begins[1:] - 1), -1]]
    return Buckets(width, first, last, np.where(empty, np.nan, low), mean, np.where(empty, np.nan, high), missing)


def changes(steps: Array, values: Array) -> tuple[Array, Array]:
    """The points of a series that is constant for long: those before and after a change, and its ends."""
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    differs = np.diff(values) != 0
    keep = np.concatenate([[True], differs]) | np.concatenate([differs, [True]]) if len(steps) else np.empty(0, bool)
    return steps[keep], values[keep]
