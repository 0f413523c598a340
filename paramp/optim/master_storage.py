"""How the fp32 masters of half-precision weights are stored beside a flat buffer: one row of a table for each way.

================  ==================================  ============================================================
``masters``       stored beside the weights           what the optimizer steps
================  ==================================  ============================================================
``False``         nothing                             the weights
``True``          fp32 masters, 4 bytes a weight      the masters; the weights are their rounding
``"remainder"``   int16 remainders, 2 bytes a weight  masters, joined block by block, that exist during a step only
================  ==================================  ============================================================

A storage is of the part of one buffer that this rank steps; slices count from where that part begins.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from .master_residuals import join, split
from .master_weights import follow


class NoMasters:
    """The weights are stepped themselves. Also the base of the ways to store masters.

    Attributes:
        weights: those that this rank steps, 1-dim; a view of their buffer.
        dtype: what the optimizer keeps its state in.
        stepped: the storage of the optimizer's parameters, 1-dim, as long as ``weights``.
        state: what is stored beside the weights, each 1-dim and as long as they are.
    """

    needs_fused_step: ClassVar[bool] = False
    """Masters exist during a fused step only, so that no other optimizer can step them."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights
        self.dtype = weights.dtype
        self.stepped = weights
        self.state: tuple[torch.Tensor, ...] = ()

    def read(self, own: slice) -> torch.Tensor:
        """What is stepped of a slice; shares storage with :attr:`stepped` where that holds it.

        A weight that its master does not round to was changed in place since, and is its master from here on.
        """
        return self.stepped[own]

    def write(self, own: slice, values: torch.Tensor) -> None:
        """Store ``values``, floating point, and round them to the weights."""
        _copy_unless_same(self.weights[own], values)

    def round_to_weights(self) -> None:
        """Round what an optimizer has stepped in :attr:`stepped` to the weights."""

    def follow(self, own: slice) -> None:
        """Take up weights that were changed from outside, by loading them."""
        self.read(own)


class FullMasters(NoMasters):
    """Masters in fp32."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__(weights)
        self.dtype = torch.float32
        self.stepped = torch.zeros_like(weights, dtype=torch.float32)
        self.state = (self.stepped,)

    def read(self, own: slice) -> torch.Tensor:
        master = self.stepped[own]
        follow(self.weights[own], master)
        return master

    def write(self, own: slice, values: torch.Tensor) -> None:
        _copy_unless_same(self.stepped[own], values)
        self.weights[own].copy_(values)

    def round_to_weights(self) -> None:
        self.weights.copy_(self.stepped)


class ResidualMasters(NoMasters):
    """The lower 16 bits of the masters, whose upper part the weights are (:mod:`paramp.optim.master_residuals`)."""

    needs_fused_step = True

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__(weights)
        self.dtype = torch.float32
        self.remainders = torch.zeros_like(weights, dtype=torch.int16)
        self.state = (self.remainders,)

    def read(self, own: slice) -> torch.Tensor:
        master = join(self.weights[own], self.remainders[own])
        follow(self.weights[own], master)  # a remainder may be too much for another weight than its own
        return master

    def write(self, own: slice, values: torch.Tensor) -> None:
        split(values.float(), self.weights[own], self.remainders[own])

    def follow(self, own: slice) -> None:
        """The remainders of the weights before say nothing of these; so weights have to be loaded before masters."""
        self.remainders[own].zero_()


MASTER_STORAGE: dict[bool | str, type[NoMasters]] = {False: NoMasters, True: FullMasters, "remainder": ResidualMasters}
"""By :attr:`paramp.Precision.masters`. Another way to store masters is another row."""


def _copy_unless_same(stored: torch.Tensor, values: torch.Tensor) -> None:
    if stored.data_ptr() != values.data_ptr():  # what was stepped in place needs no second pass over memory
        stored.copy_(values)
