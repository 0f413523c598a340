"""Long tensors in flat buffers: where they are in memory."""

import sys
from pathlib import Path

import pytest
import torch

from paramp.base import sizes
from paramp.base.scratch import zeros_apart

CPU = torch.device("cpu")
has_huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int16, torch.float64])
@pytest.mark.real_sizes
@pytest.mark.parametrize("size", [0, 1, 2**16 + 3, 2**22 + 5])
def test_they_are_zeros_that_can_be_written(size, dtype):
    first, second = (zeros_apart(size, dtype, CPU) for _ in range(2))
    assert (first.shape, first.dtype, first.is_contiguous()) == ((size,), dtype, True)
    first.add_(1)
    assert not second.any()
    assert bool((first == 1).all())
    if first.nbytes >= 2**18:
        assert first.data_ptr() % 4096 != second.data_ptr() % 4096


@pytest.mark.skipif(sys.platform != "linux" or not has_huge_pages, reason="this system has no transparent huge pages")
@pytest.mark.real_sizes
def test_the_longest_ask_for_huge_pages():
    """By the kernel's flags of the memory in the middle."""
    values = zeros_apart(8 * sizes.HUGE, torch.float32, CPU)
    address = values[len(values) // 2].data_ptr()
    inside, flags = False, []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.partition(" ")[0]
        if "-" in head and not head.endswith(":"):
            start, stop = (int(one, 16) for one in head.split("-"))
            inside = start <= address < stop
        elif inside and head == "VmFlags:":
            flags = line.split()[1:]
    assert "hg" in flags
