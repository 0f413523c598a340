"""Gradients in flat buffers, from the backward to the reduced gradients that the optimizer steps with.

``parameter.grad`` is a view of its buffer, so that autograd accumulates there and a reduction over data ranks is one
collective for each buffer (:mod:`.gradient_reduction`). Gradients that cannot accumulate in place (with placements
other than their parameter's, or replaced by the user) are copied there once per step.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING, Any, cast

import torch

from ..base.dtensor import is_dtensor, local, version
from ..base.module_surgery import NamedParameters, check_frozen, moved, num_hooks
from ..base.torch_internals import expect, take
from ..distributed.context import ParallelContext
from ..scaling.gradient_placements import align_gradients, sum_tied_gradients, unscale_and_check_
from ..scaling.replica_counts import TiedParameter
from .flat_buffer import Buffer, FlatParam, Units, step_ranges

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

expect("torch._foreach_copy_")

# Applied with map() to all parameters, several times a step: without a Python call for each.
GRADIENT = operator.attrgetter("grad")
VERSION = operator.attrgetter("_version")
LOCAL = operator.attrgetter("_local_tensor")
ADDRESS: Callable[[Any], int] = torch.Tensor.data_ptr
STORAGE: Callable[[Any], int] = take("torch._C._storage_address")


class GradientReduction:
    """How gradients are summed over data ranks; this one is for one data rank, and the others are its subclasses.

    Attributes:
        ties: the parameters that several pipeline stages hold a copy of.
        units: those of FSDP2 that gather the parameters in a batch; None if it does not shard them.
        sums_changes: whether gradients that are set by hand are summed too.
    """

    sums_changes = True

    def __init__(self, ties: Sequence[TiedParameter], units: Units | None) -> None:
        self.ties, self.units = ties, units

    def attach(self, gradients: FlatGradients) -> None:
        """Reduce ``gradients`` from now on."""
        self._gradients = gradients
        self._params, self._context, self._zeros = gradients.params, gradients.context, gradients.zeros

    def begin_backward(self) -> None:
        """Gradients are in their buffers, and a backward or the step begins."""

    def begin_last_backward(self) -> None:
        """The next backward is the last one of a window."""

    def end_last_backward(self) -> None:
        """It has ended, on all data ranks."""

    def forget(self) -> None:
        """All gradients were set to zero."""

    def check(self) -> None:
        """Raise a RuntimeError for gradients that were changed by hand where no reduction takes the change."""

    def before_collection(self, found_inf: torch.Tensor) -> None:
        """The step begins. ``found_inf``, 0-dim float32, is set to 1 for what is not finite and not checked later."""

    def absent(self, unchanged: list[FlatParam]) -> list[FlatParam]:
        """The parameters without a gradient on this rank; ``unchanged``: whose buffers nobody has written to."""
        return unchanged

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients over data ranks, and then those of tied parameters over the stages that hold a copy.

        The summation order over data ranks depends on the position in the buffer, which differs between stages. So the
        sum over stages has to be the last one, or copies of a tied parameter would diverge by rounding.
        """
        self._sum_ties()

    def _sum_ties(self) -> None:
        if self.ties:
            dtype = self._context.config.precision.reduce_dtypes.pp
            sum_tied_gradients(self._context, self._gradients.parameters, dtype, complete=True)

    def begin_look(self) -> Iterable[tuple[torch.Tensor, float]]:
        """The buffers are looked at before a step. Returns the gradients outside of them, and their norm weights."""
        return ()


