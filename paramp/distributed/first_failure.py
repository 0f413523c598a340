"""Failure handling: the job ends in bounded time, and the rank that failed first reports the error, once."""

import contextlib
import dis
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # missing in torch's stubs only

ECHO = "_paramp_echo"
"""The attribute of an exception that has left a context: whether it is a consequence of another rank's failure."""
EXIT_CODE = 1
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The environment variable of the file in which a launcher looks for the error of a rank."""
SECONDS_OF_GRACE = 5.0
"""The time that a rank has to end normally once it has failed; the others have that of a beat more."""
LOST = (dist.DistError, RuntimeError)
"""The exceptions that the store raises when its host is gone."""
SECONDS_TO_READ = 2.0
"""The time that rank 0, which may host the store, waits for the others to read that it has left or who failed first."""
LONGEST_WAIT = 1800.0
"""Seconds that a rank waits for the others to begin what they do together; that of gloo's collectives."""


IN_ORDER = "in order: its block or its program ended"
"""How a rank has left that no error has ended."""
SAME_CALLS = (
    "every rank has to call it equally often, so this one had more batches, or that one has left its loop early; give "
    "data ranks equal numbers of batches, and end the loop on all ranks at once"
)
OTHER_CALLS = (
    "another rank is in another call, as torch has found; call forward_backward, step and whatever else communicates "
    "on every rank, in the same order, and not under a condition such as `if rank == 0`"
)


def mark_as_echo(error: BaseException, is_echo: bool = True) -> None:
    """Mark ``error``, which leaves a context, as a consequence of another rank's failure, which that rank reports.

    Or, without ``is_echo``, as this rank's to report.
    """
    error.__dict__[ECHO] = is_echo


def is_echo(error: BaseException) -> bool:
    """Whether ``error`` is a consequence of another rank's failure."""
    return bool(error.__dict__.get(ECHO))


def left_a_context(error: BaseException) -> bool:
    """Whether the ranks have agreed which of them reports ``error``."""
    return ECHO in error.__dict__


def linger(all_have_read: Callable[[], bool], seconds: float) -> None:
    """On rank 0, which may host the store: give the others the time to read it, at most ``seconds``."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(*LOST):  # this rank was not the host, and the host has ended
        while not all_have_read() and time.monotonic() < deadline:
            time.sleep(0.02)


def is_lost_connection(error: BaseException | None) -> bool:
    """Whether ``error`` comes from a process group that has lost a rank, or was raised because of one that does."""
    while error is not None:
        text = str(error).lower()
        has_word = any(word in text for word in ("gloo", "nccl", "connection", "socket"))
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and has_word and not _is_of_python(error)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_of_python(error: RuntimeError) -> bool:
    """Whether a ``raise`` made ``error``, such as a user's about a data server; gloo's and NCCL's come from C++.

    What has a cause was made in Python too, and may not have been raised yet.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised = trace is not None and trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raised or error.__cause__ is not None


@contextmanager
def ending_in_time(error: BaseException | None, *, quiet: bool) -> Iterator[None]:
    """If there is an ``error`` and the body takes too long, report the error and end the process.

    Destroying a group whose other ranks wait in a collective may never return, and the error would not be reported.
    With ``quiet`` it is not printed, because another rank reports it.
    """

    def give_up() -> None:
        if not quiet:
            write_stderr("".join(traceback.format_exception(error)))
        end_process("" if quiet else f"{type(error).__name__}: {error}")

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


def give_launcher(text: str) -> None:
    """Write ``text``, why this rank ends, to the file that the launcher reads; the first text is kept.

    torchrun prints it. ``paramp run`` and ``paramp.notebook`` name a rank that ends without it.
    """
    if path := os.environ.get(ERROR_FILE):
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": details}}, file)


def end_process(reason: str = "") -> None:
    """End the process with an error code, also while its main thread waits where no exception reaches it.

    ``reason``: for the launcher.
    """
    give_launcher(reason or "this rank ends because another one has failed")

    # In a thread, because the main thread may hold the streams' locks.
    flushing = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    flushing.start()
    flushing.join(1.0)
    os._exit(EXIT_CODE)


