"""Memory for temporaries that is used again, and for long tensors that one loop goes over."""

from __future__ import annotations

import ctypes
import itertools
import sys

import torch

from . import sizes


class Scratch:
    """Temporaries by name, kept between uses: on a CPU a new tensor of megabytes costs a page fault for each 4 KiB."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def like(self, name: str, block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the shape of ``block``, 1-dim, uninitialised; the next one of this ``name`` overwrites it."""
        if block.numel() > sizes.KEPT:
            return torch.empty_like(block, dtype=dtype)
        held = self._held.get(name)
        if held is None or held.numel() < block.numel() or held.dtype is not dtype:
            with torch.inference_mode(False):  # whose tensors cannot be written to outside of it
                held = self._held[name] = torch.empty_like(block, dtype=dtype)
        return held if held.numel() == block.numel() else held[: block.numel()]


_PAGE = 2**12
_MADV_HUGEPAGE = 14
_num_long = itertools.count()


def zeros_apart(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, 1-dim; long ones on a CPU begin at another place in a page of memory than the ones made before.

    The system gives long tensors whole pages, so equal indices of all have one place, and share few sets of the cache
    and its store queue: AdamW over 4 tensors of 100 M elements took 79 ms, and 61 ms where they begin apart (EPYC).
    The longest are in huge pages, with which a pass over memory looks up fewer addresses.
    """
    if device.type != "cpu" or size * dtype.itemsize < sizes.APART:
        return torch.zeros(size, dtype=dtype, device=device)
    memory = torch.empty(size + _PAGE // dtype.itemsize, dtype=dtype, device=device)
    if memory.nbytes >= sizes.HUGE:
        _ask_for_huge_pages(memory)
    place = next(_num_long) * 17 % 64 * 64  # a page has 64 lines of 64 bytes
    offset = (place - memory.data_ptr()) % _PAGE // dtype.itemsize  # memory from the heap begins anywhere in a page
    return memory.zero_()[offset : offset + size]


def _ask_for_huge_pages(memory: torch.Tensor) -> None:
    """Ask Linux to back ``memory``, which was not written to yet, by pages of 2 MiB; it may refuse."""
    if sys.platform == "linux":
        first = -(-memory.data_ptr() // _PAGE) * _PAGE
        stop = (memory.data_ptr() + memory.nbytes) // _PAGE * _PAGE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(stop - first), _MADV_HUGEPAGE)
