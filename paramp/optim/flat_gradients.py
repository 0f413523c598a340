"""Gradients in flat buffers, from the backward to the reduced gradients that the optimizer steps with.

``parameter.grad`` is a view of its buffer, so that autograd accumulates there and a reduction over data ranks is one
collective for each buffer. Gradients that cannot accumulate in place (with placements other than their parameter's, or
replaced by the user) are copied there once per step.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING, cast

import torch
from torch.utils.hooks import RemovableHandle

from ..base.collectives import sum_
from ..base.dtensor import is_dtensor, local
from ..base.torch_internals import expect
from ..distributed.context import ParallelContext
from ..precision.policy import Precision
from ..scaling.grad_reduce import align_gradients, sum_tied_gradients, unscale_and_check_
from ..scaling.replicas import TiedParameter
from .master_weights import NamedParameters, check_frozen
from .param_buffer import Buffer, FlatParam, StepRange
from .zero import OverlappedReduceScatter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

expect("torch._foreach_copy_", "torch._foreach_zero_")

# Applied with map() to all parameters, several times a step: without a Python call for each.
GRADIENT = operator.attrgetter("grad")
LOCAL = operator.attrgetter("_local_tensor")
VERSION = operator.attrgetter("_version")
ADDRESS = torch.Tensor.data_ptr


class FlatGradients:
    """The gradients of one rank's trained parameters.

    Args:
        params: in the model's order.
        buffers: the buffers of ``params``, in the order in which the backward completes them.
        ranges: the ranges that this rank steps if every parameter has a gradient.
        frozen: the parameters that are not trained, by name.
        ties: the parameters that several pipeline stages hold a copy of.

    Attributes:
        overflow: 0-dim float32, set to 1 by modules that hide an overflow from their gradients (float8).
        fail: called with an error for gradients that a step cannot use.
        before_batch: called before the forward of each batch.
    """

    def __init__(
        self,
        params: Sequence[FlatParam],
        buffers: Sequence[Buffer],
        ranges: Sequence[StepRange],
        frozen: NamedParameters,
        ties: Sequence[TiedParameter],
        precision: Precision,
        context: ParallelContext,
    ) -> None:
        self._params = params
        self._parameters = [param.parameter for param in params]
        self._views: list[torch.Tensor | None] = [None] * len(params)  # each parameter's .grad, once it is allocated
        self._local_views: list[torch.Tensor] = []
        self._buffers = buffers
        self._buffer_of = {param: buffer for buffer in buffers for param in buffer.params}
        self._ranges = ranges
        self._frozen = frozen
        self._ties, self._tied = ties, {tie.parameter for tie in ties}
        self._tied_params = [param for param in params if param.parameter in self._tied]
        self.overflow = torch.zeros((), device=context.device)
        self.fail: Callable[[Exception], None] = _raise
        self._reduce_dtypes = precision.reduce_dtypes
        self._context = context
        self.before_batch: Callable[[], object] = lambda: None
        self._absent: list[FlatParam] = []
        self._noted = [0] * len(params)
        self._noted_outside: dict[FlatParam, tuple[torch.Tensor, tuple[int, ...]]] = {}
        self._zeros: dict[FlatParam, int] = dict.fromkeys(params, 0)
        """The version of each gradient when it was last known to be zero."""
        self._mismatched: list[FlatParam] = []
        self._addresses: _Addresses | None = None
        self._presence: tuple[tuple[str, ...], torch.Tensor] | None = None
        self._hooks = [
            param.parameter.register_hook(functools.partial(_find_mismatch, param, self._zeros, self._mismatched))
            for param in params
            if is_dtensor(param.parameter)
        ]
        self._overlapped: OverlappedReduceScatter | None = None
        if any(buffer.num_parts > 1 for buffer in buffers):
            reduce_dtype = self._reduce_dtypes.dp
            self._overlapped = OverlappedReduceScatter(buffers, context, reduce_dtype, self._tied, self._take_back)

    def complete(self) -> torch.Tensor:
        """Bring each gradient to its parameter's placements, and sum it over data ranks and tied copies.

        Returns this rank's flag, 0-dim float32: 1 if a non-finite gradient was then sharded, or cast to float8, so
        that the finite check would not find it.
        """
        found_inf = self.overflow.clone()
        self.overflow.zero_()
        try:
            self.before_batch()  # parameters may have been replaced since the backward
            self.check()
        except RuntimeError as error:
            self.fail(error)
        self.collect(found_inf)
        self.reduce()
        return found_inf

    def drop(self, *, overflow: bool = True) -> None:
        """Make all gradients zero, and forget an ``overflow`` that they hide."""
        self.zero_grad()
        for tie in self._ties:
            tie.summed = None
        if overflow:
            self.overflow.zero_()

    def zero_grad(self) -> None:
        """Set every gradient to zero: one fill for each buffer."""
        for buffer in self._buffers:
            buffer.gradients.zero_()
        for param in chain(self._outside(), self._mismatched):
            param.parameter.grad = None if param.placement_mismatch else param.gradient
        self.snapshot()
        self._zeros.update(zip(self._params, self._noted, strict=True))
        for _, parameter in self._frozen:  # one that was unfrozen since may have a gradient
            parameter.grad = None

    def begin_window(self) -> None:
        """Make each ``.grad`` a view of its buffer, so that backwards accumulate there; allocate at the first call.

        A backward that finds no ``.grad`` creates a new tensor, whose values :meth:`collect` copies.
        """
        if self._addresses is None:
            for buffer in self._buffers:
                buffer.make_gradients()
            self._views = [param.gradient for param in self._params]
            self._local_views = [param.local_gradient for param in self._params]
            self._addresses = _Addresses(self._buffer_of)
            self._zeros.update(zip(self._params, self._versions(), strict=True))
        if outside := self._outside():
            self._take_back(outside)

    def _outside(self) -> list[FlatParam]:
        """The parameters whose ``.grad`` is not the view of their buffer."""
        return list(compress(self._params, map(operator.is_not, map(GRADIENT, self._parameters), self._views)))

    def _versions(self) -> list[int]:
        """Each parameter's ``version``."""
        if self._addresses is None:
            return [0] * len(self._params)
        return list(map(operator.add, map(VERSION, self._views), map(VERSION, self._local_views)))

    @torch.no_grad()
    def _take_back(self, params: Iterable[FlatParam]) -> None:
        """Copy gradients that the user replaced, or set to None, back to their buffers, which ZeRO reduces.

        Those of ``params`` that are in their buffers stay as they are.
        """
        for param in params:
            given = param.parameter.grad
            if given is param.gradient or (param.placement_mismatch and given is not None):
                continue
            if given is None:
                if param.version != self._zeros[param]:  # the buffer has values, but the user has dropped them
                    param.local_gradient.zero_()
                    self._zeros[param] = param.version
                if param.placement_mismatch:
                    continue
            elif is_dtensor(given) and given.placements != cast("DTensor", param.parameter).placements:
                continue  # collect() redistributes it to the parameter's placements, together with others
            else:
                param.local_gradient.copy_(local(given).to_dense())
            param.parameter.grad = param.gradient

    def check(self) -> None:
        """Raise a RuntimeError for gradients that a step would ignore.

        A frozen parameter has a gradient, or a parameter or gradient was moved out of its buffer.
        """
        if any(parameter.grad is not None for _, parameter in self._frozen):
            check_frozen(self._frozen)
        self.begin_window()
        moved = self._addresses.moved() if self._addresses is not None else None
        if moved is not None:
            raise RuntimeError(
                f"{moved.name!r} was moved after initialize (its .data was replaced, or its module was cast or given "
                "another memory format), so that steps would not change it; do that before initialize, and change "
                "values in place (copy_, load_state_dict)"
            )

    @torch.no_grad()
    def collect(self, found_inf: torch.Tensor) -> None:
        """Copy every gradient that is not there into its buffer, complete over tensor ranks.

        Args:
            found_inf: 0-dim float32; set to 1 if an element that this rank drops here is not finite. Elements that it
                keeps are checked by the norm.
        """
        outside = self._outside()
        if self._addresses is None or outside:
            self.begin_window()
            outside = self._outside()
        if self._overlapped is not None:
            # Changed after the buffer was reduced: elements outside this rank's part are not checked later.
            unscale_and_check_(self._overlapped.changed_since(), torch.ones_like(found_inf), found_inf)
        for hook in self._hooks:  # the first window has shown which gradients have other placements
            hook.remove()
        self._hooks = []
        arrived = [param for param in outside if param.parameter.grad is not None]
        if arrived:
            whole = align_gradients([param.parameter for param in arrived], self._reduce_dtypes.tp)
            unscale_and_check_(whole, torch.ones_like(found_inf), found_inf)
            torch._foreach_copy_(
                [param.local_gradient for param in arrived],
                [local(cast(torch.Tensor, param.parameter.grad)) for param in arrived],
            )
        for param in outside:
            if param.parameter.grad is not None or param.parameter in self._tied:
                param.parameter.grad = param.gradient
        self.snapshot()
        self._absent = list(compress(self._params, map(operator.eq, self._noted, self._zeros.values())))

    def snapshot(self) -> None:
        """Record the gradients' versions, for :meth:`are_unchanged`."""
        self._noted = self._versions()
        # Of other placements, as under sequence parallelism, they stay outside of the buffers until the window ends.
        kept = ((param, param.parameter.grad) for param in self._mismatched)
        self._noted_outside = {param: (grad, _versions_of(grad)) for param, grad in kept if grad is not None}

    def are_unchanged(self) -> bool:
        """Whether no gradient was accumulated, changed or replaced since the last step or :meth:`snapshot`.

        Zeroing all is not a change; gradients of tied parameters are ignored, because the step itself changes them.
        """
        return all(
            param.parameter in self._tied
            or (param.version == noted and _is_as_noted(param, self._noted_outside.get(param, (None, ()))))
            for param, noted in zip(self._params, self._noted, strict=True)
        )

    def on_accumulation(self, call: Callable[[torch.Tensor], None]) -> list[RemovableHandle]:
        """Call ``call`` with each parameter that a backward gives a gradient, until the handles are removed."""
        return [param.parameter.register_post_accumulate_grad_hook(call) for param in self._params]

    def absent(self) -> list[FlatParam]:
        """The parameters that had no gradient on this rank when :meth:`collect` was called."""
        return self._absent

    def presence(self, first_names: Mapping[str, str]) -> torch.Tensor:
        """1 for each parameter of the whole model that has a gradient on this rank, else 0; 1-dim float64.

        ``first_names``: for each name in the whole model, the first name of the same parameter: copies of a tied
        parameter have different names.
        """
        key = tuple(param.name for param in self._absent)
        if self._presence is None or self._presence[0] != key:  # cached: a copy to a GPU synchronises
            have = {first_names[param.name] for param in self._params if param.name not in set(key)}
            values = torch.tensor([float(name in have) for name in dict.fromkeys(first_names.values())]).double()
            self._presence = key, values.to(self._context.device)
        return self._presence[1]

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients over data ranks, and then those of tied parameters over the stages that hold a copy.

        One all-reduce for each buffer; under ZeRO one reduce-scatter for each buffer that the backward has not reduced,
        after which this rank has the sums of its part.

        The summation order over data ranks depends on the position in the buffer, which differs between stages. So the
        sum over stages has to be the last one, or copies of a tied parameter would diverge by rounding.
        """
        group = self._context.batch_axis.group
        tied = [param.local_gradient for param in self._tied_params]
        whole = [buffer.gradients for buffer in self._buffers] if self._overlapped is None else tied
        for gradients in whole if self._context.batch_axis.size > 1 else ():
            sum_([gradients], group, self._reduce_dtypes.dp)
        if self._ties:
            sum_tied_gradients(self._context, self._parameters, self._reduce_dtypes.pp, complete=True)
        if self._overlapped is not None:
            if tied and self._context.batch_axis.rank > 0:
                torch._foreach_zero_(tied)  # already summed: only one data rank contributes them to the next sum
            self._overlapped.reduce_the_rest()

    def begin_last_backward(self) -> None:
        """Overlap ZeRO's reductions with the next backward, which is the last one of a window."""
        # Not in the first window, which finds the gradients whose placements differ from their parameters'.
        if self._overlapped is not None and not self._hooks:
            self._overlapped.begin()

    def end_last_backward(self) -> None:
        """Wait for the reductions that have started."""
        if self._overlapped is not None:
            self._overlapped.end()

    def for_norm(self) -> tuple[list[torch.Tensor], list[float]]:
        """The gradients that this rank counts, 1-dim and split at blocks of the norm, and each one's norm weight."""
        parts = [(part, step_range.norm_weight) for step_range in self._ranges for part in step_range.in_blocks()]
        return [part for part, _ in parts], [norm_weight for _, norm_weight in parts]

    def for_zero_count(self) -> tuple[list[torch.Tensor], list[float]]:
        """As :meth:`for_norm`, but one slice for each parameter, without the padding between them."""
        params = [param for param in self._params if param.own[0] < param.own[1]]
        return [self._own_gradient(param) for param in params], [param.norm_weight for param in params]

    def before_reduction(self) -> Iterator[tuple[torch.Tensor, float]]:
        """Each gradient that this rank has before a step, unreduced, and its norm weight.

        In sums over the world each element of the logical model counts once: as the average over data ranks, or under
        ZeRO with the value on the rank that steps it.
        """
        for param in self._params:
            gradient = param.parameter.grad
            if gradient is not param.gradient:
                if gradient is not None and gradient.numel():  # it may have as many elements as the whole parameter
                    num_parts = self._buffer_of[param].num_parts
                    yield gradient, param.norm_weight / num_parts * param.size / local(gradient).numel()
            elif param.version != self._zeros[param] and param.own[0] < param.own[1]:
                yield self._own_gradient(param), param.norm_weight

    def _own_gradient(self, param: FlatParam) -> torch.Tensor:
        buffer = self._buffer_of[param]
        return buffer.gradients[buffer.flat_range(param)]


