"""Sums of squares that do not depend on an order or a layout, against Python's exact fractions."""

import math
import random
from fractions import Fraction
from unittest import mock

import pytest
import torch
from counting import Operators
from torch._subclasses.fake_tensor import FakeTensorMode

from paramp.base import loop_block_sizes
from paramp.exact.sum_of_squares import largest, squares, total

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def exact(values):
    return sum((Fraction(value) ** 2 for value in values.double().tolist()), Fraction(0))


def sum_of(parts, norm_weights=None, order=None):
    """The total over ranks of which each has one of ``parts``, added up in ``order``."""
    norm_weights = norm_weights or [1.0] * len(parts)
    maximum = torch.stack([largest([part], CPU) for part in parts]).amax()
    by_rank = [squares([part], [weight], maximum) for part, weight in zip(parts, norm_weights, strict=True)]
    bins = torch.zeros(3, dtype=torch.float64)
    for index in order or range(len(parts)):
        bins = bins + by_rank[index]
    return total(bins)


def spread(size, dtype):
    """Numbers of very different magnitudes, of which some are subnormal."""
    return (torch.randn(size) * 2.0 ** torch.randint(-20, 12, (size,))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_exact_to_its_bound(dtype):
    torch.manual_seed(3)
    for size in (1, 2, 1000, 70_000):
        values = spread(size, dtype)
        expected = exact(values)
        error = abs(Fraction(sum_of([values]).item()) - expected)
        assert error <= expected * (Fraction(size, 2**59) + Fraction(1, 2**52))
        assert sum_of([values]).item() == pytest.approx(math.fsum(values.double().square().tolist()), rel=1e-12, abs=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_order_and_any_parts_have_the_same_bits(dtype, monkeypatch):
    torch.manual_seed(3)
    chance = random.Random(3)
    values = spread(150_000, dtype)
    values[chance.randrange(len(values))] = 6e4
    expected = sum_of([values])
    for size in (1000, 2**14, 2**16, 2**25):
        monkeypatch.setitem(loop_block_sizes.SQUARES_BLOCK, "cpu", size)
        assert sum_of([values]).equal(expected)
    for _ in range(5):
        values = values[torch.randperm(len(values))]
        ends = sorted(chance.sample(range(1, len(values)), 7))
        parts = list(values.tensor_split(ends))
        order = chance.sample(range(8), 8)
        assert sum_of(parts, order=order).equal(expected)
        # The first half on one rank, the rest on two and on eight, in other parts on each of them.
        half = len(values) // 2
        middle, end = values[half : half + 10_000], values[half + 10_000 :]
        copies = [values[:half], *[middle] * 2]
        weights = [1.0, 0.5, 0.5]
        for _ in range(8):
            where = chance.randrange(1, len(end))
            copies += [end[where:], end[:where]]
            weights += [0.125, 0.125]
        order = chance.sample(range(len(copies)), len(copies))
        assert sum_of(copies, weights, order).equal(expected)


def test_many_of_the_largest_fill_the_first_bin_exactly_up_to_the_capacity():
    """As of 2**31 elements on four ranks each: what 2**10 additions of a bin of 2**21 make."""
    most = torch.tensor(2.0 - 2.0**-23, dtype=torch.float64)  # the largest of its exponent
    values = torch.full((2**21,), most, dtype=torch.float32)
    bins, one, last = (
        squares([values[:count]], [weight], most) for count, weight in ((2**20 + 3, 0.125), (1, 1.0), (1, 0.25))
    )
    assert [Fraction(value) for value in bins.tolist()] == [Fraction(value) * (2**20 + 3) / 8 for value in one.tolist()]
    assert sum(map(Fraction, one.tolist())) == Fraction(most.item()) ** 2
    assert bins[0] == 4 * (2**20 + 3) / 8  # the nearest multiple of the unit is the bound itself
    assert squares([torch.tensor([2.0 - 2.0**-22])], [1.0], most)[0] == 4  # as the unit is 2**-18
    world = squares([values], [0.25], most) * 2**10 * 4
    last, unit = squares([values[:1]], [0.25], most), 4 / 2**20
    assert world[0] / (unit / 4) == 2**53  # of the smallest unit
    assert ((world - last) + last).equal(world)


@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-126, 1.0, 2.0**104])
def test_the_ends_of_the_range_are_exact(scale):
    values = torch.tensor([1.0, -3.0, 2.0**23 - 1, 5.0, 0.0, -0.0]) * scale
    assert Fraction(sum_of([values]).item()) == exact(values)
    assert sum_of([values[:2], values[2:]]).equal(sum_of([values.flip(0)]))


