"""Flat buffers of parameters, gradients and masters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..base.dtensor import local, version, wrap
from ..precision.policy import Precision
from .grad_norm import BLOCK

__all__ = ["Buffer", "Run", "Slot"]

ALIGNMENT = 64
"""Elements. Every parameter begins on a multiple, so that vectorized kernels see no odd ends, wherever they begin."""
BUCKET = 2**25
"""Elements of a buffer from which on the next parameter goes to another one: what is reduced over data ranks at once,
and what is there twice while weights move in."""


@dataclass(eq=False)
class Slot:
    """The place of one trained parameter."""

    name: str
    parameter: nn.Parameter
    group: int
    """Its param group in the optimizer."""
    share: float
    """What one of its elements counts in a sum over the model group and, without ZeRO, the data ranks."""
    start: int = 0
    """Where it begins in its buffer."""
    own: tuple[int, int] = (0, 0)
    """The part of the parameter, flattened, that this rank steps."""
    gradient: torch.Tensor | None = None
    """The view of the buffer's gradients for ``parameter.grad``; a DTensor where the parameter is one. None before
    there are gradients."""
    seen: int = 0
    """The version of the gradient when it was last known to be zero."""
    misplaced: bool = False
    """Autograd's gradients have other placements than the parameter, so that adding them up in the buffer would cost
    a collective in every backward; they are brought there once a step."""

    @property
    def size(self) -> int:
        return local(self.parameter).numel()

    @property
    def local_gradient(self) -> torch.Tensor:
        assert self.gradient is not None
        return local(self.gradient)

    @property
    def version(self) -> int:
        """Grows with every change of the gradient in its buffer."""
        return 0 if self.gradient is None else version(self.gradient)


@dataclass(frozen=True)
class Run:
    """Neighbours in a buffer that are stepped alike."""

    buffer: Buffer
    start: int
    """In the buffer."""
    own_start: int
    """In this rank's part of it."""
    length: int
    group: int
    share: float
    slots: tuple[Slot, ...]

    def in_blocks(self) -> Iterator[torch.Tensor]:
        """The gradient, cut where a block of the buffer begins, so that it adds up alike however it is shared out."""
        stop = self.start + self.length
        first = min(_aligned(self.start, BLOCK), stop)
        for part in (self.buffer.gradients[self.start : first], self.buffer.gradients[first:stop]):
            if part.numel():
                yield part


class Buffer:
    """Trained parameters of one dtype, one after the other.

    Attributes:
        weights, gradients: of all of them; gradients only once there are any.
        masters, remainders: of what this rank steps, where the mode has them.
        num_parts, part: how many ranks share the optimizer's work, and which of them this is.
        own_size: elements of a part.
    """

    def __init__(self, slots: Sequence[Slot], precision: Precision, num_parts: int, part: int) -> None:
        first = local(slots[0].parameter)
        self.slots = list(slots)
        self.num_parts = num_parts
        self.part = part
        stop = 0
        for slot in slots:
            slot.start, stop = stop, stop + _aligned(slot.size)
        self.own_size = _aligned(-(-stop // num_parts), BLOCK)
        self.own_start = part * self.own_size
        for slot in slots:
            low = min(max(slot.start, self.own_start), self.own_start + self.own_size)
            high = max(min(slot.start + slot.size, self.own_start + self.own_size), low)
            slot.own = (low - slot.start, high - slot.start)
        self.weights = torch.zeros(self.own_size * num_parts, dtype=first.dtype, device=first.device)
        self.gradients = self.weights[:0]
        self.gradient_dtype = precision.grad_dtype or first.dtype
        self.masters: torch.Tensor | None = None
        self.remainders: torch.Tensor | None = None
        half = first.dtype.itemsize == 2
        if half and precision.masters == "remainder":
            self.remainders = torch.zeros(self.own_size, dtype=torch.int16, device=first.device)
        elif half and precision.masters:
            self.masters = torch.zeros(self.own_size, dtype=torch.float32, device=first.device)

    def make_gradients(self) -> None:
        """Make room for gradients, and the views of it."""
        self.gradients = torch.zeros_like(self.weights, dtype=self.gradient_dtype)
        for slot in self.slots:
            gradient, parameter = self.view(self.gradients, slot), slot.parameter
            if gradient.dtype is not parameter.dtype:
                parameter.grad_dtype = gradient.dtype
            slot.gradient = wrap(gradient, parameter) if isinstance(parameter, DTensor) else gradient

    @property
    def stepped_dtype(self) -> torch.dtype:
        """What the optimizer steps in, and keeps its state in."""
        return self.weights.dtype if self.masters is None and self.remainders is None else torch.float32

    def view(self, flat: torch.Tensor, slot: Slot) -> torch.Tensor:
        """The place of ``slot`` in ``flat``, of the shape of its local part. It counts its own in-place changes."""
        view = torch.empty(0, dtype=flat.dtype, device=flat.device)
        return view.set_(flat.untyped_storage(), slot.start, local(slot.parameter).shape)  # type: ignore[call-overload]

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``flat``, which is as long as the weights."""
        return flat[self.own_start : self.own_start + self.own_size]

    def flat_range(self, slot: Slot) -> slice:
        """Where the part of ``slot`` that this rank steps lies in the whole buffer."""
        return slice(slot.start + slot.own[0], slot.start + slot.own[1])

    def own_range(self, slot: Slot) -> slice:
        """Where that part lies in this rank's part of the buffer."""
        return slice(slot.start + slot.own[0] - self.own_start, slot.start + slot.own[1] - self.own_start)

    def runs(self, absent: Iterable[Slot], missed: Mapping[Slot, int]) -> Iterator[Run]:
        """What this rank steps, in the longest ranges of one group, one share and the same steps ``missed``."""
        left_out = set(absent)
        here = (slot for slot in self.slots if slot.own[0] < slot.own[1])
        for kind, neighbours in itertools.groupby(
            here, lambda slot: (slot in left_out, slot.group, slot.share, missed.get(slot, 0))
        ):
            slots = tuple(neighbours)
            if not kind[0]:
                low = max(slots[0].start, self.own_start)
                high = min(slots[-1].start + _aligned(slots[-1].size), self.own_start + self.own_size)
                yield Run(self, low, low - self.own_start, high - low, slots[0].group, slots[0].share, slots)


def _aligned(size: int, alignment: int = ALIGNMENT) -> int:
    return -(-size // alignment) * alignment


def _in_buckets(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    together: list[Slot] = []
    for slot in slots:
        together.append(slot)
        if sum(member.size for member in together) >= BUCKET:
            yield together
            together = []
    if together:
        yield together
