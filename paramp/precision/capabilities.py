"""Native capabilities of the hardware and the installed packages."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Literal

import torch

from ..base.errors import ConfigError
from ..base.installed_packages import find_torchao, find_transformer_engine
from ..base.torch_internals import expect
from .modes import Float8

expect("torch.cpu", "torch.ops.mkldnn")

NATIVE_BF16 = (8, 0)
"""Compute capability of the first GPUs that multiply in bfloat16: Ampere."""
NATIVE_FLOAT8 = (8, 9)
"""Compute capability of the first GPUs that multiply in float8: Ada, then Hopper."""


def has_native_fp16(device: torch.device | str) -> bool:
    """Whether ``device`` multiplies fp16 matrices at a useful speed (every GPU; a CPU with AVX512-FP16 or AMX-FP16)."""
    if torch.device(device).type != "cpu":
        return True
    # As oneDNN reports; if it has no fp16 support, torch uses a scalar loop.
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported())


def has_bf16_on_cpu() -> bool:
    """Whether this CPU multiplies bfloat16 matrices natively."""
    mkldnn = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    # oneDNN accepts bfloat16 on every CPU with AVX-512, but with plain AVX-512 it computes in fp32.
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
    """The library that runs a mode's float8 layers; see :func:`find_library`."""

    name: Literal["torchao", "transformer_engine"]
    emulated: bool
    """True: operands are rounded to float8 and multiplied in fp32, with the same results, but not faster."""
    reason: str
    """A description for the user."""

    @property
    def saturates(self) -> bool:
        """Whether an input that is not finite may be finite in its layers, which so look for it in the forward."""
        return self.name == "transformer_engine"


def checks_inputs(float8: Float8 | None, device: torch.device, tensor_size: int) -> bool:
    """Whether a mode's float8 layers find overflows in forwards too, not in backwards alone."""
    return float8 is not None and find_library(float8, device, tensor_size).saturates


def find_library(float8: Float8, device: torch.device | str, tensor_size: int = 1) -> Library:
    """The library for float8 layers on ``device`` and over ``tensor_size`` tensor-parallel ranks. Does not import it.

    Raises ConfigError if no suitable library is installed.
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
            instead = " in place of Transformer Engine, whose layers do not support the DTensors of tensor parallelism"
        else:
            return Library(name="transformer_engine", emulated=False, reason=engine.reason)
    torchao = find_torchao()
    if not torchao.found:
        what = "Transformer Engine or torchao" if float8.transformer_engine else "torchao"
        raise ConfigError(f"precision: float8 layers need {what}{instead}, but {torchao.reason}")
    emulated = f", emulated: {without}; the results are the same, but it is slower" if without else ""
    return Library(name="torchao", emulated=bool(without), reason=f"{torchao.reason}{instead}{emulated}")
