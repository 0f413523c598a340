"""The sum of the squares of gradients, with the same bits whatever ranks hold them, in whatever order.

It is exact but for what is cut off each square, which depends on nothing but that element and the largest one: so
there is no order to keep (Demmel and Nguyen, *Parallel Reproducible Summation*, IEEE Trans. Comput. 64(7), 2015).

The square of an fp32, fp16 or bf16 number g is exact in fp64: it has twice 24 bits, and is from 2**-298 to 2**256. Let
2**E be the largest power of two that is not above the largest |g| of all ranks, so that g*g < 4 * 4**E. Each square is
cut into multiples of three units

    u_k = 4 * 4**E / 2**(20 k),    k = 1, 2, 3,

of which the first is the nearest to the square, the second the nearest to what is left, and so on. The sums of each
are ``bins``. What is multiplied by an integer of at most 20 bits is summed, so a sum of fp64 numbers is exact in every
order up to 2**53 units.

Capacity: n elements, counted once in the world, have a bin of at most 2**20 n units. A norm weight 2**-j, of elements
that 2**j ranks hold, makes the unit smaller by as much. So all is exact for n 2**j <= 2**33: for 2**31 elements on
4 ranks each, or 2**30 on 8. Only the first bin of elements that are all as large as the largest needs that much: it is
enough that sum(g*g) <= 2**(34 - j) 4**E, and that n 2**j <= 2**34 for the others.

Error: at most u_3 / 2 = 2**-59 4**E is lost of a square, and the sum is at least 4**E, so the relative error is at most
2**-59 n, and 2**-52 for adding the three bins up. That is 3e-11 for 2**24 elements. Half of it is that of the norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..base import loop_block_sizes
from ..base.collectives import all_reduce_

_BITS = 20
"""Of a bin."""
_NUM_BINS = 3
_EXPONENTS = (-149, 127)
"""Of the smallest and the largest fp32 numbers; zero, inf and NaN have others in fp64."""


@torch.no_grad()
def largest(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The largest magnitude in plain ``gradients``, of which some may be empty; 0-dim float64 on ``device``.

    It is inf if an element is, NaN if one is NaN; 0 without elements.
    """
    found = [torch.zeros((), dtype=torch.float64, device=device)]
    for gradient in gradients:
        if gradient.numel():
            least, most = torch.aminmax(gradient.detach())  # 13 times as fast as vector_norm, and NaN stays NaN
            found.append(torch.maximum(-least, most).to(device, torch.float64))
    return torch.stack(found).amax()


@torch.no_grad()
def squares(gradients: Sequence[torch.Tensor], norm_weights: Sequence[float], largest: torch.Tensor) -> torch.Tensor:
    """This rank's part of the sum of weight x g*g over plain ``gradients``, as three bins that the ranks can add up.

    Args:
        gradients: of any shape and device; float32, float16 or bfloat16.
        norm_weights: the weight of the elements of each gradient: 0, for none of them, or 2**-j.
        largest: 0-dim float64, the maximum over all ranks of what :func:`largest` returns. A maximum that drops NaN is
            no harm.

    Returns:
        1-dim float64 on the device of ``largest``, for :func:`total` of its sum over all ranks, which is NaN if an
        element of any rank is, else inf if one is.

    Raises:
        ValueError: a gradient is of another dtype; a norm weight is none of these.
    """
    _check_exactness(gradients, norm_weights)
    units = _units(largest)
    bins = torch.zeros_like(units)
    for gradient, norm_weight in zip(gradients, norm_weights, strict=True):
        if norm_weight and gradient.numel():
            bins += _bins(gradient.reshape(-1), units.to(gradient.device)).to(bins.device) * norm_weight
    # What is left of inf after the first bin is NaN.
    return torch.where(largest.isfinite(), bins, torch.maximum(bins[0], largest))


def squares_over_world(
    gradients: Sequence[torch.Tensor], norm_weights: Sequence[float], device: torch.device
) -> torch.Tensor:
    """The sum of squares over the world on its first rank, and 0 on the others; a collective of the world."""
    most = largest(gradients, device)
    all_reduce_(most, op=dist.ReduceOp.MAX)
    bins = squares(gradients, norm_weights, most)
    all_reduce_(bins)
    return total(bins) if dist.get_rank() == 0 else torch.zeros_like(most)


def total(bins: torch.Tensor) -> torch.Tensor:
    """The sum of squares, 0-dim float64, from the sum over all ranks of what :func:`squares` returns."""
    return bins[0] + (bins[1] + bins[2])


def _check_exactness(gradients: Sequence[torch.Tensor], norm_weights: Sequence[float]) -> None:
    for gradient, norm_weight in zip(gradients, norm_weights, strict=True):
        if gradient.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(
                f"squares got a gradient of dtype {gradient.dtype}, expected float32, float16 or bfloat16, whose "
                "squares are exact in float64; convert the parameters to one of these"
            )
        if norm_weight and math.frexp(norm_weight)[0] != 0.5:
            raise ValueError(
                f"squares got the norm weight {norm_weight}, expected 0 or a power of two, by which products are "
                "exact; take a power of two of ranks on each axis"
            )


def _units(largest: torch.Tensor) -> torch.Tensor:
    """The units u_k of the bins, made of the bits of fp64 numbers: functions such as pow need not be exact."""
    exponent = ((largest.view(torch.int64) >> 52) - 1023).clamp(*_EXPONENTS)
    steps = torch.arange(1, _NUM_BINS + 1, device=largest.device) * _BITS
    return ((2 * exponent + 2 - steps + 1023) << 52).view(torch.float64)


def _bins(flat: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    """The three bins of ``flat``, 1-dim.

    An fp64 number in [2**52 u, 2**53 u) is a multiple of u. So x + 1.5 * 2**52 u, for |x| <= 2**51 u, is rounded to the
    nearest one, and what is subtracted from it is exact. So is the remainder: no longer than x, and a multiple of the
    last bit of x. Two additions are as fast as memory, where a quotient, torch.round and a product are three passes.
    """
    shifts = (units * (1.5 * 2**52)).unbind()
    sums = []
    for block in flat.split(loop_block_sizes.SQUARES_BLOCK[flat.device.type]):
        rest = block.double().square_()
        for shift in shifts:
            multiples = (rest + shift).sub_(shift)
            rest.sub_(multiples)
            sums.append(multiples.sum())
    return torch.stack(sums).view(-1, _NUM_BINS).sum(0)
