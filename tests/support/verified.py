"""Models for `paramp verify`, right ones and wrong ones."""

from collections import OrderedDict
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

import paramp
from paramp.models import GPT, GPTConfig, MoEGPT, MoEGPTConfig

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
    sizes = {"num_layers": 2, "num_heads": 4, "width": 32, "max_seq_len": 16, "vocab_size": 120}
    return GPT(GPTConfig(**sizes, init_std=0.2, dropout=0.1))


def mixtures() -> MoEGPT:
    sizes = {"num_layers": 2, "num_heads": 4, "width": 32, "max_seq_len": 16, "vocab_size": 120}
    return MoEGPT(MoEGPTConfig(**sizes, num_experts=4, expert_width=24, dropout=0.1))


MODEL = blocks()
RIGHT = {"block*.up": "colwise", "block*.down": "rowwise"}


class WithoutAllReduce(RowwiseParallel):
    """Each rank goes on with its own part of the sum."""

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        return outputs.to_local() if isinstance(outputs, DTensor) else outputs


class Identity(torch.autograd.Function):
    """The identity, but for a sum over ``group`` in the forward, and for a ``factor`` in the backward."""

    @staticmethod
    def forward(ctx, x, group, factor):
        ctx.factor, x = factor, x.clone()
        if group is not None:
            torch.distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None, None


class BiasOnEachRank(ParallelStyle):
    """A rowwise layer by hand, whose bias every rank adds before the sum."""

    def _apply(self, module: nn.Module, device_mesh) -> nn.Module:
        for name, placement in (("weight", Shard(1)), ("bias", Replicate())):
            whole = module.get_parameter(name).detach()
            module.register_parameter(name, nn.Parameter(distribute_tensor(whole, device_mesh, [placement])))

        def forward(x: torch.Tensor) -> torch.Tensor:
            part = nn.functional.linear(x, module.weight.to_local(), module.bias.to_local())
            return Identity.apply(part, device_mesh.get_group(), 1.0)

        module.forward = forward
        return module


class HalfInputGradient(ColwiseParallel):
    """What it hands back to its input is half of what it should be, on every rank."""

    @staticmethod
    def _prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh):
        return DTensor.from_local(Identity.apply(inputs[0], None, 0.5), device_mesh, [Replicate()], run_check=False)


class Normalized(nn.Module):
    """Divides by the norm of what it is given: of a shard only, if that is one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.norm(dim=-1, keepdim=True) * 4


normalized = partial(blocks, Normalized)
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


noisy = partial(blocks, Noisy)


def fails_when_sharded() -> nn.Sequential:
    if paramp.get_context().tp.size > 1:
        raise RuntimeError("no shards, please")
    return blocks()
