"""Emulation of fp16 matrix products on CPUs that have no fp16 arithmetic.

torch's own fp16 products on such a CPU are 20 to 170 times slower than its fp32 ones. A tensor core multiplies fp16
operands exactly, adds the products in fp32, and rounds the sum to fp16 once. :func:`emulate_fp16` does the same:
fp16 operands are widened to fp32 (exactly), the product runs in fp32, and the result is rounded to fp16.

It replaces kernels of torch's operators. It covers forward and backward of linear layers, einsum, attention and
convolutions, and tensors saved for the backward stay fp16. A dispatch mode would do the same, but Python would then see
every operator: a step of a small GPT took 2.3 times as long.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.library import Library

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
# The same products into a given tensor, which compiled code calls.
_PRODUCTS_INTO: dict[Any, Any] = {
    aten.mm.out: aten.mm.default,
    aten.addmm.out: aten.addmm.default,
    aten.bmm.out: aten.bmm.default,
    aten.baddbmm.out: aten.baddbmm.default,
}
_KEY = torch._C.DispatchKey.BackendSelect
"""Above the kernels of all backends, and below autograd, autocast, DTensor and dispatch modes."""


class _Depth(threading.local):
    """How many contexts of the emulation this thread is in; autograd runs the backward of CPU tensors in it too."""

    value = 0


_depth = _Depth()


def emulate_fp16(enabled: bool = True) -> AbstractContextManager[Any]:
    """A context in which products of fp16 tensors on the CPU are computed in fp32 and rounded to fp16.

    It is one of this thread; the backward has to run inside it too. Other dtypes and devices are not changed.
    """
    return _emulated() if enabled else nullcontext()


@contextmanager
def _emulated() -> Iterator[None]:
    _replace_kernels()
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1


@functools.cache
def _replace_kernels() -> Library:
    """Once in a process, and for good: outside the contexts they call torch's."""
    library = Library("aten", "IMPL")
    for operator, fp32_outputs in _PRODUCTS.items():
        kernel = functools.partial(_product, operator, fp32_outputs)
        library.impl(operator, kernel, _KEY.name, with_keyset=True)
    for operator, product in _PRODUCTS_INTO.items():
        library.impl(operator, functools.partial(_product_into, operator, product), _KEY.name, with_keyset=True)
    return library


def _product(operator: Any, fp32_outputs: tuple[int, ...], keys: Any, *args: Any, **kwargs: Any) -> Any:
    below = keys.remove(_KEY)
    if not (_depth.value and any(map(_is_fp16_on_cpu, args))):
        return operator.redispatch(below, *args, **kwargs)
    outputs = operator.redispatch(below, *map(_widened, args), **_widened_values(kwargs))
    if isinstance(outputs, torch.Tensor):
        return outputs.half()
    return tuple(
        output.half() if output is not None and index not in fp32_outputs else output
        for index, output in enumerate(outputs)
    )


def _product_into(operator: Any, product: Any, keys: Any, *args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    if not (_depth.value and any(map(_is_fp16_on_cpu, args))):
        result: torch.Tensor = operator.redispatch(keys.remove(_KEY), *args, out=out, **kwargs)
        return result
    result = product(*map(_widened, args), **_widened_values(kwargs))
    return out.resize_(result.shape).copy_(result)


def _widened_values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _widened(value) for name, value in values.items()}


def _widened(value: Any) -> Any:
    return value.float() if _is_fp16_on_cpu(value) else value


def _is_fp16_on_cpu(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float16 and value.device.type == "cpu"
