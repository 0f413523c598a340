"""ZeRO-1 over data ranks: gradients are reduce-scattered during the backward, stepped weights all-gathered."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..base.collectives import all_gather_shards, start_reduce_scatter
from ..distributed.context import ParallelContext
from .param_buffer import Buffer, FlatParam


class OverlappedReduceScatter:
    """The reduce-scatter of each buffer during the backward, as soon as its gradients are complete.

    This is possible only in the last backward of a window, and not for gradients that the step completes: those of tied
    parameters, and those whose placements differ from their parameters'. Every rank starts the same buffers in the same
    order, each once per call of ``forward_backward``, whichever of its parameters got a gradient.

    ``take_back`` copies gradients that were replaced, here by the user's hooks, back to their buffers.
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
        self._reduced: dict[FlatParam, int] = {}  # and the version of the gradient after the reduction
        self._waiting: dict[Buffer, set[FlatParam]] = {}  # parameters without a gradient yet
        self._overlappable: list[Buffer] = []  # buffers that can be reduced before the step
        self._next: list[Buffer] = []  # overlappable buffers that have not been started, in this order
        self._running: list[Callable[[], None]] = []
        self._armed = False
        self._places = [(buffer, param) for buffer in buffers for param in buffer.params]
        for index, (_, param) in enumerate(self._places):
            hook = functools.partial(_notify, weakref.ref(self), index)
            param.parameter.register_post_accumulate_grad_hook(hook)

    def begin(self) -> None:
        """From here on, reduce buffers as they become complete: the next backward is the last one of the window."""
        self._overlappable = [buffer for buffer in self._buffers if not any(map(self._completes_late, buffer.params))]
        self._waiting = {buffer: set(buffer.params) for buffer in self._buffers}
        self._next = list(self._overlappable)
        self._armed = True

    def _completes_late(self, param: FlatParam) -> bool:
        return param.placement_mismatch or param.parameter in self._tied

    def end(self) -> None:
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
        """The local gradients that the user changed after they had been reduced."""
        return [param.local_gradient for param, then in self._reduced.items() if param.version != then]

    def reduce_the_rest(self) -> None:
        """Reduce the buffers that the last backward did not."""
        self._start(buffer for buffer in self._buffers if buffer.params[0] not in self._reduced)
        self._finish()
        self._reduced = {}


def _notify(reducer: weakref.ref[OverlappedReduceScatter], index: int, _: torch.Tensor) -> None:
    """The hook of a parameter, with a weak reference only: the garbage collector does not traverse a parameter's hooks,
    so they would keep the engine, and its context's process groups, forever."""
    alive = reducer()
    if alive is not None:
        alive.arrived(index)


def gather_weights(buffers: Iterable[Buffer], group: dist.ProcessGroup) -> None:
    """All-gather the stepped weights over ``group``: one all-gather for each buffer."""
    for buffer in buffers:
        if buffer.num_parts > 1:
            all_gather_shards(buffer.weights, buffer.own(buffer.weights), group)
