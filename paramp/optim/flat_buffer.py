"""Flat buffers of parameters, gradients and masters of one dtype, and their ranges in a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import nn

from ..base import loop_block_sizes
from ..base.dtensor import is_dtensor, local, wrap
from ..base.scratch_memory_cpu import Scratch
from ..base.staggered_memory_cpu import zeros_apart
from ..base.torch_internals import take
from ..precision.modes import Precision
from ..precision.stochastic_rounding import BitStream, flat_index, rounded
from ..scaling.local_norm import NORM_BLOCK
from .masters import Masters, sliced
from .remainder_masters import RemainderMasters

if TYPE_CHECKING:
    from ..distributed.context import Axis

ALIGNMENT = 64
"""Elements. Every parameter begins on a multiple, so that vectorized kernels handle no remainder."""


class StochasticWeights(Masters):
    """Half-precision weights without masters, rounded stochastically.

    Attributes:
        start: where this weight begins in the rank's part of the buffer, if it is a part of the rank's.
        random_bits: that of the :class:`Buffer`, which sets it.
    """

    needs_fused_step = "rounding: got 'stochastic'"

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight)
        self.start = 0
        self.random_bits: Callable[[slice], Iterator[tuple[slice, Callable[[int], torch.Tensor]]]]

    def part(self, own: slice) -> Self:
        part = super().part(own)
        part.start = self.start + own.start
        return part

    def write_stepped(self, own: slice, values: torch.Tensor, scratch: Scratch | None = None) -> None:
        weight, first = sliced(self.weight, own), self.start + (own.start or 0)
        for part, bits in self.random_bits(slice(first, first + len(values))):
            weight[part].copy_(rounded(values[part], bits(0), weight.dtype))


MASTERS: dict[bool | str, Callable[[torch.Tensor], Masters]] = {
    False: Masters,
    "stochastic": StochasticWeights,
    True: lambda weight: Masters(weight, zeros_apart(len(weight), torch.float32, weight.device)),
    "remainder": RemainderMasters,
}
"""The masters for each value of :attr:`paramp.Precision.masters`, and for stochastic rounding without masters."""


class Units(Protocol):
    """What is needed of :class:`paramp.parallel.fsdp.units.ShardedUnits`."""

    def padded_sizes(self) -> Mapping[nn.Parameter, int]: ...

    def use_memory(self, memory: Mapping[nn.Parameter, torch.Tensor]) -> None: ...

    def put_back(self, memory: Mapping[nn.Parameter, torch.Tensor]) -> None: ...

    def after_reshard(self, call: Callable[[], object]) -> Callable[[], object]: ...

    def on_gradient(self, call: Callable[[torch.Tensor], None]) -> Callable[[], None]: ...

    def take_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None: ...


@dataclass(eq=False, kw_only=True)
class FlatParam:
    """One trained parameter, and its position in a buffer."""

    name: str
    parameter: nn.Parameter
    optimizer: int
    """The index of the optimizer that steps it."""
    group: int
    """The index of its param group in that optimizer."""
    norm_weight: float
    """The weight of one element in a sum over the world: 1 / the number of ranks that count it."""
    data_axis: Axis
    """The data ranks that hold the parameter: its gradient is summed over them, and ZeRO partitions it over them."""
    reserved: int = 0
    """The elements that it takes in its buffer at least: FSDP2 pads shards to one size; the padding is zero."""
    buffer: Buffer = field(init=False, repr=False)
    """Where it is stored."""
    start: int = field(init=False, default=0)
    """Its offset in its buffer, in elements."""
    own: tuple[int, int] = field(init=False, default=(0, 0))
    """The slice of the parameter, flattened, that this rank steps: all of it without ZeRO."""
    stepped: nn.Parameter | None = field(init=False, default=None)
    """The tensor that the optimizer steps in its place: plain and local, with ZeRO this rank's part, 1-dim (0-dim for a
    0-dim parameter). None if this rank has no element of it."""
    gradient: torch.Tensor | None = field(init=False, default=None)
    """The view of the buffer's gradients for ``parameter.grad``; a DTensor if the parameter is one. None before the
    gradients are allocated."""
    placement_mismatch: bool = field(init=False, default=False)
    """Autograd's gradients have other placements than the parameter. Accumulating them in the buffer would cost a
    collective in every backward, so they accumulate outside and are copied there once per step."""
    bits: BitStream | None = field(init=False, default=None)
    """Random bits to round with, from :meth:`~paramp.optim.flat_weights.FlatWeights.round_stochastically`."""

    @property
    def size(self) -> int:
        return local(self.parameter).numel()

    @property
    def local_gradient(self) -> torch.Tensor:
        assert self.gradient is not None
        return local(self.gradient)

    @property
    def flat_range(self) -> slice:
        """The range, in the whole buffer, of what this rank steps."""
        return slice(self.start + self.own[0], self.start + self.own[1])

    @property
    def own_range(self) -> slice:
        """The range of the same part, relative to this rank's part of the buffer, as its masters expect."""
        return slice(self.flat_range.start - self.buffer.own_start, self.flat_range.stop - self.buffer.own_start)

    @property
    def stepped_gradient(self) -> torch.Tensor:
        """The gradient of what this rank steps, 1-dim, in the buffer."""
        return self.buffer.gradients[self.flat_range]

    @property
    def version(self) -> int:
        """A number that grows with every change of the gradient in its buffer."""
        # Autograd's accumulation changes a DTensor's counter, all else that of its local tensor.
        return 0 if self.gradient is None else self.gradient._version + self.local_gradient._version


