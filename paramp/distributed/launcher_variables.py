"""The launcher, rank, world size and rendezvous address of this process, from environment variables.

Launchers nest: ``srun torchrun ...``, or ``mpirun`` inside a Slurm allocation. The innermost one made the ranks, so
torchrun comes before MPI, and MPI before Slurm. Torchrun's variables may also be set by hand; they then have to agree
with those of the launcher that started the process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ..base.errors import LaunchError


@dataclass(frozen=True)
class LauncherRank:
    """The rank that a launcher (``torchrun``, ``mpi`` or ``slurm``) gave this process."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    host: str | None = None
    """The address at which rank 0 or the launcher's agent listens; None: not agreed on yet."""
    port: int | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"

    @property
    def agent_listens(self) -> bool:
        """Whether torchrun's agent hosts the store, which then outlives the ranks."""
        return has_agent() and self.launcher == "torchrun"


def has_agent() -> bool:
    """Whether torchrun's agent started this process, and hosts a store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

# rank, world size and local rank
OPEN_MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
MPICH_VARIABLES = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")


def find_place() -> LauncherRank | None:
    """This process's rank by the innermost launcher whose variables are set; None if no launcher's are set.

    Like the functions for one launcher, it raises a LaunchError if variables are incomplete, invalid or contradictory.
    """
    torchrun = torchrun_place()
    if torchrun is not None and "TORCHELASTIC_RUN_ID" in os.environ:
        return torchrun
    mpi, slurm = mpi_place(), slurm_place()
    if torchrun is None:
        # srun sets MPI's variables too (--mpi=pmi2), and then needs no MPI.
        same = mpi is not None and slurm is not None and (mpi.rank, mpi.world_size) == (slurm.rank, slurm.world_size)
        return slurm if same or mpi is None else mpi
    for other in (mpi, slurm):
        # An interactive Slurm shell is a step of one task, in which a user may start ranks by hand.
        if other is not None and other.world_size > 1 and str(other) != str(torchrun):
            raise LaunchError(
                f"launch: RANK and WORLD_SIZE say {torchrun}, but {_variables_of(other)} say {other}; "
                "unset RANK, WORLD_SIZE and LOCAL_RANK, which the launcher's own variables make unnecessary"
            )
    return torchrun


def _variables_of(place: LauncherRank) -> str:
    if place.launcher == "slurm":
        return "Slurm's SLURM_PROCID and SLURM_NTASKS"
    rank, size, _ = OPEN_MPI_VARIABLES if OPEN_MPI_VARIABLES[0] in os.environ else MPICH_VARIABLES
    return f"mpirun's {rank} and {size}"


def rank_by_any_variable() -> int:
    """This process's rank from the first valid variable, for messages before all variables have been checked."""
    for name in ("RANK", OPEN_MPI_VARIABLES[0], MPICH_VARIABLES[0], "SLURM_PROCID"):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return 0


def group_place() -> LauncherRank | None:
    """The rank that torch's process group gives, if there is one and ``RANK`` and ``WORLD_SIZE`` say nothing else."""
    if not dist.is_initialized():
        return None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if any(
        os.environ.get(name) not in (None, "", str(own)) for name, own in (("RANK", rank), ("WORLD_SIZE", world_size))
    ):
        return None
    return LauncherRank("torchrun", rank, world_size, dist.get_node_local_rank(fallback_rank=rank))


def torchrun_place() -> LauncherRank | None:
    """The rank that torchrun's variables give; None if none of them is set."""
    # MASTER_ADDR and MASTER_PORT are often exported in a shell profile, so they do not count alone.
    present = _present(TORCHRUN_VARIABLES)
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(present):
        return None
    missing = [name for name in TORCHRUN_VARIABLES if name not in present]
    _check_complete(present, missing, "torchrun --nproc-per-node N SCRIPT")
    rank, world_size, local_rank = (_number(name) for name in TORCHRUN_VARIABLES[:3])
    _check_rank("RANK", rank, "WORLD_SIZE", world_size)
    return LauncherRank("torchrun", rank, world_size, local_rank, present["MASTER_ADDR"], _master_port())


