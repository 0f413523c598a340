"""``paramp.notebook``: from a process whose ``__main__`` has the function, as a notebook's kernel has it."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import warm
from commands import PYTHON, ROOT, python, start, succeeded

import paramp
from paramp.distributed import local_launcher

SESSION = """
import sys, threading, traceback
import torch, paramp

scale = 3
torch.ones(300, 300) @ torch.ones(300, 300)  # threads that a forked process would miss

class Result:
    def __init__(self, value, sizes): self.value, self.sizes = value, sizes

class Mine(Exception):
    pass

def times(x):
    return x * scale

def train(x):
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}) as context:
        assert not torch.allclose(times(torch.ones(300, 300) @ torch.ones(300, 300)), torch.zeros(()))
        total = torch.tensor(float(context.rank + 1))
        torch.distributed.all_reduce(total)
        return Result(times(x) + total.item() + 100 * context.rank, (context.tp.size, context.world_size))

result = paramp.notebook(train, 5, ranks=2)
print(type(result) is Result, result.value, result.sizes)

def fails():
    with paramp.launch_from_torch() as context:
        if context.rank == 1:
            raise Mine("my own mistake")
        torch.distributed.barrier()

try:
    paramp.notebook(fails, ranks=2)
except Mine as error:
    print("raised", error, "".join(traceback.format_exception(error)))
"""


def test_functions_of_the_main_module_run_on_ranks_and_raise_what_they_raise():
    result = succeeded(python("-c", SESSION, PYTHONPATH=str(ROOT)))
    first, raised = result.stdout.split("\n", 1)
    assert first == "True 18.0 (2, 2)"
    assert raised.startswith("raised my own mistake")
    assert "RankTraceback: \nrank 1 of 2:\nTraceback" in raised
    assert "in fails" in raised.partition("direct cause")[0]
    assert result.stderr == ""


def test_an_interrupt_ends_the_ranks_and_not_the_session():
    session = "import os, time, paramp\ndef wait():\n os.write(1, b'ready\\n')\n while True: time.sleep(0.05)\n"
    session += "try: paramp.notebook(wait, ranks=2)\nexcept KeyboardInterrupt: print('interrupted')\n"
    pipes = {"streams": subprocess.PIPE, "PYTHONPATH": str(ROOT)}
    with start([PYTHON, "-c", session], **pipes) as process:
        assert process.stdout.readline() == process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)  # the pipe closes when the last rank has ended
        assert (output, process.returncode) == ("interrupted\n", 0)


class Stubborn(Exception):
    """Cannot be made again from its ``args``."""

    def __init__(self, first, second):
        super().__init__(first + second)


def stubborn():
    raise Stubborn("an", "swer")


def interrupted():
    raise KeyboardInterrupt("of a rank")


def ended():
    os.kill(os.getpid(), signal.SIGKILL)


def vanished():
    """Rank 1 ends, and rank 0 loses its connection."""
    with paramp.launch_from_torch() as context:
        if context.rank == 1:
            os._exit(1)
        torch.distributed.barrier()


def hang():
    """Rank 1 is frozen, and rank 0's heartbeat ends both."""
    with paramp.launch_from_torch({"hang_timeout": 1.0}) as context:
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        torch.distributed.barrier()


def test_what_cannot_be_sent_or_is_not_there_is_an_error_by_name(monkeypatch):
    """Also from a thread that is not the main one."""
    warm.start()
    monkeypatch.setattr(sys, "executable", PYTHON)
    monkeypatch.setattr(sys, "path", [*sys.path, Path("of a session")])  # which imports pass over
    monkeypatch.setattr(local_launcher, "SECONDS_TO_END", 1.0)
    lock = threading.Lock()
    errors = (
        (vanished, 2, paramp.LaunchError, "notebook: rank 1 ended with exit code 1 without an exception"),
        (hang, 2, paramp.LaunchError, "notebook: a rank ended itself without an exception; its output says more"),
        (len, 0, paramp.ConfigError, "ranks: got 0, expected an integer of 1 or more"),
        ("len", 2, paramp.ConfigError, "fn: got 'len', expected a function"),
        (lambda: lock, 1, paramp.ConfigError, "fn or its arguments cannot be sent.*TypeError: cannot pickle"),
        (threading.Lock, 1, paramp.ConfigError, "what fn returned on rank 0 cannot be sent back.*cannot pickle"),
        (sys.exit, 1, paramp.LaunchError, "rank 0 ended without returning"),
        (ended, 1, paramp.LaunchError, "notebook: rank 0 was ended by SIGKILL without an exception"),
        (stubborn, 1, paramp.LaunchError, "rank 0 failed: Stubborn: answer"),
        (interrupted, 1, KeyboardInterrupt, "of a rank"),
    )
    with ThreadPoolExecutor(2) as threads:  # beside the first two, whose other rank is waited for
        calls = [threads.submit(paramp.notebook, fn, ranks=ranks) for fn, ranks, *_ in errors]
    for call, (*_, kind, message) in zip(calls, errors, strict=True):
        with pytest.raises(kind, match=message):
            call.result()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(paramp.ConfigError, match=r'pip install "paramp\[notebook\]"'):
        paramp.notebook(len, ranks=1)
