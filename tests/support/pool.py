"""A persistent pool of ranks: processes that are started once and run one test body after another.

``@on_ranks(4)`` makes a test of a function whose first argument is a :class:`World`: the body runs on four processes at
once, each with ``torch.distributed`` set up, and the test fails with the traceback of the rank that failed first. A
failure or a hang ends the pool's processes; the next test starts new ones.

``@on_ranks(4, cuda=True)`` runs the test a second time with the ranks on GPUs, where there are any (several ranks may
share one, over gloo); elsewhere there is no such case. Two variables of the environment choose otherwise:

- ``PARAMP_TEST_DEVICE``: ``cpu`` leaves the GPU cases out and hides the GPUs, ``cuda`` runs only the GPU cases of tests
  that have both. Empty: both. Tests without ``cuda=True`` make CPU tensors and run on the CPU over gloo in any case.
- ``PARAMP_TEST_BACKEND``: what ranks on GPUs talk over, ``gloo`` (also if empty) or ``nccl``. NCCL refuses two ranks on
  one GPU, so that tests of more ranks than there are GPUs are skipped.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import Pipe, current_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import block_sizes
import pytest
import torch
import torch.distributed as dist
import warm

TIMEOUT = 240.0
"""Seconds that a body may take before its ranks are ended."""
GRACE = 3.0
"""Seconds that the other ranks get to end by themselves once one has failed."""
MOST_THREADS = 150
"""Of a rank, above which its pool is ended: before torch 2.13 a closed group keeps gloo's thread, which polls."""

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""For ``reproducible`` on GPUs: cuBLAS reads it once, and a pool's processes run many bodies."""

_pools: dict[tuple[int, str], RankPool] = {}


@dataclass(frozen=True)
class World:
    """What a test body knows of its place."""

    rank: int
    size: int
    device: str


@dataclass(frozen=True)
class Choice:
    """What the environment says the ranks are to run on."""

    devices: tuple[str, ...] = ("cpu",)
    """The cases that a test with ``cuda=True`` has."""
    backend: str = "gloo"
    """Of the ranks on GPUs."""

    @staticmethod
    def of(environment: Mapping[str, str], num_gpus: int) -> Choice:
        """The choice in ``environment`` on a machine with ``num_gpus``.

        Raises:
            ValueError: a value that is not known, or that this machine cannot serve.
        """
        device, backend = (environment.get(name, "") for name in ("PARAMP_TEST_DEVICE", "PARAMP_TEST_BACKEND"))
        if device not in ("", "cpu", "cuda"):
            raise ValueError(f"PARAMP_TEST_DEVICE: got {device!r}, expected cpu, cuda, or nothing for both")
        if backend not in ("", "gloo", "nccl"):
            raise ValueError(f"PARAMP_TEST_BACKEND: got {backend!r}, expected gloo, nccl, or nothing for gloo")
        if device == "cuda" and not num_gpus:
            raise ValueError("PARAMP_TEST_DEVICE: got 'cuda', but torch sees no GPU on this machine")
        if backend == "nccl" and device == "cpu":
            raise ValueError("PARAMP_TEST_BACKEND: got 'nccl', which moves GPU tensors only; leave one of the two out")
        if backend == "nccl" and not num_gpus:
            raise ValueError("PARAMP_TEST_BACKEND: got 'nccl', but torch sees no GPU on this machine")
        devices = (device,) if device else ("cpu", "cuda") if num_gpus else ("cpu",)
        return Choice(devices, backend or "gloo")

    def backend_of(self, device: str) -> str:
        return self.backend if device == "cuda" else "gloo"

    def why_not(self, size: int, device: str, num_gpus: int) -> str | None:
        """Why ``size`` ranks cannot run on ``device``; None if they can."""
        if self.backend_of(device) == "nccl" and size > num_gpus:
            return f"{size} ranks over NCCL need {size} GPUs, and torch sees {num_gpus}"
        return None


@functools.cache
def choice() -> Choice:
    """What this process's environment says."""
    return Choice.of(os.environ, torch.cuda.device_count())


