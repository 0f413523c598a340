"""Sums in one fixed tree: the order of additions, in any order of arrival and over any number of ranks."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks, run_on_ranks

from paramp.base import loop_block_sizes
from paramp.exact.tree_sum import SumTree, own_slice_of_sum, sum_over, sum_over_, tree_sum


def numbers(count, size=3):
    """Terms whose sum depends on the order of additions."""
    generator = torch.Generator().manual_seed(count)
    exponents = torch.randint(-4, 5, (count, 1), generator=generator)
    return list(torch.randn(count, size, generator=generator) * 10.0**exponents)


def test_the_tree_is_as_written():
    a, b, c, d, e = numbers(5)
    assert torch.equal(tree_sum([a]), a)
    assert torch.equal(tree_sum([a, b, c]), (a + b) + c)
    assert torch.equal(tree_sum([a, b, c, d, e]), ((a + b) + c) + (d + e))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 12, 13])
def test_a_tree_gives_the_same_bits_in_any_order_of_arrival(count):
    terms = numbers(count)
    expected = tree_sum(terms)
    orders = [list(range(count)), list(range(count))[::-1]]
    orders += [random.Random(seed).sample(range(count), count) for seed in range(5)]
    for order in orders:
        tree = SumTree(count)
        for place, index in enumerate(order):
            assert (tree.total() is None) == (place < count)
            tree.add(index, [terms[index].clone(), None])
        total, nothing = tree.total()
        assert torch.equal(total, expected)
        assert nothing is None


def test_a_missing_term_counts_as_nothing():
    for missing in itertools.product([False, True], repeat=4):
        terms = numbers(4)
        tree = SumTree(4)
        for index, term in enumerate(terms):
            tree.add(index, [None if missing[index] else term.clone()])
        (total,) = tree.total()
        kept = [term for term, gone in zip(terms, missing, strict=True) if not gone]
        if not kept:
            assert total is None
        else:
            zeroed = [torch.zeros(3) if gone else term for term, gone in zip(terms, missing, strict=True)]
            assert torch.equal(total, tree_sum(zeroed))


def test_a_tree_holds_one_list_a_level_if_terms_come_in_order():
    tree, most = SumTree(64), 0
    for index, term in enumerate(numbers(64)):
        tree.add(index, [term])
        most = max(most, len(tree._nodes))
    assert most <= 6


@on_ranks(4)
def test_ranks_add_up_the_rest_of_the_tree(world):
    terms = numbers(12, size=8)
    expected = tree_sum(terms)
    own = tree_sum(terms[3 * world.rank : 3 * world.rank + 3])
    group = dist.group.WORLD
    assert torch.equal(sum_over(own, group), expected)
    assert torch.equal(own_slice_of_sum(own.view(2, 4), group, 1), expected.view(2, 4)[:, [world.rank]])
    assert torch.equal(sum_over(own, None), own)
    assert not torch.equal(sum(terms), expected)  # another order has other bits


def add_up_in_place(world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_block_sizes, "SUM_PIECE", 8)
        for size in (1, 3, 8, 16, 17, 39):  # less than ranks, whole pieces, and with a rest
            terms = numbers(12, size)
            count = len(terms) // world.size
            own = tree_sum(terms[count * world.rank : count * (world.rank + 1)])
            sum_over_(own, dist.group.WORLD)
            assert torch.equal(own, tree_sum(terms)), size


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_add_up_the_rest_of_the_tree_in_place(ranks):
    run_on_ranks(ranks, __name__, "add_up_in_place", {})
