"""What the helpers of other tests refuse."""

import pytest
import torch
from reference import assert_trained

START = {"a": torch.zeros(4), "b": torch.ones(2)}
EXPECTED = {"a": torch.full((4,), 0.1), "b": torch.ones(2)}


def trained(a, b=1.0):
    return {"a": torch.full((4,), a), "b": torch.full((2,), b)}


def check(actual, expected=EXPECTED, still="b", **tolerance):
    assert_trained(actual, expected, START, still=still, **tolerance)


def test_weights_that_are_near_and_have_moved_pass():
    check(trained(0.1), rtol=1e-6)
    check(trained(0.1009), atol=1e-3)
    check(trained(0.1009), atol=9e-3, rtol=1e-3)
    check(trained(0.1009), of_way=0.01)
    check({"a": trained(0.1)["a"].half(), "b": START["b"].bfloat16()}, rtol=2.0**-11)


@pytest.mark.parametrize(
    ("actual", "options", "message"),
    [
        (trained(0.1 + 2e-3), {"atol": 1e-3}, "a: Tensor-likes are not close"),
        (trained(0.0), {"atol": 1e-3}, "a: Tensor-likes are not close"),
        (trained(0.1), {"atol": 0.011}, "a: the way is only 9.1 times what is allowed"),
        (trained(0.1), {"rtol": 0.11}, "a: the way is only 9.1 times what is allowed"),
        (trained(0.1), {"still": ()}, "b: not trained"),
        (trained(0.1, 1 + 2.0**-20), {"atol": 1e-4}, "^b"),
        (trained(0.102), {"of_way": 0.01}, "a: 0.02 of the way apart, allowed 0.01"),
        (trained(0.0), {"of_way": 0.1}, "a: 1 of the way apart"),
    ],
)
def test_other_weights_do_not(actual, options, message):
    with pytest.raises(AssertionError, match=message):
        check(actual, **options)


def test_a_wide_tolerance_and_other_names_are_refused():
    with pytest.raises(AssertionError):
        check(trained(0.1), of_way=0.11)
    with pytest.raises(AssertionError):
        check({"a": EXPECTED["a"]})