def _raise(error: Exception) -> None:
    raise error


def _is_as_noted(param: FlatParam, noted: tuple[torch.Tensor | None, tuple[int, ...]]) -> bool:
    """Whether the gradient is in its buffer, or there is none, or it is the one ``noted``, with the same versions."""
    given = param.parameter.grad
    return given is None or given is param.gradient or (given is noted[0] and _versions_of(given) == noted[1])


def _versions_of(gradient: torch.Tensor) -> tuple[int, ...]:
    """The version counters of ``gradient``, which has another one for its local tensor if it is a DTensor."""
    return VERSION(gradient), VERSION(local(gradient))


def _find_mismatch(
    param: FlatParam, zeros: Mapping[FlatParam, int], mismatched: list[FlatParam], gradient: torch.Tensor
) -> None:
    """The hook that detects gradients whose placements differ from their parameter's, before they are accumulated.

    It has no reference to the :class:`FlatGradients`, because the garbage collector does not traverse hooks.
    """
    if is_dtensor(gradient) and gradient.placements != cast("DTensor", param.parameter).placements:
        if not param.placement_mismatch:
            param.placement_mismatch = True
            mismatched.append(param)
        if param.parameter.grad is param.gradient and param.version == zeros[param]:  # nothing was accumulated there
            param.parameter.grad = None


class _Addresses:
    """Where parameters and gradients have to be: in their buffers."""

    def __init__(self, buffer_of: Mapping[FlatParam, Buffer]) -> None:
        # The local tensors of DTensors are looked up each time, because they may be replaced.
        self._params = sorted(
            (param for param in buffer_of if param.size), key=lambda param: is_dtensor(param.parameter)
        )
        tensors = [(param.parameter, param.gradient) for param in self._params]
        self._plain, self._sharded = (
            [tensor for pair in tensors for tensor in pair if tensor is not None and is_dtensor(tensor) is sharded]
            for sharded in (False, True)
        )
        self._expected = [
            flat.data_ptr() + param.start * flat.element_size()
            for param in self._params
            for flat in (buffer_of[param].weights, buffer_of[param].gradients)
        ]

    def moved(self) -> FlatParam | None:
        """A parameter that is elsewhere, or whose gradient is; None if there is none."""
        found = [*map(ADDRESS, self._plain), *map(ADDRESS, map(LOCAL, self._sharded))]
        if found == self._expected:
            return None
        different = next(index for index, address in enumerate(found) if address != self._expected[index])
        return self._params[different // 2]
