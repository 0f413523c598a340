"""``make mutants`` makes mistakes that leave programs, and runs the tests that meet them."""

import ast
import sys
import tempfile
import tomllib
from pathlib import Path

import mutants
import mutations
import pytest
import warm
from families import family, long
from mutants import Timed, Tree
from mutations import Mutant

RECORDED = """
import pytest
from commands import COLD, python, succeeded
from pool import on_ranks

from paramp.base.module_surgery import matches

@pytest.mark.parametrize("name", ["a", "b"])
def test_here(name):
    assert matches(name, "*")

@on_ranks(2)
def test_on_ranks(world):
    assert matches("a", "**")

def test_in_a_warm_process():
    succeeded(python("-c", "from paramp.base.module_surgery import matches; assert matches('a', 'a')"))

def test_in_a_cold_process():
    succeeded(python("-c", "from paramp.base.module_surgery import matches; assert matches('a', 'a')", **COLD))

def test_that_fails():
    matches("a", "*")
    assert False

ENDED = []

def test_before():
    ENDED.append("before")

def test_behind():
    assert matches("a", "*") and ENDED
"""


@family
@long
def test_every_drawn_mutant_is_another_program():
    drawn = mutations.drawn(60, "any")
    assert len({mutant.name for mutant in drawn}) == 60
    assert mutations.drawn(60, "any") == drawn != mutations.drawn(60, "other")
    for mutant in drawn:
        source = (mutations.ROOT / "paramp" / mutant.module).read_bytes()
        assert ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source)), mutant.show(source)


def test_a_mistake_outside_functions_is_met_in_those_of_its_module_and_of_modules_that_import_it(tmp_path):
    texts = {"table": "SIZE = 3", "user": '"""A user."""\nfrom .table import SIZE\nTWO = 2\ndef use(): return SIZE'}
    for name, text in (texts | {"other": "from . import user\ndef other(): return 1"}).items():
        (tmp_path / f"{name}.py").write_text(text)
    outside = [Mutant("table.py", "table.py:module:constant:1", 1, 7, 8, "(4)")]
    outside.append(Mutant("user.py", "user.py:module:constant:1", 3, 6, 7, "(3)"))
    mutations.insert(tmp_path, outside, tmp_path / "met")
    texts = {path.stem: path.read_text() for path in tmp_path.glob("*.py")}
    met = [{name for name, text in texts.items() if f"__ran__({number})" in text} for number in (0, 1)]
    assert met == [{"user"}, {"user", "other"}]
    ast.parse(texts["user"])


def test_tests_of_the_modules_folder_run_first_and_those_of_the_system_last():
    mutant = Mutant("engine/step.py", "engine/step.py:make:constant:1", 1, 0, 1, "(2)")
    met = mutants.Met([mutant], [])
    seconds = {"tests/optim/a": 0.1, "tests/engine/b": 0.3, "tests/system/c": 0.0, "tests/engine/d": 0.2}
    seconds |= {"tests/engine/e": mutants.LONG + 1, "tests/engine_of_others/f": 0.0}
    met.seconds, met._names = seconds, {mutant.name: [*seconds]}
    assert "".join(one.name[-1] for one in met.tests(mutant)) == "dbfaec"


def test_what_is_argued_about_is_there():
    argued = tomllib.loads(mutants.ARGUED.read_text()).get("equivalent", [])
    assert {one["mutant"] for one in argued} <= {one.name for one in mutations.all_sites()}
    assert all(one["reason"] for one in argued)


@family
@long
def test_what_meets_a_mutant_is_recorded_in_every_process_and_has_its_mistake(monkeypatch):
    if not (mutations.ROOT / ".git").exists():
        pytest.skip("this tree is a copy itself")
    file = "tests/test_recorded.py"
    every, stars = (
        next(one for one in mutations.sites("base/module_surgery.py") if one.name.endswith(name))
        for name in ("_match:condition:1", "_match:constant:2")
    )
    # In a short folder: the paths of sockets have 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="p-", dir="/tmp") as folder:
        monkeypatch.setattr(mutants, "RECORD", Path(folder, "met.json"))
        probed, changed = (
            Tree(Path(folder, name), python) for name, python in (("a", sys.executable), ("b", warm.bare()))
        )
        for tree in (probed, changed):
            (tree.folder / file).write_text(RECORDED)
        met = mutants.Met([every, stars], [file])
        how = met.record(probed)
        assert f"without a mistake: {file}::test_that_fails" in how
        names = [f"{file}::test_{name}" for name in ("here[a]", "here[b]", "on_ranks")]
        names += [f"{file}::test_in_a_{kind}_process" for kind in ("warm", "cold")]
        behind = f"{file}::test_behind"
        assert {one.name for one in met.tests(every)} == {*names, behind}
        assert [one.name for one in met.tests(stars)] == [f"{file}::test_on_ranks"]
        again = mutants.Met([every, stars], [file])
        assert (again.is_known, again.tests(every)) == (True, met.tests(every))
        assert not mutants.Met([every], [file]).is_known
        assert changed.run(names, 100)[0] == "passed", changed.log.read_text()
        with changed.changed(every.module, every.apply((mutations.ROOT / "paramp" / every.module).read_bytes())):
            assert changed.run(names, 100)[0] == "failed"
        assert "5 failed" in changed.log.read_text()
        monkeypatch.setattr(mutants, "KEPT", Path(folder))
        results = mutants.Results(met)
        found = results.run(every, changed)
        assert found.startswith("killed: ")
        assert results.how(every) == "killed"
        assert behind not in found  # the first that fails, as it is the shortest, but not alone
        assert results.end(every, [Timed(behind, 0.1)], changed) == ("", "")
        assert results.end(every, [Timed(behind, 0.1), Timed(names[0], 0.1)], changed) == ("killed", names[0])
