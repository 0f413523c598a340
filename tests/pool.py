"""A persistent pool of ranks: processes that are started once and run one test body after another.

``@on_ranks(4)`` makes a test of a function whose first argument is a :class:`World`: the body runs on four processes at
once, each with ``torch.distributed`` set up, and the test fails with the traceback of the rank that failed first. A
failure or a hang ends the pool's processes; the next test starts new ones.

``@on_ranks(4, cuda=True)`` runs the test a second time with the ranks on GPUs, where there are any (several ranks may
share one, over gloo); elsewhere that case is skipped.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

TIMEOUT = 240.0
"""Seconds that a body may take before its ranks are ended."""
GRACE = 3.0
"""Seconds that the other ranks get to end by themselves once one has failed."""

_pools: dict[tuple[int, str], RankPool] = {}


@dataclass(frozen=True)
class World:
    """What a test body knows of its place."""

    rank: int
    size: int
    device: str


class RankPool:
    def __init__(self, size: int, device: str) -> None:
        self.size = size
        self.device = device
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, module: str, name: str, kwargs: dict[str, Any]) -> list[Any]:
        """The values that the body ``name`` of ``module`` returned, by rank."""
        if not all(process.is_alive() for process in self._processes) or not self._processes:
            self.close()
            self._start()
        for connection in self._connections:
            connection.send((module, name, kwargs))
        replies: dict[int, tuple[str, Any]] = {}
        order: list[int] = []
        deadline = time.monotonic() + TIMEOUT
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
            raise AssertionError(f"ranks {silent} of {self.size} did not answer within {TIMEOUT:g} s")
        return [replies[rank][1] for rank in range(self.size)]

    def _start(self) -> None:
        context = mp.get_context("spawn")
        store = tempfile.mktemp(prefix="paramp-test-store-")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.size, self.device, store, sys.path), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []


def _serve(connection: Connection, rank: int, size: int, device: str, store: str, path: list[str]) -> None:
    """The life of one rank: receive a body's name, run it, answer."""
    sys.path[:] = path
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
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
            module, name, kwargs = connection.recv()
        except EOFError:
            return
        try:
            body = getattr(importlib.import_module(module), name).body
            connection.send(("done", body(world, **kwargs)))
        except BaseException:
            connection.send(("failed", (time.time(), traceback.format_exc())))
        finally:
            from paramp.mesh import current_context

            while (context := current_context()) is not None:
                context.close()


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
    """Parametrise ``device`` of ``test``: the CPU, and a GPU where there is one."""
    gpu = pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU on this machine"),
        ],
    )
    return pytest.mark.parametrize("device", ["cpu", gpu])(test)


def run_on_ranks(size: int, module: str, name: str, kwargs: dict[str, Any], device: str = "cpu") -> list[Any]:
    """The values that the body ``name`` of ``module`` returned, by rank."""
    pool = _pools.setdefault((size, device), RankPool(size, device))
    return pool.run(module, name, kwargs)


def close_pools() -> None:
    for pool in _pools.values():
        pool.close()
    _pools.clear()
