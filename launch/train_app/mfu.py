"""Model FLOPs utilisation (MFU), after Chowdhery et al. 2022 (PaLM, appendix B).

MFU is the FLOPs that the *model* needs for a step's tokens, divided by the FLOPs that the devices can do in the step's
time. Padding and recomputed activations do not count. Attention counts in full, although kernels may skip the masked
half, so that figures compare with published ones.

The peaks are those of the vendors' data sheets: dense matrix products at boost clock, accumulated in fp32 as torch
does. A data sheet's rate "with sparsity" is twice the dense one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from paramp import ParallelContext
from paramp.base.collectives import gather_objects


class Peak(NamedTuple):
    """Peak rates of one device in dense matrix products, in 10**12 FLOPs a second. None: no hardware support."""

    fp32: float
    """fp32 operands that are not rounded (torch's default)."""
    fp16: float
    bf16: float | None
    tf32: float | None = None
    """fp32 operands that torch may round to TF32 (``torch.set_float32_matmul_precision("high")``)."""


# Words of torch's device name -> peaks. The first row whose words all occur is used, so specific rows come first.
PEAKS: Mapping[tuple[str, ...], Peak] = {
    ("B200",): Peak(fp32=75.0, tf32=1125.0, fp16=2250.0, bf16=2250.0),
    ("H200", "NVL"): Peak(fp32=60.0, tf32=417.5, fp16=835.5, bf16=835.5),
    ("H200",): Peak(fp32=67.0, tf32=494.7, fp16=989.4, bf16=989.4),
    ("H100", "NVL"): Peak(fp32=60.0, tf32=417.5, fp16=835.5, bf16=835.5),
    ("H100", "PCIE"): Peak(fp32=51.2, tf32=378.0, fp16=756.0, bf16=756.0),
    ("H100",): Peak(fp32=66.9, tf32=494.7, fp16=989.4, bf16=989.4),  # SXM: "NVIDIA H100 80GB HBM3"
    ("L40S",): Peak(fp32=91.6, tf32=183.0, fp16=362.05, bf16=362.05),
    ("L4",): Peak(fp32=30.3, tf32=60.0, fp16=121.0, bf16=121.0),
    ("A100",): Peak(fp32=19.5, tf32=156.0, fp16=312.0, bf16=312.0),
    ("A30",): Peak(fp32=10.3, tf32=82.0, fp16=165.0, bf16=165.0),
    ("A10G",): Peak(fp32=35.0, tf32=35.0, fp16=70.0, bf16=70.0),
    ("A10",): Peak(fp32=31.2, tf32=62.5, fp16=125.0, bf16=125.0),
    # On GeForce cards the advertised rate is for fp16 accumulation; with fp32 it is half.
    ("RTX", "4090"): Peak(fp32=82.6, tf32=82.6, fp16=165.2, bf16=165.2),
    ("RTX", "3090"): Peak(fp32=35.6, tf32=35.6, fp16=71.0, bf16=71.0),
    ("T4",): Peak(fp32=8.1, fp16=65.0, bf16=None),
    ("V100S",): Peak(fp32=16.4, fp16=130.0, bf16=None),
    ("V100", "PCIE"): Peak(fp32=14.0, fp16=112.0, bf16=None),
    ("V100",): Peak(fp32=15.7, fp16=125.0, bf16=None),
    ("MI300X",): Peak(fp32=163.4, tf32=653.7, fp16=1307.4, bf16=1307.4),
    ("MI250X",): Peak(fp32=47.85, fp16=191.5, bf16=191.5),  # one of the card's two dies, which torch lists as devices
}

# Words that mark other chips or reduced variants, whose names also contain the words of a row.
OTHERS = frozenset({"LAPTOP", "MOBILE", "MAX-Q", "MIG", "D", "TI", "SUPER"})


def peak_flops(name: str, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """The peak rate of a device in matrix products of ``dtype``, in FLOPs per second; None if it is not known.

    Args:
        name: the result of ``torch.cuda.get_device_name()``, such as ``"NVIDIA A100-SXM4-80GB"``.
        tf32: whether fp32 operands may be rounded to TF32.
    """
    # split at hyphens and without, because both "A100-SXM4" and "MAX-Q" have to match
    words = set(name.upper().replace("-", " ").split()) | set(name.upper().split())
    if words & OTHERS:
        return None
    for row, peak in PEAKS.items():
        if words.issuperset(row):
            single = peak.tf32 if tf32 and peak.tf32 is not None else peak.fp32
            rate = {torch.float32: single, torch.float16: peak.fp16, torch.bfloat16: peak.bf16}.get(dtype)
            return None if rate is None else rate * 1e12
    return None


def world_peak_flops(context: ParallelContext, per_device: float | None = None) -> float | None:
    """The peak rate of all devices of the world, in FLOPs per second; None if any is unknown. A world collective.

    A GPU shared by several ranks counts once. CPUs are not in the table; each rank on a CPU counts as a device.

    Args:
        per_device: FLOPs per second of each device. None: from the table.
    """
    device = context.device
    name, rate = f"cpu of rank {context.rank}", per_device
    if device.type == "cuda":
        name = str(torch.cuda.get_device_properties(device).uuid)
        if rate is None:
            tf32 = torch.get_float32_matmul_precision() != "highest"
            rate = peak_flops(torch.cuda.get_device_name(device), context.config.precision.compute, tf32=tf32)
    rates = dict(gather_objects((name, rate))).values()
    return None if None in rates else math.fsum(rate for rate in rates if rate is not None)


def mfu(flops: float, seconds: float, peak: float | None) -> float | None:
    """The MFU of a step of ``flops`` and ``seconds``, 0 to 1; ``peak`` in FLOPs per second. None if it is unknown."""
    return None if peak is None else flops / (seconds * peak)
