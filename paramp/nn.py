"""Norms that compute in autocast's dtype, and fused norms. They live in :mod:`paramp.precision.norms`."""

from .precision.norms import FusedLayerNorm, FusedRMSNorm, LPGroupNorm, LPLayerNorm, LPRMSNorm

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "LPGroupNorm", "LPLayerNorm", "LPRMSNorm"]
