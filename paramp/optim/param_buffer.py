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

__all__ = ["Buffer", "FlatParam", "StepRange"]

ALIGNMENT = 64
"""Elements. Every parameter begins on a multiple, so that vectorized kernels see no odd ends, wherever they begin."""
BUCKET = 2**25
"""Elements of a buffer from which on the next parameter goes to another one: what is reduced over data ranks at once,
and what is there twice while weights move in."""


@dataclass(eq=False)
class FlatParam:
    """The place of one trained parameter."""

    name: str
    parameter: nn.Parameter
    group: int
    """Its param group in the optimizer."""
    norm_weight: float
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
    placement_mismatch: bool = False
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
class StepRange:
    """Neighbours in a buffer that are stepped alike."""

    buffer: Buffer
    start: int
    """In the buffer."""
    own_start: int
    """In this rank's part of it."""
    length: int
    group: int
    norm_weight: float
    params: tuple[FlatParam, ...]

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

    def __init__(self, params: Sequence[FlatParam], precision: Precision, num_parts: int, part: int) -> None:
        first = local(params[0].parameter)
        self.params = list(params)
        self.num_parts = num_parts
        self.part = part
        stop = 0
        for param in params:
            param.start, stop = stop, stop + _aligned(param.size)
        self.own_size = _aligned(-(-stop // num_parts), BLOCK)
        self.own_start = part * self.own_size
        for param in params:
            low = min(max(param.start, self.own_start), self.own_start + self.own_size)
            high = max(min(param.start + param.size, self.own_start + self.own_size), low)
            param.own = (low - param.start, high - param.start)
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
        for param in self.params:
            gradient, parameter = self.view(self.gradients, param), param.parameter
            if gradient.dtype is not parameter.dtype:
                parameter.grad_dtype = gradient.dtype
            param.gradient = wrap(gradient, parameter) if isinstance(parameter, DTensor) else gradient

    @property
    def stepped_dtype(self) -> torch.dtype:
        """What the optimizer steps in, and keeps its state in."""
        return self.weights.dtype if self.masters is None and self.remainders is None else torch.float32

    def view(self, flat: torch.Tensor, param: FlatParam) -> torch.Tensor:
        """The place of ``slot`` in ``flat``, of the shape of its local part. It counts its own in-place changes."""
        view = torch.empty(0, dtype=flat.dtype, device=flat.device)
        return view.set_(flat.untyped_storage(), param.start, local(param.parameter).shape)  # type: ignore[call-overload]

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``flat``, which is as long as the weights."""
        return flat[self.own_start : self.own_start + self.own_size]

    def flat_range(self, param: FlatParam) -> slice:
        """Where the part of ``slot`` that this rank steps lies in the whole buffer."""
        return slice(param.start + param.own[0], param.start + param.own[1])

    def own_range(self, param: FlatParam) -> slice:
        """Where that part lies in this rank's part of the buffer."""
        return slice(param.start + param.own[0] - self.own_start, param.start + param.own[1] - self.own_start)

    def runs(self, absent: Iterable[FlatParam], missed: Mapping[FlatParam, int]) -> Iterator[StepRange]:
        """What this rank steps, in the longest ranges of one group, one share and the same steps ``missed``."""
        left_out = set(absent)
        here = (param for param in self.params if param.own[0] < param.own[1])
        for kind, neighbours in itertools.groupby(
            here, lambda param: (param in left_out, param.group, param.norm_weight, missed.get(param, 0))
        ):
            params = tuple(neighbours)
            if not kind[0]:
                low = max(params[0].start, self.own_start)
                high = min(params[-1].start + _aligned(params[-1].size), self.own_start + self.own_size)
                yield StepRange(
                    self, low, low - self.own_start, high - low, params[0].group, params[0].norm_weight, params
                )


def _aligned(size: int, alignment: int = ALIGNMENT) -> int:
    return -(-size // alignment) * alignment


def _in_buckets(params: Sequence[FlatParam]) -> Iterator[list[FlatParam]]:
    together: list[FlatParam] = []
    for param in params:
        together.append(param)
        if sum(member.size for member in together) >= BUCKET:
            yield together
            together = []
    if together:
        yield together
