"""Small, readable models with their tensor-parallel plans."""

from .gpt import GPT, GPTConfig
from .resnet import ResNet, ResNetConfig, resnet34
from .vit import ViT, ViTConfig

__all__ = ["GPT", "GPTConfig", "ResNet", "ResNetConfig", "ViT", "ViTConfig", "resnet34"]
