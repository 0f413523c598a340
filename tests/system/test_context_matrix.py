"""Every mode on every layout with a context axis against the same mode in one process, as in test_matrix.py.

With experts too: test_expert_matrix.py has that layout.
"""

import functools

import pytest
from families import cases, family
from matrix import MODES, PAGE, check_table
from pool import World, run_on_ranks
from reference import assert_follows, assert_strays
from test_matrix import skip_without_library, train_all

LAYOUTS = {
    "cp2": (2, {"context": 2}),
    "cp4": (4, {"context": 4}),
    "cp2·tp2": (4, {"context": 2, "tensor": 2}),
    "cp2·pp2": (4, {"context": 2, "pipeline": 2}),
    "fsdp2·cp2": (4, {"context": 2, "data": {"shard": 2}}),
    "cp2·tp2·pp2": (8, {"context": 2, "tensor": 2, "pipeline": 2}),
}
EVERYTHING = [(layout, mode) for layout in LAYOUTS for mode in MODES]
PART = [("cp2·tp2", "bf16-naive")]
CELLS = cases("context matrix", EVERYTHING, PART, 4)


@functools.cache
def alone(mode):
    return train_all(World(0, 1, "cpu"), {}, [mode])[mode]


@pytest.fixture(scope="module")
def green():
    """The cells whose test has passed."""
    return set()


@family
@pytest.mark.parametrize(("layout", "mode"), CELLS)
def test_a_mode_with_cut_sequences_follows_its_single_process_run(layout, mode, green):
    """And one rank's gradient of half the size is beyond the tolerance."""
    skip_without_library(mode)
    size, parallel = LAYOUTS[layout]
    given = {"parallel": parallel, "modes": [mode], "halved": [mode]}
    found = run_on_ranks(size, "test_matrix", "train_all", given)[0]
    assert_follows(found[mode], alone(mode), mode)
    assert_strays(found[mode, "halved"], alone(mode), mode)
    green.add((mode, layout))


@family
def test_the_table_of_cut_sequences_is_what_came_out(green, request):
    """Last in the file, so that the cells have run. ``make matrix``, which runs all of them, writes the table anew."""
    check_table(PAGE, "context", "mode", MODES, [*LAYOUTS], green, request.config.getoption("--write-matrix"))
