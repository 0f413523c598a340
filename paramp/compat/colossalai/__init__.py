"""Colossal-AI's interface: replace ``import colossalai`` by ``from paramp.compat import colossalai``."""

from ...engine.initialize import initialize
from ..foreign_module_advice import add_modules
from . import amp, context, core, logging, nn, trainer, utils
from .context import get_default_parser, launch, launch_from_openmpi, launch_from_slurm, launch_from_torch

__all__ = [
    "amp",
    "context",
    "core",
    "get_default_parser",
    "initialize",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "logging",
    "nn",
    "trainer",
    "utils",
]

add_modules("colossalai")