def mpi_place() -> LauncherRank | None:
    """The rank that mpirun's variables give, Open MPI's or MPICH's; None if none of them is set."""
    for names in (OPEN_MPI_VARIABLES, MPICH_VARIABLES):
        present = _present(names)
        if not set(names[:2]) & set(present):
            continue
        if names[2] not in present and set(names[:2]) <= set(present):
            present[names[2]] = "0"  # not every version of MPICH sets it; replaced when MPI has started
        _check_complete(present, [name for name in names if name not in present], "mpirun -n N")
        rank, world_size, local_rank = (_number(name, present[name]) for name in names)
        _check_rank(names[0], rank, names[1], world_size)
        return LauncherRank("mpi", rank, world_size, local_rank)
    return None


SLURM_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
SLURM_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
FIRST_PORT, NUM_PORTS = 20000, 12000
"""The rendezvous ports of Slurm jobs: below the ports that systems assign automatically."""


def slurm_place(host: str | None = None, port: int | None = None) -> LauncherRank | None:
    """The rank of a task that ``srun`` started; None outside of Slurm, and in the batch script, which is not a task.

    Rank 0 listens at ``host`` and ``port``; None: ``MASTER_ADDR`` and ``MASTER_PORT`` if set, else the first machine
    of the step and a port computed from the job's number.
    """
    present = _present(("SLURM_PROCID", "SLURM_LOCALID"))
    in_step = any(os.environ.get(name) for name in ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"))
    if not present or (not in_step and os.environ.get("SLURM_TASK_PID")):
        return None
    size = next((name for name in SLURM_SIZES if os.environ.get(name)), None)
    nodes = next((name for name in SLURM_NODES if os.environ.get(name)), None)
    host = host or os.environ.get("MASTER_ADDR") or (first_host(os.environ[nodes]) if nodes else None)
    missing = [name for name in ("SLURM_PROCID", "SLURM_LOCALID") if name not in present]
    missing += ["SLURM_NTASKS"] if size is None else []
    missing += ["SLURM_JOB_NODELIST"] if host is None else []
    _check_complete(present, missing, "srun --ntasks N")
    assert size is not None
    rank, local_rank, world_size = _number("SLURM_PROCID"), _number("SLURM_LOCALID"), _number(size)
    _check_rank("SLURM_PROCID", rank, size, world_size)
    if port is None:
        port = _master_port() if os.environ.get("MASTER_PORT") else FIRST_PORT + _job_number() % NUM_PORTS
    return LauncherRank("slurm", rank, world_size, local_rank, host, port)


def _job_number() -> int:
    """A number that differs between jobs, and between the first 64 steps of a job."""
    texts = [os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job, step = (int(text) if text.isdecimal() else 0 for text in texts)
    return job * 64 + step % 64


def first_host(nodes: str) -> str:
    """The first machine of a list as Slurm writes it: ``gpu[003-005,9],login1`` begins with ``gpu003``."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes)
    if first is None:
        raise LaunchError(f"launch: SLURM_JOB_NODELIST is {nodes!r}, expected a list such as 'node[01-04]'")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group())


def _present(names: Sequence[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def _check_complete(present: Iterable[str], missing: Sequence[str], command: str) -> None:
    if missing:
        raise LaunchError(
            f"launch: {', '.join(present)} set, but {', '.join(missing)} missing; start with {command!r}, "
            "which sets them all, or unset them to run one process"
        )


def _number(name: str, text: str | None = None) -> int:
    text = os.environ[name] if text is None else text
    if not text.isdecimal():
        raise LaunchError(f"launch: {name} is {text!r}, expected an integer of 0 or more")
    return int(text)


def _check_rank(rank_name: str, rank: int, size_name: str, world_size: int) -> None:
    if rank >= world_size:
        raise LaunchError(f"launch: {rank_name} is {rank}, but {size_name} is {world_size}")


def _master_port() -> int:
    port = _number("MASTER_PORT")
    if not 0 < port < 2**16:
        raise LaunchError(
            f"launch: MASTER_PORT is {port}, expected 1 to 65535 (torchrun --master-port), "
            "or torchrun --standalone to have one chosen"
        )
    return port
