"""Dropout of attention probabilities by the position of query and key, the same however the sequence is sharded.

An element's random number is a hash of the seed, its row of the batch, its head and its two positions, each absorbed by
MurmurHash3's finalizer for 32 bits (Appleby, public domain), whose every output bit depends on every input bit.
"""

from __future__ import annotations

import torch

_FIRST, _SECOND = 0x85EBCA6B, 0xC2B2AE35
"""The finalizer's factors."""
_START = 0x9E3779B9


def kept(
    seed: int, probability: float, batch: torch.Tensor, heads: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Which probabilities dropout keeps: (B, H, queries, keys) bool.

    Args:
        seed: at most 64 bits of it count.
        probability: of an element to be dropped, to 32 bits.
        batch: (B,), as the others int on one device: rows of the batch.
        heads: (H,), numbered over all ranks.
        queries: positions in the sequence.
        keys: positions in the sequence.
    """
    state = torch.full((1, 1, 1, 1), _signed(_START), dtype=torch.int32, device=keys.device)
    for word in (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF):
        state = _mixed(state ^ _signed(word))
    for dim, words in enumerate((batch, heads, queries)):
        state = _mixed(state ^ words.to(torch.int32).view([-1 if axis == dim else 1 for axis in range(4)]))
    # The second time, because two rows of which the states differ in few bits have the same numbers in another order.
    drawn = _mixed(_mixed(state ^ keys.to(torch.int32)) ^ _mixed(state + _signed(_START)))
    return drawn >= int(probability * 2**32) - 2**31


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finalizer, in place; the shifts of torch are of signed numbers."""
    x ^= (x >> 16) & 0xFFFF
    x *= _signed(_FIRST)
    x ^= (x >> 13) & 0x7FFFF
    x *= _signed(_SECOND)
    x ^= (x >> 16) & 0xFFFF
    return x


def _signed(word: int) -> int:
    """The int32 of the same 32 bits."""
    return word - 2**32 if word >= 2**31 else word
