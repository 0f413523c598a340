"""The long families: each has a case in `make test`, and a sample of the others is told how to repeat."""

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import families
import pytest
from commands import python

TESTS = Path(__file__).parents[1]
VARIABLES = {"PARAMP_TEST_SEED": "", "PARAMP_TEST_WHOLE": "", "PARAMP_TEST_DEVICE": "", "PARAMP_TEST_BACKEND": ""}
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
    if is_default and {item.path for item in items} >= set(TESTS.rglob("test_*.py")):
        empty = families.without_a_case(items)  # this run has collected all tests already
    else:
        empty = collected_alone()
    assert empty == []


def item(nodeid, *marks):
    return SimpleNamespace(nodeid=nodeid, iter_markers=lambda name: (mark for mark in marks if mark.name == name))


def names_in(node):
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def unmarked(source):
    """The functions of ``source`` whose cases are a family's, but which ``pytest -m family`` does not run."""
    tree = ast.parse(source)
    imports = [one for one in tree.body if isinstance(one, ast.ImportFrom) and one.module == "families"]
    known = {one.asname or one.name: one.name for each in imports for one in each.names}
    chosen = {name for name, original in known.items() if original == "cases"}
    marks = {name for name, original in known.items() if original == "family"}
    for one in tree.body:
        if isinstance(one, ast.Assign) and names_in(one.value) & chosen:
            chosen |= {name for target in one.targets for name in names_in(target)}
    functions = [one for one in tree.body if isinstance(one, ast.FunctionDef)]
    decorators = {one.name: {name for each in one.decorator_list for name in names_in(each)} for one in functions}
    return [name for name, given in decorators.items() if given & chosen and not given & marks]


def test_a_sample_has_every_family():
    """`make test-sample` runs what is marked."""
    found = {path.name: unmarked(path.read_text(encoding="utf-8")) for path in TESTS.rglob("test_*.py")}
    assert {name: functions for name, functions in found.items() if functions} == {}
    source = """
from families import cases as chosen, family
CELLS = chosen("a", [1, 2], [1], 1)
@family
@parametrize("cell", CELLS)
def test_a(cell): ...
@parametrize("cell", CELLS)
def test_b(cell): ...
@parametrize("cell", chosen("c", [1, 2], [1], 1))
def test_c(cell): ...
@parametrize("cell", [1, 2])
def test_d(cell): ...
"""
    assert unmarked(source) == ["test_b", "test_c"]


def test_tests_without_a_case_are_found():
    left_out = pytest.mark.skipif(True, reason=families.LONG).mark
    empty = pytest.mark.skip(reason="got empty parameter set for (name)").mark
    other = pytest.mark.skipif(True, reason="torch sees no GPU on this machine").mark
    made = pytest.mark.skipif(False, reason=families.LONG).mark
    items = [item("a.py::some[1]", left_out), item("a.py::some[2]"), item("a.py::none[1]", left_out)]
    items += [item("a.py::none[2]", left_out), item("a.py::empty[name0]", empty)]
    items += [item("a.py::gpu", other), item("a.py::made", made)]
    assert families.without_a_case(items) == ["a.py::none", "a.py::empty"]


def test_a_family_without_a_case_by_default_is_an_error(monkeypatch):
    monkeypatch.setattr(families, "SEED", "")
    monkeypatch.setattr(families, "WHOLE", False)
    assert families.cases("numbers", [1, 2, 3], [3, 4], 1) == [3]
    for part in ([], [4]):
        with pytest.raises(ValueError, match="the family 'numbers' has no case by default"):
            families.cases("numbers", [1, 2, 3], part, 1)
    monkeypatch.setattr(families, "SEED", "7")
    assert families.cases("numbers", [3], [3], 1) == []  # a sample has what the default run leaves out


def report_of(request, monkeypatch, seed, *, failed=True, marks=("family",)):
    """The sections of a report to which the hook of conftest.py has added its own."""
    plugins = request.config.pluginmanager.get_plugins()
    conftest = next(one for one in plugins if getattr(one, "__file__", None) == str(TESTS / "conftest.py"))
    for module in (conftest, families):
        monkeypatch.setattr(module, "SEED", seed)
    case = SimpleNamespace(nodeid="tests/a.py::some[tp2 - it's]", get_closest_marker=lambda name: name in marks or None)
    hook = conftest.pytest_runtest_makereport(case)
    next(hook)
    with pytest.raises(StopIteration) as ended:
        hook.send(SimpleNamespace(failed=failed, sections=[]))
    return ended.value.value.sections


def test_a_failed_case_of_a_sample_prints_how_to_repeat_it(request, monkeypatch):
    ((_, command),) = report_of(request, monkeypatch, "0f1e")
    assert command == """PARAMP_TEST_SEED=0f1e python -m pytest 'tests/a.py::some[tp2 - it'"'"'s]'"""
    assert report_of(request, monkeypatch, "0f1e", failed=False) == []
    assert report_of(request, monkeypatch, "0f1e", marks=()) == []
    assert report_of(request, monkeypatch, "") == []
