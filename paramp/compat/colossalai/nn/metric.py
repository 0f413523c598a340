"""Colossal-AI's ``nn.metric``."""

from __future__ import annotations

import torch
from torch import nn


class Accuracy(nn.Module):
    """Counts the correct predictions of a batch, for :class:`~paramp.compat.colossalai.trainer.hooks.AccuracyHook`."""

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """How many of ``targets`` are the index of the largest of ``logits`` in the last dim; 0-dim."""
        return (logits.argmax(-1) == targets).sum()
