"""Memory for temporaries that is used again, and for long tensors that one loop goes over."""

from __future__ import annotations

import itertools

import torch

KEPT = 2**19
"""Elements. Longer temporaries are not kept."""


class Scratch:
    """Temporaries by name, kept between uses: on a CPU a new tensor of megabytes costs a page fault for each 4 KiB."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def like(self, name: str, block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the shape of ``block``, 1-dim, uninitialised; the next one of this ``name`` overwrites it."""
        if block.numel() > KEPT:
            return torch.empty_like(block, dtype=dtype)
        held = self._held.get(name)
        if held is None or held.numel() < block.numel() or held.dtype is not dtype:
            with torch.inference_mode(False):  # whose tensors cannot be written to outside of it
                held = self._held[name] = torch.empty_like(block, dtype=dtype)
        return held if held.numel() == block.numel() else held[: block.numel()]


LONG = 2**18
"""Bytes from which tensors begin apart."""
_num_long = itertools.count()


def zeros_apart(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, 1-dim; long ones on a CPU begin at another place in a page of memory than the ones made before.

    The system gives long tensors whole pages, so equal indices of all have one place, and share few sets of the cache
    and its store queue: AdamW over 4 tensors of 100 M elements took 79 ms, and 61 ms where they begin apart (EPYC).
    """
    if device.type != "cpu" or size * dtype.itemsize < LONG:
        return torch.zeros(size, dtype=dtype, device=device)
    lines = next(_num_long) * 17 % 64  # of 64 bytes each, of which a page has 64
    offset = lines * 64 // dtype.itemsize
    return torch.zeros(offset + size, dtype=dtype)[offset:]
