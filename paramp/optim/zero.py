"""ZeRO-1 over data ranks: gradients are reduce-scattered during the backward, stepped weights all-gathered."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..distributed.collectives import all_gather_shards, start_reduce_scatter
from ..distributed.context import ParallelContext
from .param_buffer import Buffer, FlatParam


class OverlappedReduceScatter:
    """The reduce-scatter of each buffer while the backward still goes on, as soon as its gradients are complete.

    That is known only in the last backward of a window, and not of gradients that are completed in the step: tied ones,
    and those whose placements are not their parameters'. Every rank starts the same buffers in the same order, each
    once in a call of ``forward_backward``, whichever of its parameters got a gradient.

    ``take_back`` brings gradients that were replaced, here by hooks of the user's, back to their buffers.
    """

    def __init__(
        self,
        buffers: Sequence[Buffer],
        context: ParallelContext,
        dtype: torch.dtype | None,
        tied: Collection[nn.Parameter],
        take_back: Callable[[Iterable[FlatParam]], None],
    ) -> None:
        self._buffers = buffers
        self._take_back = take_back
        self._group = context.batch_axis.group
        self._dtype = dtype
        self._tied = tied
        self._reduced: dict[FlatParam, int] = {}  # with the version of the gradient when it had been reduced
        self._waiting: dict[Buffer, set[FlatParam]] = {}  # what has no gradient yet
        self._overlappable: list[Buffer] = []  # which can be reduced before the step
        self._next: list[Buffer] = []  # of these, what has not been started, in this order
        self._running: list[Callable[[], None]] = []
        self._armed = False
        self._places = [(buffer, param) for buffer in buffers for param in buffer.params]
        for index, (_, param) in enumerate(self._places):
            hook = functools.partial(_notify, weakref.ref(self), index)
            param.parameter.register_post_accumulate_grad_hook(hook)

    def begin(self) -> None:
        """From here on, reduce what becomes complete: this is a parameter's last backward of the window."""
        self._overlappable = [buffer for buffer in self._buffers if not any(map(self._completes_late, buffer.params))]
        self._waiting = {buffer: set(buffer.params) for buffer in self._buffers}
        self._next = list(self._overlappable)
        self._armed = True

    def _completes_late(self, param: FlatParam) -> bool:
        return param.placement_mismatch or param.parameter in self._tied

    def end(self) -> None:
        """Reduce the rest of what can be reduced before the step, and wait for all."""
        if not self._armed:
            return
        self._armed = False
        self._start_overlapped(self._next)
        self._finish()
        self._reduced |= {param: param.version for buffer in self._overlappable for param in buffer.params}

    def arrived(self, index: int) -> None:
        """The gradient of a parameter has been added up. Starts every buffer that is complete in order.

        The parameter itself counts from the next call on: the user's hooks that come after this one may change its
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
        self._start_overlapped(complete)
        del self._next[: len(complete)]

    def _start_overlapped(self, buffers: Sequence[Buffer]) -> None:
        self._take_back(param for buffer in buffers for param in buffer.params)
        self._start(buffers)

    def _start(self, buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            own = buffer.own(buffer.gradients)
            self._running.append(start_reduce_scatter(buffer.gradients, own, self._group, self._dtype))

    def _finish(self) -> None:
        while self._running:
            self._running.pop(0)()

    def changed_since(self) -> list[torch.Tensor]:
        """The local gradients that were changed by hand after they had been reduced."""
        return [param.local_gradient for param, then in self._reduced.items() if param.version != then]

    def reduce_the_rest(self) -> None:
        """Reduce what the last backward did not."""
        self._start(buffer for buffer in self._buffers if buffer.params[0] not in self._reduced)
        self._finish()
        self._reduced = {}


def _notify(reducer: weakref.ref[OverlappedReduceScatter], index: int, _: torch.Tensor) -> None:
    """The hook of a parameter. It holds nothing: the garbage collector does not see through the hooks of a parameter,
    so an engine that they held would never be freed, nor the process groups of its context."""
    alive = reducer()
    if alive is not None:
        alive.arrived(index)


def gather_weights(buffers: Iterable[Buffer], group: dist.ProcessGroup) -> None:
    """Give every rank of ``group`` the weights that the others have stepped: one all-gather for each buffer."""
    for buffer in buffers:
        if buffer.num_parts > 1:
            all_gather_shards(buffer.weights, buffer.own(buffer.weights), group)
