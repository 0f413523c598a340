"""What the comparison of trainings (:func:`reference.assert_trained`) refuses."""

import pytest
import torch
from reference import assert_trained

START = {"a": torch.zeros(4), "b": torch.ones(2)}
EXPECTED = {"a": torch.full((4,), 0.1), "b": torch.ones(2)}


def check(a, b=1.0, still="b", **tolerance):
    assert_trained({"a": torch.full((4,), a), "b": torch.full((2,), b)}, EXPECTED, START, still=still, **tolerance)


def test_weights_that_are_near_and_have_moved_pass():
    check(0.1, rtol=1e-6)
    check(0.1009, atol=9e-3, rtol=1e-3)
    check(0.1009, of_way=0.01)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ((0.1 + 2e-3,), {"atol": 1e-3}, "a: Tensor-likes are not close"),
        ((0.1,), {"atol": 0.011}, "a: the way is only 9.1 times what is allowed"),
        ((0.1,), {"rtol": 0.11}, "a: the way is only 9.1 times what is allowed"),
        ((0.1,), {"still": ()}, "b: not trained"),
        ((0.1, 1 + 2.0**-20), {"atol": 1e-4}, "^b"),
        ((0.102,), {"of_way": 0.01}, "a: 0.02 of the way apart, allowed 0.01"),
        ((0.1,), {"of_way": 0.11}, "^$"),
    ],
)
def test_weights_that_are_far_or_have_not_moved_fail(values, options, message):
    with pytest.raises(AssertionError, match=message):
        check(*values, **options)
