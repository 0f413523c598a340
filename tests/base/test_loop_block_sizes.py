"""The sizes of loops over memory: users have large ones, and tests small ones in all their processes."""

import subprocess
import sys

import block_sizes
import pytest
import warm
from pool import run_on_ranks

from paramp.base import loop_block_sizes
from paramp.scaling.local_norm import NORM_BLOCK


def check_rank(world, small):
    assert (block_sizes.SMALL["BUCKET"] if small else 2**25) == loop_block_sizes.BUCKET


@pytest.mark.parametrize("small", [True, pytest.param(False, marks=pytest.mark.real_sizes)])
def test_users_have_large_ones_and_tests_small_ones_in_all_processes(small):
    current = {name: value for name, value in vars(loop_block_sizes).items() if name.isupper()}
    assert current.keys() == block_sizes.SMALL.keys()
    assert block_sizes.are_small() == (current == block_sizes.SMALL) == small
    for name, value in current.items():
        least = block_sizes.SMALL[name]
        pairs = [(value[key], least[key]) for key in value] if isinstance(value, dict) else [(value, least)]
        assert small or all(one >= 64 * other for one, other in pairs), name
    assert loop_block_sizes.STEP_BLOCK["cpu"] <= loop_block_sizes.KEPT
    assert loop_block_sizes.WIDEN_BLOCK % NORM_BLOCK == 0  # the norm has the same rows however it is widened

    run_on_ranks(2, __name__, "check_rank", {"small": small})
    if warm.python() != sys.executable:  # else processes start from cold, and have the sizes of users
        warm.start()
        code = "from paramp.base import loop_block_sizes; print(loop_block_sizes.BUCKET)"
        done = subprocess.run([warm.python(), "-c", code], capture_output=True, text=True, check=True)
        assert int(done.stdout) == current["BUCKET"]
