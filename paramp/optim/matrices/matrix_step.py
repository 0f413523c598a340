"""The step of an optimizer that needs whole matrices, of which each rank has shards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from ..flat_buffer import FlatParam
from ..flat_weights import OptimizerWeights
from .matrix_exchange import placeholder


class MatrixStep:
    """The optimizer's own ``step()``, within ``state``, on each matrix's owner. The host reads whether to skip it.

    Owners hold the optimizer's state of their matrices. Masters stay where they are: the owner gets them with the
    gradients, and returns them stepped. Three all-to-alls a step.
    """

    calls_optimizer = True

    def __init__(self, weights: OptimizerWeights, state: AbstractContextManager[None]) -> None:
        assert weights.exchange is not None
        self._optimizer = weights.optimizer
        self._weights = weights
        self._state = state
        self._exchange = weights.exchange
        buffer_of = {param: buffer for buffer in weights.buffers for param in buffer.params}
        self._places = [(param, buffer_of[param]) for param in self._exchange.params]

    @torch.no_grad()
    def __call__(self, grad_scale: torch.Tensor, found_inf: torch.Tensor, absent: Sequence[FlatParam]) -> None:
        """As :meth:`~paramp.optim.fused_step.FusedStep.__call__`."""
        skips = bool(found_inf)  # the host waits
        if skips:
            self._weights.changes.postpone()
        if skips or not self._places:
            return
        compare = self._weights.changes.due
        masters = [buffer.masters.read(buffer.own_range(param), compare=compare) for param, buffer in self._places]
        gradients = self._exchange.to_owners(self._unscaled(grad_scale))
        values = self._exchange.to_owners(masters)
        for param, stepped in self._exchange.owned.items():
            stepped.data = values.pop(param)
            stepped.grad = None if param in absent else gradients.pop(param)
        try:
            with self._state:
                self._optimizer.step()
            wholes = {param: stepped.detach() for param, stepped in self._exchange.owned.items()}
        finally:
            for stepped in self._exchange.owned.values():
                stepped.grad, stepped.data = None, placeholder(stepped.shape, stepped.dtype, stepped.device)
        new = [torch.empty_like(master) for master in masters]
        self._exchange.from_owners(wholes, new)
        for (param, buffer), master in zip(self._places, new, strict=True):
            buffer.masters.write(buffer.own_range(param), master)
        self._weights.gather_weights()

    def _unscaled(self, grad_scale: torch.Tensor) -> list[torch.Tensor]:
        """What this rank holds of each gradient, divided by ``grad_scale``; in the dtype of the optimizer's state."""
        unscaled = []
        for param, buffer in self._places:
            gradient = buffer.gradients[buffer.flat_range(param)]
            wide = torch.promote_types(gradient.dtype, torch.float32)  # in half precision the scale may overflow
            unscaled.append(gradient.to(wide).div(grad_scale).to(buffer.masters.dtype))
        return unscaled

    def state_loaded(self) -> None:
        """No action: nothing here depends on the optimizer's state."""
