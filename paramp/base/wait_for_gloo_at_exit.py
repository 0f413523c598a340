"""The end of a process that used gloo: its threads may still be releasing the tensors of their last collectives.

A tensor that Python knows is released with the interpreter's lock. A thread that waits for the lock when the
interpreter ends is ended by it, inside a destructor of torch's. The process then aborts: ``terminate called without
an active exception``. torch joins the threads of a group only when nothing holds it any more, and a model in
``DistributedDataParallel`` does. So a process that has imported this module ends once these threads rest.
"""

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

THREADS = Path("/proc/self/task")
"""Where Linux lists the threads of this process."""
NAME = "pt_gloo_runloop"
"""What torch names the threads that run gloo's collectives."""
LONGEST = 5.0
"""Seconds: the wait for a thread that does not rest."""
WITHOUT_LIST = 0.2
"""Seconds: the wait where the system does not list threads."""


@atexit.register
def let_threads_finish() -> None:
    """Wait, without the interpreter's lock, until gloo's threads rest; at most :data:`LONGEST` seconds."""
    if not THREADS.is_dir():
        time.sleep(WITHOUT_LIST)
        return
    deadline, rests = time.monotonic() + LONGEST, 0
    while rests < 2 and time.monotonic() < deadline:  # twice, because one waits while another has the lock
        states = list(_states())
        if not states:
            return
        rests = rests + 1 if set(states) == {"S"} else 0
        time.sleep(0.002)


def _states() -> Iterator[str]:
    """The state of each thread that is gloo's, or too young to have a name: ``S`` if it sleeps.

    Reading a file gives up the interpreter's lock. That wakes a thread that waits for it, so that it does not sleep.
    """
    known = {thread.native_id for thread in threading.enumerate()}
    known |= {
        os.getpid(),
        threading.get_native_id(),
    }  # Python has the old main thread after a fork
    unnamed = (THREADS.parent / "comm").read_text().strip()
    for thread in THREADS.iterdir():
        with contextlib.suppress(OSError):  # it has ended
            head, _, fields = (thread / "stat").read_text().rpartition(")")
            name = head.partition("(")[2]
            if name == NAME or (name == unnamed and int(thread.name) not in known):
                yield fields.split()[0]
