"""Recording the batches of an accumulation window, and running them again as they ran the first time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..base.module_surgery import keeping_buffers
from ..distributed.rng import RandomStream, random_states, set_random_states
from ..parallel.stage import Stages


@dataclass(frozen=True)
class Call:
    """One call of ``forward_backward``: its batch, not copied, and the state of every random stream before it."""

    x: torch.Tensor
    y: torch.Tensor
    default: list[torch.Tensor]
    """States of torch's default generators."""
    streams: list[list[torch.Tensor]]
    """States of each stage that has a stream of its own."""


class Window:
    """The calls of an accumulation window, kept until the next window begins.

    Attributes:
        calls: None if a gradient came from elsewhere too, so that the window cannot be run again.
        scale: the loss scale of the window's step, 0-dim; None before that step.
    """

    def __init__(self, stages: Stages, device: torch.device) -> None:
        self._stages = stages
        self._device = device
        self._streams = [stage.random for stage in stages if isinstance(stage.random, RandomStream)]
        self.calls: list[Call] | None = []
        self.scale: torch.Tensor | None = None

    def add(self, batch: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Record that a backward begins.

        Args:
            batch: inputs and targets, with the batch in dim 0; None where they are not known.
        """
        if self.scale is not None:
            self.calls, self.scale = [], None
        if batch is None:
            self.calls = None
        elif self.calls is not None:
            streams = [stream.states for stream in self._streams]
            self.calls.append(Call(*batch, random_states(self._device), streams))

    @property
    def is_open(self) -> bool:
        """Whether it has gradients that no step has taken."""
        return self.scale is None and (self.calls is None or len(self.calls) > 0)

    def drop(self) -> None:
        """Forget the calls of an unfinished window, whose gradients were dropped."""
        if self.scale is None:
            self.calls = []

    def end(self, scale: torch.Tensor) -> None:
        """Record the window's step, whose gradients carry ``scale``, 0-dim."""
        self.scale = scale

    @contextmanager
    def again(self) -> Iterator[Iterator[Call]]:
        """Yield the calls, each with the random streams set back to where it began.

        On exit random streams and buffers are what they were on entry.
        """
        assert self.calls is not None
        default, streams = random_states(self._device), [stream.states for stream in self._streams]
        with keeping_buffers(self._stages):
            try:
                yield (self._rewound(call) for call in self.calls)
            finally:
                self._set_random(default, streams)

    def _rewound(self, call: Call) -> Call:
        self._set_random(call.default, call.streams)
        return call

    def _set_random(self, default: list[torch.Tensor], streams: Sequence[list[torch.Tensor]]) -> None:
        set_random_states(default, self._device)
        for stream, states in zip(self._streams, streams, strict=True):
            stream.states = states
