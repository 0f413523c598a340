"""Small models that data, tensor and sharded parallelism fit, and batches, for the tests of other trainers."""

import torch
from torch import nn


class MLP(nn.Module):
    """Two layers that tensor parallelism shards, and a norm that stays a plain module."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(8)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


class Block(nn.Module):
    """Two layers that tensor parallelism shards, added to their input."""

    def __init__(self, width=8, inner=12):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def build(seed=4):
    torch.manual_seed(seed)
    return MLP()


def batch(step, rank=0, size=1):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 16, 8, generator=generator)
    return x.chunk(size)[rank], y.chunk(size)[rank]


def tensor_parallel(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
