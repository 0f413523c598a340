"""Composer's interface: ``from paramp.compat.composer import functional, algorithms``."""

from ..missing import missing
from . import algorithms, functional

__all__ = ["algorithms", "functional"]

__getattr__ = missing(
    __name__,
    {
        "Trainer": "write the loop, with paramp.initialize(model, optimizer, criterion, algorithms=[...])",
        "ComposerModel": "pass any torch.nn.Module, and its loss as the criterion of paramp.initialize",
        "optim": "use torch.optim; DecoupledAdamW(weight_decay=w) is AdamW(weight_decay=w / lr)",
    },
)
