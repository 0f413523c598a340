"""Composer's algorithms for ``paramp.initialize(..., algorithms=[...])``."""

from .compat.composer.algorithms import (
    FusedLayerNorm,
    FusedRMSNorm,
    LowPrecisionGroupNorm,
    LowPrecisionLayerNorm,
    LowPrecisionRMSNorm,
)

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "LowPrecisionGroupNorm", "LowPrecisionLayerNorm", "LowPrecisionRMSNorm"]
