"""Memory for temporaries that is used again, and for long tensors that one loop goes over."""

from __future__ import annotations

import ctypes
import itertools
import sys

import torch

STEP_BLOCK = {"cpu": 2**19, "cuda": 2**26}
"""Elements of a block of the optimizer's step, by device.

On a CPU few enough to stay in the cache between the passes over them, and so many that some microseconds of Python for
each pass do not count. On a GPU, where a launch costs some 5 us, mostly a whole buffer, of 2**25 elements and more: a
pass over 2**26 fp32 elements takes an H200, with 4.8 TB/s, some 100 us, one over 2**23 only 14 us. Each fp32 temporary
then takes 256 MiB, at a time when there are no activations. Computed, not measured.
"""
SQUARES_BLOCK = {"cpu": 2**16, "cuda": 2**25}
"""Elements of a block of exact squares (:mod:`paramp.optim.reproducible.squares`), which has three fp64 temporaries.

16 operations a block: 229,000 launches for 10**9 elements in blocks of 2**16, 484 in blocks of 2**25, with 768 MiB.
"""
KEPT = STEP_BLOCK["cpu"]
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
HUGE = 2**22
"""Bytes from which tensors are given huge pages: two of them."""
_PAGE = 2**12
_MADV_HUGEPAGE = 14
_num_long = itertools.count()


def zeros_apart(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, 1-dim; long ones on a CPU begin at another place in a page of memory than the ones made before.

    The system gives long tensors whole pages, so equal indices of all have one place, and share few sets of the cache
    and its store queue: AdamW over 4 tensors of 100 M elements took 79 ms, and 61 ms where they begin apart (EPYC).
    The longest are in huge pages, with which a pass over memory looks up fewer addresses.
    """
    if device.type != "cpu" or size * dtype.itemsize < LONG:
        return torch.zeros(size, dtype=dtype, device=device)
    memory = torch.empty(size + _PAGE // dtype.itemsize, dtype=dtype, device=device)
    if memory.nbytes >= HUGE:
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
