"""Storage of the fp32 masters of the half-precision weights in a flat buffer, as a table of classes.

================  ==================================  ============================================================
``masters``       stored beside the weights           stepped by the optimizer
================  ==================================  ============================================================
``False``         nothing                             the weights
``"stochastic"``  nothing                             the weights, rounded stochastically after a fused step
``True``          fp32 masters, 4 bytes a weight      the masters, which are then rounded to the weights
``"remainder"``   int16 remainders, 2 bytes a weight  masters, joined block by block, that exist only during a step
================  ==================================  ============================================================

A storage object covers the part of one buffer that this rank steps; slices are relative to that part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

import torch

from ..base.scratch import Scratch
from ..precision.stochastic_rounding import rounded
from .master_residuals import join, split
from .master_weights import follow


class NoMasters:
    """No masters: the weights themselves are stepped. Also the base class of the storages with masters.

    Attributes:
        weights: the weights that this rank steps, 1-dim; a view of their buffer.
        dtype: the dtype of the optimizer's state.
        stepped: the storage of the optimizer's parameters, 1-dim, as long as ``weights``.
        state: the tensors stored beside the weights, each 1-dim and as long as ``weights``.
    """

    needs_fused_step: ClassVar[str | None] = None
    """The setting that only a fused step can follow, as for masters that exist only during it; None: any step can."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights
        self.dtype = weights.dtype
        self.stepped = weights
        self.state: tuple[torch.Tensor, ...] = ()

    def read(self, own: slice, scratch: Scratch | None = None) -> torch.Tensor:
        """The values that are stepped in a slice; a view of :attr:`stepped` if that holds them, else of ``scratch``.

        If a master does not round to its weight, the weight was changed in place, and the master takes its value.
        """
        return self.stepped[own]

    def write(self, own: slice, values: torch.Tensor, scratch: Scratch | None = None) -> None:
        """Store ``values``, floating point, and round them to the weights."""
        _copy_unless_same(self.weights[own], values)

    def write_stepped(self, own: slice, values: torch.Tensor, scratch: Scratch | None = None) -> None:
        """As :meth:`write`, for the values of a fused step."""
        self.write(own, values, scratch)

    def round_to_weights(self) -> None:
        """Round the values that an optimizer has stepped in :attr:`stepped` to the weights."""

    def follow(self, own: slice) -> None:
        """Update masters after weights were loaded."""
        self.read(own)


class StochasticWeights(NoMasters):
    """Half-precision weights without masters, rounded stochastically.

    Attributes:
        random_bits: ``random_bits(own)`` yields, for each parameter in a slice, its range and 32 random bits for each
            element of it. :meth:`paramp.optim.param_buffer.Buffer.round_stochastically` sets it.
    """

    needs_fused_step = "rounding: got 'stochastic'"

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__(weights)
        self.random_bits: Callable[[slice], Iterator[tuple[slice, torch.Tensor]]] = lambda own: iter(())

    def write_stepped(self, own: slice, values: torch.Tensor, scratch: Scratch | None = None) -> None:
        for part, bits in self.random_bits(own):
            stepped = values[part.start - own.start : part.stop - own.start]
            self.weights[part].copy_(rounded(stepped, bits, self.weights.dtype))


class FullMasters(NoMasters):
    """Masters in fp32."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__(weights)
        self.dtype = torch.float32
        self.stepped = torch.zeros_like(weights, dtype=torch.float32)
        self.state = (self.stepped,)

    def read(self, own: slice, scratch: Scratch | None = None) -> torch.Tensor:
        master, weight = self.stepped[own], self.weights[own]
        follow(weight, master, scratch)
        return master

    def write(self, own: slice, values: torch.Tensor, scratch: Scratch | None = None) -> None:
        _copy_unless_same(self.stepped[own], values)
        self.weights[own].copy_(values)

    def round_to_weights(self) -> None:
        self.weights.copy_(self.stepped)


class ResidualMasters(NoMasters):
    """The lower 16 bits of the masters; the weights are the upper part (:mod:`paramp.optim.master_residuals`)."""

    needs_fused_step = "masters: got 'remainder'"

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__(weights)
        self.dtype = torch.float32
        self.remainders = torch.zeros_like(weights, dtype=torch.int16)
        self.state = (self.remainders,)

    def read(self, own: slice, scratch: Scratch | None = None) -> torch.Tensor:
        weight = self.weights[own]
        master = join(weight, self.remainders[own], scratch)
        # After a change in place, weight and remainder may not fit together.
        follow(weight, master, scratch)
        return master

    def write(self, own: slice, values: torch.Tensor, scratch: Scratch | None = None) -> None:
        split(values.float(), self.weights[own], self.remainders[own], scratch)

    def follow(self, own: slice) -> None:
        """Reset the remainders, which belong to the old weights; so weights have to be loaded before masters."""
        self.remainders[own].zero_()


MASTER_STORAGE: dict[bool | str, type[NoMasters]] = {
    False: NoMasters,
    "stochastic": StochasticWeights,
    True: FullMasters,
    "remainder": ResidualMasters,
}
"""The storage class for each value of :attr:`paramp.Precision.masters`, and for stochastic rounding without masters."""


def _copy_unless_same(stored: torch.Tensor, values: torch.Tensor) -> None:
    if stored.data_ptr() != values.data_ptr():  # values stepped in place need no copy
        stored.copy_(values)
