"""Composer's surgery on norms: ``apply_low_precision_layernorm`` and the others."""

from .compat.composer.functional import (
    apply_fused_layernorm,
    apply_fused_rmsnorm,
    apply_low_precision_groupnorm,
    apply_low_precision_layernorm,
    apply_low_precision_rmsnorm,
)

__all__ = [
    "apply_fused_layernorm",
    "apply_fused_rmsnorm",
    "apply_low_precision_groupnorm",
    "apply_low_precision_layernorm",
    "apply_low_precision_rmsnorm",
]
