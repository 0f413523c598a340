"""Layer, group and RMS norms that compute in autocast's dtype, and the replacement of a model's norms by them.

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
with the kernels of NVIDIA's Apex if these are installed (:mod:`paramp.base.optional_packages`).
"""

from __future__ import annotations

import functools
import importlib
import logging
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..base.dtensor import is_dtensor
from ..base.errors import ConfigError
from ..base.optional_packages import find_apex
from ..base.replace_class import replace_class
from .policy import Mode, Precision

log = logging.getLogger(__name__)

Weight = Tensor | None
Norm = Callable[..., Tensor]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

WITHOUT_EFFECT = ("fp16", "fp8", "amp_fp8", "fp8-mixed")
"""Precisions, besides those without autocast, in which Composer's low-precision norms have no effect."""


class NoEffectWarning(UserWarning):
    """The requested replacement of norms has no effect."""


class LPLayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` with input and output in autocast's dtype, fp16 or bf16; without autocast it is the plain norm.

    Parameters and their gradients keep their dtype. Statistics are in fp32.
    """

    def forward(self, input: Tensor) -> Tensor:
        return _low_layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class LPGroupNorm(nn.GroupNorm):
    """``nn.GroupNorm`` in autocast's dtype; see :class:`LPLayerNorm`."""

    def forward(self, input: Tensor) -> Tensor:
        return _low_group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class LPRMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` in autocast's dtype; see :class:`LPLayerNorm`. ``eps=None``: the machine epsilon of fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return _low_rms_norm(x, self.normalized_shape, self.weight, self.eps)


class FusedLayerNorm(nn.LayerNorm):
    """:class:`LPLayerNorm` with the kernels of NVIDIA's Apex if it is installed, else with torch's.

    Apex's kernels need plain CUDA tensors of one dtype, and both weight and bias or neither. Other inputs, such as the
    DTensors of sequence parallelism, use torch's.
    """

    def forward(self, input: Tensor) -> Tensor:
        return _fused_layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class FusedRMSNorm(nn.RMSNorm):
    """:class:`LPRMSNorm` with the kernels of NVIDIA's Apex; see :class:`FusedLayerNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        return _fused_rms_norm(x, self.normalized_shape, self.weight, self.eps)


FP32_STATISTICS = ("cuda",)
"""Devices on which torch's own layer and RMS norms keep the statistics of low-precision input in fp32."""


# fx.wrap: a symbolic trace records each of these as one call, as it does torch's norms.
@fx.wrap
def _low_layer_norm(x: Tensor, shape: Sequence[int], weight: Weight, bias: Weight, eps: float) -> Tensor:
    def norm(x: Tensor, weight: Weight, bias: Weight) -> Tensor:
        return F.layer_norm(x, list(shape), weight, bias, eps)

    return _in_autocast_dtype(norm, _widened(norm, FP32_STATISTICS), x, weight, bias)


@fx.wrap
def _low_group_norm(x: Tensor, num_groups: int, weight: Weight, bias: Weight, eps: float) -> Tensor:
    def norm(x: Tensor, weight: Weight, bias: Weight) -> Tensor:
        return F.group_norm(x, num_groups, weight, bias, eps)

    return _in_autocast_dtype(norm, _widened(norm), x, weight, bias)


@fx.wrap
def _low_rms_norm(x: Tensor, shape: Sequence[int], weight: Weight, eps: float | None) -> Tensor:
    def plain(x: Tensor, weight: Weight) -> Tensor:
        return F.rms_norm(x, list(shape), weight, eps)

    def norm(x: Tensor, weight: Weight) -> Tensor:
        return F.rms_norm(x, list(shape), weight, _eps_of(x, eps))

    return _in_autocast_dtype(plain, _widened(norm, FP32_STATISTICS), x, weight)


@fx.wrap
def _fused_layer_norm(x: Tensor, shape: Sequence[int], weight: Weight, bias: Weight, eps: float) -> Tensor:
    def norm(x: Tensor, weight: Weight, bias: Weight) -> Tensor:
        apex = _apex_norms() if _fits_apex(x, weight, bias) else None
        if apex is None or (weight is None) != (bias is None):
            return F.layer_norm(x, list(shape), weight, bias, eps)
        if weight is None:
            return apex.fused_layer_norm(x, tuple(shape), eps)
        return apex.fused_layer_norm_affine(x, weight, bias, tuple(shape), eps)

    fused = _widened(norm, FP32_STATISTICS)
    return _in_autocast_dtype(fused, fused, x, weight, bias)


