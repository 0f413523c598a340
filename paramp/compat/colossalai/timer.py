"""Colossal-AI's timers."""

from __future__ import annotations

import time

import torch


class Timer:
    """A stopwatch that waits for the GPU, with a history of its times in seconds."""

    def __init__(self) -> None:
        self.history: list[float] = []
        self._begin = 0.0
        self._elapsed = 0.0

    def start(self) -> None:
        """Begin to measure."""
        self._begin = _now()

    def stop(self, keep_in_history: bool = False) -> float:
        """End the measurement, and return the seconds since :meth:`start`."""
        self._elapsed = _now() - self._begin
        if keep_in_history:
            self.history.append(self._elapsed)
        return self._elapsed

    def get_elapsed_time(self) -> float:
        """The seconds of the last measurement."""
        return self._elapsed

    def get_history_mean(self) -> float:
        """The mean of the history; 0 if that is empty."""
        return self.get_history_sum() / max(len(self.history), 1)

    def get_history_sum(self) -> float:
        """The sum of the history."""
        return sum(self.history)

    def reset(self) -> None:
        """Forget all times."""
        self.history, self._elapsed = [], 0.0


class MultiTimer:
    """Timers by name, made at their first use.

    Args:
        on: False: nothing is measured.
    """

    def __init__(self, on: bool = True) -> None:
        self.timers: dict[str, Timer] = {}
        self._on = on

    def start(self, name: str) -> None:
        """Start the timer ``name``."""
        if self._on:
            self.timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool = False) -> float | None:
        """Stop the timer ``name``; its seconds, or None if nothing is measured."""
        return self.timers[name].stop(keep_in_history) if self._on else None

    def get_timer(self, name: str) -> Timer:
        """The timer ``name``."""
        return self.timers[name]

    def reset(self, name: str | None = None) -> None:
        """Reset one timer, or all."""
        for key, timer in self.timers.items():
            if name in (None, key):
                timer.reset()

    def is_on(self) -> bool:
        """Whether it measures."""
        return self._on


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
