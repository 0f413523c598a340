"""A flat buffer: parameters, gradients and masters of one dtype, one after the other; and its ranges in a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..base.dtensor import is_dtensor, local, version, wrap
from ..precision.policy import Precision
from .grad_norm import NORM_BLOCK
from .master_storage import MASTER_STORAGE

ALIGNMENT = 64
"""Elements. Every parameter begins on a multiple, so that vectorized kernels see no odd ends, wherever they begin."""
BUCKET = 2**25
"""Elements from which on a buffer takes no further parameter: what one collective reduces over data ranks, and the most
memory that exists twice while parameters are copied into their buffers."""


@dataclass(eq=False)
class FlatParam:
    """One trained parameter, and its place in a buffer."""

    name: str
    parameter: nn.Parameter
    group: int
    """The index of its param group in the optimizer."""
    norm_weight: float
    """What one of its elements counts in a sum over the world: 1 / the number of ranks that count it."""
    start: int = 0
    """Where it begins in its buffer, in elements."""
    own: tuple[int, int] = (0, 0)
    """The slice of the parameter, flattened, that this rank steps: all of it without ZeRO."""
    gradient: torch.Tensor | None = None
    """The view of the buffer's gradients for ``parameter.grad``; a DTensor where the parameter is one. None before
    there are gradients."""
    seen: int = 0
    """The version of the gradient when it was last known to be zero."""
    placement_mismatch: bool = False
    """Autograd's gradients have other placements than the parameter. Adding them up in the buffer would cost a
    collective in every backward, so they add up outside and move there once a step."""

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


class Buffer:
    """Trained parameters of one dtype, one after the other, each beginning on a multiple of 64 elements.

    Attributes:
        weights: 1-dim, in the parameters' dtype.
        gradients: 1-dim, as long as ``weights``; empty before :meth:`make_gradients`.
        masters: how the masters of what this rank steps are stored.
        num_parts: how many ranks partition the optimizer's work; this one has elements ``own_start`` to ``own_start +
            own_size``.
    """

    def __init__(self, params: Sequence[FlatParam], precision: Precision, num_parts: int, part: int) -> None:
        first = local(params[0].parameter)
        self.params = list(params)
        self.num_parts = num_parts
        stop = 0
        for param in params:
            param.start, stop = stop, stop + _aligned(param.size)
        # In whole blocks of the norm, so that it adds up to the same bits however many ranks there are.
        self.own_size = _aligned(-(-stop // num_parts), NORM_BLOCK)
        self.own_start = part * self.own_size
        own_stop = self.own_start + self.own_size
        for param in params:
            low = min(max(param.start, self.own_start), own_stop)
            param.own = (low - param.start, max(min(param.start + param.size, own_stop), low) - param.start)
        self.weights = torch.zeros(self.own_size * num_parts, dtype=first.dtype, device=first.device)
        self.gradients = self.weights[:0]
        self.gradient_dtype = precision.grad_dtype or first.dtype
        storage = MASTER_STORAGE[precision.masters if first.dtype.itemsize == 2 else False]
        self.masters = storage(self.own(self.weights))

    def make_gradients(self) -> None:
        """Allocate the gradients, zeros, and each parameter's view of them."""
        self.gradients = torch.zeros_like(self.weights, dtype=self.gradient_dtype)
        for param in self.params:
            gradient, parameter = self.view(self.gradients, param), param.parameter
            if gradient.dtype is not parameter.dtype:
                parameter.grad_dtype = gradient.dtype
            param.gradient = wrap(gradient, parameter) if is_dtensor(parameter) else gradient

    def view(self, flat: torch.Tensor, param: FlatParam) -> torch.Tensor:
        """The place of ``param`` in ``flat``, of the shape of its local part.

        Not by indexing: views of one tensor share a version counter, and here each counts its own in-place changes.
        """
        view = torch.empty(0, dtype=flat.dtype, device=flat.device)
        return view.set_(flat.untyped_storage(), param.start, local(param.parameter).shape)  # type: ignore[call-overload]

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``flat``, 1-dim and as long as the weights."""
        return flat[self.own_start : self.own_start + self.own_size]

    def flat_range(self, param: FlatParam) -> slice:
        """Where the part of ``param`` that this rank steps lies in the whole buffer."""
        return slice(param.start + param.own[0], param.start + param.own[1])

    def own_range(self, param: FlatParam) -> slice:
        """Where that part lies in this rank's part of the buffer, as :attr:`masters` counts."""
        return slice(param.start + param.own[0] - self.own_start, param.start + param.own[1] - self.own_start)


