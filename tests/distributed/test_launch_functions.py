"""Contexts: who is where, one after the other, and what goes wrong."""

import contextlib
import functools
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from commands import TORCHRUN, run, torchrun
from counting import Collectives
from pool import on_ranks
from small_engines import each_raises, engine_of, train_step

import paramp
from paramp.distributed import launch_from_torch_mpi_slurm, launcher_variables, rendezvous
from paramp.distributed.rendezvous import free_port


def test_a_world_of_one_needs_no_launcher():
    """One context after another, which may be closed twice; and the seed."""
    given = functools.partial(paramp.launch, None, 0, 1, "127.0.0.1", free_port())
    for make, seed in (
        (lambda: paramp.launch_from_torch({"seed": 3}), 3),
        (lambda: paramp.launch_from_torch({"seed": 7}, seed=8), 8),
        (given, 1024),
    ):
        with make() as context:
            assert (context.rank, context.world_size, context.local_rank) == (0, 1, 0)
            assert context.is_first_stage
            assert context.is_last_stage
            assert context.is_main
            assert context.mesh.mesh_dim_names == ("pp", "dp", "tp")
            assert tuple(context.mesh.mesh.shape) == (1, 1, 1)
            assert paramp.get_context() is context
            assert context.config.seed == seed
            assert dist.get_backend() == "gloo" or context.device.type == "cuda"
        context.close()
        assert not dist.is_initialized()
        with pytest.raises(RuntimeError, match="no parallel context"):
            paramp.get_context()


def test_a_world_of_one_does_not_listen():
    """So that the port may be another program's."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with paramp.launch(None, 0, 1, "127.0.0.1", port) as context:
            assert context.world_size == 1


@pytest.mark.parametrize("config", [{}, {"precision": "16-mixed", "clip_grad_norm": 1.0}, {"reproducible": True}])
def test_a_step_of_one_process_makes_no_collective(config):
    with paramp.launch_from_torch(config):
        engine = engine_of(torch.nn.Linear(4, 4))
        for _ in range(2):
            with Collectives() as collectives:
                train_step(engine, torch.ones(2, 4))
                engine.zero_grad()
        assert not any(collectives.counts.values()), collectives.counts


@pytest.mark.parametrize(
    ("gpus", "has_nccl", "expected"),
    [
        *(("AB", True, "nccl"), ("AB", False, "gloo"), ("AA", True, "gloo"), ("A-", True, "gloo")),
        *(("--", True, "gloo"), ("A", True, "gloo")),
    ],
)
def test_ranks_take_nccl_if_each_has_a_gpu_of_its_own(monkeypatch, gpus, has_nccl, expected):
    """``-``: a rank without a GPU. A single rank sends nothing."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=gpus[device.index]))
    monkeypatch.setattr(launch_from_torch_mpi_slurm, "choose_interface", lambda *_: None)
    store, size, made = dist.HashStore(), len(gpus), []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: made.append(backend))

    def make_group(rank):
        device = torch.device("cpu" if gpus[rank] == "-" else "cuda", rank)
        place = launcher_variables.LauncherRank("launch", rank, size, rank)
        launch_from_torch_mpi_slurm._init_process_group(store, place, None, device)

    with ThreadPoolExecutor() as ranks:
        [*ranks.map(make_group, range(size))]
    assert made == [expected] * size


def test_launches_that_are_refused(monkeypatch):
    def launch(rank, world_size, port):
        return lambda: paramp.launch(None, rank, world_size, "127.0.0.1", port)

    calls = {
        "rank: got 2, expected 0 to 1": launch(2, 2, 29500),
        "port: got 0": launch(0, 1, 0),
        "port: got 70000": launch(0, 1, 70000),
    }
    if not torch.cuda.is_available():
        calls["torch sees no GPU"] = lambda: paramp.launch_from_torch(device="cuda")
        own = r"backend: got 'nccl', .* on each of 1 rank\(s\), .*rank 0 has cpu"
        calls[own] = lambda: paramp.launch_from_torch(backend="nccl")
    each_raises(paramp.LaunchError, calls)
    with pytest.raises(paramp.ConfigError, match="does not divide the world of 1 ranks; start a multiple of 4"):
        paramp.launch_from_torch({"parallel": {"tensor": 2, "pipeline": 2}})
    assert not dist.is_initialized()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    some = "RANK, WORLD_SIZE set, but LOCAL_RANK, MASTER_ADDR, MASTER_PORT"
    each_raises(paramp.LaunchError, {some: paramp.launch_from_torch})


def test_free_ports_are_free_and_no_connection_takes_them():
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 10
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for port in ports:
        assert not first <= port <= last or first < 5000  # where the range leaves room outside
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_the_port_behind_the_range_of_connections_is_a_free_one(monkeypatch):
    monkeypatch.setattr(rendezvous, "_ports_of_connections", lambda: (4096, 65534))
    assert free_port() == 65535  # the only one that is left


