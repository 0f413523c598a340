"""Colossal-AI's names for the groups that a rank belongs to."""

from __future__ import annotations

import enum


class ParallelMode(enum.Enum):
    """Which of a rank's groups is meant. There is one kind of tensor parallelism here, so that 1D is TENSOR."""

    GLOBAL = "global"
    """All ranks."""
    DATA = "dp"
    PIPELINE = "pp"
    TENSOR = "tp"
    PARALLEL_1D = TENSOR
    MODEL = "model"
    """The ranks that together hold one replica of the model."""
