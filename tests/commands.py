"""Running the project's commands as a user does, each with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from paramp.launching import free_port

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run(command: list[str], *, timeout: float = 120.0, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", **variables}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
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
            output, errors = process.communicate()
        raise AssertionError(f"{command} took more than {timeout:g} s\n{output}\n{errors}") from None
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def torchrun(processes: int, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return run(
        [*TORCHRUN, "--nproc-per-node", str(processes), "--master-port", str(free_port()), *arguments], **options
    )


def python(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, *arguments], **options)
