"""The model and the criterion that ``convert_to_amp`` returns: they compute in a mode's precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ....distributed.context import current_context
from ....engine.compute_context import ComputeContext
from ....parallel.stage import Stage


class AmpModel(Stage):
    """A model that computes in a mode: inputs are cast, floating-point outputs come back in fp32 at the least.

    :attr:`module` is the model that was given. On the earlier stages of the current context's pipeline, outputs stay
    in the compute dtype.
    """

    def __init__(self, model: nn.Module, compute: ComputeContext) -> None:
        context = current_context()
        super().__init__(
            model, compute.precision, compute.device, is_first=True, is_last=context is None or context.is_last_stage
        )
        self._compute = compute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        with self._compute.enter():
            return super().forward(*args, **kwargs)


class AmpCriterion(nn.Module):
    """A criterion that computes as the model does: under autocast, where the mode has one. :attr:`loss` is it."""

    def __init__(self, loss: Callable[..., Any], compute: ComputeContext) -> None:
        super().__init__()
        self.loss = loss
        self._compute = compute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The criterion's loss."""
        with self._compute.enter(autocast=self._compute.precision.autocast):
            return self.loss(*args, **kwargs)
