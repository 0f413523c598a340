"""Mixed precision without an engine, for a loop of one's own (:mod:`paramp.compat.colossalai.amp`)."""

from .compat.colossalai.amp import (
    AMP_TYPE,
    AmpCriterion,
    AmpModel,
    AmpOptimizer,
    convert_to_amp,
    convert_to_apex_amp,
    convert_to_naive_amp,
    convert_to_torch_amp,
)

__all__ = [
    "AMP_TYPE",
    "AmpCriterion",
    "AmpModel",
    "AmpOptimizer",
    "convert_to_amp",
    "convert_to_apex_amp",
    "convert_to_naive_amp",
    "convert_to_torch_amp",
]
