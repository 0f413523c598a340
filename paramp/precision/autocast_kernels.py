"""Kernels of torch's operators under autocast: those that CUDA widens to fp32 on the CPU too, and grouped products.

Autocast is in torch's dispatcher, and so are these: kernels for autocast's key. So they also apply to operators inside
other operators, and to forwards that checkpointing recomputes. Where :data:`depth` is 0 they call the default kernel
unchanged, so that torch's autocast works as without them. ``rms_norm``, which CUDA's table has from torch 2.12 on, gets
one for CUDA too where it has none.

``F.grouped_mm``, the products of all experts of a layer, has no kernel for autocast in torch: fp32 weights would be
multiplied in fp32. It gets one that casts to autocast's dtype, as ``F.linear`` does. So does the operator that
transformers runs in its place in compiled code and on GPUs older than Ampere.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from ..base.torch_internals import TO_FP32, TO_WIDEST, expect, take

expect("torch._C", "torch.ops.mkldnn")

tree_leaves = take("torch.utils._pytree.tree_leaves")
tree_map_only = take("torch.utils._pytree.tree_map_only")

KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
"""Autocast's key in the dispatcher, by the type of the device."""
LSTM = torch.ops.aten.lstm.input
GROUPED = torch.ops.aten._grouped_mm.default
depth = dict.fromkeys(KEYS, 0)
"""The number of contexts by device in which the kernels compute as they say."""


@functools.cache
def operator_kernels(device_type: str) -> Mapping[Any, Callable[..., Any]]:
    """The kernels for grouped products, and for each overload that CUDA's table widens and ``device_type`` does not."""
    kernels: dict[Any, Callable[..., Any]] = {LSTM: _lstm} if device_type == "cpu" else {}
    if not _has_kernel(GROUPED, KEYS[device_type]):
        kernels[GROUPED] = functools.partial(_grouped, device_type)
    for names, to_wide in ((TO_FP32, _to_fp32), (TO_WIDEST, _to_widest)):
        for name in names.split():
            packet = getattr(torch.ops.aten, name)
            for operator in (getattr(packet, overload) for overload in packet.overloads()):
                # torch 2.11 lacks that of rms_norm
                is_widened = name == "rms_norm" or _has_kernel(operator, KEYS["cuda"])
                if is_widened and not _has_kernel(operator, KEYS[device_type]):
                    kernels[operator] = functools.partial(_widened, operator, device_type, to_wide)
    return kernels


def _has_kernel(operator: Any, key: torch._C.DispatchKey) -> bool:
    name = operator.name()
    # some overloads exist only for TorchScript
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, key.name)


def _widened(
    operator: Any,
    device_type: str,
    to_wide: Callable[[Any, str], Any],
    keys: torch._C.DispatchKeySet,
    *args: Any,
    **kwargs: Any,
) -> Any:
    autocast, below = _keys(device_type)
    if not depth[device_type]:
        return operator.redispatch(keys & below, *args, **kwargs)
    with torch._C._ExcludeDispatchKeyGuard(autocast):
        args, kwargs = to_wide((args, kwargs), device_type)
        return operator(*args, **kwargs)


@functools.cache
def _keys(device_type: str) -> tuple[torch._C.DispatchKeySet, torch._C.DispatchKeySet]:
    """Autocast's key on ``device_type``, and all keys after it."""
    key = KEYS[device_type]
    return torch._C.DispatchKeySet(key), torch._C._dispatch_keyset_full_after(key)


def _lstm(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    """Cast the input of an LSTM before torch selects its implementation, where oneDNN has none in autocast's dtype.

    For an fp32 input torch selects oneDNN's LSTM on CPUs, whose input autocast then casts; but oneDNN cannot train an
    LSTM in fp16, and in bf16 not on every CPU. For an input in that dtype torch uses operators that work on all.
    """
    (autocast, below), dtype = _keys("cpu"), torch.get_autocast_dtype("cpu")
    if not depth["cpu"] or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return LSTM.redispatch(keys & below, *args, **kwargs)
    with torch._C._ExcludeDispatchKeyGuard(autocast):
        args, kwargs = tree_map_only(
            torch.Tensor, lambda one: one.to(dtype) if one.dtype is torch.float32 else one, (args, kwargs)
        )
        return LSTM(*args, **kwargs)


def narrowed(operator: Any, device_type: str, keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``operator`` of tensors in autocast's dtype; as in torch's own products, those in fp64 are not cast."""
    autocast, below = _keys(device_type)
    if not depth[device_type]:
        return cast(torch.Tensor, operator.redispatch(keys & below, *args, **kwargs))
    dtype = torch.get_autocast_dtype(device_type)

    def narrow(tensor: torch.Tensor) -> torch.Tensor:
        is_cast = tensor.is_floating_point() and tensor.dtype is not torch.float64 and tensor.device.type == device_type
        return tensor.to(dtype) if is_cast else tensor

    with torch._C._ExcludeDispatchKeyGuard(autocast):
        args, kwargs = tree_map_only(torch.Tensor, narrow, (args, kwargs))
        return cast(torch.Tensor, operator(*args, **kwargs))


def _grouped(
    device_type: str,
    keys: torch._C.DispatchKeySet,
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    *args: Any,
) -> torch.Tensor:
    """The grouped product, which leaves the rows behind the last group undefined, in its result and its gradient.

    Here both are zero.
    """
    if not depth[device_type] or offs is None or a.ndim != 2 or b.ndim != 3:
        return narrowed(GROUPED, device_type, keys, a, b, offs, *args)
    behind = (torch.arange(len(a), device=a.device) >= offs[-1])[:, None]
    product = narrowed(GROUPED, device_type, keys, a.masked_fill(behind, 0.0), b, offs, *args)
    return product.masked_fill(behind, 0.0)


def _to_fp32(arguments: Any, device_type: str) -> Any:
    def widen(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            is_low = value.dtype.itemsize < 4 and value.is_floating_point() and value.device.type == device_type
            return value.float() if is_low else value
        return [*map(widen, value)] if isinstance(value, (list, tuple)) else value  # of tensors or numbers

    args, kwargs = arguments
    return tuple(map(widen, args)), {name: widen(value) for name, value in kwargs.items()}


def _to_widest(arguments: Any, device_type: str) -> Any:
    """As on CUDA: to fp32 if any of the tensors is fp32; fp64 tensors are not changed."""
    wide = any(isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32 for leaf in tree_leaves(arguments))
    return _to_fp32(arguments, device_type) if wide else arguments
