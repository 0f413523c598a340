"""The sizes of loops over memory: which ones users have, and which ones the tests."""

import ast
import subprocess
import sys
from pathlib import Path

import block_sizes
import pytest
import warm
from pool import on_ranks

import paramp
from paramp.base import sizes
from paramp.scaling.local_norm import NORM_BLOCK

PACKAGE = Path(paramp.__file__).parent
NAMES = {name for name in vars(sizes) if name.isupper()}
OTHERS = {
    "scaling/grad_norm.py": {"NORM_BLOCK", "FAR", "LONG"},  # the first two define the sum; from LONG on one is compiled
    "optim/compiled/step.py": {"TRIED"},  # a length that Inductor runs in one thread only
    "engine/state/random_streams.py": {"PYTHON_STATE"},  # a format
    "checkpoint/json_codec.py": {"LARGEST_TENSOR"},  # limits
    "parallel/fsdp/unit_order.py": {"MAX_KNOWN"},
    "tools/verify/activation_recorder.py": {"BUDGET"},
    "distributed/failures.py": {"LONGEST_WAIT"},
    "engine/state/count_unit.py": {"LARGEST_COUNT"},
    "data/corpus.py": {"BIGRAM_TOKENS"},  # defines the estimate
    "data/token_sources.py": {"SAMPLED_TOKENS"},
    "base/scratch.py": {"_PAGE"},  # the system's
    "config/schema.py": {"DEFAULT_SEED"},
    "tools/verify/options.py": {"INIT_SCALE"},
}
"""Large numbers of the package that are no size of a loop, or that define a result."""


@pytest.mark.real_sizes
def test_users_have_the_large_ones():
    assert {name: getattr(sizes, name) for name in NAMES} == {
        "STEP_BLOCK": {"cpu": 2**19, "cuda": 2**26},
        "SQUARES_BLOCK": {"cpu": 2**16, "cuda": 2**25},
        "WIDEN_BLOCK": 2**20,
        "BUCKET": 2**25,
        "KEPT": 2**19,
        "APART": 2**18,
        "HUGE": 2**22,
        "SWAPPED": 2**16,
        "SWAP_PIECE": 2**19,
        "SUM_PIECE": 2**19,
        "SAMPLED_RUN": 256,
        "HASHED_WORDS": {"cpu": 2**18, "cuda": 2**22},
        "COUNTED": 2**22,
        "TRACE_FILE": 2**28,
        "CHECKED_READ": 2**22,
        "TEXT_READ": 2**22,
        "TOKENIZED": 2**20,
        "TOKENS_READ": 2**18,
    }
    assert not block_sizes.are_small()
    assert sizes.STEP_BLOCK["cpu"] <= sizes.KEPT


@pytest.mark.parametrize("small", [True, pytest.param(False, marks=pytest.mark.real_sizes)])
def test_the_norm_has_the_same_rows_however_it_is_widened(small):
    assert block_sizes.are_small() == small
    assert sizes.WIDEN_BLOCK % NORM_BLOCK == 0


def small_ones():
    return {name: getattr(sizes, name) for name in block_sizes.SMALL}


def test_tests_have_small_ones():
    assert block_sizes.SMALL.keys() == NAMES
    assert small_ones() == block_sizes.SMALL


@on_ranks(2)
def test_so_do_their_ranks(world):
    assert small_ones() == block_sizes.SMALL


@pytest.mark.real_sizes
@on_ranks(2)
def test_ranks_of_a_marked_test_have_the_large_ones(world):
    assert sizes.BUCKET == 2**25


@pytest.mark.skipif(warm.python() == sys.executable, reason="processes start from cold, and have the sizes of users")
@pytest.mark.parametrize("small", [True, pytest.param(False, marks=pytest.mark.real_sizes)])
def test_so_do_processes_that_a_test_starts(small):
    warm.start()
    code = "from paramp.base import sizes; print(sizes.BUCKET)"
    done = subprocess.run([warm.python(), "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == (block_sizes.SMALL["BUCKET"] if small else 2**25)


def constants(path):
    """Names of the module's numbers of 512 and more."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names = {inner.id for inner in ast.walk(node.value) if isinstance(inner, ast.Name)}
            calls = any(isinstance(inner, ast.Call) for inner in ast.walk(node.value))
            if not names and not calls:
                value = eval(compile(ast.Expression(node.value), str(path), "eval"))
                numbers = value.values() if isinstance(value, dict) else [value]
                if any(isinstance(one, (int, float)) and one >= 512 for one in numbers):
                    yield node.targets[0].id


def test_no_other_module_has_one():
    found = {str(path.relative_to(PACKAGE)): set(constants(path)) for path in sorted(PACKAGE.rglob("*.py"))}
    assert found.pop("base/sizes.py") == NAMES - {"SAMPLED_RUN"}
    others = {name: names for name, names in found.items() if names}
    assert others == OTHERS, "a size of a loop over memory belongs in paramp/base/sizes.py"
