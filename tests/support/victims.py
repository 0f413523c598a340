"""Runs whose ranks are killed from outside: finding the processes of a launcher's ranks, and ending one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import warm
from commands import ROOT, TORCHRUN, environment

from paramp.checkpoint.dcp_storage import read_tensor
from paramp.checkpoint.open_checkpoint import OpenCheckpoint
from paramp.distributed.rendezvous import free_port

TINY = [
    *("launch/train.py", "--batch-size", "8", "--seq-len", "32", "--precision", "16-mixed"),
    *("--set", "train.eval_sequences=8", "--set", "train.eval_every=10000", "--resume", "auto"),
]


class Run:
    """A command in a session of its own, its output in a file, that a test watches and disturbs."""

    def __init__(self, command: list[str], log: Path, **variables: str) -> None:
        self.log, self.pids = log, Path(tempfile.mkdtemp(prefix="paramp-pids-"))
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(variables | {warm.PIDS: str(self.pids)}),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ranks(self) -> dict[int, int]:
        """Process ids by rank, of the processes that are there now. Warm ones are no descendants; each has a file."""
        if written := {int(path.name): path.read_text() for path in self.pids.glob("[0-9]*")}:
            return {rank: int(pid) for rank, pid in written.items() if pid and Path("/proc", pid).exists()}
        found = {}
        for pid in descendants(self.process.pid):
            try:
                entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            rank = next((entry for entry in entries if entry.startswith(b"RANK=")), b"")
            if rank:
                found[int(rank[5:])] = pid
        return found

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
        pid = self.ranks().get(rank)
        try:
            os.kill(pid or 0, signal.SIGKILL) if pid else None
        except ProcessLookupError:
            return False
        return pid is not None

    def finish(self, seconds: float = 150.0) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"the run did not end in {seconds:g} s:\n{self.log.read_text()}") from None

    def end(self) -> None:
        """End everything that is still there."""
        warm_ones = [path.read_text() for path in self.pids.iterdir()] if self.process.poll() is None else []
        for pid in [*map(int, filter(None, warm_ones)), *descendants(self.process.pid), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        shutil.rmtree(self.pids, ignore_errors=True)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def descendants(pid: int) -> list[int]:
    """The processes that ``pid`` has started, and those that they have."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def torchrun_command(processes: int, *arguments: str, restarts: int = 0) -> list[str]:
    return [
        *TORCHRUN,
        *("--nproc-per-node", str(processes), "--max-restarts", str(restarts)),
        *("--master-port", str(free_port()), *arguments),
    ]


def weights_at(checkpoint: Path) -> dict[str, bytes]:
    """The bytes of every tensor of a checkpoint but the default random streams, which hold Python's own."""
    with OpenCheckpoint(checkpoint) as opened:
        return {
            name: read_tensor(opened, name).numpy().tobytes()
            for name in opened.header.tensors
            if not name.startswith("random.rank.")
        }
