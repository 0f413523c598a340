"""paramp: mixed precision that is right under every parallel layout.

context = paramp.launch_from_torch(config)
engine, *_ = paramp.initialize(model, optimizer, criterion)
loss = engine.forward_backward(x, y)
engine.step()
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import algorithms, amp, functional, models, nn
    from .base.errors import CheckpointError, ConfigError, DataError, LaunchError, ReplicaDrift, TrainingDiverged
    from .config.schema import Config
    from .distributed.context import ParallelContext, get_context
    from .distributed.launch_from_torch_mpi_slurm import (
        launch,
        launch_from_environment,
        launch_from_openmpi,
        launch_from_slurm,
        launch_from_torch,
        start_heartbeat,
    )
    from .distributed.notebook import notebook
    from .distributed.token_positions import token_positions
    from .engine.checkpoint_manager import Checkpoints
    from .engine.engine import Engine
    from .engine.initialize import initialize
    from .engine.signals import StopRequest
    from .engine.step import StepResult
    from .integrations.fabric import FabricPrecision
    from .observe.grad_histogram import gradient_histogram
    from .observe.recorded_window import record_batch
    from .observe.replica_check import check_replicas
    from .observe.window_replay import trace_overflow
    from .parallel.materialize import init_module
    from .parallel.microbatches import whole
    from .precision.modes import Precision
    from .scaling.grad_norm import clip_grad_norm_
    from .scaling.loss_scaler import DistributedGradScaler
    from .scaling.loss_scaling_options import LossScaling
    from .tools.metrics import Metrics

__version__ = "0.2.0"  # pyproject.toml reads it here

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "Config",
    "ConfigError",
    "DataError",
    "DistributedGradScaler",
    "Engine",
    "FabricPrecision",
    "LaunchError",
    "LossScaling",
    "Metrics",
    "ParallelContext",
    "Precision",
    "ReplicaDrift",
    "StepResult",
    "StopRequest",
    "TrainingDiverged",
    "__version__",
    "algorithms",
    "amp",
    "check_replicas",
    "clip_grad_norm_",
    "functional",
    "get_context",
    "gradient_histogram",
    "init_module",
    "initialize",
    "launch",
    "launch_from_environment",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "models",
    "nn",
    "notebook",
    "record_batch",
    "start_heartbeat",
    "token_positions",
    "trace_overflow",
    "whole",
]

_HOMES = {
    "base.errors": "CheckpointError ConfigError DataError LaunchError ReplicaDrift TrainingDiverged",
    "config.schema": "Config",
    "distributed.context": "ParallelContext get_context",
    "distributed.launch_from_torch_mpi_slurm": (
        "launch launch_from_environment launch_from_openmpi launch_from_slurm launch_from_torch start_heartbeat"
    ),
    "distributed.notebook": "notebook",
    "distributed.token_positions": "token_positions",
    "engine.checkpoint_manager": "Checkpoints",
    "engine.engine": "Engine",
    "engine.initialize": "initialize",
    "engine.signals": "StopRequest",
    "engine.step": "StepResult",
    "integrations.fabric": "FabricPrecision",
    "observe.grad_histogram": "gradient_histogram",
    "tools.metrics": "Metrics",
    "observe.window_replay": "trace_overflow",
    "observe.recorded_window": "record_batch",
    "observe.replica_check": "check_replicas",
    "scaling.grad_norm": "clip_grad_norm_",
    "scaling.loss_scaler": "DistributedGradScaler",
    "scaling.loss_scaling_options": "LossScaling",
    "parallel.microbatches": "whole",
    "parallel.materialize": "init_module",
    "precision.modes": "Precision",
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names.split()}
"""Where each public name lives. It loads on first use, so that ``import paramp`` costs little over ``import torch``."""
_MODULES = ("algorithms", "amp", "functional", "models", "nn")


if not TYPE_CHECKING:  # it would hide misspelled names from type checkers

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f".{name}", __name__)
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
