"""The spelling of NVIDIA Apex: ``from paramp.compat.apex import amp`` where a script said ``from apex import amp``.

NVIDIA removed ``apex.amp`` from Apex in 2025. It is here, made for models that are spread over processes as well.
"""

from . import amp, normalization, optimizers

__all__ = ["amp", "normalization", "optimizers"]
