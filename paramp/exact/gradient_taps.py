"""Uses of a parameter whose gradients are kept apart from each other."""

from __future__ import annotations

from typing import Any, cast

import torch

from ..base.errors import ConfigError
from ..optim.flat_buffer import FlatParam


class Tap:
    """One use of a parameter, whose gradient is kept apart from that of others.

    It is the use of a tied parameter under another name than its first. Copies of the parameter on other pipeline
    stages have the gradients of their uses only. So those of one stage are added up apart too, and summed at the step.
    Or it is the use of experts that data ranks share for the microchunk of one of them.
    """

    def __init__(self, param: FlatParam, name: str, what: str) -> None:
        """``name``: of the parameter in this use; ``what``: says in a message what it is."""
        self.param = param
        self.name = name
        self._what = what
        self.microchunk: torch.Tensor | None = None
        """The gradient of the microchunk whose backward ran last; None if it has none."""
        self.window: torch.Tensor | None = None
        """The gradient of the window, in the dtype of the parameter's gradients."""

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """``weight``, the parameter's local tensor, for a computation whose gradient comes here."""
        return cast(torch.Tensor, _Tapped.apply(weight, self))

    def take(self, gradient: torch.Tensor) -> None:
        """Keep the ``gradient`` of a microchunk.

        Raises:
            ConfigError: the parameter was used twice in the microchunk.
        """
        if self.microchunk is not None:
            raise ConfigError(
                f"reproducible: {self.name!r}, {self._what}, is used twice in a forward; expected one use of each "
                "name; use a second module, and tie its parameters"
            )
        self.microchunk = gradient + 0.0  # 0 for -0, as where gradients are added to zeros

    def pop(self) -> torch.Tensor | None:
        """The gradient of the microchunk in fp32, and forget it."""
        gradient, self.microchunk = self.microchunk, None
        return None if gradient is None else gradient.to(torch.float32, copy=True)


class _Tapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, tap: Tap) -> torch.Tensor:
        ctx.tap = tap
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.tap.take(gradient.detach())
        return None, None
