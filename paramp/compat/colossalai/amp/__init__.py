"""Colossal-AI's ``amp`` package: its modes, and mixed precision without an engine."""

from ...foreign_config_values import AMP_TYPE
from .convert import (
    AmpCriterion,
    AmpModel,
    convert_to_amp,
    convert_to_apex_amp,
    convert_to_naive_amp,
    convert_to_torch_amp,
)
from .optimizer import AmpOptimizer

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