JOB = {"SLURM_JOB_ID": "71", "SLURM_STEP_ID": "2", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "gpu[003-005,9],login1"}


@pytest.mark.parametrize(
    ("variables", "host", "port"),
    [
        ({}, "gpu003", 20000 + (71 * 64 + 2) % 12000),
        ({"SLURM_STEP_ID": "3"}, "gpu003", 20000 + (71 * 64 + 3) % 12000),
        ({"SLURM_STEP_NODELIST": "gpu9,login1"}, "gpu9", 20000 + (71 * 64 + 2) % 12000),
        ({"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}, "10.0.0.7", 29500),
    ],
)
def test_tasks_of_slurm_meet_at_the_first_machine_and_a_port_of_the_job(monkeypatch, variables, host, port):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "MASTER_"))]:
        monkeypatch.delenv(name)
    for rank in (0, 5):
        for name, value in {**JOB, "SLURM_PROCID": str(rank), "SLURM_LOCALID": "1", **variables}.items():
            monkeypatch.setenv(name, value)
        assert launcher_variables.slurm_place() == launcher_variables.LauncherRank("slurm", rank, 8, 1, host, port)


@pytest.mark.parametrize("standalone", [True, False])
def test_worlds_one_after_another_under_torchrun(standalone):
    """The agent's store outlives a world, and gloo would meet the addresses of the last one there."""
    script = "tests/support/scripts/contexts_one_after_another.py"
    result = run([*TORCHRUN, "--standalone", "--nproc-per-node", "2", script]) if standalone else torchrun(2, script)
    assert result.returncode == 0, result.stderr
    losses = [line.split(": ")[1] for line in result.stdout.splitlines() if line.startswith("round")]
    assert len(losses) == 4
    assert len(set(losses)) == 1


@contextlib.contextmanager
def environment(**variables):
    """Torchrun's variables as given, the others unset."""
    others = {name: value for name, value in os.environ.items() if name not in launcher_variables.TORCHRUN_VARIABLES}
    with mock.patch.dict(os.environ, others | variables, clear=True):
        yield


@on_ranks(2)
def test_a_process_group_that_is_there_needs_no_variables(world):
    """As in the workers of Ray Train, in a notebook, or after ``torch.multiprocessing.spawn``."""
    groups = list(dist.distributed_c10d._world.pg_map)
    for variables in ({}, {"RANK": str(world.rank), "WORLD_SIZE": "2"}, {"MASTER_ADDR": "10.0.0.1"}):
        with environment(**variables), paramp.launch_from_torch({"precision": "16-mixed"}) as context:
            assert (context.rank, context.world_size, context.local_rank) == (world.rank, 2, world.rank)
            assert context.heartbeat is None
            engine = engine_of(torch.nn.Linear(4, 4))
            assert train_step(engine, torch.ones(2, 4) * world.rank, torch.ones(2, 4)).stepped
        assert list(dist.distributed_c10d._world.pg_map) == groups
    total = torch.ones(())
    dist.all_reduce(total)  # the group is alive
    assert total == 2


@on_ranks(2)
def test_a_process_group_that_does_not_fit(world):
    launch = paramp.launch_from_torch
    differs = {r"as rank . of 2, but the launcher gave rank . of 8": launch}
    with mock.patch.dict(os.environ, WORLD_SIZE="8"):
        each_raises(paramp.LaunchError, differs)
    with environment():
        with pytest.raises(paramp.ConfigError, match="does not divide the world of 2 ranks"):
            launch({"parallel": {"tensor": 4}})
        with pytest.raises(paramp.ConfigError, match="seed: rank 0 has 1, but rank 1 has 2"):
            launch(seed=1 + world.rank)
        calls = {
            r"backend: got 'nccl', but torch\.distributed is initialised with 'cpu:g": {"backend": "nccl"},
            "backend: got 'cpu:mpi,cuda:nccl', but": {"backend": "cpu:mpi,cuda:nccl"},
            r"device: got 'meta', but torch\.distributed is initialised with 'cpu:g": {"device": "meta"},
        }
        each_raises(paramp.LaunchError, {words: functools.partial(launch, **given) for words, given in calls.items()})
        for backend in ("gloo", "cpu:gloo,cuda:nccl"):
            with launch(backend=backend, device="cpu") as context:
                assert context.world_size == 2
    stop = pytest.raises(RuntimeError, match="stop")
    with stop, launch({"parallel": {"data": 2}}):  # which ends as the block has
        raise RuntimeError("stop")


def test_a_process_group_without_a_backend_of_its_own(tmp_path):
    """``init_process_group()`` without a backend, which torch chooses by device."""
    dist.init_process_group(init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with environment(), paramp.launch_from_torch(device="cpu") as context:
            assert context.world_size == 1
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
