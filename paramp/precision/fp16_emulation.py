"""Emulation of fp16 matrix products on CPUs that have no fp16 arithmetic.

torch's own fp16 products on such a CPU are 20 to 170 times slower than its fp32 ones. A tensor core multiplies fp16
operands exactly, adds the products in fp32, and rounds the sum to fp16 once. :func:`emulate_fp16` does the same:
fp16 operands are widened to fp32 (exactly), the product runs in fp32, and the result is rounded to fp16.

It replaces kernels of torch's operators, from the first context on; outside a context these call torch's, which costs
each product some 5 microseconds of Python. They cover forward and backward of linear layers, einsum, attention and
convolutions, and tensors saved for the backward stay fp16. Forms that neither autograd nor compiled code uses, such as
``addmm_`` and ``mv(out=)``, stay torch's. A dispatch mode would do the same, but Python would then see every operator:
a step of a small GPT took 1.6 times as long, and of one in small chunks 2.3 times.
"""

from __future__ import annotations

import functools
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.library import Library

from ..base.torch_internals import expect

expect("torch._C.DispatchKey", "torch.ops.aten")

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
_ATTENTION = {operator for operator in _PRODUCTS if "attention" in str(operator)}
"""Their operands may have several dtypes; those of the others have one."""
_KEY = torch._C.DispatchKey.BackendSelect
"""Above the kernels of all backends, and below autograd, autocast, DTensor and dispatch modes."""


def emulate_fp16(enabled: bool = True) -> AbstractContextManager[Any]:
    """A context in which products of fp16 tensors on the CPU are computed in fp32 and rounded to fp16.

    It is one of this thread; the backward has to run inside it too. What autograd computes in threads of its own, as
    below 60 nested backwards, is torch's. Other dtypes and devices are not changed.
    """
    return _Emulation() if enabled else nullcontext()


class _Contexts:
    """The number of contexts that a thread is in."""

    depth = 0


class _Thread(threading.local):
    def __init__(self) -> None:
        self.contexts = _Contexts()


_thread = _Thread()
_replacing = threading.Lock()


class _Emulation:
    def __init__(self) -> None:
        self._entered: list[_Contexts] = []
        """The threads', for each time that it was entered: a generator may be closed in another thread."""

    def __enter__(self) -> None:
        with _replacing:
            _replace_kernels()
        self._entered.append(_thread.contexts)
        _thread.contexts.depth += 1

    def __exit__(self, *_: object) -> None:
        self._entered.pop().depth -= 1


@functools.cache
def _replace_kernels() -> Library:
    library = Library("aten", "IMPL")
    for operator, fp32_outputs in _PRODUCTS.items():
        library.impl(operator, functools.partial(_product, operator, fp32_outputs), _KEY.name, with_keyset=True)
    for operator, product in _PRODUCTS_INTO.items():
        library.impl(operator, functools.partial(_product_into, operator, product), _KEY.name, with_keyset=True)
    return library


def _product(operator: Any, fp32_outputs: tuple[int, ...], keys: Any, *args: Any, **options: Any) -> Any:
    below = keys.remove(_KEY)
    if not (_thread.contexts.depth and _are_fp16(operator, args)):
        return operator.redispatch(below, *args, **options)
    wide = {name: _widened(value) for name, value in options.items()}
    outputs = operator.redispatch(below, *map(_widened, args), **wide)
    if isinstance(outputs, torch.Tensor):
        return outputs.half()
    return tuple(
        output.half() if output is not None and index not in fp32_outputs else output
        for index, output in enumerate(outputs)
    )


def _product_into(operator: Any, product: Any, keys: Any, *args: Any, out: torch.Tensor, **options: Any) -> Any:
    below = keys.remove(_KEY)
    if not (_thread.contexts.depth and _are_fp16(operator, (*args, out))):
        return operator.redispatch(below, *args, out=out, **options)
    result = product.redispatch(below, *map(_widened, args), **options).half()
    return torch.mul(result, 1, out=out)  # resizes it as torch's product does


def _are_fp16(operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether tensors of ``args`` are fp16 ones of the CPU, and others too where torch expects one dtype."""
    found = [_is_fp16_on_cpu(value) for value in args if isinstance(value, torch.Tensor)]
    return any(found) if operator in _ATTENTION else all(found)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and _is_fp16_on_cpu(value) else value


def _is_fp16_on_cpu(tensor: torch.Tensor) -> bool:
    return (
        tensor.dtype is torch.float16
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )
