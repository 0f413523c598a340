"""Signals that request a run to save and stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ..distributed.context import ParallelContext

SECONDS_OF_ONE_REQUEST = 1.0
"""Signals within this time are one request: a terminal sends SIGINT to a launcher and to its ranks, and the launcher
passes it on."""
NOTICE = (
    b"paramp: interrupted; this run saves after the current step, and then stops (Ctrl-C once more: stop at once)\n"
)


class StopRequest:
    """Records the signals that request a stop of this process, so that it can save first. A context manager.

    Slurm sends SIGTERM before the time limit of a job and before preemption (``--signal``: another one, earlier);
    torchrun sends it when it is terminated itself. Ctrl-C is SIGINT: a launcher passes it on to its ranks, and rank 0
    says what happens. Any of the signals later than a second after that ends the process at once. Leaving the context
    restores the previous handlers.
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)) -> None:
        self._signals = signals
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()
        self._interrupted: float | None = None  # when the first SIGINT came
        self.received: int | None = None
        """The number of the first signal that this rank received."""

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._record) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked worker of a loader, which ends when this process does
            if number == signal.SIGTERM:  # also multiprocessing's `terminate`
                _end_by(number)
            return
        self.received = self.received or number
        now = time.monotonic()
        if self._interrupted is not None and now - self._interrupted > SECONDS_OF_ONE_REQUEST:
            _end_by(number)
        if number == signal.SIGINT and self._interrupted is None:
            self._interrupted = now
            if os.environ.get("RANK", "0") == "0":
                os.write(2, NOTICE)  # print is not reentrant

    def agreed(self, context: ParallelContext) -> bool:
        """Whether any rank received a signal, the same on every rank; one small all-reduce."""
        asked = torch.tensor(float(self.received is not None), device=context.device)
        dist.all_reduce(asked)
        return bool(asked > 0)


def _end_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
