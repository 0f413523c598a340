"""Launch functions: under torchrun, MPI or Slurm, as a single process, or with a given rank and address.

Each function returns a :class:`~paramp.distributed.context.ParallelContext`. All checks happen before the first
process group is made, so a mistake is an error on every rank and never a hang.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # missing in torch's stubs only

from ..base.collectives import is_distributed
from ..base.errors import ConfigError, LaunchError, require
from ..base.torch_internals import expect, warn_if_untested
from ..base.values_checked_by_type import is_integer
from ..config.layout_of_run_command import load_in_layout
from ..config.schema import DEFAULT_SEED, Config
from .agreed_arguments import Call, agree, agree_on_config, agreed_call
from .context import ParallelContext, report_errors, required_context
from .exact_mode_protocol import numerics_of
from .heartbeat import Heartbeat
from .launcher_variables import LauncherRank, find_place, group_place, has_agent, mpi_place, slurm_place, torchrun_place
from .mpi_rendezvous import meet_by_mpi
from .network_interfaces import choose_interface
from .rendezvous import host_store, join_store, meet

expect("torch.distributed.distributed_c10d")

ConfigSource = Config | Mapping[str, Any] | str | Path | None


def launch_from_torch(
    config: ConfigSource = None,
    *,
    backend: str | None = None,
    device: torch.device | str | None = None,
    seed: int = DEFAULT_SEED,
) -> ParallelContext:
    """Join the processes that ``torchrun`` started; with none of its variables set, a world of one.

    If torch.distributed is initialised already, as in the workers of Ray Train, its default process group is used, with
    or without the variables. The context then makes groups of its own beside it and destroys only those, and it has no
    heartbeat.

    Args:
        config: a dict, a :class:`~paramp.config.schema.Config`, or a path to a ``.toml`` or ``.py`` file.
        backend: ``"nccl"``, ``"gloo"``, ... None: that of the process group if there is one; else NCCL if every one of
            several ranks has its own GPU, else gloo, over which ranks may share one.
        device: None: the local rank's GPU (shared if there are fewer GPUs than local ranks), or the CPU without GPUs.
        seed: a value other than the default replaces the configuration's ``seed``.

    Raises:
        ConfigError: the configuration is wrong, or its layout does not fit the world.
        LaunchError: some of torchrun's variables are set and others missing, the ranks do not reach each other, NCCL
            is asked for where ranks have no GPU or share one; or the process group that there is has another rank or
            size than the variables say, or not the ``backend`` or the ``device``.
    """
    settings = _load(config)
    return _join(settings, group_place() or torchrun_place(), backend, device, seed)


def launch_from_slurm(
    config: ConfigSource = None,
    *,
    host: str | None = None,
    port: int | None = None,
    backend: str | None = None,
    device: torch.device | str | None = None,
    seed: int = DEFAULT_SEED,
) -> ParallelContext:
    """Join the tasks that ``srun`` started; outside of a Slurm step, a world of one.

    Args:
        host: the machine of task 0. None: ``MASTER_ADDR`` if set, else the first machine of the step.
        port: the port of task 0. None: ``MASTER_PORT`` if set, else one from 20000 to 31999, computed from the job's
            and the step's numbers.
        config, backend, device, seed: as for :func:`launch_from_torch`.

    Raises:
        ConfigError, LaunchError: as :func:`launch_from_torch`; or the port is in use.
    """
    return _join(_load(config), slurm_place(host, _check_port(port)), backend, device, seed)


def launch_from_openmpi(
    config: ConfigSource = None,
    *,
    host: str | None = None,
    port: int | None = None,
    backend: str | None = None,
    device: torch.device | str | None = None,
    seed: int = DEFAULT_SEED,
) -> ParallelContext:
    """Join the processes that ``mpirun`` started, Open MPI's or MPICH's; outside of it, a world of one.

    mpi4py numbers the ranks. Over MPI, rank 0 broadcasts a free port and its addresses; each other rank uses the first
    address at which it reaches rank 0.

    Args:
        host: the name or address at which all machines reach rank 0's. None: found automatically.
        port: the port of rank 0. None: a free one.
        config, backend, device, seed: as for :func:`launch_from_torch`.

    Raises:
        ConfigError, LaunchError: as :func:`launch_from_torch`; or mpi4py is missing or belongs to another MPI, the port
            is in use, or a rank does not reach rank 0.
    """
    settings, place, store = _load(config), mpi_place(), None
    _check_port(port)
    if place is not None:
        settings.parallel.data_size(place.world_size)  # raise before MPI starts
        place, store = meet_by_mpi(place, host, port)
    return _join(settings, place, backend, device, seed, store)


def launch_from_environment(config: ConfigSource = None, **options: Any) -> ParallelContext:
    """Join the processes of the launcher that started this one: torchrun, mpirun or srun; without one, a world of one.

    Takes the options of :func:`launch_from_torch`; raises what it and the launcher's function raise.
    """
    report_errors()
    place = find_place()
    functions = {"torchrun": launch_from_torch, "mpi": launch_from_openmpi, "slurm": launch_from_slurm}
    return functions["torchrun" if place is None else place.launcher](config, **options)


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

    If torch's ``fake`` process group is already initialised, no rank is waited for: this process is the only rank of
    its world that runs, for example to measure the memory of one rank.

    Args:
        local_rank: the rank of this process on its machine; it selects the GPU. None: ``rank`` modulo the GPUs.
        config, backend, device, seed: as for :func:`launch_from_torch`.

    Raises:
        ConfigError, LaunchError: as :func:`launch_from_torch`; or an invalid rank or port, or the port is in use.
    """
    settings = _load(config)
    if not 0 <= rank < world_size:
        raise LaunchError(f"rank: got {rank}, expected 0 to {world_size - 1} in a world of {world_size}")
    _check_port(port)
    if local_rank is None:
        local_rank = rank % (torch.cuda.device_count() or world_size)
    return _join(settings, LauncherRank("launch", rank, world_size, local_rank, host, port), backend, device, seed)


