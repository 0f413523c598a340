"""paramp: mixed precision that is right under every parallel layout.

context = paramp.launch_from_torch(config)
engine, *_ = paramp.initialize(model, optimizer, criterion)
loss = engine.forward_backward(x, y)
engine.step()
"""

from . import algorithms, amp, functional, models, nn
from .building import init_module
from .config import Config, ConfigError
from .engine import Engine, StepResult
from .environment import LaunchError
from .errors import CheckpointError, DataError, ReplicaDrift, TrainingDiverged
from .fabric import FabricPrecision
from .grads import clip_grad_norm_
from .initialization import initialize
from .launching import launch, launch_from_environment, launch_from_openmpi, launch_from_slurm, launch_from_torch
from .mesh import ParallelContext, get_context
from .precision import LossScaling, Precision
from .scaler import DistributedGradScaler

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "DistributedGradScaler",
    "Engine",
    "FabricPrecision",
    "LaunchError",
    "LossScaling",
    "ParallelContext",
    "Precision",
    "ReplicaDrift",
    "StepResult",
    "TrainingDiverged",
    "__version__",
    "algorithms",
    "amp",
    "clip_grad_norm_",
    "functional",
    "get_context",
    "init_module",
    "initialize",
    "launch",
    "launch_from_environment",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "models",
    "nn",
]
