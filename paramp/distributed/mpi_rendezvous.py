"""Rendezvous of ranks that ``mpirun`` started: they agree on a store over MPI."""

import secrets
import sys
from dataclasses import replace
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # missing in torch's stubs only

from ..base.errors import LaunchError, first_line
from .launcher_variables import LauncherRank
from .network_interfaces import own_hosts
from .rendezvous import PASSWORD, find_store, host_store

_met: tuple[LauncherRank, TCPStore] | None = None
"""Kept until the process ends: MPI cannot be started a second time."""


def meet_by_mpi(place: LauncherRank, host: str | None, port: int | None) -> tuple[LauncherRank, Store]:
    """The rank that MPI gives this process, and a store that all ranks share; see ``launch_from_openmpi``."""
    global _met
    if _met is not None:
        return _met
    ours = "mpi4py.MPI" not in sys.modules
    mpi = _import_mpi(place, ours)
    world = mpi.COMM_WORLD
    if world.size != place.world_size:
        raise LaunchError(
            f"launch: mpirun started {place.world_size} processes, but mpi4py sees {world.size}: it uses another MPI, "
            f"{first_line(mpi.Get_library_version())!r}; start with the mpirun of that MPI"
        )
    machine = world.Split_type(mpi.COMM_TYPE_SHARED)
    one_machine = world.allreduce(machine.size, mpi.MIN) == world.size
    hosts = [host] if host else ["localhost"] if one_machine else None
    found, store = _share_store(world, hosts, port or 0)
    place = replace(place, rank=world.rank, local_rank=machine.rank, host=found, port=store.port)
    machine.Free()
    if ours:
        world.Barrier()
        mpi.Finalize()
    _met = place, store
    return _met


def _import_mpi(place: LauncherRank, ours: bool) -> Any:
    """The module ``mpi4py.MPI``; importing it starts MPI. ``ours``: the program has not imported it yet."""
    try:
        import mpi4py

        if ours:
            # MPI's finalize at exit waits for all ranks, and would hang after one of them has failed.
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"launch: mpirun started {place.world_size} processes, but mpi4py cannot be used "
            f'({first_line(error)}); pip install "paramp[mpi]", and install an MPI library'
        ) from None
    return MPI


def _share_store(world: Any, hosts: list[str] | None, port: int) -> tuple[str, TCPStore]:
    """The host of ``hosts`` (None: any) at which this rank reaches rank 0 of ``world``, and the store it hosts."""
    problem, store, meeting = None, None, None
    if world.rank == 0:
        try:
            store = host_store(port)
            password = secrets.token_hex(16)
            store.set(PASSWORD, password)
            meeting = (own_hosts() if hosts is None else hosts, store.port, password)
        except LaunchError as error:
            problem = error
    # Rank 0 broadcasts its error too: otherwise the others would wait.
    meeting, reason = world.bcast((meeting, None if problem is None else str(problem)), root=0)
    if reason is not None:
        raise problem or LaunchError(reason)
    hosts, port, password = meeting
    if not hosts:
        raise LaunchError(
            "launch: there are several machines, but rank 0's machine has only loopback addresses; "
            "pass launch_from_openmpi the host at which the others reach it"
        )
    if store is not None:
        return hosts[0], store
    return find_store(hosts, port, password.encode())
