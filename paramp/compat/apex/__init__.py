"""NVIDIA Apex's interface: replace ``from apex import amp`` by ``from paramp.compat.apex import amp``.

NVIDIA removed ``apex.amp`` from Apex in 2025. This one also supports models that are distributed over processes.
"""

from ..foreign_module_advice import add_modules
from . import amp, fp16_utils, multi_tensor_apply, normalization, optimizers, parallel

__all__ = ["amp", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel"]

add_modules("apex")
