"""The Vision Transformer (Dosovitskiy et al. 2021, *An image is worth 16x16 words*).

:class:`ViT` is an ``nn.Sequential``: embedding of patches, blocks, norm, pooling, head. Pipeline stages begin at any of
its modules; tensor parallelism shards attention heads, MLPs and the head. Images are (batch, channels, side, side).
Hidden tensors are (batch, sequence, features); the sequence is the class token, if there is one, and the patches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ..base.errors import ConfigError, require
from .preset_model import PresetModel
from .transformer import Linear, TransformerConfig


@dataclass(frozen=True, kw_only=True)
class ViTConfig(TransformerConfig):
    """The shape of a :class:`ViT`."""

    causal: ClassVar[bool] = False
    gelu: ClassVar[str] = "none"
    norm_eps: ClassVar[float] = 1e-6

    image_size: int = 224
    """Pixels of a side."""
    patch_size: int = 16
    """Pixels of a patch's side."""
    in_channels: int = 3
    num_classes: int = 1000
    class_token: bool = True
    """True: classify by the features of a class token in front of the patches, as in the paper. False: by the mean of
    the patches' features; the sequence is one shorter, so that sequence parallelism can divide it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        divides = self.image_size % self.patch_size == 0
        require(divides, "image_size", self.image_size, f"a multiple of patch_size {self.patch_size}")

    @property
    def seq_len(self) -> int:
        return (self.image_size // self.patch_size) ** 2 + self.class_token


PRESETS = {
    "tiny": ViTConfig(
        num_layers=4, num_heads=4, width=64, image_size=8, patch_size=2, in_channels=1, num_classes=10, init_std=0.1
    ),
    "vit-b16": ViTConfig(num_layers=12, num_heads=12, width=768),
}


class PatchEmbedding(nn.Module):
    """Images to features (batch, sequence, width): the class token, then the patches row by row."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.std = config.init_std
        self.shape = (config.in_channels, config.image_size, config.image_size)
        self.patch_size = config.patch_size
        pixels = config.in_channels * config.patch_size**2
        self.patches = Linear(pixels, config.width, 1 / math.sqrt(pixels))
        self.token = nn.Parameter(torch.empty(1, config.width)) if config.class_token else None
        self.positions = nn.Parameter(torch.empty(config.seq_len, config.width))
        self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the class token to 0 and the positions from a normal distribution."""
        if self.token is not None:
            nn.init.zeros_(self.token)
        nn.init.normal_(self.positions, std=self.std)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.shape[1:] != self.shape:
            raise ValueError(f"images: got {tuple(images.shape)}, expected (batch, {', '.join(map(str, self.shape))})")
        size = self.patch_size
        pixels = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # batch, channel, row, y, column, x
        features = self.patches(pixels.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2))
        if self.token is not None:
            token = self.token.to(features.dtype).expand(len(features), 1, -1)
            features = torch.cat([token, features], dim=1)
        embedded: torch.Tensor = self.dropout(features + self.positions)
        return embedded


class Pool(nn.Module):
    """Features (batch, sequence, width) to the input of the classifier, (batch, width)."""

    def __init__(self, class_token: bool) -> None:
        super().__init__()
        self.class_token = class_token

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0] if self.class_token else x.mean(1)


class ViT(PresetModel):
    """Images (batch, channels, side, side) to logits (batch, classes). Presets: ``tiny``, ``vit-b16``."""

    presets = PRESETS

    def __init__(self, config: ViTConfig) -> None:
        layers = {"embedding": PatchEmbedding(config), **config.body(), "pool": Pool(config.class_token)}
        super().__init__(config, {**layers, "head": Linear(config.width, config.num_classes, config.init_std)})

    def tensor_parallel_plan(self, tensor_size: int, sequence_parallel: bool) -> dict[str, str]:
        """The style of each layer on ``tensor_size`` ranks; the embedding is replicated.

        Raises:
            ConfigError: the heads do not divide evenly, or under ``sequence_parallel`` the sequence does not.
        """
        config = self.config
        # Sharded by inputs, which divide for any number of classes.
        plan: dict[str, str] = {**config.blocks_plan(tensor_size, sequence_parallel), "head": "rowwise_scatter"}
        if not sequence_parallel:
            return plan
        if config.seq_len % tensor_size:
            patches = config.seq_len - config.class_token
            fix = "False" if patches % tensor_size else f"False, or a model with class_token=False, of {patches}"
            raise ConfigError(
                f"parallel.sequence_parallel: got True, but the model's sequence of {config.seq_len} does not divide "
                f"by parallel.tensor.size {tensor_size}; expected {fix}"
            )
        return plan | {"embedding": "scatter_sequence", "norm": "sequence", "pool": "gather_sequence"}
