"""What stages' shapes and code may depend on in a batch."""

from __future__ import annotations

import enum
from typing import Any

import torch

from .microbatches import Batch, Whole

CONSTANTS = (
    *(int, float, complex, str, enum.Enum, type(None), type(...), slice, range),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Values that are the same in each batch of a kind."""


def batch_key(batch: Batch) -> tuple[Any, ...]:
    """The shapes and dtypes of the inputs of ``batch``, and their constants."""
    return (len(batch.args), *((path, _kind(leaf)) for path, leaf in batch.inputs()))


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Whole):
        return "whole", leaf.tensor.shape, leaf.tensor.dtype
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype
    return (type(leaf), repr(leaf)) if isinstance(leaf, CONSTANTS) else type(leaf)  # True is not 1
