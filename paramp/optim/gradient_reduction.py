"""How gradients are summed over data ranks: one of these is given to the flat gradients.

=========================  ===================================================================
:class:`AllReduce`         one all-reduce for each buffer, at the step
:class:`ReduceScatter`     ZeRO-1: a reduce-scatter for each buffer, in the last backward
:class:`UnitReduction`     FSDP2 has reduced each unit into the buffers, at the end of its backward
=========================  ===================================================================

One data rank needs none (:class:`~paramp.optim.flat_gradients.GradientReduction`); the exact mode has two of its own
(:mod:`paramp.exact.microchunk_gradients`).
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from ..base.collectives import start_reduce_scatter, sum_
from ..base.torch_internals import expect
from ..distributed.context import ParallelContext
from ..distributed.exact_mode_protocol import Numerics
from ..scaling.complete_and_unscale_gradients import unscale_and_check_
from ..scaling.copies_per_element import TiedParameter
from .flat_buffer import Buffer, FlatParam, Units
from .flat_gradients import FlatGradients, GradientReduction

expect("torch._foreach_zero_")


def gradient_reduction(
    ties: Sequence[TiedParameter], units: Units | None, numerics: Numerics, context: ParallelContext
) -> GradientReduction:
    """How the gradients of an engine are summed over data ranks, and those of ``ties`` over stages.

    ``units``: those into which FSDP2 has sharded the parameters; None if it has not.
    """
    kind: type[GradientReduction] = GradientReduction
    if units is not None:
        kind = UnitReduction
    elif context.batch_axis.size > 1:
        kind = ReduceScatter if context.config.parallel.zero > 0 else AllReduce
    reduction: GradientReduction = numerics.gradient_reduction(kind)(ties, units)
    return reduction


def _sum_over_data_ranks(gradients: Iterable[tuple[Buffer, torch.Tensor]], context: ParallelContext) -> None:
    for buffer, gradient in gradients:
        sum_([gradient], buffer.data_axis.group, context.config.precision.reduce_dtypes.dp)


class AllReduce(GradientReduction):
    """One all-reduce for each buffer, at the step."""

    @torch.no_grad()
    def reduce(self) -> None:
        """As in the base class."""
        _sum_over_data_ranks([(buffer, buffer.gradients) for buffer in self._gradients.buffers], self._context)
        super().reduce()


class ReduceScatter(GradientReduction):
    """A reduce-scatter of each buffer during the backward, as soon as its gradients are complete.

    This is possible only in the last backward of a window, and not for gradients that the step completes: those of tied
    parameters, and those whose placements differ from their parameters'. Every rank starts the same buffers in the same
    order, each once per call of ``forward_backward``, whichever of its parameters got a gradient. After the step's
    reduction each rank has the sums of its part.
    """

    def attach(self, gradients: FlatGradients) -> None:
        """As in the base class."""
        super().attach(gradients)
        self._buffers = gradients.buffers
        self._reduced: dict[FlatParam, int] = {}  # and the version of the gradient after the reduction
        self._waiting: dict[Buffer, set[FlatParam]] = {}  # parameters without a gradient yet
        self._overlappable: list[Buffer] = []  # buffers that can be reduced before the step
        self._next: list[Buffer] = []  # overlappable buffers that have not been started, in this order
        self._running: list[Callable[[], None]] = []
        self._armed = False
        self._places = [(buffer, param) for buffer in self._buffers for param in buffer.params]
        for index, (_, param) in enumerate(self._places):
            hook = functools.partial(_notify, weakref.ref(self), index)
            param.parameter.register_post_accumulate_grad_hook(hook)

    def begin_last_backward(self) -> None:
        """From here on, reduce buffers as they become complete."""
        # Not in the first window, which finds the gradients whose placements differ from their parameters'.
        if self._gradients.outside.hooks:
            return
        self._overlappable = [buffer for buffer in self._buffers if not any(map(self._completes_late, buffer.params))]
        self._waiting = {buffer: set(buffer.params) for buffer in self._buffers}
        self._next = list(self._overlappable)
        self._armed = True

    def _completes_late(self, param: FlatParam) -> bool:
        return param.placement_mismatch or param.parameter in self._gradients.tied

    def end_last_backward(self) -> None:
        """Reduce the rest of the overlappable buffers, and wait for all reductions."""
        if not self._armed:
            return
        self._armed = False
        self._start_overlapped(self._next)
        self._finish()
        self._reduced |= {param: param.version for buffer in self._overlappable for param in buffer.params}

    def arrived(self, index: int) -> None:
        """Record that a parameter has its gradient, and start the next buffers, in order, that were complete before.

        The parameter itself counts from the next call on: the user's hooks that run after this one may change its
        gradient.
        """
        if not self._armed:
            return
        buffer, param = self._places[index]
        if param not in self._waiting[buffer]:
            raise RuntimeError(
                f"{param.name!r} got two gradients in one backward, as under activation checkpointing with "
                "use_reentrant=True; pass use_reentrant=False there, or set parallel.zero to 0"
            )
        complete = list(itertools.takewhile(lambda buffer: not self._waiting[buffer], self._next))
        self._waiting[buffer].discard(param)
        if complete:
            self._start_overlapped(complete)
            del self._next[: len(complete)]

    def _start_overlapped(self, buffers: Sequence[Buffer]) -> None:
        self._gradients.outside.take_back(param for buffer in buffers for param in buffer.params)
        self._start(buffers)

    def _start(self, buffers: Iterable[Buffer]) -> None:
        dtype = self._context.config.precision.reduce_dtypes.dp
        for buffer in buffers:
            own = buffer.own(buffer.gradients)
            self._running.append(start_reduce_scatter(buffer.gradients, own, buffer.data_axis.group, dtype))

    def _finish(self) -> None:
        while self._running:
            self._running.pop(0)()

    def forget(self) -> None:
        """As in the base class."""
        self._reduced = {}

    def before_collection(self, found_inf: torch.Tensor) -> None:
        """As in the base class: elements outside this rank's part that were changed after they had been reduced."""
        changed = [param.local_gradient for param, then in self._reduced.items() if param.version != then]
        unscale_and_check_(changed, torch.ones_like(found_inf), found_inf)

    @torch.no_grad()
    def reduce(self) -> None:
        """As in the base class; a reduce-scatter for each buffer that the last backward has not reduced."""
        tied = [param for param in self._params if param.parameter in self._gradients.tied]
        _sum_over_data_ranks([(param.buffer, param.local_gradient) for param in tied], self._context)
        super().reduce()
        others = [param.local_gradient for param in tied if param.data_axis.rank > 0]
        if others:
            torch._foreach_zero_(others)  # already summed: only one data rank contributes them to the next sum
        self._start(buffer for buffer in self._buffers if buffer.params[0] not in self._reduced)
        self._finish()
        self._reduced = {}


