"""Composer's functions that change the norms of a model, for a user's own loop (:mod:`paramp.precision.norms`).

Each changes ``model`` in place, before or after it is sharded over a tensor axis, and returns the number of changed
modules. ``optimizers``, those of the model's parameters, need not be passed and may be made before or after, because
the parameters stay the same objects. Modules with their own forward are not changed. A model without such norms, or a
precision in which they have no effect, gives a :class:`~paramp.precision.norms.NoEffectWarning`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import nn

from ...base.errors import ConfigError
from ...base.replace_class import replace_class
from ...precision.modes import Mode, Precision
from ...precision.norms import FusedLayerNorm, FusedRMSNorm, LPGroupNorm, LPLayerNorm, LPRMSNorm, NoEffectWarning
from ..missing import missing

log = logging.getLogger(__name__)

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

WITHOUT_EFFECT = ("fp16", "fp8", "amp_fp8", "fp8-mixed")
"""Precisions, besides those without autocast, in which Composer's low-precision norms have no effect."""

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
    return _replace_norms(model, nn.LayerNorm, LPLayerNorm, precision=precision, optimizers=optimizers)


def apply_low_precision_groupnorm(
    model: nn.Module, precision: Mode | None = None, optimizers: Optimizers | None = None
) -> int:
    """As :func:`apply_low_precision_layernorm`, for each ``nn.GroupNorm``."""
    return _replace_norms(model, nn.GroupNorm, LPGroupNorm, precision=precision, optimizers=optimizers)


def apply_low_precision_rmsnorm(
    model: nn.Module, precision: Mode | None = None, optimizers: Optimizers | None = None
) -> int:
    """As :func:`apply_low_precision_layernorm`, for each ``nn.RMSNorm``."""
    return _replace_norms(model, nn.RMSNorm, LPRMSNorm, precision=precision, optimizers=optimizers)


def apply_fused_layernorm(model: nn.Module, optimizers: Optimizers | None = None) -> int:
    """Make each ``nn.LayerNorm`` of ``model`` use the kernels of NVIDIA's Apex if these are installed.

    Under autocast its input and output are in autocast's dtype, as in Apex. Without Apex, and on a CPU, torch's kernels
    compute the same, with statistics in fp32.

    Raises:
        TypeError: the model is wrapped in DDP or FSDP, or ``optimizers`` has another type.
    """
    return _replace_norms(model, nn.LayerNorm, FusedLayerNorm, optimizers=optimizers)


def apply_fused_rmsnorm(model: nn.Module, optimizers: Optimizers | None = None) -> int:
    """As :func:`apply_fused_layernorm`, for each ``nn.RMSNorm``."""
    return _replace_norms(model, nn.RMSNorm, FusedRMSNorm, optimizers=optimizers)


def _replace_norms(
    model: nn.Module,
    plain: type[nn.Module],
    replacement: type[nn.Module],
    *,
    precision: Mode | None = None,
    optimizers: Optimizers | None = None,
) -> int:
    """Change the class of the ``plain`` norms in ``model`` to ``replacement``, in place; return their number.

    Modules and parameters stay the same objects (:func:`paramp.base.replace_class.replace_class`), so optimizers and
    their state stay valid.
    """
    for optimizer in [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers or ():
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizers: got {type(optimizer).__name__}, expected an optimizer or several")
    kind, new = type(model).__name__, replacement.__name__
    if why := _why_without_effect(precision):
        warnings.warn(f"{new} has no effect in {why}; {kind} is not changed", NoEffectWarning, stacklevel=3)
        return 0
    names = replace_class(model, plain, replacement)
    if not names and not any(isinstance(module, replacement) for module in model.modules()):
        message = f"{kind} has no {plain.__name__} with torch's own forward; {new} replaced none"
        warnings.warn(message, NoEffectWarning, stacklevel=3)
    log.info("%s: %d x %s instead of %s", kind, len(names), new, plain.__name__)
    return len(names)


def _why_without_effect(precision: Mode | None) -> str | None:
    """``precision`` with the reason why norms are not changed in it; None if they are."""
    if precision is None:
        return None
    name = precision.name if isinstance(precision, Precision) else precision
    if name in WITHOUT_EFFECT:
        return f"precision {name!r}, in which Composer does not change norms"
    try:
        casts = Precision.parse(precision).autocast
    except ConfigError as error:
        raise ConfigError(f"{error}; or one of {', '.join(WITHOUT_EFFECT)}, which change nothing") from None
    return None if casts else f"precision {name!r}, which has no autocast to fp16 or bf16"


__getattr__ = missing(__name__, {}, "only Composer's functions on norms are here; write the other in your own loop")