def start_heartbeat(
    timeout: float = 300.0, *, end_after: int | None = 4, context: ParallelContext | None = None
) -> Heartbeat:
    """Watch the ranks of a loop whose process group another made (:mod:`paramp.distributed.heartbeat`).

    Every rank calls it. From then on a rank that is silent for ``timeout`` seconds is named by every other rank, with
    its phase, and they end; an exception that ends a rank inside the ``with`` ends the others, and is printed once.
    ``context.phase(name)`` names phases, and each phase ``"step"`` counts a step. It ends with the context, by
    ``stop()``, or at the end of ``with paramp.start_heartbeat():``. In one process it does nothing.

    Args:
        timeout: below that of the collectives, which is 10 minutes on NCCL.
        end_after: time-outs after which the ranks end if every one of them has stayed in the same phase ``"forward"``,
            ``"loss"``, ``"backward"`` or ``"step"``. None: never.
        context: None: the current one.

    Raises:
        ConfigError: on every rank: ``timeout`` is not above 0, ``end_after`` is not 1 or more, or one of them differs
            between ranks; the context has a heartbeat or an engine already, or there is none in a world of several
            ranks.
        LaunchError: a rank did not call it in time.
    """
    report_errors()

    def check() -> tuple[ParallelContext | None, Call]:
        checked = required_context("start_heartbeat", context)
        is_number = is_integer(timeout) or isinstance(timeout, float)
        require(is_number and 0 < timeout < float("inf"), "timeout", timeout, "seconds above 0")
        counts = end_after is None or (is_integer(end_after) and end_after >= 1)
        require(counts, "end_after", end_after, "an integer of 1 or more, or None")
        if checked is not None and checked.heartbeat is not None and checked.heartbeat.is_running:
            raise ConfigError("start_heartbeat: the context has a heartbeat already; set its hang_timeout instead")
        if checked is not None and checked.num_engines:
            raise ConfigError(
                "start_heartbeat: call it before paramp.initialize, whose engine reports its phases to it"
            )
        return checked, Call({"timeout": str(timeout), "end_after": str(end_after)})

    context = agreed_call("start_heartbeat", check)
    alone = not is_distributed() or dist.get_backend() == "fake"
    if context is None or alone:
        heartbeat = Heartbeat(HashStore(), 0, 1, timeout)
    else:
        heartbeat = _heartbeat_of_world(timeout, end_after)
        heartbeat.start(context.name_of)
    if context is not None:
        context.heartbeat = heartbeat
    return heartbeat


