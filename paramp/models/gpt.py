"""A decoder-only transformer of GPT-2's shape (Radford et al. 2019).

:class:`GPT` is an ``nn.Sequential``: embedding, blocks, norm, head. So a pipeline cuts it between any two of its
modules, and :meth:`GPT.tensor_parallel_plan` says in one table how each layer is shared over the tensor axis. It is
plain torch otherwise and runs without paramp around it.

Tensors below are (batch, sequence, features). Under tensor parallelism the attention and the MLP see their own heads
and hidden features; under sequence parallelism everything between them sees its own piece of the sequence.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from ..precision import ConfigError, nearest
from ..randomness import sharded_random
from ..tensor import Plan, mask_tail

__all__ = ["GPT", "GPTConfig"]


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a :class:`GPT`."""

    num_layers: int
    num_heads: int
    width: int
    """Features of the residual stream."""
    max_seq_len: int
    vocab_size: int
    """Tokens that exist; the tables are padded to a multiple of 128."""
    tied: bool = True
    """The output layer uses the token embedding's weight."""
    dropout: float = 0.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ConfigError(f"width: got {self.width}, expected a multiple of num_heads {self.num_heads}")

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / 128) * 128


PRESETS = {
    "tiny": GPTConfig(num_layers=4, num_heads=4, width=128, max_seq_len=256, vocab_size=256, init_std=0.06),
    "gpt2-124m": GPTConfig(num_layers=12, num_heads=12, width=768, max_seq_len=1024, vocab_size=50257),
    "gpt2-1.5b": GPTConfig(num_layers=48, num_heads=25, width=1600, max_seq_len=1024, vocab_size=50257),
}


def _preset(name: str) -> GPTConfig:
    if name not in PRESETS:
        raise ConfigError(f"model: got {name!r}, expected one of {', '.join(PRESETS)}{nearest(name, PRESETS)}")
    return PRESETS[name]


class Linear(nn.Linear):
    """``nn.Linear`` that starts normally distributed, with a standard deviation of its own."""

    def __init__(self, in_features: int, out_features: int, std: float, bias: bool = True) -> None:
        self.std = std
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class TokenTable(nn.Embedding):
    """``nn.Embedding`` with a standard deviation of its own."""

    def __init__(self, num_embeddings: int, width: int, std: float) -> None:
        self.std = std
        super().__init__(num_embeddings, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Module):
    """Token ids (batch, sequence) to features."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.max_seq_len = config.max_seq_len
        self.tokens = TokenTable(config.padded_vocab_size, config.width, config.init_std)
        self.positions = TokenTable(config.max_seq_len, config.width, config.init_std)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        if length > self.max_seq_len:
            raise ValueError(f"sequence of {length} tokens, expected at most max_seq_len {self.max_seq_len}")
        positions = self.positions(torch.arange(length, device=tokens.device))
        features: torch.Tensor = self.dropout(self.tokens(tokens) + positions)
        return features


class Attention(nn.Module):
    """Causal self-attention. ``qkv`` holds query, key and value of one head after the other, so that heads shard."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.width // config.num_heads
        self.dropout = config.dropout
        self.qkv = Linear(config.width, 3 * config.width, config.init_std)
        # Each block adds twice to the residual stream: GPT-2 starts those layers smaller.
        self.out = Linear(config.width, config.width, config.init_std / math.sqrt(2 * config.num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_size))
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(3))
        dropout = self.dropout if self.training else 0.0
        with sharded_random() if dropout else nullcontext():  # each rank has heads of its own
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        output: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output


class MLP(nn.Module):
    """Up, GELU, down."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.width, 4 * config.width, config.init_std)
        self.down = Linear(4 * config.width, config.width, config.init_std / math.sqrt(2 * config.num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return output


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Head(Linear):
    """Features to logits over the padded vocabulary; those of the padding are so low that they never count."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.width, config.padded_vocab_size, config.init_std, bias=False)
        self.vocab_size = config.vocab_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mask_tail(super().forward(x), self.vocab_size)


class GPT(nn.Sequential):
    """Token ids (batch, sequence) to logits (batch, sequence, padded vocabulary)."""

    def __init__(self, config: GPTConfig) -> None:
        embedding = Embedding(config)
        head = Head(config)
        if config.tied:
            head.weight = embedding.tokens.weight
        super().__init__(
            OrderedDict(
                embedding=embedding,
                blocks=nn.Sequential(*(Block(config) for _ in range(config.num_layers))),
                norm=nn.LayerNorm(config.width),
                head=head,
            )
        )
        self.config = config

    @classmethod
    def preset(cls, name: str, **changes: object) -> GPT:
        """The model called ``tiny``, ``gpt2-124m`` or ``gpt2-1.5b``; ``changes`` replace fields of its config.

        Raises:
            ConfigError: no such preset.
        """
        return cls(replace(_preset(name), **changes))  # type: ignore[arg-type]

    @staticmethod
    def own_vocab_size(name: str) -> int:
        """The vocabulary of the preset called ``name``.

        Raises:
            ConfigError: no such preset.
        """
        return _preset(name).vocab_size

    def flops_per_token(self, seq_len: int) -> int:
        """What the model needs for one token's forward and backward: 6 N + 12 L H Q T (Chowdhery et al. 2022, app. B).

        N counts the weights of the matrix products: four layers a block, and the head over the tokens that exist. The
        embeddings are looked up and cost nothing; biases and norms are not counted. 6 N is one multiplication and one
        addition in the forward and twice that in the backward. The other term is attention's two products, with
        L layers, H heads of Q features, and T = ``seq_len``.

        Call it on the whole model; it reads the config only.
        """
        config = self.config
        weights = config.num_layers * 12 * config.width**2 + config.vocab_size * config.width
        return 6 * weights + 12 * config.num_layers * config.width * seq_len

    @staticmethod
    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats of ``logits`` (batch, sequence, vocabulary) against ids (batch, sequence)."""
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def tensor_parallel_plan(self, tensor_size: int, sequence_parallel: bool) -> Plan:
        """How each layer is shared over ``tensor_size`` ranks (Shoeybi et al. 2019; Korthikanti et al. 2022).

        Raises:
            ConfigError: the heads do not divide evenly.
        """
        heads = self.config.num_heads
        if heads % tensor_size:
            raise ConfigError(
                f"parallel.tensor.size: got {tensor_size}, but the model's {heads} heads do not divide by it; "
                f"expected a divisor of {heads}"
            )
        plan: Plan = {
            "embedding.tokens": "vocab",
            "blocks.*.attention.qkv": "colwise",
            "blocks.*.attention.out": "rowwise",
            "blocks.*.mlp.up": "colwise",
            "blocks.*.mlp.down": "rowwise",
            "head": "vocab_logits",
        }
        if sequence_parallel:
            plan |= {
                "embedding": "scatter_sequence",
                "blocks.*.norm1": "sequence",
                "blocks.*.norm2": "sequence",
                "blocks.*.dropout": "sharded_random",
                "norm": "sequence",
                "blocks.*.attention.qkv": "sequence_colwise",
                "blocks.*.attention.out": "sequence_rowwise",
                "blocks.*.mlp.up": "sequence_colwise",
                "blocks.*.mlp.down": "sequence_rowwise",
                "head": "sequence_vocab_logits",
            }
        return plan
