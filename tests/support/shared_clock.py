"""A clock for the heartbeats of several processes that goes on only after all of them have beaten.

A busy machine makes it slow, and no beat late: a rank is silent on it only if it is stopped. The process that forks the
ranks turns it (:meth:`SharedClock.tick`).
"""

import contextlib
import mmap
import threading
import time
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

from paramp.distributed import heartbeat, launch_from_torch_mpi_slurm
from paramp.distributed.first_failure import LOST
from paramp.distributed.heartbeat import Heartbeat

STEP = 0.5
"""Seconds on the clock between two turns; at a time-out of 3 s a rank beats every 0.6 s."""
PAUSE = 0.02
"""Real seconds between two beats."""
BEATS, ENDED = 1.0, 2.0
"""What a rank's heartbeat does; 0 before it begins."""


class SharedClock:
    """The time of some ranks, and what they have done; in memory that forked processes share."""

    def __init__(self, num_ranks: int) -> None:
        self._memory = mmap.mmap(-1, 8 * (1 + 3 * num_ranks))
        cells = memoryview(self._memory).cast("d")
        self._now = cells[:1]
        self._state, self._beats, self._looks = (cells[1 + i * num_ranks :][:num_ranks] for i in range(3))
        self._before = ([0.0] * num_ranks, [0.0] * num_ranks)

    def now(self) -> float:
        return self._now[0]

    def tick(self, running: Collection[int]) -> None:
        """Turn the clock if every one of the ranks that are ``running`` has beaten twice since the last time.

        If rank 0 is stopped, so is its store, and the others' first threads: then the second ones count.
        """
        waited_for = [rank for rank in running if self._state[rank] != ENDED]
        counts = self._beats if 0 in running else self._looks
        before = self._before[0 if 0 in running else 1]
        if all(self._state[rank] == BEATS and counts[rank] >= before[rank] + 2 for rank in waited_for):
            self._now[0] += STEP
            self._before = (list(self._beats), list(self._looks))

    def adopt(self, rank: int) -> None:
        """In the process of ``rank``: heartbeats go by this clock from now on."""
        clock = self

        def read() -> float:
            counts = clock._beats if threading.current_thread().name == "paramp-exchange_beats" else clock._looks
            counts[rank] += 1
            return clock.now()

        def sleep(seconds: float, is_over: Callable[[], bool] = lambda: False) -> None:
            """A thread of the heartbeat waits, and lets the clock go on."""
            until = clock.now() + seconds
            while clock.now() < until and not is_over():
                clock._beats[rank] += 1
                clock._looks[rank] += 1
                time.sleep(PAUSE)

        def linger(all_have_read: Callable[[], bool], seconds: float) -> None:
            with contextlib.suppress(*LOST):
                sleep(seconds, all_have_read)

        class OnThisClock(Heartbeat):
            _clock = staticmethod(read)

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self._stopped = _Impatient()

            def _exchange_beats(self) -> None:
                clock._state[rank] = BEATS
                try:
                    super()._exchange_beats()
                finally:
                    clock._state[rank] = ENDED

            def stop(self, *, failed: bool = False) -> None:
                threads = self._threads[:]
                super().stop(failed=failed)
                for thread in threads:  # which on a busy machine takes longer than a program would wait
                    thread.join(60)

        launch_from_torch_mpi_slurm.Heartbeat = OnThisClock  # type: ignore[misc]
        heartbeat.time = SimpleNamespace(monotonic=self.now, sleep=sleep)  # type: ignore[assignment]
        heartbeat.linger = linger  # type: ignore[assignment]

    def wait(self, seconds: float) -> None:
        """The program of a rank waits for so long on this clock."""
        until = self.now() + seconds
        while self.now() < until:
            time.sleep(PAUSE)

    def wait_for_beats(self, rank: int, count: int) -> None:
        """Until ``rank`` has beaten so often."""
        until = self._beats[rank] + count
        while self._beats[rank] < until:
            time.sleep(PAUSE)


class _Impatient(threading.Event):
    """Waits a moment where a program would wait for a second."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(PAUSE)