def _heartbeat_of_world(timeout: float, end_after: int | None) -> Heartbeat:
    """One for the process group that exists, in its store."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = meet(dist.distributed_c10d._get_default_store(), rank, world_size)
    host = "the file system" if not store.has_extended_api() else "the launcher" if has_agent() else ""  # type: ignore[attr-defined]
    heartbeat = Heartbeat(PrefixStore("heartbeat", store), rank, world_size, timeout, end_after=end_after, host=host)
    agree(store, "heartbeat", "", rank, world_size, lambda _: "made")
    return heartbeat


def _load(config: ConfigSource) -> Config:
    report_errors()
    return load_in_layout(config)


def _check_port(port: int | None) -> int | None:
    if port is not None and not 0 < port < 2**16:
        raise LaunchError(f"port: got {port}, expected 1 to 65535")
    return port


def _join(
    config: Config,
    place: LauncherRank | None,
    backend: str | None,
    device: torch.device | str | None,
    seed: int,
    store: Store | None = None,
) -> ParallelContext:
    """Rendezvous with the other ranks of ``place``'s world, through ``store`` if given, and make the context."""
    warn_if_untested()
    place = place or LauncherRank("none", rank=0, world_size=1, local_rank=0)
    rank, world_size = place.rank, place.world_size
    if seed != DEFAULT_SEED:
        config = replace(config, seed=seed)
    config.parallel.data_size(world_size)  # raise before any rank waits for another
    owns_world = not dist.is_initialized()
    if not owns_world:
        _check_world(place)
        device = device or _device_of_group()
    if _device_type(device) == "cuda":
        numerics_of(config).prepare_process()  # before the next line, which initialises CUDA
    device = _set_device(device, place.local_rank)
    if not owns_world:
        _check_backend(backend, device)
        store = dist.distributed_c10d._get_default_store()
    elif store is None:
        store = _shared_store(place)
    heartbeat = None
    if owns_world or dist.get_backend() != "fake":  # with a fake process group only this rank runs
        store = meet(store, rank, world_size)
        heartbeat = _make_heartbeat(config, store, place) if owns_world else None
        agree_on_config(store, config, rank, world_size)
    if owns_world:
        if backend == "nccl":
            _check_own_gpus(store, device, rank, world_size)
        _init_process_group(store, place, backend, device)
    report_errors()  # again, as torch has put its own report around it
    return ParallelContext(config, device, place.local_rank, owns_world=owns_world, heartbeat=heartbeat)


def _device_of_group() -> torch.device | None:
    """The GPU that the process group, or whoever made it, has chosen for this rank; None: neither has."""
    bound: torch.device | None = dist.distributed_c10d._get_default_group().bound_device_id
    if bound is None and torch.cuda.is_initialized() and torch.cuda.current_device():
        return torch.device("cuda", torch.cuda.current_device())
    return bound


def _check_world(place: LauncherRank) -> None:
    if (dist.get_rank(), dist.get_world_size()) != (place.rank, place.world_size):
        raise LaunchError(
            f"launch: torch.distributed is initialised as rank {dist.get_rank()} of {dist.get_world_size()}, "
            f"but the launcher gave {place}; destroy the old process group first"
        )


def _check_backend(backend: str | None, device: torch.device) -> None:
    """A LaunchError unless the process group that there is has the ``backend`` and moves tensors of the ``device``."""
    made = dist.get_backend_config()
    if dist.get_backend() == "fake":
        return
    backends = dict(pair.split(":") for pair in made.split(","))
    found = backends.get(device.type)
    if found is None:
        raise LaunchError(
            f"device: got {str(device)!r}, but torch.distributed is initialised with {made!r}, which does not move its "
            f"tensors; expected a device of {' or '.join(backends)}"
        )
    if backend is not None and f"{device.type}:{found}" not in _by_device(backend, device):
        raise LaunchError(
            f"backend: got {backend!r}, but torch.distributed is initialised with {made!r}; leave backend out, or "
            "launch before the process group is made"
        )


