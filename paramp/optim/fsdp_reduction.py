"""Gradients of parameters that FSDP2 shards: it reduces those of each unit over data ranks, into the flat buffers."""

from __future__ import annotations

import torch

from .flat_buffer import FlatParam
from .flat_gradients import FlatGradients
from .gradient_reduction import GradientReduction, Units


class UnitReduction(GradientReduction):
    """The ``units`` that gather the parameters in a batch have reduced each gradient at the end of their backward."""

    def __init__(self, units: Units) -> None:
        self.units = units

    def attach(self, gradients: FlatGradients) -> None:
        """As in the base class."""
        super().attach(gradients)
        # A reduction gives zeros to a parameter that got no gradient on any rank, so versions do not show its absence.
        self._arrived: set[torch.Tensor] = set()  # what a backward of this rank, or the user, gave a gradient
        self._reduced = [0] * len(self._params)  # versions after the last backward
        self._in_backward = False
        assert self.units is not None
        self.units.on_gradient(self._arrived.add)

    def begin_backward(self) -> None:
        """As in the base class."""
        self._note_changes()
        self._in_backward = True

    def _note_changes(self) -> None:
        """Record which gradients the user has changed since the last backward, or dropped."""
        versions = self._gradients.versions()
        if versions == self._reduced:
            return
        for param, version, reduced in zip(self._params, versions, self._reduced, strict=True):
            if version == self._zeros[param]:
                self._arrived.discard(param.parameter)
            elif version != reduced:
                self._arrived.add(param.parameter)

    def end_last_backward(self) -> None:
        """As in the base class."""
        if self._in_backward:
            self._in_backward = False
            self._reduced = self._gradients.versions()

    def forget(self) -> None:
        """As in the base class."""
        self._arrived.clear()
        self._reduced = [*self._zeros.values()]

    def absent(self, unchanged: list[FlatParam]) -> list[FlatParam]:
        """As in the base class."""
        self._note_changes()
        return [param for param in self._params if param.parameter not in self._arrived]

    def outside_buffers(self) -> tuple[()]:
        """None; but what did not arrive on any rank is not looked at."""
        self._note_changes()
        for param in self._params:
            if param.parameter not in self._arrived and not bool(self._gradients.stepped_part(param).any()):
                self._zeros[param] = param.version
        return ()
