"""A GPT and its training step, written by hand on torch as Megatron-LM does it: the candidate of by_hand.py.

Column- and row-parallel linear layers, an embedding and a cross-entropy over a sharded vocabulary as autograd
functions; a 1F1B schedule of sends and receives; one all-reduce of a flat gradient buffer over data ranks; clipping to
the norm of the whole model; fused AdamW on this rank's tensors. Nothing here checks anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from overhead import ADAMW, AUTOCAST, MAX_NORM
from torch import nn

from paramp import ParallelContext

# --------------------------------------------------------------------------------------------------- tensor parallel


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class VocabParallelLoss(torch.autograd.Function):
    """The mean cross-entropy in nats of ``logits`` (tokens, this rank's vocabulary), fp32."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, first: int, group: Any) -> torch.Tensor:
        largest = logits.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        exponentials = (logits - largest.unsqueeze(-1)).exp_()
        own = target - first
        others = (own < 0) | (own >= logits.shape[-1])
        own = own.masked_fill(others, 0).unsqueeze(-1)
        picked = logits.gather(-1, own).squeeze(-1).masked_fill(others, 0.0)
        sums = torch.stack([exponentials.sum(-1), picked])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), own, others)
        return (largest + sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        softmax, own, others = ctx.saved_tensors
        softmax.scatter_add_(-1, own, -(~others).to(softmax.dtype).unsqueeze(-1))
        return softmax.mul_(gradient / len(softmax)), None, None, None


class Shards:
    """This rank's slices of the model's parameters, by name; all of them where tensor parallelism is 1."""

    def __init__(self, context: ParallelContext) -> None:
        self.rank, self.size, self.group = context.tp.rank, context.tp.size, context.tp.group

    def take(self, value: torch.Tensor, dim: int | None) -> Any:
        part = value if dim is None else value.chunk(self.size, dim)[self.rank]
        parameter: Any = nn.Parameter(part.detach().clone())
        parameter.is_sharded = dim is not None and self.size > 1
        return parameter

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        return Copy.apply(x, self.group) if self.size > 1 else x

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        return Reduce.apply(x, self.group) if self.size > 1 else x


class Part(nn.Module):
    """A part of the model, from the parameters of ``GPT``'s module ``source``: {own name: (parameter, sharded dim)}."""

    def __init__(self, shards: Shards, source: nn.Module, dims: dict[str, int | None]) -> None:
        super().__init__()
        self.shards = shards
        for name, parameter in source.named_parameters():
            self.register_parameter(name.replace(".", "_"), shards.take(parameter, dims.get(name)))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class HandEmbedding(Part):
    def __init__(self, shards: Shards, source: Any) -> None:
        super().__init__(shards, source, {"tokens.weight": 0})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = len(self.tokens_weight)
        own = tokens - self.shards.rank * rows
        others = (own < 0) | (own >= rows)
        x = F.embedding(own.masked_fill(others, 0), self.tokens_weight).masked_fill(others.unsqueeze(-1), 0.0)
        positions: torch.Tensor = self.positions_weight[: tokens.shape[1]]
        return self.shards.reduce(x) + positions


class HandBlock(Part):
    def __init__(self, shards: Shards, source: Any) -> None:
        dims = {"attention.qkv.weight": 0, "attention.qkv.bias": 0, "attention.out.weight": 1}
        super().__init__(shards, source, {**dims, "mlp.up.weight": 0, "mlp.up.bias": 0, "mlp.down.weight": 1})
        self.head_size = source.attention.head_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = (x.shape[-1],)
        h = self.shards.copy(F.layer_norm(x, width, self.norm1_weight, self.norm1_bias))
        heads = F.linear(h, self.attention_qkv_weight, self.attention_qkv_bias).unflatten(-1, (-1, 3, self.head_size))
        query, key, value = (one.transpose(1, 2) for one in heads.unbind(3))
        h = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.shards.reduce(F.linear(h, self.attention_out_weight)) + self.attention_out_bias
        h = self.shards.copy(F.layer_norm(x, width, self.norm2_weight, self.norm2_bias))
        h = F.gelu(F.linear(h, self.mlp_up_weight, self.mlp_up_bias), approximate="tanh")
        return x + self.shards.reduce(F.linear(h, self.mlp_down_weight)) + self.mlp_down_bias


class HandHead(Part):
    def __init__(self, shards: Shards, norm: nn.Module, head: nn.Module) -> None:
        super().__init__(shards, nn.ModuleDict({"norm": norm, "head": head}), {"head.weight": 0})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shards.copy(F.layer_norm(x, (x.shape[-1],), self.norm_weight, self.norm_bias))
        return F.linear(x, self.head_weight)


# ------------------------------------------------------------------------------------------------------ the step


class ByHand:
    """The training step of ``model``, a GPT, written by hand."""

    def __init__(self, model: Any, context: ParallelContext, mode: str, num_microbatches: int) -> None:
        self.dp, self.pp, self.dtype, self.device = context.dp, context.pp, AUTOCAST[mode], context.device
        self.num_microbatches = num_microbatches
        self.shards = Shards(context)
        layers: list[nn.Module] = [HandBlock(self.shards, block) for block in model.blocks]
        per_stage = len(layers) // self.pp.size
        layers = layers[self.pp.rank * per_stage : (self.pp.rank + 1) * per_stage]
        self.is_first, self.is_last = self.pp.rank == 0, self.pp.rank == self.pp.size - 1
        if self.is_first:
            layers.insert(0, HandEmbedding(self.shards, model.embedding))
        if self.is_last:
            layers.append(HandHead(self.shards, model.norm, model.head))
        self.module = nn.Sequential(*layers).to(self.device)
        self.parameters: list[Any] = list(self.module.parameters())
        self.gradients = torch.zeros(sum(parameter.numel() for parameter in self.parameters), device=self.device)
        start = 0
        for parameter in self.parameters:
            parameter.grad = self.gradients[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        self.optimizer = torch.optim.AdamW(self.parameters, **ADAMW)
        self.width = model.config.width
        by_gloo = dist.get_backend(self.pp.group) == "gloo"
        self.link_device = torch.device("cpu") if by_gloo else self.device  # gloo sends the host's tensors only
        self.norm = torch.zeros(())

    def train(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.pp.size > 1:
            self._one_f_one_b(x.chunk(self.num_microbatches), y.chunk(self.num_microbatches))
        else:
            self._loss(self._forward(x), y).backward()
        if self.dp.size > 1:
            dist.all_reduce(self.gradients, group=self.dp.group)
            self.gradients.div_(self.dp.size)
        self.norm = self._clip()
        self.optimizer.step()
        self.gradients.zero_()

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, dtype=self.dtype) if self.dtype else nullcontext():
            output: torch.Tensor = self.module(x)
        return output

    def _loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits, target = logits.float().flatten(0, 1), target.flatten()
        if self.shards.size == 1:
            return F.cross_entropy(logits, target)
        first = self.shards.rank * logits.shape[-1]
        loss: torch.Tensor = VocabParallelLoss.apply(logits, target, first, self.shards.group)
        return loss

    def _one_f_one_b(self, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """One forward, one backward (Narayanan et al. 2019), with two stages or more."""
        count = len(inputs)
        warm_up = min(self.pp.size - 1 - self.pp.rank, count)
        waiting: list[tuple[Any, torch.Tensor]] = []
        sends: list[Any] = []
        shape = (*inputs[0].shape, self.width)

        def forward(index: int) -> None:
            x = inputs[index] if self.is_first else self._receive(shape, self.pp.rank - 1).requires_grad_()
            output = self._forward(x)
            if self.is_last:
                output = self._loss(output, targets[index]) / count
            else:
                sends.append(
                    dist.isend(output.detach().to(self.link_device), group=self.pp.group, group_dst=self.pp.rank + 1)
                )
            waiting.append((x, output))

        def backward() -> None:
            x, output = waiting.pop(0)
            output.backward(None if self.is_last else self._receive(shape, self.pp.rank + 1))
            if not self.is_first:
                sends.append(dist.isend(x.grad.to(self.link_device), group=self.pp.group, group_dst=self.pp.rank - 1))

        for index in range(warm_up):
            forward(index)
        for index in range(warm_up, count):
            forward(index)
            backward()
        for _ in range(warm_up):
            backward()
        for send in sends:
            send.wait()

    def _receive(self, shape: tuple[int, ...], peer: int) -> torch.Tensor:
        tensor = torch.empty(shape, device=self.link_device)
        dist.recv(tensor, group=self.pp.group, group_src=peer)
        return tensor.to(self.device)

    @torch.no_grad()
    def _clip(self) -> torch.Tensor:
        """Sharded gradients are summed over tp, replicated ones counted once; stages have different parameters."""
        squares = torch.zeros((), device=self.device)
        for sharded in (True, False):
            own = [one.grad for one in self.parameters if one.is_sharded is sharded]
            if own:
                total = nn.utils.get_total_norm(own).square()
                squares += total if sharded else total / self.shards.size
        if self.shards.size * self.pp.size > 1:
            dist.all_reduce(squares)
            squares /= self.dp.size
        norm = squares.sqrt()
        self.gradients.mul_(torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0))
        return norm
