"""Emulation of fp16 matrix products on CPUs that have no fp16 arithmetic.

torch's own fp16 products on such a CPU are 20 to 170 times slower than its fp32 ones. A tensor core multiplies fp16
operands exactly, adds the products in fp32, and rounds the sum to fp16 once. :func:`emulate_fp16` does the same:
fp16 operands are widened to fp32 (exactly), the product runs in fp32, and the result is rounded to fp16. It works at
the level of torch's operators, below autograd, autocast and DTensor, so it covers forward and backward of linear
layers, einsum, attention and convolutions, and tensors saved for the backward stay fp16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

aten = torch.ops.aten

# Operator -> the indices of its outputs that are fp32 even for fp16 operands (attention's logsumexp).
_PRODUCTS: dict[Any, tuple[int, ...]] = {
    aten.mm.default: (),
    aten.addmm.default: (),
    aten.bmm.default: (),
    aten.baddbmm.default: (),
    aten.addbmm.default: (),
    aten.mv.default: (),
    aten.addmv.default: (),
    aten.dot.default: (),
    aten.convolution.default: (),
    aten.convolution_backward.default: (),
    aten._scaled_dot_product_flash_attention_for_cpu.default: (1,),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (),
}


def emulate_fp16(enabled: bool = True) -> AbstractContextManager[Any]:
    """A context in which products of fp16 tensors on the CPU are computed in fp32 and rounded to fp16.

    The backward has to run inside it too. Other dtypes and devices are not changed.
    """
    return _EmulatedFp16() if enabled else nullcontext()


class _EmulatedFp16(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # DTensor and float8 tensors are handled first; their inner operators come here
        keep = _PRODUCTS.get(func)
        if keep is None or not any(_is_fp16_on_cpu(value) for value in args):
            return func(*args, **(kwargs or {}))
        wide = [value.float() if _is_fp16_on_cpu(value) else value for value in args]
        named = {name: value.float() if _is_fp16_on_cpu(value) else value for name, value in (kwargs or {}).items()}
        outputs = func(*wide, **named)
        if isinstance(outputs, torch.Tensor):
            return outputs.half()
        return tuple(
            output.half() if output is not None and index not in keep else output
            for index, output in enumerate(outputs)
        )


def _is_fp16_on_cpu(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float16 and value.device.type == "cpu"
