"""Models for `paramp verify`.

paramp verify examples/verify.py:build_gpt --tp 2 --pp 2 --precision 16-mixed

A GPT has its own plan and loss, and its embedding gives the vocabulary of random inputs. The other model has none of
the three, so they are passed:

paramp verify examples/verify.py:build_blocks --plan examples/verify.py:PLAN \
    --batches examples/verify.py:batches --criterion torch.nn.functional:mse_loss --tp 2 --precision bf16-mixed
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from paramp.models import GPT


def build_gpt() -> GPT:
    """A small GPT, quick to verify."""
    return GPT.preset("tiny", num_layers=2, width=64, max_seq_len=16)


class Block(nn.Module):
    """Two layers that tensor parallelism shards."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def build_blocks() -> nn.Module:
    """Four blocks; a pipeline's stages begin between any two."""
    return nn.Sequential(OrderedDict((f"block{index}", Block()) for index in range(4)))


PLAN = {"block*.up": "colwise", "block*.down": "rowwise"}


def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step: inputs and targets, float32 (16, 32)."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, dims=1)
