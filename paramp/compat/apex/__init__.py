"""NVIDIA Apex: a script that wrote ``from apex import amp`` writes ``from paramp.compat.apex import amp``.

NVIDIA removed ``apex.amp`` from Apex in 2025. Here it works for models that are spread over processes as well.
"""

from . import amp, normalization, optimizers

__all__ = ["amp", "normalization", "optimizers"]
