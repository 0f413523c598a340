"""The long families: which have a case in `make test`, and a sample of the others is told how to repeat."""

import json
from pathlib import Path

import families
import pytest
from commands import python

TESTS = Path(__file__).parents[1]
VARIABLES = {"PARAMP_TEST_SEED": "", "PARAMP_TEST_WHOLE": "", "PARAMP_TEST_DEVICE": "", "PARAMP_TEST_BACKEND": ""}
SAMPLE_ONLY = [
    "tests/integrations/test_recipes.py::test_the_script_for_ray_train_runs",
    "tests/system/test_benchmarks.py::test_other_libraries_compute_the_same_on_data_and_tensor_ranks",
    "tests/system/test_benchmarks.py::test_the_loop_of_fabric_computes_the_same",
    "tests/system/test_benchmarks.py::test_the_table_of_amp_methods_has_a_row_or_a_reason_for_every_mode",
    "tests/system/test_benchmarks.py::test_the_table_of_schedules_has_a_row_for_every_schedule",
    "tests/system/test_benchmarks.py::test_the_tests_for_a_gpu_are_found_with_torch_numpy_safetensors_and_pytest_alone",
    "tests/system/test_launch_commands.py::test_mpirun_on_two_hosts",
    "tests/system/test_launch_commands.py::test_two_agents_that_start_their_ranks_again",
    "tests/system/test_mutants.py::test_every_drawn_mutant_is_another_program",
    "tests/system/test_mutants.py::test_what_meets_a_mutant_is_recorded_in_every_process_and_has_its_mistake",
]
"""Single long tests: of another project's cluster, of hosts that there may not be, and of tools for developers."""
COLLECT = """
import json, sys, pytest
class Found:
    def pytest_collection_finish(self, session):
        from families import without_a_case
        print("found:", json.dumps(without_a_case(session.items)))
options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore:Module already imported"]  # it starts warm
sys.exit(pytest.main(["--collect-only", "-q", *options, "tests"], plugins=[Found()]))
"""


def collected_alone():
    """What a process of its own says, which collects all tests without variables."""
    done = python("-c", COLLECT, timeout=240, PYTEST_ADDOPTS="", **VARIABLES)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("found: ")]
    return json.loads(line.removeprefix("found: "))


def test_every_family_has_a_case_by_default(request):
    items = request.session.items
    is_default = not (families.WHOLE or families.SEED)
    others = set(TESTS.rglob("test_*.py")) - set(TESTS.glob("checks/*"))  # `make lint` runs those
    if is_default and {item.path for item in items} >= others:
        empty = families.without_a_case(items)  # this run has collected all tests already
    else:
        empty = collected_alone()
    assert sorted(empty) == SAMPLE_ONLY


def test_a_default_run_has_a_case_and_a_sample_others_and_how_to_repeat_them(monkeypatch):
    monkeypatch.setattr(families, "WHOLE", False)
    monkeypatch.setattr(families, "SEED", "")
    assert families.cases("numbers", [1, 2, 3], [3, 4], 1) == [3]
    with pytest.raises(ValueError, match="the family 'numbers' has no case by default"):
        families.cases("numbers", [1, 2, 3], [4], 1)
    monkeypatch.setattr(families, "SEED", "0f1e")
    assert families.cases("numbers", [1, 3], [3], 2) == [1]
    expected = """PARAMP_TEST_SEED=0f1e python -m pytest 'tests/a.py::some[tp2 - it'"'"'s]'"""
    assert families.how_to_repeat("tests/a.py::some[tp2 - it's]") == expected
