"""Recording the batches of an accumulation window and its random state, to rerun it bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ..base.module_surgery import keeping_buffers
from ..distributed.rng import RandomStream, random_states, set_random_states
from ..parallel.batches import Batch
from ..pipeline.stage import Stages

RandomStates = tuple[list[torch.Tensor], list[list[torch.Tensor]]]
"""The states of torch's default generators, and of each stage's random stream."""


class Call(NamedTuple):
    """One call of ``forward_backward``: a reference to its batch, the random states before it, its index."""

    batch: Batch
    random: RandomStates
    number: int


class WindowBatches:
    """The calls of an accumulation window, kept until the next window begins."""

    def __init__(self, stages: Stages, device: torch.device) -> None:
        self.stages = stages
        self._device = device
        self._streams = [stage.random for stage in stages if isinstance(stage.random, RandomStream)]
        self.calls: list[Call] | None = []
        """None if a backward of an unknown batch contributed, so that the window cannot be rerun."""
        self.scale: torch.Tensor | None = None
        """The loss scale of the window's step, 0-dim; None before that step."""

    def add(self, batch: Batch | None) -> None:
        """Record that a backward begins, of ``batch``; None if it is not known."""
        if self.scale is not None:
            self.calls, self.scale = [], None
        if batch is None:
            self.calls = None
        elif self.calls is not None:
            self.calls.append(Call(batch, self._random_states(), len(self.calls)))

    @property
    def last_index(self) -> int:
        """The index in the window of the call that was added last."""
        return max(0, len(self.calls or ()) - 1)

    @property
    def is_open(self) -> bool:
        """Whether it has gradients that no step has used yet."""
        return self.scale is None and (self.calls is None or len(self.calls) > 0)

    def drop(self) -> None:
        """Discard the calls of an unfinished window, after its gradients were zeroed."""
        if self.scale is None:
            self.calls = []

    @contextmanager
    def again(self) -> Iterator[Iterator[Call]]:
        """Yield an iterator over the calls; each step of it restores the random states of its call.

        On exit the random states and buffers of the entry are restored.
        """
        before = self._random_states()
        with keeping_buffers(self.stages):
            try:
                yield self._rewound()
            finally:
                self._set_random(before)

    def _rewound(self) -> Iterator[Call]:
        for call in self.calls or ():
            self._set_random(call.random)
            yield call

    def _random_states(self) -> RandomStates:
        return random_states(self._device), [stream.states for stream in self._streams]

    def _set_random(self, states: RandomStates) -> None:
        set_random_states(states[0], self._device)
        for stream, own in zip(self._streams, states[1], strict=True):
            stream.states = own
