"""How processes find each other: from torchrun's variables, alone, or with a rank and an address given.

Each function here ends in a :class:`~paramp.mesh.ParallelContext`. All checks happen before the first process group
is made, so a mistake is an error on every rank and never a hang.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]  # missing in torch's stubs only
from torch.distributed.rendezvous import rendezvous

from .config import DEFAULT_SEED, Config, flatten, load
from .mesh import ParallelContext, report_once
from .precision import ConfigError

__all__ = ["LaunchError", "free_port", "launch", "launch_from_torch", "start_processes", "torchrun_variables"]

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

ConfigSource = Config | Mapping[str, Any] | str | Path | None


class LaunchError(RuntimeError):
    """The processes cannot find each other. The message names what is missing and how to set it."""


def launch_from_torch(
    config: ConfigSource = None,
    *,
    backend: str | None = None,
    device: torch.device | str | None = None,
    seed: int = DEFAULT_SEED,
) -> ParallelContext:
    """Join the processes that ``torchrun`` started; with none of its variables set, a world of one.

    Args:
        config: a dict, a :class:`~paramp.config.Config`, or a path to a ``.toml`` or ``.py`` file.
        backend: ``"nccl"``, ``"gloo"``, ... None: NCCL where every rank has a GPU of its own, else gloo.
        device: None: the local rank's GPU, a shared one where there are fewer GPUs than local ranks, else the CPU.
        seed: a value other than the default replaces the configuration's ``seed``.

    Raises:
        ConfigError: the configuration is wrong, or its layout does not fit the world.
        LaunchError: some of torchrun's variables are set and others missing.
    """
    settings = load(config)
    variables = torchrun_variables()
    if variables is None:
        return _join(settings, 0, 1, 0, None, backend, device, seed)
    rank, world_size, local_rank = (int(variables[name]) for name in TORCHRUN_VARIABLES[:3])
    return _join(settings, rank, world_size, local_rank, "env://", backend, device, seed)


def launch(
    config: ConfigSource,
    rank: int,
    world_size: int,
    host: str,
    port: int,
    *,
    local_rank: int | None = None,
    backend: str | None = None,
    device: torch.device | str | None = None,
    seed: int = DEFAULT_SEED,
) -> ParallelContext:
    """Join ``world_size`` processes at ``host:port``, where rank 0 listens.

    Args:
        local_rank: this process among those of its machine; it picks the GPU. None: ``rank`` modulo the GPUs.
        config, backend, device, seed: as for :func:`launch_from_torch`.

    Raises:
        ConfigError: the configuration is wrong, or its layout does not fit the world.
        LaunchError: an impossible rank or port.
    """
    settings = load(config)
    if not 0 <= rank < world_size:
        raise LaunchError(f"rank: got {rank}, expected 0 to {world_size - 1} in a world of {world_size}")
    if not 0 < port < 2**16:
        raise LaunchError(f"port: got {port}, expected 1 to 65535")
    gpus = torch.cuda.device_count()
    if local_rank is None:
        local_rank = rank % gpus if gpus else rank
    address = f"[{host}]" if ":" in host else host
    return _join(settings, rank, world_size, local_rank, f"tcp://{address}:{port}", backend, device, seed)


def torchrun_variables() -> dict[str, str] | None:
    """torchrun's variables of this process; None where none of them is set.

    Raises:
        LaunchError: some are set and others not, or one is not a sensible number.
    """
    present = {name: os.environ[name] for name in TORCHRUN_VARIABLES if os.environ.get(name)}
    # MASTER_ADDR and MASTER_PORT are often exported in a shell profile; alone they start nothing.
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(present):
        return None
    missing = [name for name in TORCHRUN_VARIABLES if name not in present]
    if missing:
        raise LaunchError(
            f"launch: {', '.join(present)} set, but {', '.join(missing)} missing; start with "
            "'torchrun --nproc-per-node N SCRIPT', which sets them all, or unset them to run one process"
        )
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not present[name].isdecimal():
            raise LaunchError(f"launch: {name} is {present[name]!r}, expected an integer of 0 or more")
    if not 0 < int(present["MASTER_PORT"]) < 2**16:
        raise LaunchError(
            f"launch: MASTER_PORT is {present['MASTER_PORT']}, expected 1 to 65535 (torchrun --master-port), "
            "or torchrun --standalone to have one chosen"
        )
    if int(present["RANK"]) >= int(present["WORLD_SIZE"]):
        raise LaunchError(f"launch: RANK is {present['RANK']}, but WORLD_SIZE is {present['WORLD_SIZE']}")
    return present


def _join(
    config: Config,
    rank: int,
    world_size: int,
    local_rank: int,
    init_method: str | None,
    backend: str | None,
    device: torch.device | str | None,
    seed: int,
) -> ParallelContext:
    if seed != DEFAULT_SEED:
        config = replace(config, seed=seed)
    config.parallel.data_size(world_size)  # complain before anything waits
    device = _choose_device(device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    owns_world = not dist.is_initialized()
    serial = next(_launches)
    if owns_world:
        if init_method is None:
            store: Any = HashStore()
        else:
            store, _, _ = next(rendezvous(init_method, rank, world_size))
        # The launcher's store outlives a context; what an earlier one left there must not be taken for this one's.
        store = PrefixStore(f"paramp/{serial}", store)
        _agree_on_config(store, config, rank, world_size)
        backend = backend or _agree_on_backend(store, device, rank, world_size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    elif (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        raise LaunchError(
            f"launch: torch.distributed already runs as rank {dist.get_rank()} of {dist.get_world_size()}, "
            f"but the launcher says rank {rank} of {world_size}; destroy the old process group first"
        )
    else:
        store = PrefixStore(f"paramp/{serial}", dist.distributed_c10d._get_default_store())
        _agree_on_config(store, config, rank, world_size)
    if world_size > 1:
        report_once()
    return ParallelContext(
        config, rank=rank, world_size=world_size, local_rank=local_rank, device=device, owns_world=owns_world
    )


def _agree_on_config(store: Any, config: Config, rank: int, world_size: int) -> None:
    """Complain on every rank if the ranks were configured differently, which would train wrongly or hang."""
    settings = {
        key: value for key, value in flatten(config).items() if not key.startswith("train.") and key not in config.user
    }
    store.set(f"config/{rank}", json.dumps(settings, sort_keys=True))
    first = json.loads(store.get("config/0"))
    for other in range(1, world_size):
        theirs = json.loads(store.get(f"config/{other}"))
        for key in sorted(first.keys() | theirs.keys()):
            if first.get(key) != theirs.get(key):
                raise ConfigError(
                    f"{key}: rank 0 has {first.get(key)!r}, but rank {other} has {theirs.get(key)!r}; "
                    "give every rank the same configuration"
                )


_launches = itertools.count()


def _agree_on_backend(store: Any, device: torch.device, rank: int, world_size: int) -> str:
    """NCCL if every rank of the world has a GPU of its own, else gloo; the same answer on every rank."""
    mine = f"no GPU of rank {rank}"
    if device.type == "cuda" and dist.is_nccl_available():
        mine = f"GPU {torch.cuda.get_device_properties(device).uuid}"
    store.set(f"device/{rank}", mine)
    devices = {store.get(f"device/{other}") for other in range(world_size)}
    all_gpus = all(name.startswith(b"GPU ") for name in devices)
    return "nccl" if all_gpus and len(devices) == world_size else "gloo"


def _choose_device(requested: torch.device | str | None, local_rank: int) -> torch.device:
    gpus = torch.cuda.device_count()
    if requested is None:
        return torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    device = torch.device(requested)
    if device.type == "cuda" and not gpus:
        raise LaunchError(f"device: got {str(device)!r}, but torch sees no GPU; leave device out to use the CPU")
    if str(device) == "cuda":
        return torch.device("cuda", local_rank % gpus)
    return device


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def start_processes(command: Sequence[str], num_processes: int) -> int:
    """Run ``command`` once a rank on this machine, with torchrun's variables set; the exit code of the first failure.

    When one rank fails, the others get a moment to end by themselves and are then terminated. Signals that ask this
    process to stop are passed on.
    """
    # Hosted here, the store outlives every rank, so that the last of them can still ask which failed first.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    threads = max(1, (os.cpu_count() or 1) // num_processes)
    shared = {
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    processes = [
        subprocess.Popen(command, env=inherited | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num_processes)
    ]

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        _end(processes)
        sys.exit(128 + number)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while True:
            codes = [process.poll() for process in processes]
            failed = [code for code in codes if code]
            if failed:
                _end(processes, grace=5.0)
                return failed[0] if failed[0] > 0 else 128 - failed[0]
            if all(code == 0 for code in codes):
                return 0
            time.sleep(0.05)
    finally:
        _end(processes)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end(processes: Sequence[subprocess.Popen[bytes]], grace: float = 0.0) -> None:
    """Wait ``grace`` seconds for ``processes``, then ask them to stop, then make them."""
    for ask, patience in ((None, grace), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        alive = [process for process in processes if process.poll() is None]
        if ask is not None:
            for process in alive:
                process.send_signal(ask)
        deadline = time.monotonic() + patience
        for process in alive:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
