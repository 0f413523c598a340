"""Layer, group and RMS norms that compute in autocast's dtype.

Under autocast torch computes a norm in fp32: its input is widened, and its fp32 output has to be narrowed again for the
next matrix product, four bytes per element each way. The input and output of the norms here are in autocast's dtype
instead::

    x, weight, bias ── cast to fp16 or bf16 ──► mean and variance in fp32 ──► rounded once, to fp16 or bf16

The parameters stay in fp32 and get fp32 gradients; only the copies that the forward uses are in low precision. Without
autocast each norm gives the same bits as the norm that it replaces.

Not every kernel keeps the statistics of low-precision input in fp32. Apex's norms do, and torch's layer and RMS norms
on CUDA. torch's norms on a CPU round mean and 1/deviation to the input's dtype for the backward (with a mean of 50
deviations, gradients of weights were 9 to 16 units in the last place off), and its group norm on CUDA does so for the
forward too. In these cases the rounded operands are widened to fp32 and the result is rounded, so that values and
dtypes are the same everywhere.

``LP*`` are the norms of Composer's "Low Precision" algorithms, ``Fused*`` those of its "Fused LayerNorm": the same,
with the kernels of NVIDIA's Apex if these are installed (:mod:`paramp.base.installed_packages`).
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..base.dtensor import is_dtensor
from ..base.installed_packages import find_apex

Weight = Tensor | None
Norm = Callable[..., Tensor]


class NoEffectWarning(UserWarning):
    """The requested replacement of norms has no effect."""


class LPLayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` with input and output in autocast's dtype, fp16 or bf16; without autocast it is the plain norm.

    Parameters and their gradients keep their dtype. Statistics are in fp32.
    """

    def forward(self, input: Tensor) -> Tensor:
        return _layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, fused=False)


class LPGroupNorm(nn.GroupNorm):
    """``nn.GroupNorm`` in autocast's dtype; see :class:`LPLayerNorm`."""

    def forward(self, input: Tensor) -> Tensor:
        return _group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class LPRMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` in autocast's dtype; see :class:`LPLayerNorm`. ``eps=None``: the machine epsilon of fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return _rms_norm(x, self.normalized_shape, self.weight, self.eps, fused=False)


class FusedLayerNorm(nn.LayerNorm):
    """:class:`LPLayerNorm` with the kernels of NVIDIA's Apex if it is installed, else with torch's.

    Apex's kernels need plain CUDA tensors of one dtype, and both weight and bias or neither. Other inputs, such as the
    DTensors of sequence parallelism, use torch's.
    """

    def forward(self, input: Tensor) -> Tensor:
        return _layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, fused=True)


class FusedRMSNorm(nn.RMSNorm):
    """:class:`LPRMSNorm` with the kernels of NVIDIA's Apex; see :class:`FusedLayerNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        return _rms_norm(x, self.normalized_shape, self.weight, self.eps, fused=True)


FP32_STATISTICS = ("cuda",)
"""Devices on which torch's own layer and RMS norms keep the statistics of low-precision input in fp32."""


# fx.wrap: a symbolic trace records each of these as one call, as it does torch's norms.
@fx.wrap
def _layer_norm(x: Tensor, shape: Sequence[int], weight: Weight, bias: Weight, eps: float, *, fused: bool) -> Tensor:
    def norm(x: Tensor, weight: Weight, bias: Weight) -> Tensor:
        apex = _apex_norms() if fused and _fits_apex(x, weight, bias) else None
        if apex is None or (weight is None) != (bias is None):
            return F.layer_norm(x, list(shape), weight, bias, eps)
        if weight is None:
            return apex.fused_layer_norm(x, tuple(shape), eps)
        return apex.fused_layer_norm_affine(x, weight, bias, tuple(shape), eps)

    low = _widened(norm, FP32_STATISTICS)
    return _in_autocast_dtype(low if fused else norm, low, x, weight, bias)


@fx.wrap
def _group_norm(x: Tensor, num_groups: int, weight: Weight, bias: Weight, eps: float) -> Tensor:
    def norm(x: Tensor, weight: Weight, bias: Weight) -> Tensor:
        return F.group_norm(x, num_groups, weight, bias, eps)

    return _in_autocast_dtype(norm, _widened(norm), x, weight, bias)


@fx.wrap
def _rms_norm(x: Tensor, shape: Sequence[int], weight: Weight, eps: float | None, *, fused: bool) -> Tensor:
    def plain(x: Tensor, weight: Weight) -> Tensor:
        return F.rms_norm(x, list(shape), weight, eps)

    def norm(x: Tensor, weight: Weight) -> Tensor:
        # None: the machine epsilon of the dtype in which torch computes the norm
        least = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps
        apex = _apex_norms() if fused and _fits_apex(x, weight) else None
        if apex is None:
            return F.rms_norm(x, list(shape), weight, least)
        if weight is None:
            return apex.fused_rms_norm(x, tuple(shape), least)
        return apex.fused_rms_norm_affine(x, weight, tuple(shape), least)

    low = _widened(norm, FP32_STATISTICS)
    return _in_autocast_dtype(low if fused else plain, low, x, weight)


def _in_autocast_dtype(plain: Norm, low: Norm, x: Tensor, *weights: Weight) -> Tensor:
    """``low`` of ``x`` and ``weights`` in the dtype to which autocast casts ``x``; ``plain`` without a cast."""
    kind = x.device.type
    is_cast = x.is_floating_point() and x.dtype is not torch.float64
    if not (is_cast and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return plain(x, *weights)
    dtype = torch.get_autocast_dtype(kind)
    cast = [None if value is None else value.to(dtype) for value in (x, *weights)]
    with torch.autocast(kind, enabled=False):
        return low(*cast)


def _widened(norm: Norm, unless_on: Sequence[str] = ()) -> Norm:
    """``norm``, but for fp16 or bf16 input computed in fp32 and rounded once, except on the devices ``unless_on``."""

    def computed(x: Tensor, *weights: Weight) -> Tensor:
        if x.dtype not in (torch.float16, torch.bfloat16) or x.device.type in unless_on:
            return norm(x, *weights)
        return norm(*[None if value is None else value.float() for value in (x, *weights)]).to(x.dtype)

    return computed


def _fits_apex(x: Tensor, *weights: Weight) -> bool:
    tensors = [x, *(weight for weight in weights if weight is not None)]
    plain = all(_is_plain_cuda(tensor) and tensor.dtype is x.dtype for tensor in tensors)
    return plain and x.numel() > 0 and not torch.compiler.is_compiling()


def _is_plain_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda and not is_dtensor(tensor)


@functools.cache
def _apex_norms() -> ModuleType | None:
    """The module of Apex that has its norms as functions; None if it cannot be used."""
    if not find_apex().fused_norms:
        return None
    try:
        importlib.import_module("fused_layer_norm_cuda")
        return importlib.import_module("apex.normalization.fused_layer_norm")
    except (ImportError, OSError) as error:  # built for another torch
        warnings.warn(f"NVIDIA's Apex is installed but does not load ({error}); torch's norms are used", stacklevel=2)
        return None
