"""NVIDIA Apex's interface: replace ``from apex import amp`` by ``from paramp.compat.apex import amp``.

NVIDIA removed ``apex.amp`` from Apex in 2025. This one also supports models that are distributed over processes.
"""

from . import amp, fp16_utils, normalization, optimizers, parallel

__all__ = ["amp", "fp16_utils", "normalization", "optimizers", "parallel"]
