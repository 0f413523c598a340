"""A launcher for the ranks of one machine, and the check that prints a mistake of all ranks only once."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ..config.layout_of_run_command import VARIABLE
from .first_failure import ERROR_FILE
from .rendezvous import host_store

ABORTED = (
    "; if gloo says above that sizes do not match, the ranks called different things, as when one leaves out "
    "engine.evaluate(): set TORCH_DISTRIBUTED_DEBUG=DETAIL, and torch names the calls"
)
SECONDS_FOR_RANK_0 = 5.0
SECONDS_OF_ONE_RUN = 60.0
SECONDS_TO_END = 5.0
"""The time that ranks have to end by themselves once another one has failed, and again after SIGTERM."""
SECONDS_TO_SAVE = 30.0
"""The time that ranks have to save a checkpoint after SIGTERM; as long as torchrun gives them."""


def _print_error(text: str) -> None:
    print(f"error: {text}", file=sys.stderr, flush=True)


def start_processes(
    command: Sequence[str],
    num_processes: int,
    layout: str = "",
    unreported: Callable[[str], None] = _print_error,
) -> int:
    """Run ``command`` once per rank on this machine, with torchrun's variables set; the exit code of the first failure.

    When one rank fails, the others have 5 s to end before they are terminated. SIGINT, SIGTERM and SIGUSR1 stop the
    ranks with SIGTERM, and give them time to save; a second one kills them. They are left alone if this is not the main
    thread.

    Args:
        layout: for the launch functions of the ranks (:data:`paramp.config.layout_of_run_command.VARIABLE`).
        unreported: gets the rank that ended with an error of which it has said nothing, and how it ended.
    """
    # Hosted here, the store outlives every rank, so that the last of them can still read which failed first.
    store = host_store(0)
    environment = _shared_environment(store.port, num_processes) | {VARIABLE: layout}
    folder = tempfile.TemporaryDirectory(prefix="paramp-errors-", ignore_cleanup_errors=True)
    files = [Path(folder.name, str(rank)) for rank in range(num_processes)]
    processes = [
        subprocess.Popen(
            command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), ERROR_FILE: str(files[rank])}
        )
        for rank in range(num_processes)
    ]

    stopping = False

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        nonlocal stopping
        again, stopping = stopping, True
        _end(processes, to_stop=0.0 if again else SECONDS_TO_SAVE)
        sys.exit(128 + number)

    in_main = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) if in_main else ()
    previous = {number: signal.signal(number, stop) for number in signals}
    try:
        return _wait(processes, files, unreported)
    finally:
        _end(processes)
        folder.cleanup()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _shared_environment(port: int, num_processes: int) -> dict[str, str]:
    """This process's environment and the variables that torchrun sets to the same value on every rank."""
    threads = max(1, (os.cpu_count() or 1) // num_processes)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    return inherited | {
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "paramp",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], files: Sequence[Path], unreported: Callable[[str], None]
) -> int:
    """Wait until all have ended, or one has failed and the others had 5 s to end; the exit code.

    ``files``: of each rank, where it writes why it fails. One that fails and has not is passed to ``unreported``.
    """
    while True:
        codes = [process.poll() for process in processes]
        failures = [(files[rank].exists(), rank, code) for rank, code in enumerate(codes) if code]
        if failures:
            reported, rank, failed = min(failures)  # the others may have failed because of one that could not say so
            _end(processes, grace=SECONDS_TO_END)
            if not reported:
                unreported(f"rank {rank} {_how(failed)}")
            return failed if failed > 0 else 128 - failed
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}{ABORTED if -code == signal.SIGABRT else ''}"


def _end(processes: Sequence[subprocess.Popen[bytes]], grace: float = 0.0, to_stop: float | None = None) -> None:
    """Wait ``grace`` seconds for ``processes``, then send SIGTERM, and after ``to_stop`` more seconds SIGKILL."""
    to_stop = SECONDS_TO_END if to_stop is None else to_stop
    for ask, patience in ((None, grace), (signal.SIGTERM, to_stop), (signal.SIGKILL, SECONDS_TO_END)):
        alive = [process for process in processes if process.poll() is None]
        if ask is not None:
            for process in alive:
                process.send_signal(ask)
        deadline = time.monotonic() + patience
        for process in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def reported_by_rank_0(message: str, rank: int) -> bool:
    """Whether rank 0 of this machine has printed ``message``, so that this rank need not.

    Before the ranks are connected, each finds a mistake alone, mostly the same one. Rank 0 prints it and writes it to a
    file; the others wait for that file, unless the launcher ends them earlier, and print only a different message.
    """
    file_of_rank_0 = Path(tempfile.gettempdir(), f"paramp-{os.getuid()}")
    content = f"{os.getppid()} {message}"
    try:
        if rank > 0:
            time.sleep(SECONDS_FOR_RANK_0)
            fresh = file_of_rank_0.exists() and time.time() - file_of_rank_0.stat().st_mtime < SECONDS_OF_ONE_RUN
            if fresh and file_of_rank_0.read_text() == content:
                return True
        with open(os.open(file_of_rank_0, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
            file.write(content)
    except OSError:  # then the message is printed more than once
        pass
    return False
