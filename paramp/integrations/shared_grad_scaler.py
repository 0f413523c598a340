"""A shared loss scale as a ``torch.amp.GradScaler``, for libraries that call one."""

from __future__ import annotations

from typing import Any

import torch

from .shared_scale import SharedScale


class SharedGradScaler:
    """The methods of ``torch.amp.GradScaler`` for one :class:`SharedScale`; other names are those of its scaler."""

    def __init__(self, shared: SharedScale) -> None:
        self.shared = shared

    def scale(self, outputs: Any) -> Any:
        """``outputs``, a tensor or an iterable of tensors, times the scale."""
        return self.shared.scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale, if that was not done."""
        self.shared.unscale(plain_optimizer(optimizer))

    def step(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> Any:
        """Step ``optimizer`` on every rank or on none."""
        return self.shared.step(plain_optimizer(optimizer), **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Set the scale to ``new_scale``. Without it no effect: the scale is updated when the next backward begins."""
        if new_scale is not None:
            self.shared.advance()
            self.shared.scaler.update(new_scale)

    def is_enabled(self) -> bool:
        """Whether losses are scaled."""
        return self.shared.mode.scaling is not None

    def get_scale(self) -> float:
        """The factor for the next loss."""
        self.shared.update()
        return self.shared.scaler.get_scale()

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state after the last step."""
        return self.shared.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from :meth:`state_dict`, or from torch's ``GradScaler``."""
        self.shared.load_state_dict(state_dict)

    def _lazy_init_scale_growth_tracker(self, device: Any) -> None:
        """Accelerate calls it after it has loaded a state, which exists from the start here."""

    def __getattr__(self, name: str) -> Any:
        if name == "shared" or name.startswith("__"):  # when a copy is made
            raise AttributeError(name)
        return getattr(self.shared.scaler, name)


def plain_optimizer(optimizer: Any) -> Any:
    """The optimizer inside those wrappers that hold a :class:`SharedGradScaler`."""
    while isinstance(getattr(optimizer, "scaler", None), SharedGradScaler):
        optimizer = optimizer.optimizer
    return optimizer
