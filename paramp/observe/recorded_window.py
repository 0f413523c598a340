"""What is kept of an accumulation window, so that it can run again bit for bit: its batches and random states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..base.state_over_trials import keeping_state
from ..distributed.rng import random_states, set_random_states
from ..distributed.trials import without_draws
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


class WindowRecord(NamedTuple):
    """The batches of an accumulation window that has ended, to run once more."""

    stages: Stages
    calls: Sequence[RecordedBatch] | None
    """None if a backward of an unknown batch contributed, so that the window cannot be rerun."""
    scale: torch.Tensor | None
    """The loss scale of the window's step, 0-dim; None before that step."""
    device: torch.device

    @contextmanager
    def again(self) -> Iterator[Iterator[RecordedBatch]]:
        """Yield an iterator over the batches; each step of it restores torch's random states of its batch.

        On exit the random states of the entry, Python's and NumPy's too, and the modules' own state are restored.
        """
        streams = self.stages.streams
        before = [stream.states for stream in streams]

        def set_streams(states: Sequence[list[torch.Tensor]]) -> None:
            for stream, one in zip(streams, states, strict=True):
                stream.states = one

        def rewound() -> Iterator[RecordedBatch]:
            for call in self.calls or ():
                set_random_states(call.random, self.device)
                set_streams(call.streams)
                yield call

        with keeping_state(self.stages), without_draws(self.device):
            try:
                yield rewound()
            finally:
                set_streams(before)