def test_zeros_nothing_and_norm_weights_of_zero_count_as_nothing():
    for gradients in ([], [torch.zeros(5)], [torch.empty(0)], [torch.zeros(3), torch.empty(0, 2)]):
        maximum = largest(gradients, CPU)
        assert maximum.equal(torch.zeros((), dtype=torch.float64))
        assert squares(gradients, [1.0] * len(gradients), maximum).equal(torch.zeros(3, dtype=torch.float64))
    assert sum_of([torch.ones(4), torch.ones(3)], [1.0, 0.0]) == 4
    uncounted = squares([torch.ones(4), torch.tensor([math.nan])], [1.0, 0.0], torch.ones((), dtype=torch.float64))
    assert total(uncounted) == 4


def assert_is(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_one_element_that_is_not_finite_is_found(dtype, wrong):
    """With a norm weight of zero too."""
    values = torch.ones(100_003, dtype=dtype)
    values[70_001] = wrong
    maximum = largest([torch.ones(3), values], CPU)
    assert_is(maximum, abs(wrong))
    sums = squares([values], [0.5], maximum)
    assert_is(total(sums), abs(wrong))
    assert_is(total(sums + squares([torch.ones(3)], [1.0], maximum)), abs(wrong))
    assert_is(total(squares([torch.ones(3), values], [1.0, 0.0], maximum)), abs(wrong))
    dropped = squares([values], [0.5], torch.ones((), dtype=torch.float64))  # by a maximum that ignores NaN
    assert not total(dropped).isfinite()


@pytest.mark.parametrize("maximum", [math.inf, math.nan])
def test_nan_on_one_rank_and_inf_on_another_are_nan_whatever_the_maximum_keeps(maximum):
    parts = [torch.tensor([1.0, math.inf]), torch.tensor([2.0]), torch.tensor([math.nan, 3.0])]
    maximum = torch.tensor(maximum, dtype=torch.float64)
    assert total(torch.stack([squares([part], [1.0], maximum) for part in parts]).sum(0)).isnan()


def test_what_has_no_exact_square_or_product_is_refused():
    one = torch.ones((), dtype=torch.float64)
    with pytest.raises(ValueError, match=r"dtype torch.float64, expected float32"):
        squares([torch.ones(2, dtype=torch.float64)], [1.0], one)
    with pytest.raises(ValueError, match=r"norm weight 0.33.*, expected 0 or a power of two"):
        squares([torch.ones(2)], [1 / 3], one)


@pytest.mark.real_sizes
def test_a_gpu_launches_few_kernels():
    with FakeTensorMode():
        counts, most = [], torch.empty((), dtype=torch.float64)
        for length, size in ((2**22, 2**16), (2**27, loop_block_sizes.SQUARES_BLOCK["cuda"])):
            with mock.patch.dict(loop_block_sizes.SQUARES_BLOCK, cpu=size), Operators() as operators:
                squares([torch.empty(length, dtype=torch.float16)], [1.0], most)
            counts.append(sum(not operator.is_view for operator, _ in operators.calls))
    assert counts[0] > 2**22 / 2**16 * 10
    assert counts[1] < 100
    assert loop_block_sizes.SQUARES_BLOCK["cuda"] * 8 * 3 < 2**30  # bytes of its temporaries
