"""A persistent pool of ranks: processes that are started once and run one test body after another.

``@on_ranks(4)`` makes a test of a function whose first argument is a :class:`World`: the body runs on four processes at
once, each with ``torch.distributed`` set up, and the test fails with the traceback of the rank that failed first. A
failure or a hang ends the pool's processes; the next test starts new ones.

``@on_ranks(4, cuda=True)`` runs the test a second time with the ranks on GPUs, where there are any (several ranks may
share one, over gloo); elsewhere there is no such case. Two variables of the environment choose otherwise:

- ``PARAMP_TEST_DEVICE``: ``cpu`` leaves the GPU cases out and hides the GPUs, ``cuda`` runs only the GPU cases of tests
  that have both. Tests without ``cuda=True`` run on the CPU over gloo in any case.
- ``PARAMP_TEST_BACKEND``: what ranks on GPUs talk over, ``gloo`` (also if empty) or ``nccl``. NCCL refuses two ranks on
  one GPU, so that tests of more ranks than there are GPUs are skipped.
"""

import functools
import gc
import importlib
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
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

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""For ``reproducible`` on GPUs: cuBLAS reads it once, and a pool's processes run many bodies."""
FOLDER = "PARAMP_TEST_FOLDER"
"""The folder of a pool's files, which goes with it."""

_pools: dict[tuple[int, str], "RankPool"] = {}


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
    def of(environment: Mapping[str, str], num_gpus: int) -> "Choice":
        """The choice in ``environment`` on a machine with ``num_gpus``.

        Raises:
            ValueError: a value that is not known, or that this machine cannot serve.
        """
        given = {}
        for name, known in (("PARAMP_TEST_DEVICE", ("cpu", "cuda")), ("PARAMP_TEST_BACKEND", ("gloo", "nccl"))):
            given[name] = value = environment.get(name, "")
            if value not in ("", *known):
                raise ValueError(f"{name}: got {value!r}, expected {', '.join(known)}, or nothing")
            if value in ("cuda", "nccl") and not num_gpus:
                raise ValueError(f"{name}: got {value!r}, but torch sees no GPU on this machine")
        device, backend = given.values()
        if backend == "nccl" and device == "cpu":
            raise ValueError("PARAMP_TEST_BACKEND: got 'nccl', which moves GPU tensors only; leave one of the two out")
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
        self.size, self.device, self.backend = size, device, choice().backend_of(device)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._folder = ""

    def run(self, module: str, name: str, kwargs: dict[str, Any], timeout: float = TIMEOUT) -> list[Any]:
        """The values that the body ``name`` of ``module`` returned, by rank."""
        if not self._processes or any(process.poll() is not None for process in self._processes):
            self.close()
            self._start()
        for connection in self._connections:
            test = os.environ.get("PYTEST_CURRENT_TEST", "")
            connection.send((module, name, kwargs, block_sizes.are_small(), test))
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        values, failed = [None] * self.size, []
        deadline = time.monotonic() + timeout
        while waiting and (ready := wait([*waiting], timeout=max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    at, failure, values[rank] = connection.recv()
                except EOFError:
                    at, failure = time.time(), "the process died"
                if failure:
                    failed.append(("SystemExit" in failure, at, rank, failure))  # another one tells what happened
                    deadline = min(deadline, time.monotonic() + GRACE)
        if failed or waiting:
            self.close()
        if failed:
            *_, rank, failure = min(failed)
            raise AssertionError(f"rank {rank} of {self.size} failed first:\n{failure}")
        if waiting:
            silent = sorted(waiting.values())
            raise AssertionError(f"ranks {silent} of {self.size} did not answer within {timeout:g} s")
        return values

    def _start(self) -> None:
        # A process that is forked from one whose imports asked for the GPU cannot use it.
        python = sys.executable if self.device == "cuda" else warm.python()
        warm.start()
        self._folder = tempfile.mkdtemp(prefix="paramp-test-")
        for rank in range(self.size):
            ours, theirs = Pipe()
            place = (rank, self.size, self.device, self.backend, sys.path)
            key = bytes(current_process().authkey)  # with which tensors in bodies' values are fetched
            process = subprocess.Popen(
                [python, "-c", _SERVE.format(theirs.fileno(), place, str(Path(__file__).parent), key)],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"RANK": str(rank), FOLDER: self._folder, **DETERMINISTIC},
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
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


_SERVE = """
import sys
from multiprocessing import current_process
from multiprocessing.connection import Connection
current_process().authkey = {3!r}
sys.path.insert(0, {2!r})
import pool
pool.serve(Connection({0}), *{1!r})
"""


def serve(connection: Connection, rank: int, size: int, device: str, backend: str, path: list[str]) -> None:
    """The life of one rank: receive a body's name, run it, answer."""
    sys.path[:] = path
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=r"step\(\): (all|its) gradients")  # tests make scaled ones by hand
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a launch in the body takes the CPU, as the body's tensors do
    else:
        # NCCL takes the current device, and has to find another on each rank. Over gloo ranks may share one; without
        # this a mesh would take LOCAL_RANK's, which there may not be.
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, init_method=f"file://{os.environ[FOLDER]}/store", rank=rank, world_size=size)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # never used: the process group is there already
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
            connection.send((0.0, "", body(world, **kwargs)))
        except BaseException:
            connection.send((time.time(), traceback.format_exc(), None))
        finally:
            from paramp.base.dtensor import forget_sharding_decisions
            from paramp.distributed.context import current_context

            while (context := current_context()) is not None:
                context.close()
            # Those that the body made itself. The mesh caches hold them too.
            for group in [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
                dist.destroy_process_group(group)
            forget_sharding_decisions()
            gc.collect()  # engines are cycles, which keep groups and so gloo's threads, which poll
            gc.freeze()  # what is left are modules, which need not be gone through every time


def on_ranks(size: int | Callable[..., int], cuda: bool = False):
    """Run the decorated test on ``size`` ranks at once, or as many as it makes of the test's arguments; with ``cuda``,
    on the CPU and again on GPUs."""

    def decorate(body):
        parameters = list(inspect.signature(body).parameters.values())[1:]

        @functools.wraps(body)
        def test(device="cpu", **kwargs):
            ranks = size(**kwargs) if callable(size) else size
            run_on_ranks(ranks, body.__module__, body.__name__, kwargs, device)

        test.body = body
        del test.__wrapped__
        device = [inspect.Parameter("device", inspect.Parameter.KEYWORD_ONLY)] if cuda else []
        test.__signature__ = inspect.Signature([*parameters, *device])
        return on_each_device(test) if cuda else test

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
    return _pools.setdefault((size, device), RankPool(size, device)).run(module, name, kwargs, timeout)


def shared_folder() -> Path:
    """A new folder that all ranks know. Every rank of the world calls this."""
    return Path(of_rank_0(tempfile.mkdtemp, None, None, os.environ.get(FOLDER)))


def of_rank_0(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function`` returns on rank 0, which alone runs it. Every rank of the world calls this."""
    values = [function(*args) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(values)
    return values[0]


def close_pools() -> None:
    for pool in _pools.values():
        pool.close()
    _pools.clear()
