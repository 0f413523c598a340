"""Warnings, once each, of batches whose gradients no step uses, or adds to those of another batch by mistake."""

from __future__ import annotations

import warnings

ADDED_UP = (
    "forward_backward: the second batch before a step(), without gradient_accumulation: their gradients add up to a "
    "sum. Call step() after each batch; for one optimizer step with the mean over k batches, also set "
    "gradient_accumulation=k in the configuration; to drop the gradients of the first batch, call engine.zero_grad()"
)
UNUSED = (
    "{} batches have run, and step() was never called: nothing is trained. Call engine.step() after each "
    "forward_backward or backward"
)
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

    def __init__(self, is_main: bool) -> None:
        """Only one rank, for which ``is_main``, warns."""
        self.dropped = 0
        self.stepped = False
        self._count = 0
        self._texts = {ADDED_UP, UNUSED} if is_main else set()  # that may still be shown

    def begin_batch(self, adds_up: bool) -> None:
        """Warn if there is a reason; ``adds_up``: the gradients of the next batch are added to another one's."""
        if adds_up:
            self._warn(ADDED_UP)
        if not self.stepped and (self._count >= MANY or self.dropped >= MANY_DROPPED):
            self._warn(UNUSED)
        self._count += 1

    def _warn(self, text: str) -> None:
        if text in self._texts:
            self._texts.remove(text)
            warnings.warn(text.format(self._count), stacklevel=7)  # the line that calls the engine
