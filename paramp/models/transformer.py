"""Parts of the transformers here (Vaswani et al. 2017): attention, MLP, and the block of both.

Tensors are (batch, sequence, features). Under tensor parallelism each rank has some of the attention heads
and of the MLP's hidden features. Under sequence parallelism each rank has a slice of the sequence between them.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ..base.errors import ConfigError, require
from ..distributed.random_across_tensor_ranks import Place, sharded_random
from .preset_model import check_counts


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The shape of a stack of :class:`Block`."""

    causal: ClassVar[bool]
    """Whether attention is causal."""
    gelu: ClassVar[str]
    """``approximate`` of ``F.gelu``: ``none`` or ``tanh``."""
    norm_eps: ClassVar[float]

    num_layers: int
    num_heads: int
    width: int
    """Features of the residual stream."""
    dropout: float = 0.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        check_counts(self)
        require(0 <= self.dropout < 1, "dropout", self.dropout, "a number from 0 to below 1")
        require(0 <= self.init_std < math.inf, "init_std", self.init_std, "a finite number of 0 or more")
        divides = self.width % self.num_heads == 0
        require(divides, "width", self.width, f"a multiple of num_heads {self.num_heads}")

    def body(self) -> dict[str, nn.Module]:
        """The modules between embedding and head, by name."""
        blocks = nn.Sequential(*(self.block() for _ in range(self.num_layers)))
        return {"blocks": blocks, "norm": nn.LayerNorm(self.width, self.norm_eps)}

    def block(self) -> Block:
        """A new block."""
        return Block(self)

    def mlp(self) -> nn.Module:
        """The new MLP of a block."""
        return MLP(self)

    def blocks_plan(self, tensor_size: int, sequence_parallel: bool) -> dict[str, str]:
        """The styles of ``blocks`` on ``tensor_size`` ranks (Shoeybi et al. 2019; Korthikanti et al. 2022)."""
        if self.num_heads % tensor_size:
            raise ConfigError(
                f"parallel.tensor.size: got {tensor_size}, but the model's {self.num_heads} heads do not divide by it; "
                f"expected a divisor of {self.num_heads}"
            )
        prefix = "sequence_" if sequence_parallel else ""
        plan: dict[str, str] = {
            "blocks.*.attention.qkv": f"{prefix}colwise",
            "blocks.*.attention.out": f"{prefix}rowwise",
            **self.mlp_plan(sequence_parallel),
        }
        if sequence_parallel:
            plan |= {"blocks.*.norm1": "sequence", "blocks.*.norm2": "sequence", "blocks.*.dropout": "sharded_random"}
        return plan

    def mlp_plan(self, sequence_parallel: bool) -> dict[str, str]:
        """The styles of the ``mlp`` of each block."""
        prefix = "sequence_" if sequence_parallel else ""
        return {"blocks.*.mlp.up": f"{prefix}colwise", "blocks.*.mlp.down": f"{prefix}rowwise"}


class Linear(nn.Linear):
    """``nn.Linear`` with normal initialisation of standard deviation ``std``; the bias starts at 0."""

    def __init__(self, in_features: int, out_features: int, std: float, bias: bool = True) -> None:
        self.std = std
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Attention(nn.Module):
    """Self-attention. The rows of ``qkv`` are ordered by head (query, key, value of each), so heads shard."""

    tensor_place: Place | None = None
    """Of this rank on the axis that heads are sharded over; None: on that of the latest context."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.head_size = config.width // config.num_heads
        self.dropout = config.dropout
        self.causal = config.causal
        self.qkv = Linear(config.width, 3 * config.width, config.init_std)
        # GPT-2 scales the layers that add to the residual stream, two a block, by 1 / sqrt(2 * num_layers).
        self.out = Linear(config.width, config.width, config.init_std / math.sqrt(2 * config.num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_size))
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(3))
        dropout = self.dropout if self.training else 0.0
        with sharded_random(self.tensor_place) if dropout else nullcontext():  # other heads, other masks, on each rank
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=self.causal)
        output: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output


class MLP(nn.Module):
    """Up, GELU, down."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gelu = config.gelu
        self.up = Linear(config.width, 4 * config.width, config.init_std)
        self.down = Linear(4 * config.width, config.width, config.init_std / math.sqrt(2 * config.num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(F.gelu(self.up(x), approximate=self.gelu))
        return output


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, config.norm_eps)
        self.mlp = config.mlp()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))
