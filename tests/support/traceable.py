"""Models that are not sequential. Not in the tests' own file, whose assertions pytest rewrites."""

import torch
from torch import nn
from torch.nn import functional as F


class Level(nn.Module):
    """A module of two outputs."""

    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x))), (x > 0).float().mean(-1, keepdim=True)


class UNet(nn.Module):
    """Skips over several stages, a shared module, a parameter and a buffer of its own, several outputs of a module."""

    def __init__(self, width=8):
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.down1, self.down2, self.middle = Level(width), Level(width), Level(width)
        self.norm = nn.LayerNorm(width)  # called three times
        self.join2, self.join1 = nn.Linear(2 * width, width), nn.Linear(2 * width, width)
        self.gain = nn.Parameter(torch.full((width,), 1.5))  # used on the first stage and on the last
        self.unused = nn.Linear(2, 2)
        self.register_buffer("table", torch.linspace(-1, 1, 16))
        self.head = nn.Linear(width, 4)

    def forward(self, x, scale=2.0):
        batch, length, _ = x.shape
        assert length <= 16, "too long"
        start = self.norm(self.inner(x)) * self.gain
        first, positive = self.down1(start)
        second, _ = self.down2(self.norm(first))
        bottom, _ = self.middle(second)
        up = self.join2(torch.cat([bottom, second], -1))
        up += self.table[:length].view(1, length, 1)
        up = self.norm(self.join1(torch.cat([up, first], -1))) + positive
        up = up * self.gain + torch.arange(length, device=x.device).view(1, -1, 1) / scale
        return self.head(up.reshape(batch, length, -1) + x.mean(-1, keepdim=True))


class Block(nn.Module):
    """Attention and an MLP, given a mask and rotary tables."""

    def __init__(self, width, heads):
        super().__init__()
        self.size = width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, mask, tables):
        cos, sin = tables

        def turned(y):
            one, other = y.chunk(2, -1)
            return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)

        query, key, value = (
            layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(turned(query), turned(key), value, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    """Tokens to logits; what does not depend on the weights is made once and given to each block."""

    def __init__(self, width=16, heads=4, layers=4):
        super().__init__()
        self.size = width // heads
        self.tokens = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        length = ids.size(1)
        angles = torch.arange(length, device=ids.device)[:, None] * 0.5 ** torch.arange(self.size // 2)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        tables = angles.cos(), angles.sin()
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, mask, tables)
        return self.head(self.norm(x))


class Nested(nn.Module):
    """All of it in one module of the user's, which has to be opened to be split."""

    def __init__(self):
        super().__init__()
        self.inside = UNet()

    def forward(self, x):
        return self.inside(x) * 0.5
