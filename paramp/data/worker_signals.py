"""Signals to all processes of a rank do not end the workers of its loaders.

Ctrl-C, torchrun, ``timeout`` and schedulers send a signal to a process group. The rank saves before it stops
(:class:`paramp.StopRequest`), and needs its workers until then.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

from torch.utils.data import DataLoader

SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}


def start_workers(loader: Any, start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """The iterator of ``loader`` that ``start`` makes, whose workers are :class:`_Apart`.

    A new worker holds :data:`SIGNALS` back until it is apart. Workers of a fork server stay as they are: the server
    would hold signals back for all that it forks, and torch's watchdog ends its workers with it, not with the rank.
    """
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return start()
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if method == "forkserver":
        return start()
    own = loader.worker_init_fn
    # it stays: an iterator of a user's class may start workers with its first batch
    loader.worker_init_fn = _Apart(own.worker_init_fn if isinstance(own, _Apart) else own, os.getpid())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        if method == "spawn":
            resource_tracker.ensure_running()  # unblocks SIGINT and SIGTERM where it starts the tracker
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        return start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class _Apart:
    """Puts a worker into a process group of its own, then calls the user's ``worker_init_fn``.

    ``terminate`` of the rank, to this process alone, ends it as before, and so does torch's watchdog after the rank.
    """

    worker_init_fn: Callable[[int], object] | None
    rank: int
    """The process of the rank."""

    def __call__(self, worker: int) -> None:
        if os.getpid() != self.rank:  # a worker may be a thread of it
            os.setpgid(0, 0)
            while hasattr(signal, "sigtimedwait") and (held := signal.sigtimedwait(SIGNALS, 0)):  # macOS has none
                if held.si_pid == self.rank:
                    os._exit(0)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)