class Departures:
    """Which rank has left a context first, and how: for the errors of the ranks that still wait for it.

    A rank that leaves closes its connections. The others' collectives then fail with an error of gloo's or NCCL's that
    names no rank. So a rank writes that it leaves into the launch's store before it closes them. Does nothing in a
    world of one.
    """

    def __init__(self, key: str, rank: int, world_size: int) -> None:
        """``key`` is that of the context in the default store, equal on every rank."""
        self._key = key
        self._rank, self._world_size = rank, world_size
        alone = world_size == 1 or dist.get_backend() == "fake"
        self._store: Store | None = None if alone else dist.distributed_c10d._get_default_store()
        self._announced = alone
        self._lingered = False

    def failed_after_another(self, error: BaseException) -> bool:
        """Whether another rank failed before this one, which fails with ``error``; that one reports its error.

        A rank that dies breaks the connections of its peers, so one error raises on all ranks; or every rank finds the
        same mistake in the configuration. Every rank that fails calls this once, before :meth:`announce`.
        """
        try:
            return self._store is not None and self._store.add(f"{self._key}/failed", 1) > 1
        except RuntimeError:  # the process that hosted the store has ended
            return is_lost_connection(error)

    def announce(self, text: str) -> None:
        """Write that this rank leaves, in the words of ``text``; that of the first rank is kept."""
        if self._announced or self._store is None:
            return
        self._announced = True
        with contextlib.suppress(*LOST):  # the process that hosted the store has ended
            self._store.compare_set(f"{self._key}/first", "", text)
            if self._store.add(f"{self._key}/left", 1) == self._world_size:
                self._store.set(f"{self._key}/all", "")

    def drop_store(self) -> None:
        """Use the store no more: its host has left."""
        self._store = None

    def linger(self) -> None:
        """On rank 0: give the others the time to read it, once: a launcher ends this rank soon after them."""
        if self._rank == 0 and self._store is not None and not self._lingered:
            self._lingered = True
            linger(lambda: self._has(f"{self._key}/all"), SECONDS_TO_READ)

    def first(self) -> str:
        """What the first rank that left has written; empty if none has."""
        key = f"{self._key}/first"
        return self._store.get(key).decode() if self._store is not None and self._has(key) else ""

    def explain(self, error: BaseException | None) -> None:
        """Name the rank that has left first in a note of ``error``, if that is of a lost connection and does not."""
        text = "" if error is None else self.cause_of(error)
        if text and error is not None and text not in str(error):
            error.add_note(f"paramp: {text}")

    def cause_of(self, error: BaseException) -> str:
        """Which rank has left first, if ``error`` is of a lost connection; empty if it is not, or if none has."""
        if self._store is None or not is_lost_connection(error):
            return ""
        try:
            return self.first()
        except LOST:
            return "the store of this launch has ended, with rank 0 or the launcher, whichever hosts it"

    def explained(self, function: str, error: Exception) -> RuntimeError | None:
        """For ``error`` of the public ``function``, if it is of a lost connection: one that names who has left first.

        For one of a collective that others have not called: one that says so. Else None.

        Every rank calls the function equally often, so a rank that has left in order was given fewer batches, or has
        left its loop early.
        """
        if "mismatch between collectives" in str(error):  # TORCH_DISTRIBUTED_DEBUG=DETAIL compares them
            return RuntimeError(f"{function}: {OTHER_CALLS}")
        text = self.cause_of(error)
        return RuntimeError(f"{function}: {text}{f'; {SAME_CALLS}' if IN_ORDER in text else ''}") if text else None

    def gather(self, name: str, function: str, elsewhere: Callable[[], str] = lambda: "") -> None:
        """Wait until every rank has come here for the public ``function``; ``name``: of this time, on every rank.

        ``elsewhere`` returns why a rank will not come; empty: it does not know one.

        Raises:
            RuntimeError: a rank has left, will not come, or has not come in :data:`LONGEST_WAIT` seconds.
        """
        if self._store is None:
            return
        key, pause, deadline = f"{self._key}/{name}", 0.001, time.monotonic() + LONGEST_WAIT
        num_here = self._store.add(f"{key}/here", 1)
        if num_here == self._world_size:
            self._store.set(f"{key}/all", "")
        while not self._has(f"{key}/all"):
            text = self.first() or ("" if time.monotonic() < deadline else f"others have not in {LONGEST_WAIT:g} s")
            if text or (pause >= 0.1 and (text := elsewhere())):
                raise RuntimeError(f"{function}: every rank has to call it, but {text}")
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _has(self, key: str) -> bool:
        return self._store is not None and self._store.check([key])
