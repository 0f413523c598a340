"""The result of a step, and counters of steps; read from the device only on access."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch


class StepResult:
    """The result of :meth:`Engine.step`; equal on every rank.

    The values are on the device. The first access waits for the step and reads all of them.
    """

    __slots__ = ("_stepping", "_values", "_with_zeros")

    def __init__(
        self, values: torch.Tensor | Sequence[float | None], *, stepping: bool = True, with_zeros: bool = False
    ) -> None:
        """``stepping`` is False while gradients accumulate.

        ``values``: the loss scale and, at the end of a window, 0 for a step that was made, 1 for an overflow or 2 for
        another reason to skip it, gradient norm, number of zeros and loss; 1-dim float64, or numbers, None for unknown
        values.
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
        """Whether the weights changed. False while gradients accumulate, after an overflow, or if all counts were 0."""
        return self._stepping and not self._read(1)

    @property
    def overflow(self) -> bool:
        """Whether a gradient was not finite on some rank, so that all ranks skipped the step."""
        return self._stepping and self._read(1) == 1

    @property
    def loss_scale(self) -> float:
        """The loss scale of this step's gradients; 1 if losses are not scaled."""
        return self._read(0) or 0.0

    @property
    def grad_norm(self) -> float | None:
        """The norm of the whole model's gradient before clipping; None while accumulating; not finite on overflow."""
        return self._read(2) if self._stepping else None

    @property
    def num_zeros(self) -> int | None:
        """The number of zero elements in the whole model's gradient; None unless the mode has ``log_num_zeros``."""
        zeros = self._read(3) if self._stepping and self._with_zeros else None
        return None if zeros is None else round(zeros)

    @property
    def loss(self) -> float | None:
        """The true loss of the window, as :meth:`Engine.forward_backward` returns it; None while accumulating."""
        return self._read(4) if self._stepping else None

    def __repr__(self) -> str:
        names = ("stepped", "overflow", "loss_scale", "grad_norm", "num_zeros", "loss")
        return f"StepResult({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


class StepCounters:
    """Counters of steps on the device. Reading them waits for the last step only, not for work queued after it.

    The values are, in this order: optimizer steps made; steps skipped; steps skipped in a row up to now; the number
    of those in a row that left the loss scale at its floor; and of the last steps in a row, how many were made with a
    gradient whose norm is 0.
    """

    SIZE = 5

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(self.SIZE, dtype=torch.int64, device=device)
        self._copy = torch.zeros(self.SIZE, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def add(self, skip: torch.Tensor, overflow: torch.Tensor, at_floor: torch.Tensor, vanished: torch.Tensor) -> None:
        """Count a step: skipped or not, for an overflow or not, with the loss scale at its floor or not; 0-dim bool.

        ``vanished``, 0-dim bool: it was made with the gradient of a loss, whose norm is 0.
        """
        self._counts[2:4].mul_(overflow)
        self._counts[4:].mul_(vanished)
        self._counts += torch.stack([~skip, overflow, overflow, overflow & at_floor, vanished])
        self._publish()

    @property
    def made(self) -> torch.Tensor:
        """The number of optimizer steps made, 0-dim int64 on the device; a view."""
        return self._counts[0]

    def load(self, counts: Sequence[int]) -> None:
        """Set the values to ``counts``, as :meth:`read` returned them; those missing at the end are 0."""
        rest = [0] * (self.SIZE - len(counts))
        self._counts.copy_(torch.tensor([*counts, *rest]))
        self._publish()

    def read(self) -> list[int]:
        """The values after the last :meth:`add`."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy.tolist()

    def skips(self) -> list[int]:
        """What tells whether training goes on: steps made, skipped, skipped in a row, and of these at the floor."""
        return self.read()[:4]

    def stop_after_skip(self, max_skipped: int | None) -> bool:
        """Whether training stops if the next step is skipped too; never if ``max_skipped`` is None.

        The counts of the steps before decide, so the host waits for a step only if its skip would stop the training.
        """
        if max_skipped is None:
            return False
        _, _, in_a_row, at_floor = self.skips()
        return in_a_row >= max_skipped - 1 or at_floor > 0

    def warn_if_vanished(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Warn if the step before, of ``optimizers``, was the first in a row with a gradient whose norm is 0."""
        made, *_, in_a_row = self.read()
        if in_a_row == 1:
            names = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
            warnings.warn(
                f"step {made} of {names} was made with a gradient whose norm is exactly 0, though the loss depends on "
                "the model: half-precision gradients may have underflowed. Look at engine.gradient_histogram() between "
                "forward_backward and step, at the loss scale (engine.scaler.get_scale()), at the count that a "
                "criterion returns beside its sum, and at the criterion, whose gradient may be 0",
                stacklevel=2,
            )

    def _publish(self) -> None:
        # The copy to pinned memory is asynchronous: the host waits for its event in read(), and nowhere else.
        self._copy.copy_(self._counts, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
