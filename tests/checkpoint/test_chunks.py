"""Slices of tensors: ranges of a flattened tensor, split into rectangles and joined again."""

import itertools

import pytest
import torch
from pool import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from paramp.base.errors import CheckpointError
from paramp.checkpoint.chunks import chunk_of, flat_slices


def test_every_range_of_elements_is_its_slices():
    for shape in [(), (7,), (3, 4), (2, 3, 4), (1, 5, 1), (2, 1, 3, 2)]:
        whole = torch.arange(max(1, torch.Size(shape).numel())).view(shape)
        for start, stop in itertools.combinations(range(whole.numel() + 1), 2):
            found = []
            for offsets, sizes in flat_slices(shape, start, stop):
                slice_ = whole
                for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                    slice_ = slice_.narrow(dim, offset, size)
                found += slice_.reshape(-1).tolist()
            assert found == list(range(start, stop)), (shape, start, stop)


def test_a_range_of_elements_has_few_slices():
    assert len(list(flat_slices((10, 10, 10), 11, 989))) == 5
    assert list(flat_slices((4, 4), 5, 14)) == [((1, 1), (1, 3)), ((2, 0), (1, 4)), ((3, 0), (1, 2))]


def test_a_dim_that_was_split_in_two_is_one_again():
    """As query, key and value side by side are kept under tensor parallelism."""
    whole = torch.arange(24.0).view(6, 4)
    chunk = chunk_of("qkv", whole.view(3, 2, 4), whole.view(3, 2, 4), shape=(6, 4))
    rebuilt = torch.zeros(6, 4)
    for slice_ in chunk.slices:
        rebuilt[slice_.offsets[0] : slice_.offsets[0] + slice_.sizes[0]] = slice_.values
    assert torch.equal(rebuilt, whole)
    chunk = chunk_of("qkv", whole.view(3, 2, 4), whole.reshape(-1)[3:18], shape=(6, 4), elements=(3, 18))
    held = {
        (slice_.offsets[0] + row, slice_.offsets[1] + column): value
        for slice_ in chunk.slices
        for row, values in enumerate(slice_.values.tolist())
        for column, value in enumerate(values)
    }
    assert held == {divmod(index, 4): float(index) for index in range(3, 18)}


@on_ranks(2)
def test_terms_of_a_sum_are_not_saved(world):
    terms = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (2,)), [Partial()])
    with pytest.raises(CheckpointError, match=r"weight: its placements are \(Partial\(sum\),\), but a partial sum"):
        chunk_of("weight", terms, terms.to_local())
