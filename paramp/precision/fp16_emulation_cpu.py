"""Emulation of fp16 matrix products on CPUs that have no fp16 arithmetic.

torch's own fp16 products on such a CPU are 20 to 170 times slower than its fp32 ones. A tensor core multiplies fp16
operands exactly, adds the products in fp32, and rounds the sum to fp16 once. :func:`emulate_fp16` does the same:
fp16 operands are widened to fp32 (exactly), the product runs in fp32, and the result is rounded to fp16.

It replaces kernels of torch's operators while a context is open, or what :func:`fp16_kernels` returns is kept; outside
of a context they call torch's, which costs each product some 5 microseconds of Python. They cover forward and backward
of linear layers, einsum, attention and convolutions, and tensors saved for the backward stay fp16. Forms that neither
autograd nor compiled code uses, such as ``addmm_`` and ``mv(out=)``, stay torch's. A dispatch mode would do the same,
but Python would then see every operator: a step of a small GPT took 1.6 times as long, and of one in small chunks 2.3
times.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..base.replaced_in_torch import REPLACED, replace_kernels
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
# The same products into a given tensor, which compiled code calls, and F.grouped_mm for each of its groups.
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


class _Thread(threading.local):
    def __init__(self) -> None:
        self.depth = [0]
        """The number of contexts that this thread is in."""


_thread = _Thread()


@contextmanager
def emulate_fp16() -> Iterator[None]:
    """A context in which products of fp16 tensors on the CPU are computed in fp32 and rounded to fp16.

    It is one of this thread; the backward has to run inside it too. What autograd computes in threads of its own, as
    below 60 nested backwards, is torch's. Other dtypes and devices are not changed.
    """
    _ = fp16_kernels()  # kept while the context is open
    depth = _thread.depth  # of the thread that enters: a generator may be closed in another one
    depth[0] += 1
    try:
        yield
    finally:
        depth[0] -= 1


def is_emulated() -> bool:
    """Whether this thread is in such a context."""
    return _thread.depth[0] > 0


def fp16_kernels() -> torch.library.Library:
    """The kernels, which torch has as long as the result is kept."""
    return REPLACED.get(_KEY.name) or replace_kernels(
        _KEY.name,
        {operator: partial(_product, operator, fp32_outputs) for operator, fp32_outputs in _PRODUCTS.items()}
        | {operator: partial(_product_into, operator, product) for operator, product in _PRODUCTS_INTO.items()},
    )


def _product(operator: Any, fp32_outputs: tuple[int, ...], keys: Any, *args: Any, **options: Any) -> Any:
    below = keys.remove(_KEY)
    if not (_thread.depth[0] and _are_fp16(operator, args)):
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
    if not (_thread.depth[0] and _are_fp16(operator, (*args, out))):
        return operator.redispatch(below, *args, out=out, **options)
    result = product.redispatch(below, *map(_widened, args), **options).half()
    return torch.mul(result, 1, out=out)  # resizes it as torch's product does


def _are_fp16(operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether ``args`` has fp16 tensors on the CPU, and no others where torch expects one dtype."""
    are_fp16 = [_is_fp16_on_cpu(value) for value in args if isinstance(value, torch.Tensor)]
    return any(are_fp16) if operator in _ATTENTION else all(are_fp16)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and _is_fp16_on_cpu(value) else value


def _is_fp16_on_cpu(tensor: torch.Tensor) -> bool:
    return (
        tensor.dtype is torch.float16
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )
