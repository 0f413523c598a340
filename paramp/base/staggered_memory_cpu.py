"""Long tensors that one loop over memory goes over together: where each begins, and the pages that it is in."""

from __future__ import annotations

import ctypes
import itertools
import sys

import torch

from . import loop_block_sizes

_PAGE = 2**12
_MADV_HUGEPAGE = 14
_num_long = itertools.count()


def zeros_apart(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, 1-dim; long ones on a CPU begin at another place in a page of memory than the ones made before.

    The system gives long tensors whole pages, so equal indices of all have one place, and share few sets of the cache
    and its store queue: AdamW over 4 tensors of 100 M elements took 79 ms, and 61 ms where they begin apart (EPYC).
    The longest are in huge pages, with which a pass over memory looks up fewer addresses.
    """
    if device.type != "cpu" or size * dtype.itemsize < loop_block_sizes.APART:
        return torch.zeros(size, dtype=dtype, device=device)
    memory = torch.empty(size + _PAGE // dtype.itemsize, dtype=dtype, device=device)
    if memory.nbytes >= loop_block_sizes.HUGE:
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
