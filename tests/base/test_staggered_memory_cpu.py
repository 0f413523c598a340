"""Long tensors in flat buffers: where they are in memory."""

import pytest
import torch

from paramp.base.staggered_memory_cpu import zeros_apart

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int16, torch.float64])
@pytest.mark.real_sizes
@pytest.mark.parametrize("size", [0, 1, 2**16 + 3, 2**22 + 5])
def test_tensors_are_zeros_that_can_be_written(size, dtype):
    first, second = (zeros_apart(size, dtype, CPU) for _ in range(2))
    assert (first.shape, first.dtype, first.is_contiguous()) == ((size,), dtype, True)
    first.add_(1)
    assert not second.any()
    assert bool((first == 1).all())
    if first.nbytes >= 2**18:
        assert first.data_ptr() % 4096 != second.data_ptr() % 4096
