"""A hash of a tensor's bits, computed on its device.

It is a sum of 32-bit words, each times an odd 64-bit number that depends on its index, modulo 2**64. Multiplying by an
odd number is invertible, so a change in a single word always shows. Changes in several words cancel out with a chance
of about 2**-32 if only signs differ, of 2**-64 in general.
"""

import functools

import torch
import torch.nn.functional as F

CHUNK_WORDS = {"cpu": 2**18, "cuda": 2**22}
"""Words that are hashed at once. The hash needs 16 bytes for each, beside the tensor."""


def hash_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A hash of the bits of ``tensor``, of any shape and dtype: 0-dim int64, on its device; no host synchronisation."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    multipliers = _multipliers(tensor.device)
    for number, words in enumerate(_words(tensor).split(len(multipliers))):
        total += (words * multipliers[: len(words)]).sum() * (2 * number + 1)
    return total


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of ``tensor`` as 1-dim int32, filled up with zeros; a view of it where it fits."""
    octets = tensor.detach().reshape(-1).view(torch.uint8)
    if octets.numel() % 4 or octets.storage_offset() % 4:
        octets = F.pad(octets, (0, -octets.numel() % 4))
    return octets.view(torch.int32)


@functools.cache
def _multipliers(device: torch.device) -> torch.Tensor:
    """Odd numbers for a chunk, 1-dim int64, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**63), 2**63 - 1, (CHUNK_WORDS[device.type],), generator=generator)
    return numbers.bitwise_or_(1).to(device)
