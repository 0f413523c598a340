"""Failure handling: the job ends in bounded time, and the rank that failed first reports the error, once."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # missing in torch's stubs only

ECHO = "_paramp_echo"
"""The attribute that marks an exception as a consequence of another rank's failure."""
EXIT_CODE = 1
SECONDS_OF_GRACE = 5.0
"""The time that a rank has to end normally once it or another has failed."""
SECONDS_FOR_THE_OTHERS = 2.0
"""The time that rank 0, which may host the store, waits for the others to read which rank failed first."""


def mark_as_echo(error: BaseException) -> None:
    """Mark ``error``, which left a context, as a consequence of another rank's failure, which that rank reports."""
    error.__dict__[ECHO] = True


def is_echo(error: BaseException) -> bool:
    """Whether ``error`` has that mark."""
    return ECHO in error.__dict__


def report_once() -> None:
    """Suppress the traceback of errors that are marked as consequences of another rank's failure."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not is_echo(error):
            previous(kind, error, traceback)

    if not getattr(previous, "reports_once", False):
        hook.reports_once = True  # type: ignore[attr-defined]
        sys.excepthook = hook


def failed_after_another(store: Store, key: str, error: BaseException) -> bool:
    """Whether another rank failed before this one, which fails with ``error``. Every rank that fails calls it once.

    A rank that dies breaks the connections of its peers, so one error raises on all ranks; or every rank finds the same
    mistake in the configuration. The first rank that increments ``key`` of the store reports its error.
    """
    try:
        return store.add(key, 1) > 1
    except RuntimeError:  # the process that hosted the store has ended
        return is_lost_connection(error)


def wait_for_failures(store: Store, key: str, world_size: int) -> None:
    """Wait until all ranks have called :func:`failed_after_another`, at most ``SECONDS_FOR_THE_OTHERS``."""
    deadline = time.monotonic() + SECONDS_FOR_THE_OTHERS
    try:
        while store.add(key, 0) < world_size and time.monotonic() < deadline:
            time.sleep(0.02)
    except RuntimeError:  # this rank was not the host, and the host has ended
        return


def is_lost_connection(error: BaseException | None) -> bool:
    """Whether ``error`` comes from a process group that has lost a rank."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "nccl", "connection", "socket"))
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def ending_in_time(error: BaseException | None, *, quiet: bool) -> Iterator[None]:
    """If there is an ``error`` and the body takes too long, report the error and end the process.

    Destroying a group whose other ranks wait in a collective may never return, and the error would not be reported.
    With ``quiet`` it is not printed, because another rank reports it.
    """

    def give_up() -> None:
        if not quiet:
            write_stderr("".join(traceback.format_exception(error)))
        end_process()

    if error is None:
        yield
        return
    timer = threading.Timer(SECONDS_OF_GRACE, give_up)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # a thread that still runs when the interpreter ends may abort the process


def write_stderr(text: str) -> None:
    """Write to stderr at once, even while the main thread holds the lock of ``sys.stderr``."""
    os.write(2, text.encode())


def end_process() -> None:
    """End the process with an error code, also while its main thread waits where no exception reaches it."""

    # In a thread, because the main thread may hold the streams' locks.
    flushing = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    flushing.start()
    flushing.join(1.0)
    os._exit(EXIT_CODE)
