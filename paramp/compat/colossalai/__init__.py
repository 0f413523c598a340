"""Colossal-AI's interface: replace ``import colossalai`` by ``from paramp.compat import colossalai``."""

from ...engine.initialize import initialize
from . import amp, context, core, logging, nn, utils
from .launching import launch, launch_from_openmpi, launch_from_slurm, launch_from_torch

__all__ = [
    "amp",
    "context",
    "core",
    "initialize",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "logging",
    "nn",
    "utils",
]
