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

import copy
from collections.abc import Callable, Iterator
from typing import ClassVar, Self

import torch

from ..base.scratch_cpu import Scratch, zeros_apart
from ..precision.master_residuals import join, split
from ..precision.stochastic_rounding import rounded
from .master_weights import follow

ALL = slice(None)


class NoMasters:
    """No masters: the weights themselves are stepped. Also the base class of the storages with masters.

    Attributes:
        weights: the weights that this rank steps, 1-dim; a view of their buffer.
        dtype: the dtype of :attr:`stepped`, which is that of the optimizer's state, if this is not stored in another.
        stepped: the storage of the optimizer's parameters, 1-dim, as long as ``weights``.
        state: the tensors stored beside the weights, each 1-dim and as long as ``weights``.
    """

    needs_fused_step: ClassVar[str | None] = None
    """The setting that only a fused step can follow, as for masters that exist only during it; None: any step can."""
    are_compared: ClassVar[bool] = False
    """Whether :meth:`read` costs passes over memory that are needed only after changes of weights in place."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights
        self.dtype = weights.dtype
        self.stepped = weights
        self.state: tuple[torch.Tensor, ...] = ()

    def part(self, own: slice) -> Self:
        """The storage of a slice, which shares memory."""
        part = copy.copy(self)
        part.weights = self.weights[own]
        part.stepped = part.weights if self.stepped is self.weights else self.stepped[own]
        part.state = ()
        return part

    def read(self, own: slice, scratch: Scratch | None = None, *, compare: bool = True) -> torch.Tensor:
        """The values that are stepped in a slice; a view of :attr:`stepped` if that holds them, else of ``scratch``.

        If a master does not round to its weight, the weight was changed in place, and the master takes its value.
        ``compare``: False if no weight was changed since the last step
        (:class:`~paramp.optim.changes.in_place.ChangedWeights`).
        """
        return sliced(self.stepped, own)

    def write(self, own: slice, values: torch.Tensor, scratch: Scratch | None = None) -> None:
        """Store ``values``, floating point, and round them to the weights."""
        _copy_unless_same(sliced(self.weights, own), values)

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
        start: where this storage begins in the rank's part of the buffer, if it is a part of the rank's.
        random_bits: that of the :class:`~paramp.optim.flat_buffer.Buffer`, which sets it.
    """

    needs_fused_step = "rounding: got 'stochastic'"

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__(weights)
        self.start = 0
        self.random_bits: Callable[[slice], Iterator[tuple[slice, Callable[[int], torch.Tensor]]]]

    def part(self, own: slice) -> Self:
        part = super().part(own)
        part.start = self.start + own.start
        return part

    def write_stepped(self, own: slice, values: torch.Tensor, scratch: Scratch | None = None) -> None:
        weights, first = sliced(self.weights, own), self.start + (own.start or 0)
        for part, bits in self.random_bits(slice(first, first + len(values))):
            weights[part].copy_(rounded(values[part], bits(0), weights.dtype))


class FullMasters(NoMasters):
    """Masters in fp32."""

    are_compared = True

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__(weights)
        self.dtype = torch.float32
        self.stepped = zeros_apart(len(weights), torch.float32, weights.device)
        self.state = (self.stepped,)

    def read(self, own: slice, scratch: Scratch | None = None, *, compare: bool = True) -> torch.Tensor:
        master = sliced(self.stepped, own)
        if compare:
            follow(sliced(self.weights, own), master, scratch)
        return master

    def write(self, own: slice, values: torch.Tensor, scratch: Scratch | None = None) -> None:
        _copy_unless_same(sliced(self.stepped, own), values)
        sliced(self.weights, own).copy_(values)

    def round_to_weights(self) -> None:
        self.weights.copy_(self.stepped)


class ResidualMasters(NoMasters):
    """The lower 16 bits of the masters; the weights are the upper part (:mod:`paramp.precision.master_residuals`)."""

    needs_fused_step = "masters: got 'remainder'"

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__(weights)
        self.dtype = torch.float32
        self.remainders = zeros_apart(len(weights), torch.int16, weights.device)
        self.state = (self.remainders,)

    def part(self, own: slice) -> Self:
        part = super().part(own)
        part.remainders = self.remainders[own]
        return part

    def read(self, own: slice, scratch: Scratch | None = None, *, compare: bool = True) -> torch.Tensor:
        weight = sliced(self.weights, own)
        master = join(weight, sliced(self.remainders, own), scratch)
        # After a change in place, weight and remainder may not fit together: a zero with the remainder of another
        # bfloat16 may be NaN. So they are compared in any case.
        follow(weight, master, scratch)
        return master

    def write(self, own: slice, values: torch.Tensor, scratch: Scratch | None = None) -> None:
        split(values.float(), sliced(self.weights, own), sliced(self.remainders, own), scratch)

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


def sliced(flat: torch.Tensor, own: slice) -> torch.Tensor:
    """``flat[own]``; ``flat`` itself if that is all of it, because a view costs a microsecond."""
    return flat if own == ALL else flat[own]


def _copy_unless_same(stored: torch.Tensor, values: torch.Tensor) -> None:
    if stored.data_ptr() != values.data_ptr():  # values stepped in place need no copy
        stored.copy_(values)
