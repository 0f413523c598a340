"""Backwards of the user's own through an output of the engine, which the engine would not scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..optim.flat_gradients import FlatGradients

TEXT = (
    "loss.backward() was called on an output of the engine: its gradients are neither scaled nor averaged over the "
    "accumulation window and the data ranks; call engine.zero_grad(), and engine.backward(loss) in its place"
)


class ForeignBackward:
    """Notices a backward that is not the engine's and accumulates gradients; ``torch.autograd.grad`` does not.

    Attributes:
        handles: what removes hooks on parameters, during such a backward and until :meth:`stop`.
        accumulated: whether there was one.
    """

    def __init__(self, gradients: FlatGradients) -> None:
        self._gradients = gradients
        self._in_ours = False
        self.handles: list[Callable[[], None]] = []
        self.accumulated = False

    @contextmanager
    def ours(self) -> Iterator[None]:
        """A backward of the engine's runs inside."""
        self._in_ours = True
        try:
            yield
        finally:
            self._in_ours = False

    def watch(self, output: torch.Tensor) -> None:
        """Notice a backward through ``output``, the model's."""
        if output.requires_grad:
            output.register_hook(self._notice)

    def stop(self) -> None:
        """Remove the hooks on parameters."""
        while self.handles:
            self.handles.pop()()

    def _notice(self, _: torch.Tensor) -> None:
        if not self._in_ours and not self.handles:
            units, call = self._gradients.reduction.units, self._notice_gradient
            if units is not None:
                self.handles = [units.on_gradient(call)]
            else:
                trained = [one for one in self._gradients.parameters if one.requires_grad]  # some may be frozen now
                self.handles = [one.register_post_accumulate_grad_hook(call).remove for one in trained]

    def _notice_gradient(self, _: torch.Tensor) -> None:
        self.accumulated = True
