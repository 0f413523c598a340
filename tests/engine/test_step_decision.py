"""The decision of a step, computed by the host and on the device, against values by hand and against each other."""

import math
from itertools import product

import pytest
import torch

from paramp.engine.step_decision import NUM_SUMS, _decide_on_device, _decide_on_host


def decided(sums, scale=8.0, window_size=4, mean_factor=1.0, max_norm=None):
    """Overflow, skip, failures, divisor and the values of the result, from the host and from the device."""
    arguments = window_size, mean_factor, max_norm, []
    sums = torch.tensor(sums, dtype=torch.float64)
    decisions = [_decide_on_host(sums.tolist(), scale, *arguments)]
    decisions.append(_decide_on_device(sums, torch.tensor(scale), *arguments))
    found = []
    for one in decisions:
        tensors = [one.overflow, one.skip, one.num_failed, one.divisor, one.values]
        assert [tensor.dtype for tensor in tensors] == [torch.bool] * 2 + [torch.float64] * 3
        assert [tensor.ndim for tensor in tensors] == [0, 0, 0, 0, 1]
        found.append([*map(float, tensors[:4]), *tensors[4].tolist()])
    host, device = found
    assert torch.equal(torch.tensor(host).nan_to_num(-1), torch.tensor(device).nan_to_num(-1))
    return host


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
        ([0, 1600, 0, 6, 4, 0, 4, 2], {}, [0, 1, 2, 8, 8, 2, 5, 0, 1.5]),
        # A mean on one rank, and counts of 15 on the three others, or of 0: a failure.
        ([0, 1600, 0, 8, 16, 15, 4, 0], {}, [0, 1, 1, 8 / (4 / 15), 8, 2, 5 * 4 / 15, 0, 0.5]),
        ([0, 1600, 0, 8, 1, 0, 4, 0], {}, [0, 1, 1, 8, 8, 2, 5, 0, 8]),
    ],
)
def test_a_decision_by_hand(sums, options, expected):
    assert decided(sums, **options) == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_host_and_device_decide_alike_at_the_edges():
    edges = [0.0, 1.0, 1e-300, 1e300, math.inf, math.nan]
    for found, squares, weight, count, failed in product([0.0, 1.0], edges, edges, edges, [0.0, 1.0]):
        sums = [found, squares, 2.0, 3.0, weight, count, 1.0, failed]
        assert len(sums) == NUM_SUMS
        for max_norm in (None, 1e-300, 1.0):
            decided(sums, scale=3.0, max_norm=max_norm)
