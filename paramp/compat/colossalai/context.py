"""Colossal-AI's names for the groups that a rank belongs to."""

from __future__ import annotations

import enum


class ParallelMode(enum.Enum):
    """The groups that a rank belongs to. There is only one kind of tensor parallelism, so 1D is TENSOR."""

    GLOBAL = "global"
    """All ranks."""
    DATA = "dp"
    PIPELINE = "pp"
    TENSOR = "tp"
    PARALLEL_1D = TENSOR
    MODEL = "model"
    """The ranks that together hold one replica of the model."""