class Buffer:
    """Trained parameters of one dtype and data axis, one after the other, each on a multiple of 64 elements.

    Attributes:
        data_axis: that of the parameters.
        weights: 1-dim, in the parameters' dtype.
        gradients: 1-dim, as long as ``weights``; empty before :meth:`make_gradients`.
        masters: the storage of the masters that this rank steps.
        rounds_state: whether elementwise optimizer state is rounded stochastically to bfloat16 after each step.
        average: the averages of the values that this rank steps, 1-dim, of ``own_size``; None if there are none.
        num_parts: the number of ranks over which ZeRO partitions the buffer; this rank steps elements ``own_start`` to
            ``own_start + own_size``.
    """

    def __init__(self, params: Sequence[FlatParam], precision: Precision, *, is_partitioned: bool) -> None:
        first, self.data_axis = local(params[0].parameter), params[0].data_axis
        self.params = list(params)
        self.num_parts = num_parts = self.data_axis.size if is_partitioned else 1
        part = self.data_axis.rank if is_partitioned else 0
        stop = 0
        for param in params:
            param.buffer, param.start = self, stop
            stop += aligned(max(param.size, param.reserved))
        # A multiple of the norm's blocks, so that the norm has the same bits for any number of ranks.
        self.own_size = aligned(-(-stop // num_parts), NORM_BLOCK)
        self.own_start = part * self.own_size
        own_stop = self.own_start + self.own_size
        for param in params:
            low = min(max(param.start, self.own_start), own_stop)
            param.own = (low - param.start, max(min(param.start + param.size, own_stop), low) - param.start)
        self.weights = zeros_apart(self.own_size * num_parts, first.dtype, first.device)
        self.gradients = self.weights[:0]
        asked = None if first.is_complex() else precision.grad_dtype  # a real one would lose the imaginary parts
        self.gradient_dtype = asked or first.dtype
        kind = precision.masters or (precision.rounding == "stochastic" and "stochastic")
        self.masters = MASTERS[kind if first.dtype.itemsize == 2 else False](self.own(self.weights))
        if isinstance(self.masters, StochasticWeights):
            self.masters.random_bits = self.random_bits
        self.rounds_state = precision.optimizer_state == "bf16"
        self.average: torch.Tensor | None = None

    def make_gradients(self) -> None:
        """Allocate the gradients, as zeros, and each parameter's view of them."""
        self.gradients = zeros_apart(len(self.weights), self.gradient_dtype, self.weights.device)
        for param in self.params:
            gradient, parameter = self.view(self.gradients, param), param.parameter
            if gradient.dtype is not parameter.dtype:
                parameter.grad_dtype = gradient.dtype
            param.gradient = wrap(gradient, parameter) if is_dtensor(parameter) else gradient

    def make_average(self) -> None:
        """Allocate the averages, at least in fp32, as zeros."""
        dtype = torch.promote_types(self.masters.dtype, torch.float32)
        self.average = torch.zeros_like(self.own(self.weights), dtype=dtype)

    def random_bits(self, own: slice) -> Iterator[tuple[slice, Callable[[int], torch.Tensor]]]:
        """For each parameter in a slice of this rank's part: its range in the slice, and the bits of its elements.

        The bits are a function of a word, as :class:`~paramp.precision.stochastic_rounding.BitStream` has them.
        """
        for param in self.params:
            held = param.own_range
            start, stop = max(held.start, own.start), min(held.stop, own.stop)
            if start < stop:
                assert param.bits is not None
                first = param.own[0] - held.start  # from the rank's part of the buffer to the parameter
                index = whole_index(param.parameter, start + first, stop + first)
                yield slice(start - own.start, stop - own.start), partial(param.bits, index)

    def view(self, flat: torch.Tensor, param: FlatParam) -> torch.Tensor:
        """The view of ``param`` in ``flat``, of the shape of its local part.

        Not made by indexing: those views share a version counter, but each parameter's changes are counted separately.
        """
        view = torch.empty(0, dtype=flat.dtype, device=flat.device)
        start = flat.storage_offset() + param.start
        return view.set_(flat.untyped_storage(), start, local(param.parameter).shape)  # type: ignore[call-overload]

    def memory(self, param: FlatParam) -> torch.Tensor:
        """The memory that ``param`` takes in :attr:`weights`, with the padding that it :attr:`~FlatParam.reserved`."""
        return self.weights[param.start : param.start + max(param.size, param.reserved)]

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``flat``, 1-dim and as long as the weights."""
        return flat[self.own_start : self.own_start + self.own_size]


def whole_index(parameter: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The indices in the whole, flattened tensor of elements ``start`` to ``stop - 1`` of its flattened local part."""
    shape, part, offsets = tuple(parameter.shape), tuple(local(parameter).shape), (0,) * parameter.ndim
    if is_dtensor(parameter):
        local_shape_and_offset = take("torch.distributed.tensor._utils.compute_local_shape_and_global_offset")
        found = local_shape_and_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        offsets = tuple(found[1])
    return flat_index(start, stop, part, offsets, shape, local(parameter).device)


def aligned(size: int, alignment: int = ALIGNMENT) -> int:
    """``size`` rounded up to a multiple."""
    return -(-size // alignment) * alignment


def in_buckets(params: Sequence[FlatParam]) -> Iterator[list[FlatParam]]:
    """``params`` in consecutive lists, one for each buffer."""
    first = size = 0
    for index, param in enumerate(params):
        size += param.size
        if size >= loop_block_sizes.BUCKET or index == len(params) - 1:
            yield list(params[first : index + 1])
            first, size = index + 1, 0


@dataclass(frozen=True)
class StepRange:
    """Neighbours in a buffer that are stepped with the same options, the same norm weight and the same step count."""

    buffer: Buffer
    start: int
    """The offset in the buffer."""
    length: int
    group: int
    norm_weight: float
    params: tuple[FlatParam, ...]

    @property
    def own_start(self) -> int:
        """The offset in this rank's part of the buffer."""
        return self.start - self.buffer.own_start

    def in_blocks(self) -> Iterator[torch.Tensor]:
        """The gradient, 1-dim, split at a block of the norm, so that the norm has the same bits in any layout."""
        stop = self.start + self.length
        first = min(aligned(self.start, NORM_BLOCK), stop)
        for part in (self.buffer.gradients[self.start : first], self.buffer.gradients[first:stop]):
            if part.numel():
                yield part


def step_ranges(
    buffers: Iterable[Buffer], absent: Collection[FlatParam] = (), missed: Mapping[FlatParam, int] | None = None
) -> list[StepRange]:
    """The ranges of ``buffers`` that this rank steps without the parameters in ``absent``.

    ``missed``: a number for each parameter, equal for those that have missed the same steps; None: none has.
    """
    return [one for buffer in buffers for one in _ranges_of(buffer, set(absent), missed or {})]


def _ranges_of(buffer: Buffer, absent: set[FlatParam], missed: Mapping[FlatParam, int]) -> Iterator[StepRange]:
    here = (param for param in buffer.params if param.own[0] < param.own[1])
    for kind, neighbours in itertools.groupby(
        here, lambda param: (param in absent, param.group, param.norm_weight, missed.get(param, 0))
    ):
        params = tuple(neighbours)
        if not kind[0]:
            low = max(params[0].start, buffer.own_start)
            high = min(params[-1].start + aligned(params[-1].size), buffer.own_start + buffer.own_size)
            yield StepRange(buffer, low, high - low, *kind[1:3], params)
