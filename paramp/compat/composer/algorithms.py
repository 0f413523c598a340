"""Composer's algorithms that change the norms of a model: ``paramp.initialize(..., algorithms=[...])``.

An algorithm is any object with ``apply(model, precision)``. ``initialize`` calls it with the whole model, before it is
partitioned and sharded, and with the training mode.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ...precision.modes import Precision
from ..missing import missing
from . import functional

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "LowPrecisionGroupNorm", "LowPrecisionLayerNorm", "LowPrecisionRMSNorm"]


@dataclass(frozen=True)
class LowPrecisionLayerNorm:
    """:func:`paramp.functional.apply_low_precision_layernorm` with the training mode."""

    def apply(self, model: nn.Module, precision: Precision) -> int:
        return functional.apply_low_precision_layernorm(model, precision)


@dataclass(frozen=True)
class LowPrecisionGroupNorm:
    """:func:`paramp.functional.apply_low_precision_groupnorm` with the training mode."""

    def apply(self, model: nn.Module, precision: Precision) -> int:
        return functional.apply_low_precision_groupnorm(model, precision)


@dataclass(frozen=True)
class LowPrecisionRMSNorm:
    """:func:`paramp.functional.apply_low_precision_rmsnorm` with the training mode."""

    def apply(self, model: nn.Module, precision: Precision) -> int:
        return functional.apply_low_precision_rmsnorm(model, precision)


@dataclass(frozen=True)
class FusedLayerNorm:
    """:func:`paramp.functional.apply_fused_layernorm`."""

    def apply(self, model: nn.Module, precision: Precision) -> int:
        return functional.apply_fused_layernorm(model)


@dataclass(frozen=True)
class FusedRMSNorm:
    """:func:`paramp.functional.apply_fused_rmsnorm`."""

    def apply(self, model: nn.Module, precision: Precision) -> int:
        return functional.apply_fused_rmsnorm(model)


__getattr__ = missing(
    __name__,
    {
        "GradientClipping": "set clip_grad_norm in the configuration",
        "LabelSmoothing": "use torch.nn.CrossEntropyLoss(label_smoothing=0.1)",
    },
    "only those on norms are here; any object with apply(model, precision) is an algorithm",
)
