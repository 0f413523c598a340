"""``make mutants`` makes mistakes that leave programs, and runs the tests that meet them."""

import ast
import contextlib
import sys
import tempfile
import tomllib
from pathlib import Path

import mutants
import mutations
import pytest
import warm
from mutants import Timed, Tree

RECORDED = """
import pytest
from commands import COLD, python, succeeded
from pool import on_ranks

from paramp.base.module_surgery import matches

@pytest.fixture(scope="module")
def shared():
    matches("a", "a.b")

def test_fixture(shared):
    pass

@pytest.mark.parametrize("name", ["a", "b"])
def test_here(name):
    assert matches(name, "*")

@on_ranks(2)
def test_on_ranks(world):
    assert matches("a", "**")

def test_that_fails():
    matches("a", "*")
    assert False

@on_ranks(2)
def test_on_the_same_ranks(world):
    matches("a", "a")

def test_in_a_warm_process():
    succeeded(python("-c", "from paramp.base.module_surgery import matches; assert matches('a', 'a')"))

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


def test_what_meets_a_mutant_is_recorded_in_every_process_of_a_test(short_folder, monkeypatch):
    if not (mutations.ROOT / ".git").exists():
        pytest.skip("this tree is a copy itself")
    monkeypatch.setattr(mutants, "RECORD", short_folder / "met.json")
    tree = Tree(short_folder / "tree", sys.executable)
    file = "tests/test_recorded.py"
    (tree.folder / file).write_text(RECORDED)
    every, stars = (
        next(one for one in mutations.sites("base/module_surgery.py") if one.name.endswith(name))
        for name in ("_match:condition:1", "_match:constant:2")
    )
    met = mutants.Met([every, stars], [file])
    how = met.record(tree)
    assert how.startswith("failed"), how  # one of them fails
    assert f"without a mistake: {file}::test_that_fails" in how
    names = ("here[a]", "here[b]", "on_ranks", "on_the_same_ranks", "in_a_warm_process", "in_a_cold_process", "fixture")
    assert {one.name for one in met.tests(every)} == {f"{file}::test_{name}" for name in names}
    assert [one.name for one in met.tests(stars)] == [f"{file}::test_on_ranks"]
    assert all(one.seconds > 0 for one in met.tests(every))
    again = mutants.Met([every, stars], [file])
    assert (again.is_known, again.tests(every)) == (True, met.tests(every))
    assert not mutants.Met([every], [file]).is_known


def test_a_mutant_is_the_package_of_its_tree_in_every_process(short_folder):
    if not (mutations.ROOT / ".git").exists():
        pytest.skip("this tree is a copy itself")
    tree = Tree(short_folder / "tree", warm.bare())
    (tree.folder / "tests" / "test_recorded.py").write_text(RECORDED)
    mutant = next(one for one in mutations.sites("base/module_surgery.py") if one.name.endswith("_match:condition:1"))
    source = (mutations.ROOT / "paramp" / mutant.module).read_bytes()
    names = [f"tests/test_recorded.py::test_{name}" for name in ("here", "on_ranks", "in_a_warm_process")]
    assert tree.run(names, 100)[0] == "passed", tree.log.read_text()
    with tree.changed(mutant.module, mutant.apply(source)):
        assert tree.run(names, 100)[0] == "failed"
    assert "4 failed" in tree.log.read_text()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (1, "def f(a=1):\n    __ran__(0)\n    if a:"),  # a default counts in the calls
        (2, "    __ran__(0)\n    if a:"),
        (3, "        __ran__(0)\n        b()"),
        (4, "    else:\n        __ran__(0)\n        if c:"),
        (6, '    """Text."""\n    __ran__(0)\n    try:'),
        (8, "    __ran__(0)\n    try:"),
        (9, "        __ran__(0)\n        d()"),
        (10, "    __ran__(0)\n    try:"),
        (11, "        __ran__(0)\n        e()"),
        (12, '    """Text."""\n    __ran__(0)\n    try:'),  # outside functions: each of them
    ],
)
def test_a_probe_stands_before_the_statement(package, line, expected):
    source = "def f(a=1):\n    if a:\n        b()\n    elif c:\n        pass\n"
    source += 'def g():\n    """Text."""\n    try:\n        d()\n    except E:\n        e()\nG = 1\n'
    (package / "m.py").write_text(source)
    mutations.insert(package, [mutant(line)], package.parent / "met")
    assert expected in (package / "m.py").read_text()


def mutant(line=2):
    return mutations.Mutant("m.py", "m.py:f:constant:1", line, 0, 0, "")


def test_the_tests_that_meet_a_mutant_are_chosen_the_shortest_first(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "RECORD", tmp_path / "met.json")
    met = mutants.Met([], [])
    met.seconds = {"a::slow": 5, "a::quick": 2, "tests/system/b::b": 1, "long::long": 99}
    met._names = {mutant().name: sorted(met.seconds)}
    assert [one.name for one in met.tests(mutant())] == ["a::quick", "a::slow", "tests/system/b::b", "long::long"]


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

    class Met:
        def tests(self, mutant):
            return [Timed("tests/a.py::one", 10), Timed("tests/b.py::two", 10)] if results else []

    texts = {"paramp/m.py": "m", "tests/a.py": "a", "tests/b.py": "b"}
    monkeypatch.setattr(mutants, "_text", texts.get)
    monkeypatch.setattr(mutants, "KEPT", tmp_path)
    assert mutants.Results(Met(), 100).how(mutant()) == ""
    mutants.Results(Met(), 100).run(mutant(), Scripted())
    assert mutants.Results(Met(), 100).how(mutant()) == how
    assert not left
    shorter = mutants.Results(Met(), 10).how(mutant())  # the first test only
    assert shorter == (how if how in ("killed", "not covered") else "")
    texts["tests/b.py"] = "changed"
    assert mutants.Results(Met(), 100).how(mutant()) == ("" if results else how)


def test_test_files_are_found_by_folders_and_names():
    assert mutants.test_files(["tests/system/test_mutants.py"]) == ["tests/system/test_mutants.py"]
    assert "tests/system/test_mutants.py" in mutants.test_files(["tests/system/"])
    assert not mutants.test_files(["tests/sys"])
