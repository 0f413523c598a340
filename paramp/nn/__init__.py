"""Norms that compute in autocast's dtype (:mod:`paramp.norms`), and the learning-rate schedules of Colossal-AI
(:mod:`paramp.nn.lr_scheduler`)."""

from ..norms import FusedLayerNorm, FusedRMSNorm, LPGroupNorm, LPLayerNorm, LPRMSNorm

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "LPGroupNorm", "LPLayerNorm", "LPRMSNorm"]
