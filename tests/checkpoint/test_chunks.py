"""Boxes of tensors: a stretch of a flattened tensor, cut up and put together again."""

import itertools

import torch

from paramp.checkpoint.chunks import flat_boxes, piece_of


def test_every_stretch_of_a_tensor_is_its_boxes():
    for shape in [(), (7,), (3, 4), (2, 3, 4), (1, 5, 1), (2, 1, 3, 2)]:
        whole = torch.arange(max(1, torch.Size(shape).numel())).view(shape)
        for start, stop in itertools.combinations(range(whole.numel() + 1), 2):
            found = []
            for offsets, sizes in flat_boxes(shape, start, stop):
                box = whole
                for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                    box = box.narrow(dim, offset, size)
                found += box.reshape(-1).tolist()
            assert found == list(range(start, stop)), (shape, start, stop)


def test_a_stretch_has_few_boxes():
    assert len(list(flat_boxes((10, 10, 10), 11, 989))) == 5
    assert list(flat_boxes((4, 4), 5, 14)) == [((1, 1), (1, 3)), ((2, 0), (1, 4)), ((3, 0), (1, 2))]


def test_a_dim_that_was_split_in_two_is_one_again():
    """As query, key and value side by side are kept under tensor parallelism."""
    whole = torch.arange(24.0).view(6, 4)
    piece = piece_of("qkv", whole.view(3, 2, 4), whole.view(3, 2, 4), shape=(6, 4))
    rebuilt = torch.zeros(6, 4)
    for box in piece.boxes:
        rebuilt[box.offsets[0] : box.offsets[0] + box.sizes[0]] = box.values
    assert torch.equal(rebuilt, whole)
    piece = piece_of("qkv", whole.view(3, 2, 4), whole.reshape(-1)[3:18], shape=(6, 4), own=(3, 18))
    held = {
        (box.offsets[0] + row, box.offsets[1] + column): value
        for box in piece.boxes
        for row, values in enumerate(box.values.tolist())
        for column, value in enumerate(values)
    }
    assert held == {divmod(index, 4): float(index) for index in range(3, 18)}
