"""torch's autocast, with norms and softmax in the same dtype on the CPU as on CUDA.

On CUDA autocast widens operators that lose accuracy in half precision to fp32: norms, softmax, exponentials, powers,
sums, losses. On the CPU it does not: they run in the dtype of their input, so that a model gives different results.
:func:`computing` closes that gap: inside it the operators that CUDA's table widens compute in fp32 on the CPU too.

This is implemented where autocast is, in torch's dispatcher: each of these operators gets a kernel for the CPU's
autocast key. So it also applies to operators inside other operators, and to forwards that checkpointing recomputes. The
kernels are there while a context is open, or what :func:`widening_kernels` returns is kept; outside of
:func:`widening` they call the default kernel unchanged, so that torch's autocast works as without them. ``rms_norm``,
which CUDA's table has from torch 2.12 on, gets one for CUDA too where it has none.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..base.torch_internals import REPLACED, TO_FP32, TO_WIDEST, expect, replace_kernels, take
from .modes import Precision

expect("torch._C")

tree_leaves = take("torch.utils._pytree.tree_leaves")
tree_map_only = take("torch.utils._pytree.tree_map_only")

KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
"""Autocast's key in the dispatcher, by the type of the device."""
LSTM = torch.ops.aten.lstm.input
_depth = dict.fromkeys(KEYS, 0)


def widening_kernels(device_type: str) -> torch.library.Library | None:
    """The kernels for ``device_type``, which torch has as long as the result is kept; None: there are none for it."""
    if device_type not in KEYS:
        return None
    key = KEYS[device_type].name
    return REPLACED.get(key) or replace_kernels(key, _widening_kernels(device_type))


@functools.cache
def _widening_kernels(device_type: str) -> Mapping[Any, Callable[..., Any]]:
    """The kernels for each overload that CUDA's table widens and that has none on ``device_type``."""
    kernels = {LSTM: _lstm} if device_type == "cpu" else {}
    for names, cast in ((TO_FP32, _to_fp32), (TO_WIDEST, _to_widest)):
        for name in names.split():
            packet = getattr(torch.ops.aten, name)
            for operator in (getattr(packet, overload) for overload in packet.overloads()):
                # torch 2.11 lacks that of rms_norm
                is_widened = name == "rms_norm" or _has_kernel(operator, KEYS["cuda"])
                if is_widened and not _has_kernel(operator, KEYS[device_type]):
                    kernels[operator] = functools.partial(_widened, operator, device_type, cast)
    return kernels


def _has_kernel(operator: Any, key: torch._C.DispatchKey) -> bool:
    name = operator.name()
    # some overloads exist only for TorchScript
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, key.name)


def _widened(
    operator: Any,
    device_type: str,
    cast: Callable[[Any, str], Any],
    keys: torch._C.DispatchKeySet,
    *args: Any,
    **kwargs: Any,
) -> Any:
    autocast, below = _keys(device_type)
    if not _depth[device_type]:
        return operator.redispatch(keys & below, *args, **kwargs)
    with torch._C._ExcludeDispatchKeyGuard(autocast):
        args, kwargs = cast((args, kwargs), device_type)
        return operator(*args, **kwargs)


@functools.cache
def _keys(device_type: str) -> tuple[torch._C.DispatchKeySet, torch._C.DispatchKeySet]:
    """Autocast's key on ``device_type``, and all keys after it."""
    key = KEYS[device_type]
    return torch._C.DispatchKeySet(key), torch._C._dispatch_keyset_full_after(key)


def _lstm(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    """Cast the input of an LSTM to fp16 before torch selects its implementation, under autocast to fp16.

    For an fp32 input torch selects oneDNN's LSTM on CPUs, whose input autocast then casts; but oneDNN cannot train an
    LSTM in fp16. For an fp16 input torch uses operators that work on every CPU.
    """
    autocast, below = _keys("cpu")
    if not _depth["cpu"] or torch.get_autocast_dtype("cpu") is not torch.float16:
        return LSTM.redispatch(keys & below, *args, **kwargs)
    with torch._C._ExcludeDispatchKeyGuard(autocast):
        args, kwargs = tree_map_only(
            torch.Tensor, lambda one: one.half() if one.dtype is torch.float32 else one, (args, kwargs)
        )
        return LSTM(*args, **kwargs)


def _to_fp32(arguments: Any, device_type: str) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        is_low = tensor.dtype.itemsize < 4 and tensor.is_floating_point() and tensor.device.type == device_type
        return tensor.float() if is_low else tensor

    return tree_map_only(torch.Tensor, cast, arguments)


def _to_widest(arguments: Any, device_type: str) -> Any:
    """As on CUDA: to fp32 if any of the tensors is fp32; fp64 tensors are not changed."""
    wide = any(isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32 for leaf in tree_leaves(arguments))
    return _to_fp32(arguments, device_type) if wide else arguments


@contextmanager
def widening(precision: Precision, device_type: str) -> Iterator[None]:
    """The part of :func:`computing` that the backward needs too, because checkpointing recomputes forwards in it."""
    kept = widening_kernels(device_type) if precision.autocast else None
    if kept is None:
        yield
        return
    _depth[device_type] += 1
    try:
        yield
    finally:
        _depth[device_type] -= 1


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A context in which tensors that are made without a dtype get ``dtype``."""
    outer = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(outer)


@contextmanager
def computing(precision: Precision, device_type: str) -> Iterator[None]:
    """A context in which a model's forward computes in the mode ``precision`` on devices of ``device_type``."""
    with ExitStack() as stack:
        if precision.autocast:
            stack.enter_context(torch.autocast(device_type, dtype=precision.compute))
            stack.enter_context(widening(precision, device_type))
        if precision.default_dtype:
            stack.enter_context(default_dtype(precision.weights))
        yield


def to_compute(tensor: torch.Tensor, precision: Precision, device: torch.device | None = None) -> torch.Tensor:
    """A model's input on ``device``; a floating-point one in the compute dtype."""
    return moved(tensor, device, precision.compute if tensor.is_floating_point() else None)


def moved(tensor: torch.Tensor, device: torch.device | None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``tensor`` on ``device``, in ``dtype``; the host does not wait for a copy from pinned memory."""
    return tensor.to(device, dtype, non_blocking=tensor.device.type == "cpu")


def to_outputs(tensor: torch.Tensor, precision: Precision) -> torch.Tensor:
    """A model's output; a floating-point one in the mode's dtype for outputs, by default fp32 or wider."""
    if not tensor.is_floating_point():
        return tensor
    dtype = precision.outputs or torch.promote_types(tensor.dtype, torch.float32)
    if tensor.dtype is dtype:
        return tensor
    return tensor.to(dtype)
