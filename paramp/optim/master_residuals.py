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

import torch


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The masters, float32, of ``weight`` (float16 or bfloat16) and ``remainder`` (int16), elementwise."""
    wide = weight.float()
    if weight.dtype is torch.bfloat16:
        return (wide.view(torch.int32) + remainder).view(torch.float32)
    return wide - remainder.float() * _steps(wide)


def split(master: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    """Round ``master`` (float32) to ``weight``, and store the difference in ``remainder``; both in place."""
    weight.copy_(master)
    wide = weight.float()
    if weight.dtype is torch.bfloat16:
        left = master.view(torch.int32) - wide.view(torch.int32)
        remainder.copy_(left.masked_fill_(~wide.isfinite(), 0).clamp_(-(2**15), 2**15 - 1))
        return
    steps = _steps(wide)
    left = wide.sub_(master).div_(steps).round_()
    remainder.copy_(left.nan_to_num_(0.0, 0.0, 0.0).clamp_(1 - 2.0**15, 2.0**15 - 1))


def _steps(wide: torch.Tensor) -> torch.Tensor:
    """2**(e - 26), float32: the value of one step of the remainder of each fp16 weight, given in float32."""
    exponent = (wide.view(torch.int32) & 0x7F800000).clamp(113 << 23, 142 << 23)  # of 2**-14 to 2**15
    return (exponent - (26 << 23)).view(torch.float32)
