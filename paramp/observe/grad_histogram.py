"""A histogram of gradients by binary exponent: how many underflow, and how far the largest is from overflowing.

An element g is counted by its exponent e with 2**e <= |g| < 2**(e + 1). Gradients carry the loss scale, so another
scale shifts the whole histogram (:meth:`GradientHistogram.at_scale`). Elements that have underflowed to zero in half
precision stay zero at any scale.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..base import loop_block_sizes
from ..base.collectives import is_distributed
from ..base.dtensor import as_real, is_dtensor, local
from ..base.errors import ConfigError
from ..base.values_checked_by_type import user_path
from ..distributed.context import ParallelContext
from ..optim.flat_gradients import FlatGradients
from ..optim.flat_weights import FlatWeights
from ..scaling.grad_norm import norm_weight
from .loops_without_engine import agreed_context, checked_scale

LOWEST, HIGHEST = -1074, 1023
"""The exponents of the smallest subnormal and of the largest float64."""
ZEROS, NON_FINITE = HIGHEST - LOWEST + 1, HIGHEST - LOWEST + 2
"""Indices of these counts in the table, after the exponents."""


@dataclass(frozen=True)
class GradientHistogram:
    """The scaled gradients of the whole model, each element counted once; counts are averaged over data ranks."""

    counts: Mapping[int, float]
    """The number of elements by exponent, without zeros and non-finite ones."""
    zeros: float
    non_finite: float
    largest: float
    """The largest finite magnitude; 0 if no element is finite and non-zero."""
    scale: float
    """The loss scale that the gradients carry."""
    dtype: torch.dtype
    """The mode's compute dtype, which defines underflow and headroom."""

    @property
    def total(self) -> float:
        """The number of elements counted."""
        return sum(self.counts.values()) + self.zeros + self.non_finite

    @property
    def underflow(self) -> float:
        """The fraction of elements that are zero or subnormal in :attr:`dtype`."""
        lowest = math.frexp(torch.finfo(self.dtype).smallest_normal)[1] - 1
        low = sum(count for exponent, count in self.counts.items() if exponent < lowest)
        return (low + self.zeros) / self.total if self.total else 0.0

    @property
    def headroom(self) -> float:
        """log2 of the factor by which the scale can grow before the largest element overflows; inf if all are 0."""
        return math.log2(torch.finfo(self.dtype).max / self.largest) if self.largest else math.inf

    def at_scale(self, scale: float) -> GradientHistogram:
        """The histogram at another loss scale, without the rounding that it would cause.

        Raises:
            ValueError: the ratio of the scales is not a power of two.
        """
        mantissa, exponent = math.frexp(scale / self.scale) if scale > 0 else (0.0, 0)
        if mantissa != 0.5:
            raise ValueError(f"scale: got {scale!r}, expected {self.scale:g} times a power of two")
        shift = exponent - 1
        moved = {old + shift: count for old, count in self.counts.items()}
        return replace(self, counts=moved, largest=math.ldexp(self.largest, shift), scale=scale)

    def describe(self) -> str:
        """One line."""
        bad = f", {self.non_finite:.0f} elements not finite" if self.non_finite else ""
        return (
            f"gradients at a loss scale of {self.scale:g} in {str(self.dtype).removeprefix('torch.')}: "
            f"{self.underflow:.2%} underflow, headroom 2**{self.headroom:.1f}{bad}"
        )

    def as_json(self) -> dict[str, Any]:
        """All values as plain ones; a headroom of inf is None."""
        return {
            "counts": {str(exponent): count for exponent, count in sorted(self.counts.items())},
            "zeros": self.zeros,
            "non_finite": self.non_finite,
            "largest": self.largest,
            "scale": self.scale,
            "dtype": str(self.dtype).removeprefix("torch."),
            "underflow": self.underflow,
            "headroom": self.headroom if math.isfinite(self.headroom) else None,
        }

    def save(self, path: str | Path) -> None:
        """Write all values to a file, as JSON."""
        user_path(path).write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def histogram_of(weights: FlatWeights, scale: float, dtype: torch.dtype) -> GradientHistogram:
    """The histogram of the gradients of ``weights``, which carry the loss scale ``scale``. A world collective."""
    return _summed(_before_reduction(weights.gradients), weights.device, scale, dtype)


