"""Stochastic rounding to half precision, with random bits that depend on no layout.

A value between two neighbouring numbers of the dtype becomes the upper one with a probability of its distance from the
lower one in units of theirs, so that its mean is exact, and updates below half a unit of a weight's last place are not
lost (Gupta et al., 2015). The random bits of an element are a hash of seed, step, the parameter's name and its index in
the whole tensor, so that every rank that holds it rounds it alike.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


def key_of(seed: int, name: str) -> int:
    """A 32-bit key of a parameter."""
    return zlib.crc32(f"{seed} {name}".encode())


def random_bits(index: torch.Tensor, key: int, step: torch.Tensor) -> torch.Tensor:
    """32 random bits for each element of ``index``, as int32.

    Args:
        index: int64, or int32, which is faster and gives the same bits; 0 or more.
        step: 0-dim int64 on the device.
    """
    if index.dtype is torch.int64:  # indices that differ by multiples of 2**32 then differ in the lower half
        index = (index ^ (index >> 32) * 0x9E3779B1).int()
    word = _mix_(index ^ signed(key))
    return _mix_(word.bitwise_xor_(_mix_((step ^ key * 0x9E3779B1 % 2**32).int())))


@dataclass(frozen=True, eq=False)
class BitStream:
    """The random bits of one parameter at each step."""

    key: int
    """Equal on all ranks that have a part of the parameter: :func:`key_of`."""
    step: torch.Tensor
    """0-dim int64 on the device, the number of steps made; read at each call."""

    def __call__(self, index: torch.Tensor, word: int) -> torch.Tensor:
        """32 random bits for each element of ``index``, as int32; others for each ``word``. Word 0 is the weight's."""
        return random_bits(index, (self.key + word * 0x9E3779B1) % 2**32, self.step)


def _mix_(word: torch.Tensor) -> torch.Tensor:
    """In place, a bijection of 32-bit words with little bias (Wellons, "lowbias32"). The products wrap."""
    word.bitwise_xor_(_shifted(word, 16)).mul_(0x7FEB352D)
    word.bitwise_xor_(_shifted(word, 15)).mul_(signed(0x846CA68B))
    return word.bitwise_xor_(_shifted(word, 16))


def _shifted(word: torch.Tensor, bits: int) -> torch.Tensor:
    """``word >> bits`` without copies of the sign."""
    return (word >> bits).bitwise_and_(2 ** (32 - bits) - 1)


def signed(word: int) -> int:
    """The int32 with the bits of ``word``, 0 to 2**32 - 1."""
    return word - 2**32 if word >= 2**31 else word


def flat_index(
    start: int, stop: int, part: Sequence[int], offsets: Sequence[int], whole: Sequence[int], device: torch.device
) -> torch.Tensor:
    """The indices in a flattened tensor of elements ``start`` to ``stop - 1`` of a flattened rectangle of it.

    As int32 where they fit, else int64.

    Args:
        part, offsets: the sizes of the rectangle, and where it begins.
        whole: the shape of the tensor.
    """
    dtype = torch.int32 if math.prod(whole) <= 2**31 else torch.int64
    rest = torch.arange(start, stop, dtype=dtype, device=device)
    if tuple(part) == tuple(whole):
        return rest
    index, stride = torch.zeros_like(rest), 1
    for size, offset, full in zip(reversed(part), reversed(offsets), reversed(whole), strict=True):
        index += (rest % size + offset) * stride
        rest = rest // size
        stride *= full
    return index


def rounded(values: torch.Tensor, bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values``, float32, rounded stochastically to ``dtype``, float16 or bfloat16, with 32 random ``bits`` (int32).

    Numbers of the dtype stay. What rounds to infinity is what rounding to nearest rounds there.
    """
    if dtype is torch.bfloat16:  # the upper half of an fp32 number
        moved = (bits & 0xFFFF).add_(values.view(torch.int32)).bitwise_and_(-0x10000).view(torch.float32)
    else:
        # The exponent of one unit in the last place: 10 below the value's, 24 below 1 for subnormal numbers.
        exponents = (((values.view(torch.int32) >> 23) & 0xFF).clamp_(min=113, max=254) - 10) << 23
        unit = exponents.view(torch.float32)
        scaled = values / unit
        floor = scaled.floor()
        up = _shifted(bits, 8).float().mul_(2.0**-24) < scaled - floor
        moved = ((floor + up) * unit).copysign(values)  # -0 stays
    largest = torch.finfo(dtype).max
    if values.device.type == "cpu" and values.numel():  # mostly all are finite there; on a GPU the host would wait
        low, high = values.aminmax()
        if low >= -largest and high <= largest:
            return moved.to(dtype)
    nearest = values.to(dtype)
    return torch.where(nearest.isfinite(), moved.clamp(-largest, largest).to(dtype), nearest)


def round_state(
    stored: Sequence[torch.Tensor], values: Sequence[torch.Tensor], bits: Callable[[int], torch.Tensor]
) -> None:
    """Round a parameter's optimizer state ``values``, float32, into ``stored``, bfloat16, stochastically; all 1-dim.

    ``bits(word)``: 32 random bits for each element. Two states take the halves of one word.
    """
    drawn = torch.empty(0)
    for index, (one, value) in enumerate(zip(stored, values, strict=True)):
        drawn = drawn >> 16 if index % 2 else bits(1 + index // 2)
        one.copy_(rounded(value, drawn, one.dtype))
