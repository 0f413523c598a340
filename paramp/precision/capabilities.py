"""What the hardware and the installed packages can compute natively."""

from __future__ import annotations

import torch

__all__ = ["has_native_fp16"]


def has_native_fp16(device: torch.device | str) -> bool:
    """Whether ``device`` multiplies fp16 matrices at a useful speed (every GPU; a CPU with AVX512-FP16 or AMX-FP16)."""
    if torch.device(device).type != "cpu":
        return True
    # oneDNN's own answer; without it torch falls back to a scalar loop.
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported())
