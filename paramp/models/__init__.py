"""Small, readable models with their tensor-parallel plans."""

from .gpt import GPT, GPTConfig
from .moe_gpt import MoEGPT, MoEGPTConfig
from .resnet import ResNet, ResNetConfig, resnet34
from .vit import ViT, ViTConfig

__all__ = ["GPT", "GPTConfig", "MoEGPT", "MoEGPTConfig", "ResNet", "ResNetConfig", "ViT", "ViTConfig", "resnet34"]
