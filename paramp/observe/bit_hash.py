"""A hash of a tensor's bits, computed on its device.

It is the sum of all 32-bit words modulo 2**64, each times an odd 64-bit multiplier that depends on its index. An odd
multiplier is invertible modulo 2**64, so a change of a single word always changes the hash. Changes of several words
cancel with a probability of about 2**-64, or 2**-32 if only sign bits differ.
"""

import functools

import torch
import torch.nn.functional as F

from ..base import loop_block_sizes


def hash_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A hash of the bits of ``tensor`` (any dims and dtype): 0-dim int64 on its device, without synchronisation."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    sizes = loop_block_sizes.HASHED_WORDS
    multipliers = _multipliers(tensor.device, sizes.get(tensor.device.type, sizes["cuda"]))
    for number, words in enumerate(_words(tensor).split(len(multipliers))):
        # chunks share the multipliers; the odd factor makes the hash depend on the index of the chunk
        total += (words * multipliers[: len(words)]).sum() * (2 * number + 1)
    return total


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of ``tensor`` as 1-dim int32, padded with zeros; a view if strides, size and alignment allow."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    octets = plain.reshape(-1).contiguous().view(torch.uint8)  # reshape alone leaves a column its stride
    # view(int32) needs whole words at a 4-byte offset; padding copies, which restores the alignment
    if octets.numel() % 4 or octets.storage_offset() % 4:
        octets = F.pad(octets, (0, -octets.numel() % 4))
    return octets.view(torch.int32)


@functools.cache
def _multipliers(device: torch.device, count: int) -> torch.Tensor:
    """Odd multipliers for a chunk, 1-dim int64, equal on every rank."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    return numbers.bitwise_or_(1).to(device)