def _before_reduction(gradients: FlatGradients) -> Iterator[tuple[torch.Tensor, float]]:
    """Each gradient that this rank has before a step, unreduced, and its norm weight.

    In sums over the world each element of the logical model counts once: as the average over data ranks, or under
    ZeRO with the value on the rank that steps it.
    """
    elsewhere = gradients.reduction.begin_look()
    for param in gradients.params:
        gradient = param.parameter.grad
        if gradient is not param.gradient:
            if gradient is not None and gradient.numel():  # it may have as many elements as the whole parameter
                num_parts = param.buffer.num_parts
                yield gradient, param.norm_weight / num_parts * param.size / local(gradient).numel()
        elif param.version != gradients.zeros[param] and param.own[0] < param.own[1]:
            yield param.stepped_gradient, param.norm_weight
    yield from elsewhere


@torch.no_grad()
def gradient_histogram(
    model: nn.Module,
    *,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float16,
    context: ParallelContext | None = None,
) -> GradientHistogram:
    """The histogram of the gradients of a model in a loop without an engine; it changes nothing.

    Every rank calls it between backward and ``zero_grad``. Each element of the logical model counts once: a shard on
    the rank that holds it, a replica as the average over its ranks, a partial sum of a DTensor as the sum. Gradients
    that ``fully_shard`` has not reduced yet, as before the last backward of an accumulation, are not counted.

    Args:
        model: this rank's, or its stage; plain, in DDP, sharded by ``fully_shard``, or of DTensors.
        scale: the loss scale that the gradients carry; 1 after ``unscale_``.
        dtype: that of the computation, which defines underflow and headroom.
        context: None: the current one; none is needed in one process.

    Raises:
        ConfigError: on every rank: a rank has wrong arguments, or others than another rank; or no parameter has a
            gradient.
        LaunchError: a rank did not call it in time.
    """

    def check(_: ParallelContext | None) -> tuple[nn.Module, dict[str, object]]:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigError(f"dtype: got {dtype!r}, expected a floating-point dtype, such as torch.float16")
        return model, {"scale": checked_scale(scale), "dtype": str(dtype)}

    context = agreed_context("gradient_histogram", context, check)
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    device = context.device if context else next((one.device for one in parameters), torch.device("cpu"))
    pairs = ((_in_placements(parameter), norm_weight(parameter, context)) for parameter in parameters)
    histogram = _summed(pairs, device, float(scale), dtype)
    if not histogram.total:
        raise ConfigError("gradient_histogram: no parameter has a gradient; call it after backward, before zero_grad")
    return histogram


def _in_placements(parameter: nn.Parameter) -> torch.Tensor:
    """The gradient of ``parameter``, dense and in its placements."""
    gradient = parameter.grad
    assert gradient is not None
    if is_dtensor(gradient) and is_dtensor(parameter):
        return gradient.redistribute(placements=parameter.placements)
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _summed(
    gradients: Iterable[tuple[torch.Tensor, float]], device: torch.device, scale: float, dtype: torch.dtype
) -> GradientHistogram:
    """The histogram of this rank's ``gradients``, each with its norm weight, and the other ranks'."""
    table = torch.zeros(NON_FINITE + 1, dtype=torch.float64, device=device)
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for gradient, weight in gradients:
        counts, most = _count(local(gradient))
        table += (counts * weight).to(device)  # counts replicated elements once
        largest = torch.maximum(largest, most.to(device))
    if is_distributed():
        dist.all_reduce(table)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    *exponents, zeros, non_finite = table.tolist()
    counts_by_exponent = {index + LOWEST: count for index, count in enumerate(exponents) if count}
    return GradientHistogram(counts_by_exponent, zeros, non_finite, float(largest), scale, dtype)


def _count(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts of the plain ``gradient`` (1-dim, float64), and its largest finite magnitude (0-dim, float64).

    The real and the imaginary part of a complex element count as one each.
    """
    gradient = as_real(gradient).reshape(-1)
    table = torch.zeros(NON_FINITE + 1, dtype=torch.int64, device=gradient.device)
    largest = torch.zeros((), dtype=torch.float64, device=gradient.device)
    for chunk in gradient.split(loop_block_sizes.COUNTED):
        values = chunk.double()  # fp32 and half subnormals are normal in float64, so frexp is exact
        indices = values.frexp().exponent.long() - 1 - LOWEST
        indices = torch.where(values == 0, ZEROS, torch.where(values.isfinite(), indices, NON_FINITE))
        table += torch.bincount(indices, minlength=NON_FINITE + 1)
        if values.numel():
            largest = torch.maximum(largest, values.abs().nan_to_num(0.0, 0.0, 0.0).amax())
    return table.double(), largest
