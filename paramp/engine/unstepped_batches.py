"""What is wrong with gradients before a step: warnings, once each, if no step uses them, or they are another's."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import torch

from ..base.observer_spans import STEP
from .shared_failure import SharedFailure

ADDED_UP = (
    "forward_backward: the second batch before a step(): their gradients add up to a sum. Call step() after each "
    "batch, also with gradient_accumulation=k in the configuration, which makes one optimizer step with the mean over "
    "k of them; to drop the gradients of a window's first batch, call engine.zero_grad()"
)
UNUSED = (
    "{} batches have run, and step() was never called: nothing is trained. Call engine.step() after each "
    "forward_backward or backward"
)
CHANGED = (
    "step(): all gradients were changed since the backward, when they carry the loss scale ({}) and are each rank's "
    "terms of sums: clipping or adding a number there makes the step wrong, or too small to see. Set clip_grad_norm in "
    "the configuration; in other changes of engine.before_step or of yours, count with engine.scaler.get_scale(). What "
    "scales with the gradients, such as a mask, is right"
)
BY_HAND = (
    "step(): its gradients are from no backward of the engine, such as loss.backward() of a loss of model(x): a step "
    "divides gradients by the loss scale ({}), and adds those of data ranks up. Call engine.forward_backward(x, y), or "
    "engine.backward(engine.criterion(engine(x), y))"
)
NO_BACKWARD = (
    "step(): no backward since the last step, so there are no gradients to step with; call "
    "engine.forward_backward(x, y), or engine.backward(engine.criterion(engine(x), y)), before each step"
)
INSIDE = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
"""Where the code is that the user's line calls."""
MANY = 100
"""Batches before the first call of ``step()`` that are a mistake, also of a loop that adds up gradients by hand."""
MANY_DROPPED = 5
"""The same where their gradients were dropped."""


class UnsteppedBatches:
    """The batches of one engine that no step has used.

    Attributes:
        dropped: windows whose gradients were dropped.
        stepped: whether ``step()`` was called.
    """

    def __init__(self, failure: SharedFailure, is_main: bool) -> None:
        """Only one rank, for which ``is_main``, warns."""
        self._failure = failure
        self.dropped = 0
        self.stepped = False
        self._count = 0
        self._texts = {ADDED_UP, UNUSED, CHANGED, BY_HAND} if is_main else set()  # that may still be shown

    def begin_batch(self, is_second: bool, *, warn: bool) -> None:
        """Warn if there is a reason. ``is_second``: of two without a ``step()``; ``warn`` if their gradients add up.

        Raises:
            RuntimeError: it is the second one of this rank, and another rank has called ``step()``.
        """
        if is_second:
            self._failure.meet("forward_backward", {STEP}, "begins a second batch without a step()")
        if is_second and warn:
            self._warn(ADDED_UP)
        if not self.stepped and (self._count >= MANY or self.dropped >= MANY_DROPPED):
            self._warn(UNUSED, self._count)
        self._count += 1

    def warn_of_gradients(self, text: str, scale: torch.Tensor) -> None:
        """Warn of the gradients of a step, which carry the loss ``scale``, 0-dim; it is read once."""
        if text in self._texts:
            self._warn(text, float(scale))

    def _warn(self, text: str, *values: object) -> None:
        if text in self._texts:
            self._texts.remove(text)
            warnings.warn(text.format(*values), stacklevel=depth_of_user())


def depth_of_user() -> int:
    """The ``stacklevel`` in the caller's function of the line that calls the engine."""
    here = inspect.currentframe()
    frame, depth = here and here.f_back, 1
    while frame is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame, depth = frame.f_back, depth + 1
    return depth
