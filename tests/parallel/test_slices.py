"""Layers in slices against torch's own in fp64, and their bits on one tensor rank against two and four."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from paramp.base.dtensor import local
from paramp.distributed.reproducible.place import Place
from paramp.parallel.reproducible.slices import add_bias, fan_out, join, split, sum_slices
from paramp.parallel.reproducible.styles import SlicedColwise, SlicedRows, SlicedRowwise, SlicedSequence


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("parts", [1, 3])
def test_join_undoes_split(parts):
    x = values(2, 3, 24).requires_grad_()
    cut = split(x, 4, -1, parts)
    assert [tuple(one.shape) for one in cut] == [(2, 3, 6)] * 4
    assert all(one.is_contiguous() and one.data_ptr() % 64 == 0 for one in cut)
    whole = join(cut, -1, parts)
    assert torch.equal(whole, x)
    weights = values(2, 3, 24, seed=1)
    (whole * weights).sum().backward()
    assert torch.equal(x.grad, weights)


def test_slices_are_aligned_wherever_they_begin():
    weight = values(8, 3)  # a slice of two rows has 24 bytes
    assert all(one.data_ptr() % 64 == 0 for one in split(weight, 4, 0))
    (alias,) = fan_out(weight[1:], 1, None)
    assert alias.data_ptr() % 64 == 0


def test_aliases_get_the_trees_sum():
    x = values(5).requires_grad_()
    a, b, c, d = fan_out(x, 4, None)
    (1e8 * a + 1.0 * b - 1e8 * c + 1.0 * d).sum().backward()
    expected = (torch.tensor(1e8) + 1.0) + (torch.tensor(-1e8) + 1.0)
    assert torch.equal(x.grad, expected.expand(5))


def test_terms_are_added_in_fp32_and_rounded_once():
    terms = [torch.tensor([1.0]).half(), torch.tensor([2.0**-11]).half(), torch.tensor([2.0**-11]).half()]
    total = sum_slices(terms, None)
    assert total.dtype is torch.float32
    assert float(total.half()) == 1 + 2.0**-10  # in fp16 each addition would be lost


def test_a_bias_gets_the_sum_over_slices_of_the_sequence():
    total, bias = values(2, 8, 3).requires_grad_(), values(3, seed=1).requires_grad_()
    weights = values(2, 8, 3, seed=2)
    (add_bias(total, bias, 4, None) * weights).sum().backward()
    a, b, c, d = (weights[:, start : start + 2].reshape(-1, 3).sum(0) for start in (0, 2, 4, 6))
    assert torch.equal(bias.grad, (a + b) + (c + d))
    assert torch.equal(total.grad, weights)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, tokens):
        x = self.table(tokens)
        return x + self.down(F.relu(self.up(self.norm(x))))


def sliced(block, place, mesh=None):
    for name, style in (
        ("table", SlicedRows(place)),
        ("norm", SlicedSequence(place)),
        ("up", SlicedColwise(place)),
        ("down", SlicedRowwise(place)),
    ):
        style._apply(block.get_submodule(name), mesh)
    return block


TOKENS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))


@functools.cache
def on_one_rank():
    """The output and the gradients of a block in slices."""
    block = sliced(Block(), Place(0, 2, 4))
    output = block(TOKENS)
    (output * values(2, 8, 16, seed=5)).sum().backward()
    return output.detach(), {name: value.grad for name, value in block.named_parameters()}


def test_slices_compute_what_torch_computes():
    exact = Block().double()
    expected = exact(TOKENS)
    (expected * values(2, 8, 16, seed=5).double()).sum().backward()
    output, gradients = on_one_rank()
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6)
    for name, value in exact.named_parameters():
        torch.testing.assert_close(gradients[name].double(), value.grad, rtol=1e-5, atol=1e-5)


def compare_with_one_rank(world):
    mesh = init_device_mesh("cpu", (world.size,))
    block = sliced(Block(), Place(0, 2, 4, dist.group.WORLD), mesh)
    output = block(TOKENS)
    (output * values(2, 8, 16, seed=5)).sum().backward()
    expected, gradients = on_one_rank()
    assert torch.equal(output, expected)
    for name, value in block.named_parameters():
        own = local(value.grad)
        dim = next((dim for dim, size in enumerate(own.shape) if size != gradients[name].shape[dim]), None)
        whole = gradients[name] if dim is None else gradients[name].chunk(world.size, dim)[world.rank]
        assert torch.equal(own, whole), name


@on_ranks(2)
def test_two_tensor_ranks_have_the_same_bits(world):
    compare_with_one_rank(world)


@on_ranks(4)
def test_four_tensor_ranks_have_the_same_bits(world):
    compare_with_one_rank(world)
