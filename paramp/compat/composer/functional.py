"""Composer's functions that change the norms of a model, for a user's own loop (:mod:`paramp.precision.norms`).

Each changes ``model`` in place, before or after it is sharded over a tensor axis, and returns the number of changed
modules. ``optimizers``, those of the model's parameters, need not be passed and may be made before or after, because
the parameters stay the same objects. Modules with their own forward are not changed. A model without such norms, or a
precision in which they have no effect, gives a :class:`~paramp.precision.norms.NoEffectWarning`.
"""

from torch import nn

from ...precision.norms import (
    FusedLayerNorm,
    FusedRMSNorm,
    LPGroupNorm,
    LPLayerNorm,
    LPRMSNorm,
    Optimizers,
    replace_norms,
)
from ...precision.policy import Mode
from ..missing import missing

__all__ = [
    "apply_fused_layernorm",
    "apply_fused_rmsnorm",
    "apply_low_precision_groupnorm",
    "apply_low_precision_layernorm",
    "apply_low_precision_rmsnorm",
]


def apply_low_precision_layernorm(
    model: nn.Module, precision: Mode | None = None, optimizers: Optimizers | None = None
) -> int:
    """Make the input and output of each ``nn.LayerNorm`` of ``model`` autocast's dtype.

    Args:
        precision: Composer's name (``amp``, ``amp_fp16``, ``bf16``, ``amp_bf16``, ``fp32``, ``fp16``, ``amp_fp8``)
            or a mode. If it has no autocast to fp16 or bf16, and in fp8, it warns and changes nothing. None: the
            autocast that is active at each forward decides.

    Raises:
        ConfigError: an unknown precision.
        TypeError: the model is wrapped in DDP or FSDP, or ``optimizers`` has another type.
    """
    return replace_norms(model, nn.LayerNorm, LPLayerNorm, precision=precision, optimizers=optimizers)


def apply_low_precision_groupnorm(
    model: nn.Module, precision: Mode | None = None, optimizers: Optimizers | None = None
) -> int:
    """As :func:`apply_low_precision_layernorm`, for each ``nn.GroupNorm``."""
    return replace_norms(model, nn.GroupNorm, LPGroupNorm, precision=precision, optimizers=optimizers)


def apply_low_precision_rmsnorm(
    model: nn.Module, precision: Mode | None = None, optimizers: Optimizers | None = None
) -> int:
    """As :func:`apply_low_precision_layernorm`, for each ``nn.RMSNorm``."""
    return replace_norms(model, nn.RMSNorm, LPRMSNorm, precision=precision, optimizers=optimizers)


def apply_fused_layernorm(model: nn.Module, optimizers: Optimizers | None = None) -> int:
    """Make each ``nn.LayerNorm`` of ``model`` use the kernels of NVIDIA's Apex if these are installed.

    Under autocast its input and output are in autocast's dtype, as in Apex. Without Apex, and on a CPU, torch's kernels
    compute the same, with statistics in fp32.

    Raises:
        TypeError: the model is wrapped in DDP or FSDP, or ``optimizers`` has another type.
    """
    return replace_norms(model, nn.LayerNorm, FusedLayerNorm, optimizers=optimizers)


def apply_fused_rmsnorm(model: nn.Module, optimizers: Optimizers | None = None) -> int:
    """As :func:`apply_fused_layernorm`, for each ``nn.RMSNorm``."""
    return replace_norms(model, nn.RMSNorm, FusedRMSNorm, optimizers=optimizers)


__getattr__ = missing(__name__, {}, "only Composer's functions on norms are here; write the other in your own loop")
