"""A decoder-only transformer of GPT-2's shape (Radford et al. 2019).

:class:`GPT` is an ``nn.Sequential``: embedding, blocks, norm, head. It is plain torch and runs without an engine too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ..distributed.token_positions import sequence_length, token_positions
from ..parallel.tensor.sharded_loss import mask_tail
from .preset_model import PresetModel
from .transformer import Linear, TransformerConfig


@dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
    """The shape of a :class:`GPT`."""

    causal: ClassVar[bool] = True
    gelu: ClassVar[str] = "tanh"
    norm_eps: ClassVar[float] = 1e-5

    max_seq_len: int
    vocab_size: int
    """The number of tokens; embedding and head are padded to a multiple of 128."""
    tied: bool = True
    """The output layer uses the token embedding's weight."""

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / 128) * 128


PRESETS = {
    "tiny": GPTConfig(num_layers=4, num_heads=4, width=128, max_seq_len=256, vocab_size=256, init_std=0.06),
    "gpt2-124m": GPTConfig(num_layers=12, num_heads=12, width=768, max_seq_len=1024, vocab_size=50257),
    "gpt2-1.5b": GPTConfig(num_layers=48, num_heads=25, width=1600, max_seq_len=1024, vocab_size=50257),
}


class TokenTable(nn.Embedding):
    """``nn.Embedding`` with normal initialisation of standard deviation ``std``."""

    def __init__(self, num_embeddings: int, width: int, std: float) -> None:
        self.std = std
        super().__init__(num_embeddings, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Module):
    """Token ids (batch, sequence), int64, to features (batch, sequence, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.max_seq_len = config.max_seq_len
        self.tokens = TokenTable(config.padded_vocab_size, config.width, config.init_std)
        self.positions = TokenTable(config.max_seq_len, config.width, config.init_std)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = sequence_length(tokens.shape[1])
        if length > self.max_seq_len:
            raise ValueError(f"sequence of {length} tokens, expected at most max_seq_len {self.max_seq_len}")
        positions = self.positions(token_positions(tokens.shape[1], tokens.device))
        features: torch.Tensor = self.dropout(self.tokens(tokens) + positions)
        return features


class Head(Linear):
    """Features to logits over the padded vocabulary; the logits of the padding are masked."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.width, config.padded_vocab_size, config.init_std, bias=False)
        self.vocab_size = config.vocab_size
        self.register_forward_hook(_mask_padding)


def _mask_padding(head: Head, _inputs: object, logits: torch.Tensor) -> torch.Tensor:
    """A hook, so that the forward is that of a Linear, which the plan computes on local tensors."""
    return mask_tail(logits, head.vocab_size)


class GPT(PresetModel):
    """Token ids (batch, sequence), int64, to logits (batch, sequence, padded vocabulary).

    Presets: ``tiny``, ``gpt2-124m``, ``gpt2-1.5b``.
    """

    presets: ClassVar[Mapping[str, GPTConfig]] = PRESETS

    def __init__(self, config: GPTConfig) -> None:
        embedding = Embedding(config)
        head = Head(config)
        if config.tied:
            head.weight = embedding.tokens.weight
        super().__init__(config, {"embedding": embedding, **config.body(), "head": head})

    def flops_per_token(self, seq_len: int) -> int:
        """FLOPs of one token's forward and backward: 6 N + 12 L H Q T (Chowdhery et al. 2022, appendix B).

        N counts the weights of the matrix products: four layers a block, and the head without its padding. Embeddings
        are lookups; they, biases and norms are not counted. 6 N is one multiplication and one addition a weight in the
        forward, and twice that in the backward. The other term is the two products of attention, with L layers,
        H heads of Q features, and T = ``seq_len``.
        """
        config = self.config
        weights = config.num_layers * 12 * config.width**2 + config.vocab_size * config.width
        return 6 * weights + 12 * config.num_layers * config.width * seq_len

    def tensor_parallel_plan(self, tensor_size: int, sequence_parallel: bool) -> dict[str, str]:
        """The style of each layer on ``tensor_size`` ranks; a ConfigError if the heads do not divide evenly."""
        blocks = self.config.blocks_plan(tensor_size, sequence_parallel)
        ends: dict[str, str] = {"embedding.tokens": "vocab", "head": "vocab_logits"}
        if sequence_parallel:
            ends |= {"embedding": "scatter_sequence", "norm": "sequence", "head": "sequence_vocab_logits"}
        return blocks | ends
