"""The decision of a step against values by hand."""

import math

import pytest
import torch

from paramp.scaling.step_decision import decide


@pytest.mark.parametrize(
    ("sums", "options", "expected"),
    [
        # A mean of 4 losses; the gradient's norm is 40 at the scale of 8.
        ([0, 1600, 3, 6, 4, 0, 4, 0], {}, [0, 0, 0, 8, 8, 0, 5, 3, 1.5]),
        ([0, 1600, 3, 6, 4, 0, 4, 0], {"max_norm": 2.5 + 5e-7}, [0, 0, 0, 16, 8, 0, 5, 3, 1.5]),
        ([0, 1600, 3, 6, 4, 0, 4, 0], {"max_norm": 6.0}, [0, 0, 0, 8, 8, 0, 5, 3, 1.5]),
        ([0, 1600, 3, 6, 4, 0, 4, 0], {"mean_factor": 2.0}, [0, 0, 0, 4, 8, 0, 10, 3, 1.5]),
        # Sums with a count of 16: the window's 4 parts over it.
        ([0, 1600, 0, 8, 16, 16, 4, 0], {"mean_factor": 3.0}, [0, 0, 0, 32, 8, 0, 1.25, 0, 0.5]),
        # A flag, or a norm that is not finite: an overflow, whose norm is not finite. Its divisor is the scale.
        ([1, 1600, 0, 6, 4, 0, 4, 0], {"max_norm": 2.5}, [1, 1, 0, 8, 8, 1, math.inf, 0, 1.5]),
        ([0, math.inf, 0, 6, 4, 0, 4, 0], {"max_norm": 2.5}, [1, 1, 0, 8, 8, 1, math.inf, 0, 1.5]),
        # Gradients without a loss; all counts are 0; two ranks failed.
        ([0, 1600, 0, 0, 0, 0, 0, 0], {}, [0, 0, 0, 8, 8, 0, 5, 0, math.nan]),
        ([0, 0, 0, 0, 0, 0, 4, 0], {}, [0, 1, 0, 8, 8, 2, 0, 0, math.nan]),
        ([0, 0, 0, 0, 0, 0, 1, 0], {}, [0, 1, 0, 8, 8, 2, 0, 0, math.nan]),
        ([0, 1600, 0, 6, 4, 0, 4, 2], {}, [0, 1, 2, 8, 8, 2, 5, 0, 1.5]),
        # A mean on one rank, and counts of 15 on the three others, or of 0: a failure.
        ([0, 1600, 0, 8, 16, 15, 4, 0], {}, [0, 1, 1, 8 / (4 / 15), 8, 2, 5 * 4 / 15, 0, 0.5]),
        ([0, 1600, 0, 8, 1, 0, 4, 0], {}, [0, 1, 1, 8, 8, 2, 5, 0, 8]),
    ],
)
def test_a_decision_by_hand(sums, options, expected):
    given = {"window_size": 4, "mean_factor": 1.0, "max_norm": None} | options
    decision = decide(torch.tensor(sums, dtype=torch.float64), torch.tensor(8.0), **given)
    flags, numbers = [decision.overflow, decision.skip], [decision.num_failed, decision.divisor]
    assert {flag.dtype for flag in flags} == {torch.bool}
    assert {number.dtype for number in (*numbers, decision.values)} == {torch.float64}
    assert [*map(float, flags + numbers), *decision.values.tolist()] == pytest.approx(expected, rel=1e-12, nan_ok=True)
