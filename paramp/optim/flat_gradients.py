"""Gradients in flat buffers, from the backward to the reduced gradients that the optimizer steps with.

``parameter.grad`` is a view of its buffer, so that autograd accumulates there and a reduction over data ranks is one
collective for each buffer (:mod:`.gradient_reduction`). Gradients that cannot accumulate in place, of other placements
than their parameters or set by the user, are copied there once per step (:mod:`.gradients_outside_buffers`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress
from typing import Any

import torch

from ..base.dtensor import is_dtensor
from ..base.module_surgery import NamedParameters, check_frozen, moved, num_hooks
from ..base.torch_internals import take
from ..distributed.context import ParallelContext
from ..scaling.complete_and_unscale_gradients import sum_tied_gradients
from ..scaling.copies_per_element import TiedParameter
from .flat_buffer import Buffer, FlatParam, Units, step_ranges
from .gradients_outside_buffers import OutsideGradients

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
        outside: those that are not in their buffers.
        tied: the parameters that several pipeline stages hold a copy of.
        zeros: the version of each gradient when it was last known to be zero.
        absent: the parameters that had no gradient on this rank when :meth:`collect` was called.
        for_norm: the gradients that this rank counts, 1-dim and split at blocks of the norm, and their norm weights.
        overflow: 0-dim float32, set to 1 by modules that hide an overflow from their gradients (float8).
        fail: called with an error for gradients that a step cannot use.
        before_batch: called before the forward of each batch, and before each step.
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
        self.absent: list[FlatParam] = []
        self.for_norm: tuple[list[torch.Tensor], list[float]] = [], []  # once they are allocated
        self._frozen = frozen
        self._views: list[torch.Tensor | None] = [None] * len(params)  # each parameter's .grad, once it is allocated
        self._local_views: list[torch.Tensor] = []
        self._are_sharded = [*map(is_dtensor, self.parameters)]
        self._storages = [*map(STORAGE, compress(self.parameters, self._are_sharded))]
        self._addresses: list[int] | None = None
        """Where parameters and gradients have to be: in their buffers."""
        self._noted = [0] * len(params)
        # FSDP2's units bring gradients to the placements.
        self.outside = OutsideGradients(() if reduction.units is not None else params, self.zeros)
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
        for param in chain(self._outside(), self.outside.mismatched):
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
        if name := sharded and next((param.name for param in self.params if num_hooks(param.parameter)), None):
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
            self.for_norm = [part for part, _ in parts], [norm_weight for _, norm_weight in parts]
            self.zeros.update(zip(self.params, self.versions(), strict=True))
        if outside := self._outside():
            self.outside.take_back(outside)
        self.reduction.begin_backward()

    def _outside(self) -> list[FlatParam]:
        """The parameters whose ``.grad`` is not the view of their buffer."""
        return list(compress(self.params, map(operator.is_not, map(GRADIENT, self.parameters), self._views)))

    def versions(self) -> list[int]:
        """Each parameter's ``version``."""
        if self._addresses is None:
            return [0] * len(self.params)
        return list(map(operator.add, map(VERSION, self._views), map(VERSION, self._local_views)))

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
        if self.outside.hooks:
            self.outside.stop_watching(self.context)  # the first window has shown which gradients have other placements
        if outside:
            self.outside.collect(outside, found_inf, self.context.config.precision.reduce_dtypes.tp)
        for param in outside:
            if param.parameter.grad is not None or param.parameter in self.tied:
                param.parameter.grad = param.gradient
        self.snapshot()
        unchanged = list(compress(self.params, map(operator.eq, self._noted, self.zeros.values())))
        self.absent = self.reduction.absent(unchanged)

    def snapshot(self) -> None:
        """Record the gradients' versions, for :meth:`are_unchanged`."""
        self._noted = self.versions()
        if self.outside.mismatched:
            self.outside.snapshot()

    def are_unchanged(self) -> bool:
        """Whether no gradient was accumulated, changed or replaced since the last step or :meth:`snapshot`.

        Zeroing all is not a change; gradients of tied parameters are ignored, because the step itself changes them.
        So are all that are set by hand where the :attr:`reduction` would not sum them.
        """
        return not self.reduction.sums_changes or all(
            param.parameter in self.tied or (param.version == noted and self.outside.is_unchanged(param))
            for param, noted in zip(self.params, self._noted, strict=True)
        )


def _raise(error: Exception) -> None:
    raise error
