"""A transformer of one's own: masks, keyword inputs, nested inputs, dropout, and an output that has its loss."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, HEADS, LENGTH = 24, 16, 4, 8
PLAN = {
    **{f"blocks.*.attention.{name}": "colwise" for name in ("query", "key", "value")},
    "blocks.*.attention.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


@dataclass
class Reply:
    loss: torch.Tensor | None
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)  # the gradient of its bias would be zero but for rounding
        self.drop = nn.Dropout(0.0)

    def forward(self, x, mask):
        query, key, value = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.drop(self.out(mixed.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, mask=None):
        x = x + self.attention(self.norms[0](x), mask)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Assistant(nn.Module):
    """Tied embeddings; a mask of padding (B, T) and one of positions (T, T), which is added to the scores."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.roles = nn.Embedding(VOCAB, WIDTH), nn.Embedding(3, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.2)

    def forward(self, ids, mask=None, bias=None, *, extras=None, temperature=1.0, causal=False, labels=None):
        length = ids.size(1)
        x = self.tokens(ids) + self.places[:length]
        if extras is not None:
            x = x + self.roles(extras["roles"]) * extras["weight"]
        scores = torch.zeros(length, length) if bias is None else bias
        if causal:
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        if mask is not None:
            scores = scores + torch.where(mask, 0.0, -1e9)[:, None, None]
        for block in self.blocks:
            x = block(x, mask=scores.to(x.dtype))
        logits = self.head(self.norm(x)) / temperature
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
        return Reply(loss, logits, (x,))


def assistant(layers: int = 4) -> Assistant:
    torch.manual_seed(8)
    return Assistant(layers)


def dialogue(seed: int, size: int = 8) -> dict:
    """The keyword inputs of a batch; each row is padded, and has four labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (size, LENGTH), generator=generator)
    lengths = torch.randint(5, LENGTH + 1, (size, 1), generator=generator)
    place = torch.arange(LENGTH)
    return {
        "ids": ids,
        "mask": place < lengths,
        "bias": -0.1 * (place[:, None] - place).abs().float(),
        "extras": {"roles": ids % 3, "weight": torch.tensor(0.5)},
        "temperature": torch.full((1, 1, 1), 0.7),
        "causal": True,
        "labels": torch.where((place >= lengths - 4) & (place < lengths), ids.roll(-1, 1), -100),
    }
