"""fp32 masters stored as the half-precision weight and a 16-bit remainder.

A weight is the upper part of its master, so storing only the lower part costs two bytes instead of four. For
bfloat16 the two are the upper and the lower half of the same 32 bits (as in Megatron-LM). A tie that was rounded down
is one fp32 unit off; everything else is exact. fp16 has another exponent range, so its remainder is a number of
steps at the weight's own scale::

    w = fp16(m)    e = max(exponent of w, -14)    r = int16((w - m) / 2**(e - 26))    m' = w - r * 2**(e - 26)

w - m is at most half a unit of w, 2**(e - 11), which is 2**15 steps; r is clamped to one step less, so that m' rounds
to w, never to the other neighbour of a tie. r is subtracted, so that a zero keeps its sign. Joining and splitting again
changes nothing. From 2**-14 up, a step of r is an eighth of an fp32 unit, and m' equals m bit for bit. Below, where
fp16 is subnormal, the step stays 2**-40: m' equals m bit for bit down to 2**-17, except ties, which are one step off;
below that, m' differs from m by at most 2**-40.
A weight that is not finite has the remainder 0.
"""

from __future__ import annotations

from typing import Self

import torch

from ..base.scratch_memory_cpu import Scratch
from ..base.staggered_memory_cpu import zeros_apart
from .masters import Masters, follow, sliced


class RemainderMasters(Masters):
    """The lower 16 bits of the masters; the weights are the upper part."""

    needs_fused_step = "masters: got 'remainder'"

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight)
        self.dtype = torch.float32
        self.remainders = zeros_apart(len(weight), torch.int16, weight.device)
        self.state = (self.remainders,)

    def part(self, own: slice) -> Self:
        part = super().part(own)
        part.remainders = self.remainders[own]
        return part

    def read(self, own: slice, scratch: Scratch | None = None, *, compare: bool = True) -> torch.Tensor:
        weight = sliced(self.weight, own)
        master = join(weight, sliced(self.remainders, own), scratch)
        # After a change in place, weight and remainder may not fit together: a zero with the remainder of another
        # bfloat16 may be NaN. So they are compared in any case.
        follow(weight, master, scratch)
        return master

    def write(self, own: slice, values: torch.Tensor, scratch: Scratch | None = None) -> None:
        split(values.float(), sliced(self.weight, own), sliced(self.remainders, own), scratch)

    def follow_load(self, own: slice) -> None:
        """Reset the remainders, which belong to the old weights; so weights have to be loaded before masters."""
        self.remainders[own].zero_()


def join(weight: torch.Tensor, remainder: torch.Tensor, scratch: Scratch | None = None) -> torch.Tensor:
    """The masters, float32, of ``weight`` (float16 or bfloat16) and ``remainder`` (int16); 1-dim, of ``scratch``."""
    scratch = scratch or Scratch()
    wide = scratch.like("wide", weight, torch.float32).copy_(weight)
    if weight.dtype is torch.bfloat16:
        wide.view(torch.int32).add_(scratch.like("remainder", weight, torch.int32).copy_(remainder))
        return wide
    left = scratch.like("left", weight, torch.float32).copy_(remainder)
    return wide.addcmul_(left, _powers(wide, scratch), value=-(2.0**-26))  # the products are exact


def split(master: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor, scratch: Scratch | None = None) -> None:
    """Round ``master`` (float32) to ``weight``, and store the difference in ``remainder``; both in place; 1-dim."""
    scratch = scratch or Scratch()
    weight.copy_(master)
    wide = scratch.like("left", weight, torch.float32).copy_(weight)
    # A sum is finite only if all elements are. On a GPU, asking would synchronise.
    finite = weight.device.type == "cpu" and bool(wide.sum().isfinite())
    if weight.dtype is torch.bfloat16:
        unfit = None if finite else ~wide.isfinite()
        bits = wide.view(torch.int32)
        left = torch.sub(master.view(torch.int32), bits, out=bits)
        remainder.copy_((left if unfit is None else left.masked_fill_(unfit, 0)).clamp_(-(2**15), 2**15 - 1))
        return
    inverse = _powers(wide, scratch).view(torch.int32).neg_().add_(254 << 23).view(torch.float32)
    rounded = wide.sub_(master).mul_(inverse).mul_(2.0**26).round_()
    remainder.copy_((rounded if finite else rounded.nan_to_num_(0.0, 0.0, 0.0)).clamp_(1 - 2.0**15, 2.0**15 - 1))


def _powers(wide: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """2**e of each fp16 weight, given in float32; float32. A step of its remainder is 2**(e - 26)."""
    bits = scratch.like("powers", wide, torch.int32)
    # In integers: the bits of floats are in the order of their values.
    bits = torch.bitwise_and(wide.view(torch.int32), 0x7F800000, out=bits).clamp_(113 << 23, 142 << 23)
    return bits.view(torch.float32)
