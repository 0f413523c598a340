"""Models for `python -m paramp verify`, right ones and wrong ones."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

import paramp
from paramp.models import GPT, GPTConfig

WIDTH = 16


class Block(nn.Module):
    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 32)
        self.activation = activation or nn.GELU()
        self.down = nn.Linear(32, WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(self.activation(self.up(x))))


def blocks(activation: type[nn.Module] = nn.GELU) -> nn.Sequential:
    return nn.Sequential(OrderedDict((f"block{index}", Block(activation())) for index in range(4)))


def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, dims=1)


def gpt() -> GPT:
    return GPT(
        GPTConfig(num_layers=2, num_heads=4, width=32, max_seq_len=16, vocab_size=120, init_std=0.2, dropout=0.1)
    )


RIGHT = {"block*.up": "colwise", "block*.down": "rowwise"}


class WithoutAllReduce(RowwiseParallel):
    """Each rank goes on with its own part of the sum."""

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        return outputs.to_local() if isinstance(outputs, DTensor) else outputs


class BiasOnEachRank(ParallelStyle):
    """A rowwise layer by hand, whose bias every rank adds before the sum."""

    def _apply(self, module: nn.Module, device_mesh) -> nn.Module:
        weight = nn.Parameter(distribute_tensor(module.weight.detach(), device_mesh, [Shard(1)]))
        bias = nn.Parameter(distribute_tensor(module.bias.detach(), device_mesh, [Replicate()]))
        module.register_parameter("weight", weight)
        module.register_parameter("bias", bias)

        def forward(x: torch.Tensor) -> torch.Tensor:
            partial = nn.functional.linear(x, module.weight.to_local(), module.bias.to_local())
            return _Sum.apply(partial, device_mesh.get_group())

        module.forward = forward
        return module


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        torch.distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class HalfInputGradient(ColwiseParallel):
    """What it hands back to its input is half of what it should be, on every rank."""

    @staticmethod
    def _prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh):
        return DTensor.from_local(_Halving.apply(inputs[0]), device_mesh, [Replicate()], run_check=False)


class _Halving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


class Normalized(nn.Module):
    """Divides by the norm of what it is given: of a shard only, if that is one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.norm(dim=-1, keepdim=True) * 4


def normalized() -> nn.Sequential:
    return blocks(Normalized)


NO_ALL_REDUCE = RIGHT | {"block2.down": WithoutAllReduce()}
BIAS_ON_EACH_RANK = RIGHT | {"block1.down": BiasOnEachRank()}
HALF_GRADIENT = RIGHT | {"block2.up": HalfInputGradient()}


def unseeded() -> nn.Sequential:
    """Another model in each layout."""
    torch.manual_seed(torch.distributed.get_world_size())
    return blocks()


def batches_of_the_layout(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batches(step + 100 * torch.distributed.get_world_size())


TWO_BATCHES = [batches(1), batches(2)]


def uneven_batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batches(step)[0], batches(step)[1][1:]


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


def noisy() -> nn.Sequential:
    return blocks(Noisy)


def fails_when_sharded() -> nn.Sequential:
    if paramp.get_context().tp.size > 1:
        raise RuntimeError("no shards, please")
    return blocks()