class RankPool:
    def __init__(self, size: int, device: str) -> None:
        self.size = size
        self.device = device
        self.backend = choice().backend_of(device)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._store = ""

    def run(self, module: str, name: str, kwargs: dict[str, Any], timeout: float = TIMEOUT) -> list[Any]:
        """The values that the body ``name`` of ``module`` returned, by rank."""
        if not self._processes or any(process.poll() is not None for process in self._processes):
            self.close()
            self._start()
        for connection in self._connections:
            test = os.environ.get("PYTEST_CURRENT_TEST", "")
            connection.send((module, name, kwargs, block_sizes.are_small(), test))
        replies: dict[int, tuple[str, Any]] = {}
        order: list[int] = []
        deadline = time.monotonic() + timeout
        while len(replies) < self.size:
            open_ = {self._connections[rank]: rank for rank in range(self.size) if rank not in replies}
            ready = wait(list(open_), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = open_[connection]  # type: ignore[index]
                try:
                    replies[rank] = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    replies[rank] = ("failed", (time.time(), "the process died"))
                order.append(rank)
                if replies[rank][0] == "failed":
                    deadline = min(deadline, time.monotonic() + GRACE)
        failed = sorted(
            ("SystemExit" in value[1], value[0], rank)  # a rank that ends quietly leaves the report to another
            for rank, (kind, value) in replies.items()
            if kind == "failed"
        )
        if failed or len(replies) < self.size:
            self.close()
            if failed:
                rank = failed[0][2]
                raise AssertionError(f"rank {rank} of {self.size} failed first:\n{replies[rank][1][1]}")
            silent = sorted(set(range(self.size)) - set(replies))
            raise AssertionError(f"ranks {silent} of {self.size} did not answer within {timeout:g} s")
        values, num_threads = zip(*(replies[rank][1] for rank in range(self.size)), strict=True)
        if max(num_threads) > MOST_THREADS:
            self.close()
        return list(values)

    def _start(self) -> None:
        # A process that is forked from one whose imports asked for the GPU cannot use it.
        python = sys.executable if self.device == "cuda" else warm.python()
        warm.start()
        self._store = tempfile.mktemp(prefix="paramp-test-store-")
        for rank in range(self.size):
            ours, theirs = Pipe()
            place = (rank, self.size, self.device, self.backend, self._store, sys.path)
            key = bytes(current_process().authkey)  # with which tensors in bodies' values are fetched
            process = subprocess.Popen(
                [python, "-c", _SERVE.format(theirs.fileno(), place, str(Path(__file__).parent), key)],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"RANK": str(rank), **DETERMINISTIC},
            )
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self._store:
            Path(self._store).unlink(missing_ok=True)


_SERVE = """
import sys
from multiprocessing import current_process
from multiprocessing.connection import Connection
current_process().authkey = {3!r}
sys.path.insert(0, {2!r})
import pool
pool.serve(Connection({0}), *{1!r})
"""


def serve(connection: Connection, rank: int, size: int, device: str, backend: str, store: str, path: list[str]) -> None:
    """The life of one rank: receive a body's name, run it, answer."""
    sys.path[:] = path
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a launch in the body takes the CPU, as the body's tensors do
    else:
        # NCCL takes the current device, and has to find another on each rank. Over gloo ranks may share one; without
        # this a mesh would take LOCAL_RANK's, which there may not be.
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # never used: the process group is there already
    }
    world = World(rank, size, device)
    while True:
        try:
            module, name, kwargs, small, test = connection.recv()
        except EOFError:
            return
        try:
            block_sizes.use(small)
            function = getattr(importlib.import_module(module), name)
            body = getattr(function, "body", function)
            os.environ["PYTEST_CURRENT_TEST"] = test  # as in the process of the test
            value = body(world, **kwargs)
            connection.send(("done", (value, _num_threads())))
        except BaseException:
            connection.send(("failed", (time.time(), traceback.format_exc())))
        finally:
            from paramp.base.dtensor import forget_sharding_decisions
            from paramp.distributed.context import current_context

            while (context := current_context()) is not None:
                context.close()
            # Those that the body made itself. The mesh caches hold them too.
            for group in [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
                dist.destroy_process_group(group)
            forget_sharding_decisions()
            # Engines are cycles. Until they are collected, each one's groups keep gloo's threads, which poll: after
            # some hundred bodies those of idle ranks took half of the machine.
            gc.collect()
            gc.freeze()  # what is left are modules, which need not be gone through every time


def _num_threads() -> int:
    """Of this process, Python's and others'; 0 where the system does not tell."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 0


def on_ranks(size: int, cuda: bool = False):
    """Run the decorated test on ``size`` ranks at once; with ``cuda``, on the CPU and again on GPUs."""

    def decorate(body):
        parameters = list(inspect.signature(body).parameters.values())[1:]

        @functools.wraps(body)
        def test(device="cpu", **kwargs):
            run_on_ranks(size, body.__module__, body.__name__, kwargs, device)

        test.body = body
        del test.__wrapped__
        if not cuda:
            test.__signature__ = inspect.Signature(parameters)
            return test
        test.__signature__ = inspect.Signature(
            [*parameters, inspect.Parameter("device", inspect.Parameter.KEYWORD_ONLY)]
        )
        return on_each_device(test)

    return decorate


def on_each_device(test):
    """Parametrise ``device`` of ``test``: the CPU, and a GPU where there is one, or what the environment chooses."""
    marks = {"cpu": (), "cuda": pytest.mark.cuda}
    cases = [pytest.param(device, marks=marks[device]) for device in choice().devices]
    return pytest.mark.parametrize("device", cases)(test)


def run_on_ranks(
    size: int, module: str, name: str, kwargs: dict[str, Any], device: str = "cpu", timeout: float = TIMEOUT
) -> list[Any]:
    """The values that the body ``name`` of ``module`` returned, by rank; an AssertionError after ``timeout``."""
    reason = choice().why_not(size, device, torch.cuda.device_count())
    if reason is not None:
        pytest.skip(reason)
    pool = _pools.setdefault((size, device), RankPool(size, device))
    return pool.run(module, name, kwargs, timeout)


def shared_folder() -> Path:
    """A new folder that all ranks know. Every rank of the world calls this."""
    folders = [tempfile.mkdtemp(prefix="paramp-test-")]
    dist.broadcast_object_list(folders)
    return Path(folders[0])


def close_pools() -> None:
    for pool in _pools.values():
        pool.close()
    _pools.clear()
