"""Signals that request a run to save and stop."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ..distributed.context import ParallelContext


class StopRequest:
    """Records the signals that request a stop of this process, so that it can save first. A context manager.

    Slurm sends SIGTERM before the time limit of a job and before preemption (``--signal``: another one, earlier);
    torchrun sends it when it is terminated itself. Leaving the context restores the previous handlers.
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        self._signals = signals
        self._before: dict[signal.Signals, Any] = {}
        self.received: int | None = None
        """The number of the signal that this rank received."""

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._record) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, _: FrameType | None) -> None:
        self.received = number

    def agreed(self, context: ParallelContext) -> bool:
        """Whether any rank received a signal, the same on every rank; one small all-reduce."""
        asked = torch.tensor(float(self.received is not None), device=context.device)
        dist.all_reduce(asked)
        return bool(asked > 0)
