"""``apex.fp16_utils``: the one function of it that scripts with ``amp`` use."""

from __future__ import annotations

import torch

from ..missing import missing

__all__ = ["to_python_float"]


def to_python_float(tensor: torch.Tensor) -> float:
    """The number in ``tensor``, which has one element."""
    return tensor.item()


USE_AMP = "its functions came before amp; use amp.initialize(model, optimizer, opt_level='O2') and amp.scale_loss"

__getattr__ = missing(__name__, {}, USE_AMP)
