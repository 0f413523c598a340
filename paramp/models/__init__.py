"""Small, readable models with their tensor-parallel plans."""

from .gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig"]
