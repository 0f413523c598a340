"""``make mutants`` makes mistakes that leave programs, and runs the tests that run their lines."""

import ast
import contextlib
import sys
import tempfile
import tomllib
from pathlib import Path

import covered
import mutants
import mutations
import pytest
from mutants import Timed
from trees import Tree

RECORDED = """
import pytest
from commands import COLD, python
from pool import on_ranks

from paramp.base.module_surgery import matches

@pytest.fixture(scope="module")
def shared():
    matches("a", "a.b")

def test_fixture(shared):
    pass

@pytest.mark.parametrize("name", ["a", "b"])
def test_here(name):
    matches(name, "*")

@on_ranks(2)
def test_on_ranks(world):
    matches("a", "**")

@on_ranks(2)
def test_on_the_same_ranks(world):
    matches("a", "a")

def test_in_a_warm_process():
    python("-c", "from paramp.base.module_surgery import matches; matches('a', 'a')")

def test_in_a_cold_process():
    python("-c", "from paramp.base.module_surgery import matches; matches('a', 'a')", **COLD)
"""


def test_every_drawn_mutant_is_another_program():
    drawn = mutations.drawn(60, "any")
    assert len({mutant.name for mutant in drawn}) == 60
    assert mutations.drawn(60, "any") == drawn != mutations.drawn(60, "other")
    for mutant in drawn:
        source = (mutations.ROOT / "paramp" / mutant.module).read_bytes()
        assert ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source)), mutant.show(source)


def test_mutants_are_made_in_every_package():
    folders = {path.parent.name for path in (mutations.ROOT / "paramp").glob("*/__init__.py")}
    assert {mutant.module.partition("/")[0] for mutant in mutations.all_sites()} >= folders


@pytest.mark.parametrize(
    ("before", "operator", "after"),
    [
        ("a = b < c", "comparison", "a = (b <= c)"),
        ("a = b * c", "arithmetic", "a = (b / c)"),
        ("a += b", "arithmetic", "a -= b"),
        ("a = 3", "constant", "a = (4)"),
        ("if a:\n    b()", "condition", "if (not a):\n    b()"),
        ("a = b and c", "condition", "a = (b or c)"),
        ("a.b()", "deletion", "pass"),
        ("raise A(f'{b + 1}')", "deletion", "pass"),
    ],
)
def test_an_operator_changes_one_place(before, operator, after, package):
    (package / "module.py").write_text(before)
    (mutant,) = (one for one in mutations.sites.__wrapped__("module.py") if f":{operator}:" in one.name)
    assert mutant.apply(before.encode()).decode() == after


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The package of another tree, empty."""
    for module in (mutations, mutants):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "paramp").mkdir()
    return tmp_path / "paramp"


def test_what_is_argued_about_is_there():
    named = {one.name for one in mutations.all_sites()}
    argued = tomllib.loads(mutants.ARGUED.read_text()).get("equivalent", [])
    assert {one["mutant"] for one in argued} <= named
    assert all(one["reason"] for one in argued)


@pytest.fixture
def short_folder():
    """In which sockets can be made: their paths have 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="p-", dir="/tmp") as folder:
        yield Path(folder)


def test_lines_are_recorded_in_every_process_of_a_test(tmp_path, short_folder):
    pytest.importorskip("coverage")
    if not (mutations.ROOT / ".git").exists():
        pytest.skip("this tree is a copy itself")
    tree = Tree(short_folder / "tree", sys.executable)
    (tree.folder / "tests" / "test_recorded.py").write_text(RECORDED)
    result, _ = tree.run(["tests/test_recorded.py"], 240, **covered.configure(tmp_path / "lines", tree.package))
    assert result == "passed", tree.log.read_text()
    lines, tests = covered.read(tmp_path / "lines", tree.package)
    source = (tree.package / "base" / "module_surgery.py").read_text().splitlines()
    stars = 1 << next(number for number, line in enumerate(source, 1) if "return any(" in line)
    inside = mutations.lines_in_functions("base/module_surgery.py")
    by = {
        name.partition("::")[2]: run & inside for name, run in lines["base/module_surgery.py"].items() if run & inside
    }
    names = ("here", "on_ranks", "on_the_same_ranks", "in_a_warm_process", "in_a_cold_process")
    assert by.keys() == {"", *(f"test_{name}" for name in names)}
    assert [name for name, run in by.items() if run & stars] == ["test_on_ranks"]
    assert {name.partition("::")[2] for name in tests} == by.keys() - {""} | {"test_fixture"}
    assert all(test["seconds"] > 0 and not test["failed"] for test in tests.values())


