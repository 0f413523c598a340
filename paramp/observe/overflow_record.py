"""What is kept of an accumulation window, so that it can run again bit for bit: its batches and random states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..base.module_surgery import keeping_buffers
from ..distributed.rng import RandomStream, random_states, set_random_states
from ..parallel.batches import Batch
from ..parallel.token_counts import token_counts
from ..pipeline.stage import Stages


class RecordedBatch(NamedTuple):
    """A batch, and the states of torch's random streams before it ran; :func:`record_batch` makes one."""

    batch: Any
    random: list[torch.Tensor]
    """Of the CPU's default generator and, where CUDA is in use, of the current GPU's."""
    streams: Sequence[list[torch.Tensor]] = ()
    """In an engine: of each stage's random stream."""
    number: int = 0
    """Its index among the calls of ``forward_backward`` in the window."""


def record_batch(batch: Any) -> RecordedBatch:
    """``batch`` for :func:`trace_overflow`, with the states of torch's random streams.

    Call it before the batch runs, if the model has dropout: the rerun then drops what the step dropped. It keeps a
    reference to the batch, and copies some kilobytes.
    """
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    device = torch.device("cuda", torch.cuda.current_device()) if used else torch.device("cpu")
    return RecordedBatch(batch, random_states(device))


class WindowRecord:
    """The batches of an accumulation window, kept until the next window begins."""

    def __init__(self, stages: Stages, device: torch.device) -> None:
        self.stages = stages
        self.counts = token_counts(stages)  # of the tokens in the window
        self._device = device
        self._streams = [stage.random for stage in stages if isinstance(stage.random, RandomStream)]
        self.calls: list[RecordedBatch] | None = []
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
            self.calls.append(RecordedBatch(batch, *self._random_states(), len(self.calls)))

    @property
    def last_index(self) -> int:
        """The index in the window of the batch that was added last."""
        return max(0, len(self.calls or ()) - 1)

    @property
    def is_open(self) -> bool:
        """Whether it has gradients that no step has used yet."""
        return self.scale is None and (self.calls is None or len(self.calls) > 0)

    def drop(self) -> None:
        """Discard the batches of an unfinished window, after its gradients were zeroed."""
        if self.is_open:
            self.calls = []
            for counts in self.counts:
                counts.restart()

    @contextmanager
    def again(self) -> Iterator[Iterator[RecordedBatch]]:
        """Yield an iterator over the batches; each step of it restores the random states of its batch.

        On exit the random states and buffers of the entry are restored.
        """
        before = self._random_states()

        def rewound() -> Iterator[RecordedBatch]:
            for call in self.calls or ():
                self._set_random(call.random, call.streams)
                yield call

        with keeping_buffers(self.stages):
            try:
                yield rewound()
            finally:
                self._set_random(*before)

    def _random_states(self) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        return random_states(self._device), [stream.states for stream in self._streams]

    def _set_random(self, random: list[torch.Tensor], streams: Sequence[list[torch.Tensor]]) -> None:
        set_random_states(random, self._device)
        for stream, states in zip(self._streams, streams, strict=True):
            stream.states = states
