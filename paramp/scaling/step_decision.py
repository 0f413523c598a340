"""The decision of a step, equal on every rank, from sums over the world; no value that the host would wait for.

What the host needs of it, it reads later, from a :class:`HostCopy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class StepDecision:
    """Tensors on the device, equal on all ranks."""

    overflow: torch.Tensor
    """0-dim bool: a gradient is not finite on some rank, so the step is skipped on all ranks."""
    skip: torch.Tensor
    """0-dim bool: the step is skipped on all ranks: an overflow, a total count of 0, or a failure."""
    num_failed: torch.Tensor
    """0-dim float64: the number of ranks on which a batch failed or has an invalid count; more, if ranks have losses
    of different kinds."""
    divisor: torch.Tensor
    """0-dim float64: the divisor that unscales, averages and clips the gradients in one operation."""
    mean_count: torch.Tensor
    """0-dim float64: of all microbatches, in the window's unit; 0 or NaN if they have no counts."""
    values: torch.Tensor
    """1-dim float64: loss scale, 0 (stepped), 1 (overflow) or 2 (skipped), norm, number of zeros, mean loss."""


NUM_SUMS = 8
"""Of all ranks: overflows, squares, zeros, losses, their weights, counts among these, number of losses, failures."""


def decide(
    sums: torch.Tensor, scale: torch.Tensor, window_size: int, mean_factor: float, max_norm: float | None
) -> StepDecision:
    """The decision from the ``sums`` of all ranks.

    Args:
        sums: 1-dim float64, :data:`NUM_SUMS` of them.
        scale: 0-dim, the loss scale that the gradients carry.
        window_size: microbatches in the accumulation window, over all data ranks.
        mean_factor: the factor for gradients of means: more than 1 if the window was shortened.
        max_norm: to clip to. None: no clipping.
    """
    found_any, squares, zeros, loss, weight, count, num_losses, num_failed = sums.unbind()
    scale = scale.double()
    num_failed = num_failed + mixes_kinds(weight, count, num_losses)
    squares = squares + torch.where(found_any > 0, torch.inf, 0.0)  # under ZeRO an element may be another rank's
    overflow = ~squares.isfinite()
    uncounted = (num_losses > 0) & (weight == 0)  # all counts are 0, so there is no mean
    skip = overflow | uncounted | (num_failed > 0)
    # Means are already divided by their number in a whole window; sums are divided by their counts here.
    factor = torch.where(count > 0, window_size / count, mean_factor)
    norm = squares.sqrt() / scale * factor
    if max_norm is not None:
        factor = factor * clip_coefficient(norm, max_norm)
    divisor = scale / torch.where(overflow, 1.0, factor)
    values = torch.stack([scale, torch.where(overflow, 1.0, 2.0 * skip), norm, zeros, loss / weight])
    return StepDecision(overflow, skip, num_failed, divisor, count / num_losses, values)


class HostCopy:
    """Numbers of a device on the host, which waits for them only when it reads them, not for what is queued since."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._values = torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._is_new = False

    @property
    def is_late(self) -> bool:
        """Whether the host would wait for the device, so that it reads them in a later call."""
        return self._copied is not None

    def start(self, values: torch.Tensor) -> None:
        """Start to copy ``values``, of the size or 0-dim."""
        self._values.copy_(values, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._is_new = True

    def read(self) -> list[Any]:
        """The values of the last :meth:`start`; at first zeros."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()

    def take(self) -> float:
        """The first value of :meth:`read`; 0 if it was taken before."""
        is_new, self._is_new = self._is_new, False
        return self.read()[0] if is_new else 0.0


def mixes_kinds(weight: torch.Tensor, count: torch.Tensor, num_losses: torch.Tensor) -> torch.Tensor:
    """Whether the sums of a window's totals over all ranks have both means and sums with counts; 0-dim bool."""
    num_means = weight - count  # up to rounding
    return (num_means > 0.5) & (num_means < num_losses - 0.5)


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor that scales ``norm`` down to ``max_norm``, at most 1 (torch's formula, with its 1e-6)."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
