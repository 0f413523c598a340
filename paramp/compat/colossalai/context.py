"""Colossal-AI's names of the groups of a rank, its ``launch`` functions, which take ``verbose``, and their parser."""

from __future__ import annotations

import argparse
import enum
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ...distributed import launch_from_torch_mpi_slurm
from ...distributed.context import ParallelContext

Launch = TypeVar("Launch", bound=Callable[..., ParallelContext])


class ParallelMode(enum.Enum):
    """The groups that a rank belongs to. There is only one kind of tensor parallelism, so 1D is TENSOR."""

    GLOBAL = "global"
    """All ranks."""
    DATA = "dp"
    PIPELINE = "pp"
    TENSOR = "tp"
    PARALLEL_1D = TENSOR
    MODEL = "model"
    """The ranks that together hold one replica of the model."""


def get_default_parser() -> argparse.ArgumentParser:
    """A parser of the arguments of :func:`launch`, to which a script adds its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", help="path of the configuration, a .py or .toml file")
    parser.add_argument("--host", help="address at which rank 0 listens")
    parser.add_argument("--port", type=int, help="port at which rank 0 listens")
    parser.add_argument("--world_size", type=int, help="number of processes")
    parser.add_argument("--rank", type=int, help="rank of this process")
    parser.add_argument("--local_rank", type=int, help="rank of this process on its machine")
    parser.add_argument("--backend", help="nccl or gloo; by default what fits the devices")
    return parser


def _with_verbose(launch: Launch) -> Launch:
    @functools.wraps(launch)
    def launching(*args: Any, verbose: bool = True, **kwargs: Any) -> ParallelContext:
        return launch(*args, **kwargs)  # launching prints nothing in any case

    return cast(Launch, launching)


launch = _with_verbose(launch_from_torch_mpi_slurm.launch)
launch_from_openmpi = _with_verbose(launch_from_torch_mpi_slurm.launch_from_openmpi)
launch_from_slurm = _with_verbose(launch_from_torch_mpi_slurm.launch_from_slurm)
launch_from_torch = _with_verbose(launch_from_torch_mpi_slurm.launch_from_torch)