@fx.wrap
def _fused_rms_norm(x: Tensor, shape: Sequence[int], weight: Weight, eps: float | None) -> Tensor:
    def norm(x: Tensor, weight: Weight) -> Tensor:
        apex = _apex_norms() if _fits_apex(x, weight) else None
        if apex is None:
            return F.rms_norm(x, list(shape), weight, _eps_of(x, eps))
        if weight is None:
            return apex.fused_rms_norm(x, tuple(shape), _eps_of(x, eps))
        return apex.fused_rms_norm_affine(x, weight, tuple(shape), _eps_of(x, eps))

    fused = _widened(norm, FP32_STATISTICS)
    return _in_autocast_dtype(fused, fused, x, weight)


def _in_autocast_dtype(plain: Norm, low: Norm, x: Tensor, *weights: Weight) -> Tensor:
    """``low`` of ``x`` and ``weights`` cast to autocast's dtype; without autocast, ``plain`` of them."""
    if (dtype := _autocast_dtype(x)) is None:
        return plain(x, *weights)
    cast = [None if value is None else value.to(dtype) for value in (x, *weights)]
    with torch.autocast(x.device.type, enabled=False):
        return low(*cast)


def _widened(norm: Norm, unless_on: Sequence[str] = ()) -> Norm:
    """``norm``, but for fp16 or bf16 input computed in fp32 and rounded once, except on the devices ``unless_on``."""

    def computed(x: Tensor, *weights: Weight) -> Tensor:
        if x.dtype not in (torch.float16, torch.bfloat16) or x.device.type in unless_on:
            return norm(x, *weights)
        return norm(*[None if value is None else value.float() for value in (x, *weights)]).to(x.dtype)

    return computed


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts ``x`` on its device; None if it does not, as for float64."""
    kind = x.device.type
    is_cast = x.is_floating_point() and x.dtype is not torch.float64
    enabled = is_cast and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if enabled else None


def _eps_of(x: Tensor, eps: float | None) -> float:
    """``eps``; if None the machine epsilon of the dtype in which torch computes the RMS norm."""
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps


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


def replace_norms(
    model: nn.Module,
    plain: type[nn.Module],
    replacement: type[nn.Module],
    *,
    precision: Mode | None = None,
    optimizers: Optimizers | None = None,
) -> int:
    """Change the class of the ``plain`` norms in ``model`` to ``replacement``, in place.

    Modules and parameters stay the same objects (:func:`paramp.base.replace_class.replace_class`), so optimizers and
    their state stay valid. Returns the number of changed modules.

    Args:
        precision: Composer's name of a precision, or a mode; without low-precision autocast it warns and changes
            nothing. None: change; the autocast that is active at each forward decides.
        optimizers: as in Composer, the optimizers of the model's parameters; they are only checked.

    Raises:
        ConfigError, TypeError: an unknown precision, a model wrapped in DDP or FSDP, or wrong ``optimizers``.
    """
    _check_optimizers(optimizers)
    kind, new = type(model).__name__, replacement.__name__
    if not _has_effect(precision):
        name = precision.name if isinstance(precision, Precision) else precision
        listed = name in WITHOUT_EFFECT
        why = "in which Composer does not change norms" if listed else "which has no autocast to fp16 or bf16"
        message = f"{new} has no effect in precision {name!r}, {why}; {kind} is not changed"
        warnings.warn(message, NoEffectWarning, stacklevel=3)
        return 0
    names = replace_class(model, plain, replacement)
    if not names and not any(isinstance(module, replacement) for module in model.modules()):
        message = f"{kind} has no {plain.__name__} with torch's own forward; {new} replaced none"
        warnings.warn(message, NoEffectWarning, stacklevel=3)
    log.info("%s: %d x %s instead of %s", kind, len(names), new, plain.__name__)
    return len(names)


def _check_optimizers(optimizers: Optimizers | None) -> None:
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    for optimizer in () if given is None else given:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizers: got {type(optimizer).__name__}, expected an optimizer or several")


def _has_effect(precision: Mode | None) -> bool:
    if precision is None:
        return True
    name = precision.name if isinstance(precision, Precision) else precision
    if name in WITHOUT_EFFECT:
        return False
    try:
        return Precision.parse(precision).autocast
    except ConfigError as error:
        raise ConfigError(f"{error}; or one of {', '.join(WITHOUT_EFFECT)}, which change nothing") from None
