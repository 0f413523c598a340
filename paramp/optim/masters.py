"""fp32 masters of half-precision weights: what is stepped in place of weights, and how these follow it and it them.

==========================  ==================================  ======================================================
``Precision.masters``       stored beside the weights           stepped by the optimizer
==========================  ==================================  ======================================================
``False``                   nothing                             the weights
``"stochastic"``            nothing                             the weights, rounded stochastically after a fused step
``True``                    fp32 masters, 4 bytes a weight      the masters, which are then rounded to the weights
``"remainder"``             int16 remainders, 2 bytes a weight  masters, joined block by block, only during a step
                                                                (:mod:`.remainder_masters`)
==========================  ==================================  ======================================================

An engine has one :class:`Masters` for the part of each flat buffer that this rank steps. Loops without flat buffers
have one for each parameter (:mod:`.masters_outside_buffers`).
"""

from __future__ import annotations

import copy
from typing import ClassVar, Self

import torch

from ..base.scratch_memory_cpu import Scratch

ALL = slice(None)


class Masters:
    """A weight, and what is stepped in its place: another tensor, its fp32 master, or the weight itself.

    Slices are of 1-dim weights.

    Attributes:
        weight: the weights that this rank steps: a view of their buffer, 1-dim, or a parameter.
        stepped: the storage of the optimizer's parameters, as long as ``weight``.
        dtype: that of the values that are stepped, and of the optimizer's state, if this is not stored in another.
        state: the tensors stored beside the weights, each as long as they.
    """

    needs_fused_step: ClassVar[str | None] = None
    """The setting that only a fused step can follow, as for masters that exist only during it; None: any step can."""

    def __init__(self, weight: torch.Tensor, stepped: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.stepped = weight if stepped is None else stepped
        self.dtype = self.stepped.dtype
        self.state = (self.stepped,) if self.has_master else ()

    @property
    def has_master(self) -> bool:
        """Whether :attr:`stepped` is a master, which has another dtype than the weight, and follows its changes."""
        return self.weight.dtype is not self.stepped.dtype

    def part(self, own: slice) -> Self:
        """The masters of a slice, which share memory."""
        part = copy.copy(self)
        part.weight = self.weight[own]
        part.stepped = part.weight if self.stepped is self.weight else self.stepped[own]
        part.state = ()
        return part

    def read(self, own: slice, scratch: Scratch | None = None, *, compare: bool = True) -> torch.Tensor:
        """The values that are stepped in a slice; a view of :attr:`stepped` if that holds them, else of ``scratch``.

        If a master does not round to its weight, the weight was changed in place, and the master takes its value.
        ``compare``: False if no weight was changed since the last step
        (:class:`~paramp.optim.user_changes.weights_changed_in_place.ChangedWeights`).
        """
        stepped = sliced(self.stepped, own)
        if compare and self.has_master:
            follow(sliced(self.weight, own), stepped, scratch)
        return stepped

    def write(self, own: slice, values: torch.Tensor, scratch: Scratch | None = None) -> None:
        """Store ``values``, floating point, and round them to the weights."""
        stepped = sliced(self.stepped, own)
        if stepped.data_ptr() != values.data_ptr():  # values stepped in place need no copy
            stepped.copy_(values)
        if self.has_master:
            sliced(self.weight, own).copy_(values)

    def write_stepped(self, own: slice, values: torch.Tensor, scratch: Scratch | None = None) -> None:
        """As :meth:`write`, for the values of a fused step."""
        self.write(own, values, scratch)

    def follow_load(self, own: slice) -> None:
        """Update masters after weights were loaded."""
        self.read(own)


def sliced(flat: torch.Tensor, own: slice) -> torch.Tensor:
    """``flat[own]``; ``flat`` itself if that is all of it, because a view costs a microsecond."""
    return flat if own == ALL else flat[own]


def follow(weight: torch.Tensor, master: torch.Tensor, scratch: Scratch | None = None) -> None:
    """Give ``master`` (float32) the value of ``weight`` (2 bytes) in each element that does not round to its bits.

    In place, same shapes; 1-dim if ``scratch`` is given, which holds the temporary.
    """
    rounded = scratch.like("rounded", weight, weight.dtype) if scratch else torch.empty_like(weight)
    changed = rounded.copy_(master).view(torch.int16).bitwise_xor_(weight.view(torch.int16))
    # Mostly nothing has changed. On a CPU the check costs less than the write; on a GPU it would synchronise.
    if weight.device.type == "cpu" and not changed.flatten().view(torch.uint8).any():  # any() is fast for bytes only
        return
    torch.where(changed == 0, master, weight, out=master)
