"""torch's autocast, with norms and softmax in the same dtype on the CPU as on CUDA.

On CUDA autocast widens operators that lose accuracy in half precision to fp32: norms, softmax, exponentials, powers,
sums, losses. On the CPU it does not: they run in the dtype of their input, so that a model gives different results.
:func:`computing` closes that gap: inside it the operators that CUDA's table widens compute in fp32 on the CPU too.

This is implemented where autocast is, in torch's dispatcher: each of these operators gets a kernel for the CPU's
autocast key. So it also applies to operators inside other operators, and to forwards that checkpointing recomputes. The
kernels are registered once, at the first use; outside of :func:`widening` they call the default kernel unchanged, so
that torch's autocast works as without them. ``rms_norm``, which CUDA's table has from torch 2.12 on, gets one for CUDA
too where it has none.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..base.torch_internals import expect, take
from .policy import Precision

expect("torch._C")

tree_leaves = take("torch.utils._pytree.tree_leaves")
tree_map_only = take("torch.utils._pytree.tree_map_only")

NAMES = (
    # norms
    *("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "norm", "renorm", "frobenius_norm", "nuclear_norm"),
    *("linalg_vector_norm", "linalg_matrix_norm", "cosine_similarity", "dist", "pdist", "cdist"),
    # softmax and sums
    *("softmax", "log_softmax", "softplus", "logsumexp", "sum", "prod", "cumsum", "cumprod"),
    # exponentials, logarithms, powers
    *("exp", "expm1", "log", "log10", "log2", "log1p", "pow", "rsqrt", "reciprocal"),
    *("acos", "asin", "cosh", "sinh", "tan", "erfinv"),
    # losses
    *("nll_loss", "nll_loss2d", "poisson_nll_loss", "hinge_embedding_loss", "cosine_embedding_loss", "kl_div"),
    *("l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss"),
    *("soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits"),
    # resampling
    *(f"upsample_{kind}" for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d")),
    *(f"upsample_{kind}" for kind in ("trilinear3d", "bicubic2d")),
)
"""The operators that torch's table for CUDA widens to fp32 (``AT_FORALL_FP32`` in ``ATen/autocast_mode.h``)."""

PROMOTED = (
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot"),
    "scatter_add",
)
"""The operators that it casts to the widest dtype of their arguments (``AT_FORALL_PROMOTE``)."""

ADDED_LATER = ("rms_norm",)
"""Those of :data:`NAMES` that the table of torch 2.11 lacks."""

KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
"""Autocast's key in the dispatcher, by the type of the device."""
LSTM = torch.ops.aten.lstm.input
_depth = dict.fromkeys(KEYS, 0)


@functools.cache
def _install(device_type: str) -> torch.library.Library:
    """Register the kernels for ``device_type``, for each overload that CUDA's table widens and that has none there."""
    library = torch.library.Library("aten", "IMPL")
    for name in (*NAMES, *PROMOTED):
        packet = getattr(torch.ops.aten, name)
        for operator in (getattr(packet, overload) for overload in packet.overloads()):
            is_widened = name in ADDED_LATER or _has_kernel(operator, KEYS["cuda"])
            if is_widened and not _has_kernel(operator, KEYS[device_type]):
                kernel = _kernel(operator, device_type, _to_widest if name in PROMOTED else _to_fp32)
                library.impl(operator, kernel, KEYS[device_type].name, with_keyset=True)
    if device_type == "cpu":
        library.impl(LSTM, _lstm, KEYS["cpu"].name, with_keyset=True)
    return library


def _has_kernel(operator: Any, key: torch._C.DispatchKey) -> bool:
    name = operator.name()
    # some overloads exist only for TorchScript
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, key.name)


def _kernel(
    operator: torch._ops.OpOverload[..., Any], device_type: str, cast: Callable[[Any, str], Any]
) -> Callable[..., Any]:
    autocast, below = _keys(device_type)

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not _depth[device_type]:
            return operator.redispatch(keys & below, *args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            args, kwargs = cast((args, kwargs), device_type)
            return operator(*args, **kwargs)

    return kernel


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
    # Often there is nothing to cast, as for a norm of fp32 activations, which is cheaper than torch's trees.
    args, kwargs = arguments
    if not _has_low((*args, *kwargs.values()), device_type):
        return arguments
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor.float() if _is_low(tensor, device_type) else tensor, arguments
    )


def _has_low(value: Any, device_type: str) -> bool:
    if isinstance(value, torch.Tensor):
        return _is_low(value, device_type)
    return isinstance(value, (tuple, list)) and any(_has_low(one, device_type) for one in value)


def _to_widest(arguments: Any, device_type: str) -> Any:
    """As on CUDA: to fp32 if any of the tensors is fp32; fp64 tensors are not changed."""
    wide = any(isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32 for leaf in tree_leaves(arguments))
    return _to_fp32(arguments, device_type) if wide else arguments


def _is_low(tensor: torch.Tensor, device_type: str) -> bool:
    return tensor.dtype.itemsize < 4 and tensor.is_floating_point() and tensor.device.type == device_type


@contextmanager
def widening(precision: Precision, device_type: str) -> Iterator[None]:
    """The part of :func:`computing` that the backward needs too, because checkpointing recomputes forwards in it."""
    if not precision.autocast or device_type not in KEYS:
        yield
        return
    _install(device_type)
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
