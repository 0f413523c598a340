"""What the hardware and the installed packages can compute natively."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Literal

import torch

from ..base.errors import ConfigError
from ..base.optional_packages import find_torchao, find_transformer_engine
from .policy import Float8

NATIVE_BF16 = (8, 0)
"""Compute capability of the first GPUs that multiply in bfloat16: Ampere."""
NATIVE_FLOAT8 = (8, 9)
"""Compute capability of the first GPUs that multiply in float8: Ada, then Hopper."""


def has_native_fp16(device: torch.device | str) -> bool:
    """Whether ``device`` multiplies fp16 matrices at a useful speed (every GPU; a CPU with AVX512-FP16 or AMX-FP16)."""
    if torch.device(device).type != "cpu":
        return True
    # oneDNN's own answer; without it torch falls back to a scalar loop.
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported())


def has_bf16_on_cpu() -> bool:
    """Whether this CPU multiplies bfloat16 matrices natively."""
    mkldnn = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    # oneDNN takes bfloat16 wherever there is AVX-512, and widens it to fp32 where that is all there is.
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return bool(mkldnn and (not x86 or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()))


def why_not_native_float8(device: torch.device) -> str:
    """Why ``device`` does not multiply float8 matrices natively; empty if it does."""
    if device.type != "cuda":
        return f"a {device.type.upper()} has no float8 products"
    capability = torch.cuda.get_device_capability(device)
    if capability >= NATIVE_FLOAT8:
        return ""
    return f"this GPU has compute capability {capability[0]}.{capability[1]}, and float8 products begin with 8.9"


@dataclass(frozen=True, kw_only=True)
class Library:
    """What the float8 layers of a mode run on here; see :func:`find_library`."""

    name: Literal["torchao", "transformer_engine"]
    emulated: bool
    """Operands are rounded to float8 and multiplied in fp32: the same numbers, without the speed."""
    reason: str
    """A sentence for the user."""


def find_library(float8: Float8, device: torch.device | str, tensor_size: int = 1) -> Library:
    """What float8 layers run on, on ``device`` and over ``tensor_size`` tensor-parallel ranks. Imports none of it.

    Raises ConfigError if nothing that would do is installed.
    """
    without = why_not_native_float8(torch.device(device))
    instead = ""
    if float8.transformer_engine:
        engine = find_transformer_engine()
        if not engine.found:
            instead = f" in place of Transformer Engine ({engine.reason})"
        elif without:
            instead = f" in place of Transformer Engine, as {without}"
        elif tensor_size > 1:
            instead = " in place of Transformer Engine, whose layers do not take the DTensors of tensor parallelism"
        else:
            return Library(name="transformer_engine", emulated=False, reason=engine.reason)
    torchao = find_torchao()
    if not torchao.found:
        what = "Transformer Engine or torchao" if float8.transformer_engine else "torchao"
        raise ConfigError(f"precision: float8 layers need {what}{instead}, but {torchao.reason}")
    emulated = f", emulated: {without}; the numbers are the same, the speed is not" if without else ""
    return Library(name="torchao", emulated=bool(without), reason=f"{torchao.reason}{instead}{emulated}")