def mutant(*lines):
    return mutations.Mutant("m.py", "m.py:f:constant:1", 2, 0, 0, "", lines)


def record(file, seconds, lines, **tests):
    """Of a test file that imports ``m.py``; ``tests``: how long each takes."""
    return {
        "seconds": seconds,
        "lines": {"m.py": {name and f"{file}::{name}": mask for name, mask in lines.items()}} if lines else {},
        "imports": ["m.py"],
        "tests": {f"{file}::{name}": {"seconds": time, "failed": int(name == "fails")} for name, time in tests.items()},
    }


def test_the_tests_that_run_a_line_are_chosen_the_shortest_first():
    lines = mutants.Lines([])
    lines.records = {
        "a": record("a", 9, {"slow": 4, "quick": 6, "other": 2, "fails": 4}, slow=5, quick=2, other=1, fails=1),
        "tests/system/b": record("tests/system/b", 1, {"b": 4}, b=1),
        "fixture": record("fixture", 3, {"": 4}),
        "imports": record("imports", 1, {}),
        "long": record("long", 99, {"long": 4}, long=99),
    }
    tests, failing = lines.tests(mutant(2))
    assert [one.name for one in tests] == ["a::quick", "fixture", "a::slow", "tests/system/b::b", "long::long"]
    assert failing == {"a::fails"}
    everything, _ = lines.tests(mutant())  # outside functions
    assert everything[-1].name == "imports"  # after all files that run a function of the module
    assert {one.name for one in everything} == lines.records.keys() | {
        *("a::other", "a::quick", "a::slow", "tests/system/b::b", "long::long")
    }


@pytest.mark.parametrize(
    ("results", "how"),
    [
        (["passed", "passed"], "lived"),
        (["passed", "failed", "passed"], "killed"),  # the last run is without the mistake
        (["failed", "failed", "passed"], "lived"),  # as the first test fails without it, too
        (["timeout", "failed", "passed"], "killed"),
        (["timeout", "passed"], "timed out"),
        (["its own limit", "passed"], "timed out"),
        (["timeout", "timeout"], "timed out"),
        ([], "not covered"),
    ],
)
def test_what_becomes_of_a_mutant(results, how, tmp_path, monkeypatch):
    left = list(results)

    class Scripted:
        log = tmp_path / "log"

        def run(self, arguments, seconds):
            result = left.pop(0)
            reason = "Timeout (>300.0s) from pytest-timeout." if result == "its own limit" else "assert 1 == 2"
            self.log.write_text(f"FAILED {arguments[-1]} - {reason}")
            return {"its own limit": "failed"}.get(result, result), 1.0

        @contextlib.contextmanager
        def changed(self, module, source):
            yield

    class Lines:
        def tests(self, mutant):
            return [Timed("tests/a.py::one", 10), Timed("tests/b.py::two", 10)] if results else [], set()

    texts = {"paramp/m.py": "m", "tests/a.py": "a", "tests/b.py": "b"}
    monkeypatch.setattr(mutants, "_text", texts.get)
    monkeypatch.setattr(mutants, "KEPT", tmp_path)
    assert mutants.Results(Lines(), 100).how(mutant(2)) == ""
    mutants.Results(Lines(), 100).run(mutant(2), Scripted())
    assert mutants.Results(Lines(), 100).how(mutant(2)) == how
    assert not left
    shorter = mutants.Results(Lines(), 10).how(mutant(2))  # the first test only
    assert shorter == (how if how in ("killed", "not covered") else "")
    texts["tests/b.py"] = "changed"
    assert mutants.Results(Lines(), 100).how(mutant(2)) == ("" if results else how)


def test_test_files_are_found_by_folders_and_names():
    assert mutants.test_files(["tests/system/test_mutants.py"]) == ["tests/system/test_mutants.py"]
    assert "tests/system/test_mutants.py" in mutants.test_files(["tests/system/"])
    assert not mutants.test_files(["tests/sys"])