def _notify(reducer: weakref.ref[ReduceScatter], index: int, _: torch.Tensor) -> None:
    """The hook of a parameter, with a weak reference only: the garbage collector does not traverse a parameter's hooks,
    so they would keep the engine, and its context's process groups, forever."""
    alive = reducer()
    if alive is not None:
        alive.arrived(index)


class UnitReduction(GradientReduction):
    """The units that gather the parameters in a batch have reduced each gradient at the end of their backward."""

    def attach(self, gradients: FlatGradients) -> None:
        """As in the base class."""
        super().attach(gradients)
        # A reduction gives zeros to a parameter that got no gradient on any rank, so versions do not show its absence.
        self._arrived: set[torch.Tensor] = set()  # what a backward of this rank, or the user, gave a gradient
        self._reduced = [0] * len(self._params)  # versions after the last backward
        self._in_backward = False
        assert self.units is not None
        self.units.on_gradient(self._arrived.add)

    def begin_backward(self) -> None:
        """As in the base class."""
        self._note_changes()
        self._in_backward = True

    def _note_changes(self) -> None:
        """Record which gradients the user has changed since the last backward, or dropped."""
        versions = self._gradients.versions()
        if versions == self._reduced:
            return
        for param, version, reduced in zip(self._params, versions, self._reduced, strict=True):
            if version == self._zeros[param]:
                self._arrived.discard(param.parameter)
            elif version != reduced:
                self._arrived.add(param.parameter)

    def end_last_backward(self) -> None:
        """As in the base class."""
        if self._in_backward:
            self._in_backward = False
            self._reduced = self._gradients.versions()

    def forget(self) -> None:
        """As in the base class."""
        self._arrived.clear()
        self._reduced = [*self._zeros.values()]

    def absent(self, unchanged: list[FlatParam]) -> list[FlatParam]:
        """As in the base class."""
        return [param for param in self._params if param.parameter not in self._arrived]

    def begin_look(self) -> tuple[()]:
        """As in the base class. What did not arrive on any rank counts as zero, so that it is not looked at."""
        self._note_changes()
        for param in self._params:
            if param.parameter not in self._arrived and not bool(param.stepped_gradient.any()):
                self._zeros[param] = param.version
        return ()