class FlatGradients:
    """The gradients of one rank's trained parameters.

    Attributes:
        params: in the model's order.
        buffers: the buffers of ``params``, in the order in which the backward completes them.
        reduction: how gradients are summed over data ranks.
        tied: the parameters that several pipeline stages hold a copy of.
        zeros: the version of each gradient when it was last known to be zero.
        overflow: 0-dim float32, set to 1 by modules that hide an overflow from their gradients (float8).
        fail: called with an error for gradients that a step cannot use.
        before_batch: called before the forward of each batch.
    """

    def __init__(
        self,
        params: Sequence[FlatParam],
        buffers: Sequence[Buffer],
        frozen: NamedParameters,
        reduction: GradientReduction,
        context: ParallelContext,
    ) -> None:
        """``frozen``: the parameters that are not trained, by name."""
        self.params, self.buffers, self.context = params, buffers, context
        self.parameters = [param.parameter for param in params]
        self.tied = {tie.parameter for tie in reduction.ties}
        self.zeros: dict[FlatParam, int] = dict.fromkeys(params, 0)
        self.overflow = torch.zeros((), device=context.device)
        self.fail: Callable[[Exception], None] = _raise
        self.before_batch: Callable[[], object] = lambda: None
        self._for_norm: tuple[list[torch.Tensor], list[float]] = [], []  # once they are allocated
        self._frozen = frozen
        self._views: list[torch.Tensor | None] = [None] * len(params)  # each parameter's .grad, once it is allocated
        self._local_views: list[torch.Tensor] = []
        self._are_sharded = [*map(is_dtensor, self.parameters)]
        self._storages = [*map(STORAGE, compress(self.parameters, self._are_sharded))]
        self._addresses: list[int] | None = None
        """Where parameters and gradients have to be: in their buffers."""
        self._absent: list[FlatParam] = []
        self._noted = [0] * len(params)
        self._noted_outside: dict[FlatParam, tuple[torch.Tensor, int]] = {}
        self._mismatched: list[FlatParam] = []
        self._presence: tuple[tuple[str, ...], torch.Tensor] | None = None
        self._hooks = [
            param.parameter.register_hook(functools.partial(_find_mismatch, param, self.zeros, self._mismatched))
            for param in params
            if is_dtensor(param.parameter) and reduction.units is None  # which bring gradients to the placements
        ]
        self.reduction = reduction
        reduction.attach(self)

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
        self.reduction.reduce()
        return found_inf

    def drop(self, *, overflow: bool = True) -> None:
        """Make all gradients zero, and forget an ``overflow`` that they hide."""
        self.zero_grad()
        for tie in self.reduction.ties:
            tie.summed = None
        if overflow:
            self.overflow.zero_()

    def zero_grad(self) -> None:
        """Set every gradient to zero: one fill for each buffer."""
        for buffer in self.buffers:
            buffer.gradients.zero_()
        for param in chain(self._outside(), self._mismatched):
            param.parameter.grad = None if param.placement_mismatch else param.gradient
        self.snapshot()
        self.zeros.update(zip(self.params, self._noted, strict=True))
        for _, parameter in self._frozen:  # one that was unfrozen since may have a gradient
            parameter.grad = None
        self.reduction.forget()

    def begin_window(self) -> None:
        """Make each ``.grad`` a view of its buffer, so that backwards accumulate there; allocate at the first call.

        A backward that finds no ``.grad`` creates a new tensor, whose values :meth:`collect` copies.

        Raises:
            RuntimeError: FSDP2 shards the parameters, and one has a hook, which would not be called.
        """
        sharded = self.reduction.units is not None
        if name := next((param.name for param in self.params if sharded and num_hooks(param.parameter)), None):
            raise RuntimeError(
                f"{name!r} has a hook on its gradient, which fully_shard does not call (parallel.data.shard); remove "
                "it, and change the gradient in engine.before_step instead"
            )
        if self._addresses is None:
            for buffer in self.buffers:
                buffer.make_gradients()
            self._views = [param.gradient for param in self.params]
            self._local_views = [param.local_gradient for param in self.params]
            weights = [param.buffer.view(param.buffer.weights, param) for param in self.params]
            storages = self._storages, map(STORAGE, compress(self._views, self._are_sharded))
            self._addresses = [*map(ADDRESS, weights), *map(ADDRESS, self._local_views), *chain(*storages)]
            parts = [(part, one.norm_weight) for one in step_ranges(self.buffers) for part in one.in_blocks()]
            self._for_norm = [part for part, _ in parts], [norm_weight for _, norm_weight in parts]
            self.zeros.update(zip(self.params, self.versions(), strict=True))
        if outside := self._outside():
            self.take_back(outside)
        self.reduction.begin_backward()

    def _outside(self) -> list[FlatParam]:
        """The parameters whose ``.grad`` is not the view of their buffer."""
        return list(compress(self.params, map(operator.is_not, map(GRADIENT, self.parameters), self._views)))

    def versions(self) -> list[int]:
        """Each parameter's ``version``."""
        if self._addresses is None:
            return [0] * len(self.params)
        return list(map(operator.add, map(VERSION, self._views), map(VERSION, self._local_views)))

    @torch.no_grad()
    def take_back(self, params: Iterable[FlatParam]) -> None:
        """Copy gradients that the user replaced, or set to None, back to their buffers, which ZeRO reduces.

        Those of ``params`` that are in their buffers stay as they are.
        """
        for param in params:
            given = param.parameter.grad
            if given is param.gradient or (param.placement_mismatch and given is not None):
                continue
            if given is None:
                if param.version != self.zeros[param]:  # the buffer has values, but the user has dropped them
                    param.local_gradient.zero_()
                    self.zeros[param] = param.version
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
        self.reduction.check()
        if any(parameter.grad is not None for _, parameter in self._frozen):
            check_frozen(self._frozen)
        self.begin_window()
        tensors, sharded = [*self.parameters, *self._views], self._are_sharded * 2
        addresses = [ADDRESS(LOCAL(one) if wraps else one) for one, wraps in zip(tensors, sharded, strict=True)]
        addresses += map(STORAGE, compress(tensors, sharded))  # all that `.data = ...` replaces in a DTensor
        if self._addresses is not None and addresses != self._addresses:
            different = next(index for index, at in enumerate(addresses) if at != self._addresses[index])
            params = [*self.params, *self.params]
            raise RuntimeError(moved([*params, *compress(params, sharded)][different].name))

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
        self.reduction.before_collection(found_inf)
        for hook in self._hooks:  # the first window has shown which gradients have other placements
            hook.remove()
        self._hooks = []
        arrived = [param for param in outside if param.parameter.grad is not None]
        if arrived:
            reduce_dtype = self.context.config.precision.reduce_dtypes.tp
            whole = align_gradients([param.parameter for param in arrived], reduce_dtype)
            unscale_and_check_(whole, torch.ones_like(found_inf), found_inf)
            torch._foreach_copy_(
                [param.local_gradient for param in arrived],
                [local(cast(torch.Tensor, param.parameter.grad)) for param in arrived],
            )
        for param in outside:
            if param.parameter.grad is not None or param.parameter in self.tied:
                param.parameter.grad = param.gradient
        self.snapshot()
        unchanged = list(compress(self.params, map(operator.eq, self._noted, self.zeros.values())))
        self._absent = self.reduction.absent(unchanged)

    @property
    def knows_placements(self) -> bool:
        """Whether a window has shown which gradients have other placements than their parameters."""
        return not self._hooks

    def snapshot(self) -> None:
        """Record the gradients' versions, for :meth:`are_unchanged`."""
        self._noted = self.versions()
        # Of other placements, as under sequence parallelism, they stay outside of the buffers until the window ends.
        kept = ((param, param.parameter.grad) for param in self._mismatched)
        self._noted_outside = {param: (grad, version(grad)) for param, grad in kept if grad is not None}

    def are_unchanged(self) -> bool:
        """Whether no gradient was accumulated, changed or replaced since the last step or :meth:`snapshot`.

        Zeroing all is not a change; gradients of tied parameters are ignored, because the step itself changes them.
        So are all that are set by hand where the :attr:`reduction` would not sum them.
        """
        return not self.reduction.sums_changes or all(
            param.parameter in self.tied
            or (param.version == noted and _is_as_noted(param, self._noted_outside.get(param, (None, 0))))
            for param, noted in zip(self.params, self._noted, strict=True)
        )

    def on_accumulation(self, call: Callable[[torch.Tensor], None]) -> list[Callable[[], None]]:
        """Call ``call`` with each parameter that a backward gives a gradient; returns what ends that."""
        if self.reduction.units is not None:
            return [self.reduction.units.on_gradient(call)]
        return [parameter.register_post_accumulate_grad_hook(call).remove for parameter in self.parameters]

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
            have = {first_names[param.name] for param in self.params if param.name not in set(key)}
            values = torch.tensor([float(name in have) for name in dict.fromkeys(first_names.values())]).double()
            self._presence = key, values.to(self.context.device)
        return self._presence[1]

    def for_norm(self) -> tuple[list[torch.Tensor], list[float]]:
        """The gradients that this rank counts, 1-dim and split at blocks of the norm, and each one's norm weight."""
        return self._for_norm

    def for_zero_count(self) -> tuple[list[torch.Tensor], list[float]]:
        """As :meth:`for_norm`, but one slice for each parameter, without the padding between them."""
        params = [param for param in self.params if param.own[0] < param.own[1]]
        return [param.stepped_gradient for param in params], [param.norm_weight for param in params]

    def before_reduction(self) -> Iterator[tuple[torch.Tensor, float]]:
        """Each gradient that this rank has before a step, unreduced, and its norm weight.

        In sums over the world each element of the logical model counts once: as the average over data ranks, or under
        ZeRO with the value on the rank that steps it.
        """
        elsewhere = self.reduction.begin_look()
        for param in self.params:
            gradient = param.parameter.grad
            if gradient is not param.gradient:
                if gradient is not None and gradient.numel():  # it may have as many elements as the whole parameter
                    num_parts = param.buffer.num_parts
                    yield gradient, param.norm_weight / num_parts * param.size / local(gradient).numel()
            elif param.version != self.zeros[param] and param.own[0] < param.own[1]:
                yield param.stepped_gradient, param.norm_weight
        yield from elsewhere


def _raise(error: Exception) -> None:
    raise error


def _is_as_noted(param: FlatParam, noted: tuple[torch.Tensor | None, int]) -> bool:
    """Whether the gradient is in its buffer, or there is none, or it is the one ``noted``, with the same version."""
    given = param.parameter.grad
    return given is None or given is param.gradient or (given is noted[0] and version(given) == noted[1])


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
