"""``apex.normalization``: norms with Apex's kernels if these are installed, else with torch's."""

from ...precision.norms import FusedLayerNorm, FusedRMSNorm

__all__ = ["FusedLayerNorm", "FusedRMSNorm"]
