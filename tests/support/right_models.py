"""Twelve correct models that tensor, pipeline and data parallelism take, with their batches, for `paramp verify`.

Each runs in torch's default state: kinks, batch statistics, routing and ties are where layouts round differently.
"""

from collections import OrderedDict
from dataclasses import dataclass

import pretrained
import torch
from torch import nn
from torch.nn import functional as F

from paramp.models import GPT, ViT
from paramp.tools.verify.options import Options

WIDTH, HEADS, LENGTH, VOCAB, CLASSES = 32, 4, 12, 64, 10
MLP = {"**.up": "colwise", "**.down": "rowwise"}
PLAN = MLP | {f"**.{name}": "colwise" for name in ("query", "key", "value")} | {"**.out": "rowwise"}


def generator(step: int) -> torch.Generator:
    """Of a step's batch; ``initial_seed`` is the run's, which has just built the model."""
    return torch.Generator().manual_seed(1000 * torch.initial_seed() + step)


def tokens(step: int, *shape: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, shape or (8, LENGTH), generator=generator(step))


class MLPBlock(nn.Module):
    def __init__(self, activation=F.relu, norm=nn.Identity) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.activation = norm(WIDTH), activation

    def forward(self, x):
        return x + self.down(self.activation(self.up(self.norm(x))))


class Attention(nn.Module):
    """Of ``x`` to ``memory``, or to itself and what is before."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, memory=None, causal=False):
        memory = x if memory is None else memory
        query, key, value = (
            layer(given).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer, given in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Of a transformer as in the first paper: norms come last, ReLU."""

    def __init__(self, cross: bool, dropout: float) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), MLPBlock()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.cross, self.norm3 = (Attention(), nn.LayerNorm(WIDTH)) if cross else (None, None)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, memory=None, causal=False):
        x = self.norm1(x + self.dropout(self.attention(x, causal=causal)))
        if self.cross is not None:
            x = self.norm3(x + self.dropout(self.cross(x, memory)))
        return self.norm2(self.dropout(self.mlp(x)))


class Translator(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.encoder = nn.ModuleList(Layer(False, dropout) for _ in range(2))
        self.decoder = nn.ModuleList(Layer(True, dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, source, target):
        memory, x = self.source(source) + self.positions, self.target(target) + self.positions
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory, causal=True)
        return self.head(x)


def sentences(step):
    target = tokens(step)
    return {"source": tokens(step + 100), "target": target}, target.roll(-1, 1)


def seeded(family: str, **changes) -> nn.Module:
    """A model of Hugging Face, which would be the same with any seed, with weights of the run's seed."""
    seed = torch.initial_seed()
    model = pretrained.build(family, vocab_size=VOCAB, **changes)
    torch.manual_seed(seed)
    for weight in model.parameters():
        nn.init.normal_(weight, weight.detach().mean().item(), 0.2)
    return model


def t5():
    return seeded("T5")


def questions(step):
    return {"input_ids": tokens(step + 100), "labels": tokens(step, 8, 8)}


def llama():
    return seeded("Llama", num_hidden_layers=2)


def prompts(step):
    ids = tokens(step)
    return {"input_ids": ids, "labels": ids}


class ConvBlock(nn.Module):
    def __init__(self, norm, activation) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm(16) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.activation = activation

    def forward(self, x):
        y = self.activation(self.norms[0](self.convs[0](x)))
        return self.activation(x + self.norms[1](self.convs[1](y)))


def convolutions(norm, activation):
    body = [nn.Conv2d(3, 16, 3, padding=1), *(ConvBlock(norm, activation) for _ in range(3))]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, WIDTH)]
    return nn.Sequential(*body, *pool, MLPBlock(activation), nn.Linear(WIDTH, CLASSES))


def batch_norms():
    return convolutions(nn.BatchNorm2d, F.relu)


def group_norms():
    return convolutions(lambda width: nn.GroupNorm(4, width), F.silu)


def images(step, channels=3, size=16):
    pixels = torch.randn(size, channels, 8, 8, generator=generator(step))
    return pixels, torch.randint(0, CLASSES, (size,), generator=generator(step + 100))


def gray_images(step):
    return images(step, 1)


class Experts(nn.Module):
    """Each token goes through the two of four experts that the router prefers."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(MLPBlock(F.silu) for _ in range(4))

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        kept = shares * (shares >= shares.topk(2, -1).values[..., -1:])
        kept = kept / kept.sum(-1, keepdim=True)
        return sum(kept[..., [index]] * expert(x) for index, expert in enumerate(self.experts))


def experts():
    blocks = [layer for _ in range(2) for layer in (nn.LayerNorm(WIDTH), Experts())]
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))


def gpt():
    """With tied embeddings."""
    return GPT.preset("tiny", num_layers=2, width=WIDTH, max_seq_len=LENGTH, vocab_size=VOCAB)


def texts(step):
    ids = tokens(step, 8, LENGTH + 1)
    return ids[:, :-1], ids[:, 1:]


def with_dropout():
    return Translator(0.3)


def vit():
    return ViT.preset("tiny", num_layers=2, width=WIDTH)


def residuals():
    return nn.Sequential(*(MLPBlock(norm=nn.LayerNorm) for _ in range(4)))


def vectors(step):
    x = torch.randn(16, WIDTH, generator=generator(step))
    return x, x.roll(1, 1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return x + self.lstm(x)[0]


def recurrent():
    layers = {"embedding": nn.Embedding(VOCAB, WIDTH), "first": Recurrent(), "second": Recurrent()}
    return nn.Sequential(OrderedDict(**layers, mlp=MLPBlock(), head=nn.Linear(WIDTH, VOCAB)))


@dataclass
class Detection:
    kind: torch.Tensor
    place: torch.Tensor


class Detector(nn.Module):
    """Two outputs of one body."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLPBlock(F.gelu, nn.LayerNorm) for _ in range(4))
        self.kind, self.place = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return Detection(self.kind(x), self.place(x))


def objects(step):
    kind = torch.randint(0, CLASSES, (16,), generator=generator(step))
    return vectors(step)[0], {"kind": kind, "place": vectors(step + 100)[0][:, :2]}


def detection_loss(output, target):
    kind = F.cross_entropy(output.kind, target["kind"])
    return kind + 0.5 * F.smooth_l1_loss(output.place, target["place"])


MODELS = {
    "encoder-decoder": ("Translator", "sentences", "PLAN", None),
    "T5": ("t5", "questions", None, None),
    "batch norms": ("batch_norms", "images", "MLP", None),
    "group norms": ("group_norms", "images", "MLP", None),
    "experts": ("experts", "texts", "MLP", None),
    "tied GPT": ("gpt", "texts", None, None),
    "dropout": ("with_dropout", "sentences", "PLAN", None),
    "Llama": ("llama", "prompts", None, None),
    "ViT": ("vit", "gray_images", None, None),
    "residual MLP": ("residuals", "vectors", "MLP", "torch.nn.functional:mse_loss"),
    "LSTM": ("recurrent", "texts", "MLP", None),
    "two outputs": ("Detector", "objects", "MLP", f"{__name__}:detection_loss"),
}
"""By name: what builds the model, its batches, plan and criterion."""


def options(name: str, **settings) -> Options:
    """Of ``paramp verify``, all others by default."""
    model, batches, plan, criterion = MODELS[name]
    plan = plan and f"{__name__}:{plan}"
    return Options(
        model=f"{__name__}:{model}", batches=f"{__name__}:{batches}", plan=plan, criterion=criterion, settings=settings
    )