def _by_device(backend: str, device: torch.device) -> list[str]:
    """``cpu:gloo,cuda:nccl`` as a list; a ``backend`` without devices is for ``device``."""
    return backend.lower().split(",") if ":" in backend else [f"{device.type}:{backend.lower()}"]


def _init_process_group(store: Store, place: LauncherRank, backend: str | None, device: torch.device) -> None:
    rank, world_size = place.rank, place.world_size
    if backend is None and world_size == 1 and dist.is_gloo_available():
        backend = "gloo"  # nothing is sent, and NCCL's communicator would take seconds and memory
    backend = backend or _agree_on_backend(store, device, rank, world_size)
    if world_size > 1 and "gloo" in backend:
        choose_interface(store, place.host or "localhost", rank, world_size)
    # NCCL connects the world at once if it is told the device, and splits it into groups; gloo refuses a device.
    bound = device if backend == "nccl" and device.type == "cuda" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=bound)


def _make_heartbeat(config: Config, store: Store, place: LauncherRank) -> Heartbeat | None:
    if place.world_size == 1 or config.hang_timeout is None:
        return None
    store, host = PrefixStore("heartbeat", store), "the launcher" if place.agent_listens else ""
    return Heartbeat(
        store, place.rank, place.world_size, config.hang_timeout, end_after=config.hang_end_after, host=host
    )


_stores: dict[tuple[str, int, int], TCPStore] = {}
"""Kept until the process ends: a later launch uses the same store."""


def _shared_store(place: LauncherRank) -> Store:
    """The store that the ranks of ``place``'s world share."""
    if place.world_size == 1 or place.host is None or place.port is None:
        return HashStore()
    key = (place.host, place.port, place.rank)
    if key not in _stores:
        listens = place.rank == 0 and not place.agent_listens
        _stores[key] = host_store(place.port) if listens else join_store(place.host, place.port)
    return _stores[key]


def _agree_on_backend(store: Any, device: torch.device, rank: int, world_size: int) -> str:
    """NCCL if every rank of the world has its own GPU, else gloo; the same on every rank."""
    mine = f"no GPU of rank {rank}"
    if device.type == "cuda" and dist.is_nccl_available():
        mine = f"GPU {torch.cuda.get_device_properties(device).uuid}"

    def backend_of(devices: list[str]) -> str:
        gpus = {name for name in devices if name.startswith("GPU ")}
        return "nccl" if len(gpus) == len(devices) else "gloo"

    return agree(store, "device", mine, rank, world_size, backend_of)


def _device_type(requested: torch.device | str | None) -> str:
    return torch.device(requested or ("cuda" if torch.cuda.device_count() else "cpu")).type


def _set_device(requested: torch.device | str | None, local_rank: int) -> torch.device:
    """The device of this rank, made torch's current one if it is a GPU."""
    gpus = torch.cuda.device_count()
    device = torch.device(requested or _device_type(requested))
    if device.type == "cuda":
        if not gpus:
            raise LaunchError(f"device: got {str(device)!r}, but torch sees no GPU; leave device out to use the CPU")
        if str(device) == "cuda":
            device = torch.device("cuda", local_rank % gpus)
        torch.cuda.set_device(device)
    return device


def _check_own_gpus(store: Any, device: torch.device, rank: int, world_size: int) -> None:
    """A LaunchError on every rank if some have no GPU of their own, which NCCL needs."""
    if _agree_on_backend(store, device, rank, world_size) != "nccl":
        raise LaunchError(
            f"backend: got 'nccl', which needs a GPU of its own on each of {world_size} rank(s), but some have none or "
            f"share one (rank {rank} has {device}); leave backend out, and ranks share a GPU over gloo"
        )
