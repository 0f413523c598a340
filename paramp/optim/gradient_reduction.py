"""How gradients are summed over data ranks: :class:`~paramp.optim.flat_gradients.FlatGradients` is given one of these.

====================================================  =================================================================
:class:`GradientReduction`                            nothing to sum: one data rank
:class:`AllReduce`                                    one all-reduce for each buffer, at the step
:class:`~paramp.optim.zero.ReduceScatter`             ZeRO: a reduce-scatter for each buffer, in the last backward
:class:`~paramp.optim.fsdp_reduction.UnitReduction`   FSDP2 has reduced each unit at the end of its backward
====================================================  =================================================================

The exact mode has its own (:mod:`paramp.exact.chunk_gradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from ..base.collectives import sum_
from ..scaling.grad_reduce import sum_tied_gradients
from .flat_buffer import FlatParam

if TYPE_CHECKING:
    from .flat_gradients import FlatGradients


class Units(Protocol):
    """What is needed of :class:`paramp.parallel.fsdp.units.ShardedUnits`."""

    def padded_sizes(self) -> Mapping[nn.Parameter, int]: ...

    def use_memory(self, memory: Mapping[nn.Parameter, torch.Tensor]) -> None: ...

    def put_back(self, memory: Mapping[nn.Parameter, torch.Tensor]) -> None: ...

    def on_gradient(self, call: Callable[[torch.Tensor], None]) -> Callable[[], None]: ...

    def take_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None: ...


class GradientReduction:
    """The reduction where there is one data rank. The others are its subclasses.

    Attributes:
        units: those of FSDP2 that gather the parameters in a batch; None if it does not shard them.
        sums_changes: whether gradients that are set by hand are summed too.
    """

    units: Units | None = None
    sums_changes = True

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
        dtype = self._context.config.precision.reduce_dtypes.pp
        sum_tied_gradients(self._context, self._gradients.parameters, dtype, complete=True)

    def _sum_over_data_ranks(self, gradients: Iterable[torch.Tensor]) -> None:
        for gradient in gradients:
            sum_([gradient], self._context.batch_axis.group, self._context.config.precision.reduce_dtypes.dp)

    def outside_buffers(self) -> Iterable[tuple[torch.Tensor, float]]:
        """Gradients that are not in their buffers yet, and their norm weights; before those are looked at."""
        return ()


class AllReduce(GradientReduction):
    """One all-reduce for each buffer, at the step."""

    @torch.no_grad()
    def reduce(self) -> None:
        """As in the base class."""
        self._sum_over_data_ranks(buffer.gradients for buffer in self._gradients.buffers)
        self._sum_ties()
