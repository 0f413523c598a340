"""A :class:`GPT` whose MLPs are mixtures of experts (Shazeer et al. 2017; Fedus et al. 2022).

A router gives each token to a few of the experts, each of them an MLP with a gate (Shazeer 2020)::

    x (tokens, width) ─► router, in fp32 ─► index, weights (tokens, choices) ─► sum over choices of weight · expert(x)

Two losses, of each layer, are added to the model's in training: that of the balance
(:mod:`paramp.parallel.expert_balance`), and the mean of logsumexp(logits)², which keeps logits small (Zoph et al.
2022). Both are outputs of the blocks, so that they have the weight, and their gradients the loss scale, of the
microbatch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..base.errors import require
from ..base.uncompiled import uncompiled
from ..parallel.expert_balance import TokenCounts
from .gpt import GPT, GPTConfig
from .preset_model import equal_stages
from .transformer import Block, Linear


@dataclass(frozen=True, kw_only=True)
class MoEGPTConfig(GPTConfig):
    """The shape of a :class:`MoEGPT`."""

    num_experts: int
    experts_per_token: int = 2
    expert_width: int
    """Hidden features of each expert."""
    balance_weight: float = 0.01
    """What the loss of the balance is multiplied by."""
    z_weight: float = 0.001
    """What the mean square of the logits' logsumexp is multiplied by."""
    bias_rate: float = 0.0
    """What a step moves the bias of each expert by, towards equal numbers of tokens; 0: there are none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen, most = self.experts_per_token, self.num_experts
        require(chosen <= most, "experts_per_token", chosen, f"at most num_experts {most}")
        for name in ("balance_weight", "z_weight", "bias_rate"):
            value = getattr(self, name)
            require(0 <= value < math.inf, name, value, "a finite number of 0 or more")

    def block(self) -> Block:
        return MixtureBlock(self)

    def mlp(self) -> nn.Module:
        return Mixture(self)

    def mlp_plan(self, sequence_parallel: bool) -> dict[str, str]:
        whole = {"blocks.*.mlp": "whole_sequence"} if sequence_parallel else {}
        return whole | {"blocks.*.mlp.experts": "expert_slices"}


PRESETS = {
    "tiny-moe": MoEGPTConfig(
        num_layers=4,
        num_heads=4,
        width=128,
        max_seq_len=256,
        vocab_size=256,
        init_std=0.06,
        num_experts=8,
        expert_width=128,
    ),
}


class TopKRouter(nn.Module):
    """Chooses the experts of each token; it computes in fp32 in every mode, as all routers do."""

    def __init__(self, config: MoEGPTConfig) -> None:
        super().__init__()
        self.num_chosen = config.experts_per_token
        self.balance_weight, self.z_weight = config.balance_weight, config.z_weight
        self.scores = Linear(config.width, config.num_experts, config.init_std, bias=False)
        self.counts = TokenCounts(config.num_experts, config.bias_rate)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of tokens (tokens, width): index and weight of their experts, (tokens, choices), and the losses, 0-dim."""
        logits = self.scores(x)
        probabilities = logits.softmax(-1)
        bias = self.counts.bias
        index = (probabilities if bias is None else probabilities + bias).topk(self.num_chosen).indices
        highest = probabilities.gather(-1, index)
        weights = highest / highest.sum(-1, keepdim=True)
        if not self.training:
            return index, weights, logits.new_zeros(())
        balance = self.counts.balance(self.counts(index), probabilities)
        z = logits.logsumexp(-1).square().mean()
        return index, weights, self.balance_weight * balance + self.z_weight * z


