"""Running the project's commands as a user does, each with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    variables = {"OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]} | variables
    return inherited | variables | {"PATH": os.pathsep.join([str(warm.folder()), variables["PATH"]])}


@contextmanager
def start(command: list[str], **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs beside the test, and is ended with it."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment(variables), start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run(
    command: list[str], *, timeout: float = 120.0, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its workers, which would wait for each other for good
        try:
            output, errors = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.stdout.close()  # type: ignore[union-attr]  # a child that left the group may hold it open for good
            process.stderr.close()  # type: ignore[union-attr]
            process.wait()
            output = errors = "(still held open by a child)"
        raise AssertionError(f"{command} took more than {timeout:g} s\n{output}\n{errors}") from None
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def torchrun(processes: int, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return run(
        [*TORCHRUN, "--nproc-per-node", str(processes), "--master-port", str(free_port()), *arguments], **options
    )


def python(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return run([PYTHON, *arguments], **options)
