"""Colossal-AI's ``trainer``: a loop over epochs with hooks, for scripts that have no loop of their own."""

from . import hooks
from .hooks import BaseHook
from .trainer import Trainer

__all__ = ["BaseHook", "Trainer", "hooks"]
