"""The model and the data of docs/tutorial.md in plain torch, which know nothing of paramp."""

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils.data import TensorDataset


class Attention(nn.Module):
    """Causal self-attention of as many heads as its layers have features for."""

    def __init__(self, width: int, head_size: int) -> None:
        super().__init__()
        self.head_size = head_size
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and MLP, each added to the residual stream."""

    def __init__(self, width: int, head_size: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, head_size)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Tokens (batch, time) to logits (batch, time, vocabulary)."""

    def __init__(self, vocabulary: int = 64, width: int = 64, num_blocks: int = 4, longest: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, head_size=16) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def counting(samples: int, seed: int) -> TensorDataset:
    """Sequences of 32 tokens that count up by 1 to 7, modulo 64, each with its next tokens."""
    random = torch.Generator().manual_seed(seed)
    first, by = torch.randint(64, (samples, 1), generator=random), torch.randint(1, 8, (samples, 1), generator=random)
    tokens = (first + by * torch.arange(33)) % 64
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])
