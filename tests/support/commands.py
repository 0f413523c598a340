"""Running the project's commands as a user does, each with a time limit."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import warm

from paramp.distributed.rendezvous import free_port

ROOT = Path(__file__).parents[2]
PYTHON = warm.python()
TORCHRUN = [PYTHON, "-m", "torch.distributed.run"]
COLD = {"PARAMP_TEST_COLD": "1"}
"""For commands whose start itself is tested: each of their processes imports all it needs."""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER_PREFIXES = ("OMPI_", "PMI", "MPI_LOCAL", "SLURM_", "TORCHELASTIC_")


def environment(variables: dict[str, str]) -> dict[str, str]:
    """What a command runs in: no launcher's variables but those given, and ``python`` that starts warm."""
    warm.start()
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(LAUNCHER_PREFIXES)
    }
    path = f"{warm.folder()}{os.pathsep}{variables.get('PATH', os.environ['PATH'])}"
    return inherited | {"OMP_NUM_THREADS": "1"} | variables | {"PATH": path}


@contextlib.contextmanager
def start(
    command: list[str], *, cwd: Path = ROOT, streams: int | None = None, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """A command that runs beside the test, and is ended with it."""
    options: dict[str, Any] = {"stdout": streams, "stderr": streams, "text": True, "start_new_session": True}
    with subprocess.Popen(command, cwd=cwd, env=environment(variables), **options) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # torchrun then ends its workers, which may wait for each other
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)


def run(
    command: list[str], *, timeout: float = 120.0, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The command's exit code and output. It fails after ``timeout``, also if a child alone is left."""
    with start(command, cwd=cwd, streams=subprocess.PIPE, **variables) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as late:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            written = b"\n".join(part or b"" for part in (late.output, late.stderr)).decode(errors="replace")
            raise AssertionError(f"{command} took more than {timeout:g} s\n{written}") from None
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def torchrun(processes: int, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    where = ["--nproc-per-node", str(processes), "--master-port", str(free_port())]
    return run([*TORCHRUN, *where, *arguments], **options)


def python(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return run([PYTHON, *arguments], **options)


def succeeded(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """``result``, of a command whose exit code is 0."""
    assert result.returncode == 0, result.stdout + result.stderr
    return result
