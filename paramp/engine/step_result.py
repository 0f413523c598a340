"""What a step did, read from the device on first use."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["StepResult"]


class StepResult:
    """What :meth:`Engine.step` did; the same on every rank.

    The values lie on the device. Reading the first of them waits for the step there; the others come with it.
    """

    __slots__ = ("_stepping", "_values", "_with_zeros")

    def __init__(
        self, values: torch.Tensor | Sequence[float | None], *, stepping: bool = True, with_zeros: bool = False
    ) -> None:
        """
        Args:
            values: the loss scale and, at the end of a window, overflow (0 or 1), gradient norm, number of zeros and
                loss; 1-dim float64, or numbers, None for what is not known.
            stepping: False while gradients accumulate.
            with_zeros: the number of zeros was asked for.
        """
        self._values: torch.Tensor | Sequence[float | None] = values
        self._stepping = stepping
        self._with_zeros = with_zeros

    def _read(self, index: int) -> float | None:
        if isinstance(self._values, torch.Tensor):
            self._values = self._values.tolist()
        return self._values[index]

    @property
    def stepped(self) -> bool:
        """The weights changed."""
        return self._stepping and not self.overflow

    @property
    def overflow(self) -> bool:
        """A gradient was not finite somewhere, so the step was skipped everywhere."""
        return self._stepping and bool(self._read(1))

    @property
    def loss_scale(self) -> float:
        """The scale that this step's gradients carried; 1 where losses are not scaled."""
        return self._read(0) or 0.0

    @property
    def grad_norm(self) -> float | None:
        """The norm of the logical model's gradient before clipping; None while accumulating; not finite on overflow."""
        return self._read(2) if self._stepping else None

    @property
    def num_zeros(self) -> int | None:
        """Zero elements in the logical gradient, where the mode asks for the count."""
        zeros = self._read(3) if self._stepping and self._with_zeros else None
        return None if zeros is None else round(zeros)

    @property
    def loss(self) -> float | None:
        """The true loss of the window, as :meth:`Engine.forward_backward` returns it; None while accumulating."""
        return self._read(4) if self._stepping else None

    def __repr__(self) -> str:
        names = ("stepped", "overflow", "loss_scale", "grad_norm", "num_zeros", "loss")
        return f"StepResult({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"