def _aligned(size: int, alignment: int = ALIGNMENT) -> int:
    """``size`` rounded up to a multiple."""
    return -(-size // alignment) * alignment


def in_buckets(params: Sequence[FlatParam]) -> Iterator[list[FlatParam]]:
    """``params``, in their order, in the lists that each make one buffer."""
    first = size = 0
    for index, param in enumerate(params):
        size += param.size
        if size >= BUCKET or index == len(params) - 1:
            yield list(params[first : index + 1])
            first, size = index + 1, 0


@dataclass(frozen=True)
class StepRange:
    """Neighbours in a buffer that are stepped with the same options, the same norm weight and the same step count."""

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
        """The gradient, 1-dim, split where a block of the norm begins: so it adds up to the same bits on any layout."""
        stop = self.start + self.length
        first = min(_aligned(self.start, NORM_BLOCK), stop)
        for part in (self.buffer.gradients[self.start : first], self.buffer.gradients[first:stop]):
            if part.numel():
                yield part


class StepRanges:
    """The ranges that this rank steps. A parameter without a gradient on any rank is not stepped.

    Adam's bias correction counts each parameter's own steps, so parameters run together only if they have missed the
    same steps.

    Attributes:
        everything: the ranges if every parameter is stepped.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers
        self._missed: dict[FlatParam, int] = {}  # equal for parameters that have missed the same steps
        self._histories = itertools.count(1)
        self._absent: tuple[FlatParam, ...] = ()
        self.everything = self._current = self._made()

    def without(self, absent: Sequence[FlatParam]) -> list[StepRange]:
        """What the next step steps, where no rank has a gradient for the parameters in ``absent``."""
        if tuple(absent) != self._absent:
            self._absent = tuple(absent)
            self._current = self._made(self._absent)
        # Whether this step is skipped is known on the device only, so the absent are counted apart in either case.
        missed: dict[int, int] = {}
        for param in absent:
            before = self._missed.get(param, 0)
            if before not in missed:
                missed[before] = next(self._histories)
            self._missed[param] = missed[before]
        return self._current

    def set_step_counts(self, steps: Mapping[FlatParam, int]) -> None:
        """Take up from a loaded state how often each parameter was stepped: those with equal counts run together."""
        most = max(steps.values(), default=0)
        self._missed = {param: count - most for param, count in steps.items()}  # histories made later are above 0
        self._current = self._made(self._absent)

    def _made(self, absent: Sequence[FlatParam] = ()) -> list[StepRange]:
        return [part for buffer in self._buffers for part in _ranges_of(buffer, set(absent), self._missed)]


def _ranges_of(buffer: Buffer, absent: set[FlatParam], missed: Mapping[FlatParam, int]) -> Iterator[StepRange]:
    here = (param for param in buffer.params if param.own[0] < param.own[1])
    for kind, neighbours in itertools.groupby(
        here, lambda param: (param in absent, param.group, param.norm_weight, missed.get(param, 0))
    ):
        params = tuple(neighbours)
        if not kind[0]:
            low = max(params[0].start, buffer.own_start)
            high = min(params[-1].start + _aligned(params[-1].size), buffer.own_start + buffer.own_size)
            yield StepRange(buffer, low, low - buffer.own_start, high - low, *kind[1:3], params)
