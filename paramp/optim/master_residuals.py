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
    if weight.dtype is torch.bfloat16:
        upper = weight.view(torch.int16).to(torch.int32) << 16
        return (upper + remainder).view(torch.float32)
    return torch.addcmul(weight.float(), remainder.float(), _steps(weight), value=-1)


def split(master: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    """Round ``master`` (float32) to ``weight``, and store the difference in ``remainder``; both in place."""
    weight.copy_(master)
    if weight.dtype is torch.bfloat16:
        upper = weight.view(torch.int16).to(torch.int32) << 16
        left = master.view(torch.int32) - upper
        remainder.copy_(torch.where(weight.isfinite(), left, 0).clamp_(-(2**15), 2**15 - 1))
        return
    left = (weight.float() - master).div_(_steps(weight)).round_()
    remainder.copy_(left.nan_to_num_(0.0, 0.0, 0.0).clamp_(1 - 2.0**15, 2.0**15 - 1))


def _steps(weight: torch.Tensor) -> torch.Tensor:
    """2**(e - 26), float32: the value of one step of the remainder of each fp16 ``weight``."""
    exponent = (weight.view(torch.int16) >> 10).bitwise_and_(31).clamp_(min=1).to(torch.int32)
    return exponent.add_(127 - 15 - 26).bitwise_left_shift_(23).view(torch.float32)
