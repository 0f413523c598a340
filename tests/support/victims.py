"""Runs whose ranks are killed from outside: finding the processes of a launcher's ranks, and ending one."""

import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from commands import ROOT, TORCHRUN, environment

from paramp.checkpoint.open_checkpoint import OpenCheckpoint
from paramp.checkpoint.resharding import read_tensor
from paramp.distributed.rendezvous import free_port

TINY = [
    *("launch/train.py", "--batch-size", "8", "--seq-len", "32", "--precision", "16-mixed"),
    *("--set", "train.eval_sequences=8", "--set", "train.eval_every=10000", "--resume", "auto"),
]
_numbers = itertools.count()


class Run:
    """A command in a session of its own, its output in a file, that a test watches and disturbs."""

    def __init__(self, command: list[str], log: Path, **variables: str) -> None:
        self.log, self._mark = log, f"{os.getpid()}-{next(_numbers)}"
        env = environment(variables | {"PARAMP_TEST_RUN": self._mark})
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _processes(self) -> dict[int, int | None]:
        """The run's processes, each with its rank. A warm one stands for the process that a server has forked for it,
        and that is killed with it."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                entries = path.read_text(errors="replace").split("\0")
                if f"PARAMP_TEST_RUN={self._mark}" in entries:
                    ranks = [int(entry[5:]) for entry in entries if entry.startswith("RANK=")]
                    found[int(path.parent.name)] = ranks[0] if ranks else None
        return found

    def ranks(self) -> dict[int, int]:
        """Process ids by rank, of the processes that are there now; those that a rank has started come after it."""
        return {rank: pid for pid, rank in sorted(self._processes().items(), reverse=True) if rank is not None}

    def wait_for(self, condition: Callable[[], bool], seconds: float = 90.0, pause: float = 0.01) -> bool:
        """Whether ``condition`` came true before the run ended or ``seconds`` passed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            if condition():
                return True
            time.sleep(pause)
        return condition()

    def kill(self, rank: int) -> bool:
        """End one rank at once. False if it is not there."""
        with contextlib.suppress(ProcessLookupError, KeyError):
            os.kill(self.ranks()[rank], signal.SIGKILL)
            return True
        return False

    def finish(self, seconds: float = 150.0) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"the run did not end in {seconds:g} s:\n{self.log.read_text()}") from None

    def end(self) -> None:
        """End everything that is still there."""
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def torchrun_command(processes: int, *arguments: str, restarts: int = 0) -> list[str]:
    where = ["--nproc-per-node", str(processes), "--master-port", str(free_port())]
    return [*TORCHRUN, *where, "--max-restarts", str(restarts), *arguments]


def weights_at(checkpoint: Path) -> dict[str, bytes]:
    """The bytes of every tensor of a checkpoint but the default random streams, which hold Python's own."""
    with OpenCheckpoint(checkpoint) as opened:
        names = [name for name in opened.header.tensors if not name.startswith("random.rank.")]
        return {name: read_tensor(opened, name).numpy().tobytes() for name in names}