class StackedExperts(nn.Module):
    """The weights of all experts, one after the other in dim 0, with the names and shapes of transformers'."""

    def __init__(self, config: MoEGPTConfig) -> None:
        super().__init__()
        self.num_experts = count = config.num_experts
        self.std, self.out_std = config.init_std, config.init_std / math.sqrt(2 * config.num_layers)
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * config.expert_width, config.width))
        self.down_proj = nn.Parameter(torch.empty(count, config.width, config.expert_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate_up_proj, std=self.std)
        nn.init.normal_(self.down_proj, std=self.out_std)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The sum over the chosen experts of each token, (tokens, width)."""
        chosen = index.reshape(-1)
        order = chosen.argsort(stable=True)
        ends = torch.searchsorted(chosen[order], torch.arange(self.num_experts, device=x.device), right=True).int()
        rows = x[order.div(index.shape[1], rounding_mode="floor")]
        gate, up = product_by_group(rows, self.gate_up_proj, ends).chunk(2, -1)
        rows = product_by_group(F.silu(gate) * up, self.down_proj, ends)
        of_token = rows[order.argsort()].view(*index.shape, x.shape[1])
        return (of_token * weights.unsqueeze(-1)).sum(1).to(x.dtype)


@uncompiled  # torch compiles F.grouped_mm in bf16 only
def product_by_group(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows (rows, inputs) times the matrix (outputs, inputs) of their group, of ``weights`` (groups, outputs, inputs).

    By ``F.grouped_mm``, or by one product for each group where torch has no kernel of it: in fp64, for sizes that are
    no multiples of 8, and on GPUs older than Ampere.

    Args:
        ends: where each group ends in the rows, 1-dim int32.
    """
    if _has_grouped_product(rows, weights):
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()  # the host waits
    return torch.cat([F.linear(*pair) for pair in zip(rows.split(sizes), weights, strict=True)])


def _has_grouped_product(rows: torch.Tensor, weights: torch.Tensor) -> bool:
    is_known = rows.dtype is not torch.float64 and not any(size % 8 for size in weights.shape[1:])
    return is_known and (rows.device.type != "cuda" or torch.cuda.get_device_capability(rows.device) >= (8, 0))


class Mixture(nn.Module):
    """A router and its experts, in the place of an MLP."""

    def __init__(self, config: MoEGPTConfig) -> None:
        super().__init__()
        self.router = TopKRouter(config)
        self.experts = StackedExperts(config)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The output for features (batch, sequence, width), and the router's losses, 0-dim."""
        tokens = x.flatten(0, -2)
        index, weights, loss = self.router(tokens)
        return self.experts(tokens, index, weights).view_as(x), loss


class MixtureBlock(Block):
    """A block that returns the losses of its router too."""

    def forward(self, x: torch.Tensor) -> Any:
        """As :class:`Block`, and the losses, 0-dim."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        output, loss = self.mlp(self.norm2(x))
        return x + self.dropout(output), loss


class MoEGPT(GPT):
    """Token ids (batch, sequence), int64, to logits (batch, sequence, padded vocabulary) and the routers' losses.

    Presets: ``tiny-moe``.
    """

    presets = PRESETS
    config: MoEGPTConfig
    embedding: nn.Module
    blocks: nn.Sequential
    norm: nn.Module
    head: nn.Module

    def forward(self, tokens: torch.Tensor) -> Any:
        """The logits, and the sum of the routers' losses, 0-dim; in evaluation it is 0."""
        x, losses = self.embedding(tokens), []
        for block in self.blocks:
            x, loss = block(x)
            losses.append(loss)
        return self.head(self.norm(x)), sum(losses)

    @staticmethod
    def loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats, as that of :class:`GPT`, and the routers' losses."""
        logits, of_routers = output
        return GPT.loss(logits, targets) + of_routers

    def flops_per_token(self, seq_len: int) -> int:
        """As that of :class:`GPT`: of the experts, those that a token chooses."""
        config = self.config
        of_experts = 3 * config.experts_per_token * config.expert_width * config.width
        instead_of_mlp = of_experts + config.num_experts * config.width - 8 * config.width**2
        return super().flops_per_token(seq_len) + 6 * config.num_layers * instead_of_mlp

    def expert_modules(self) -> list[str]:
        """The names of the modules of experts, as globs."""
        return ["blocks.*.mlp.experts"]

    def pipeline_split(self, num_stages: int) -> list[str] | None:
        """As :func:`~paramp.models.preset_model.equal_stages` of the blocks."""
        return equal_stages([f"blocks.{index}" for index in range(self.config.num_layers)], num_stages)
