"""``make mutants`` makes mistakes that leave programs, and knows those that ``tests/mutants.toml`` argues about."""

import ast
import tomllib

import mutants
import pytest


def test_every_drawn_mutant_is_another_program():
    drawn = mutants.drawn(60, "any")
    assert len({mutant.name for mutant in drawn}) == 60
    assert {mutant.area for mutant in drawn} == set(mutants.AREAS)
    assert mutants.drawn(60, "any") == drawn != mutants.drawn(60, "other")
    for mutant in drawn:
        source = (mutants.ROOT / "paramp" / mutant.module).read_bytes()
        assert ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source)), mutant.show(source)


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
def test_an_operator_changes_one_place(before, operator, after, tmp_path, monkeypatch):
    (tmp_path / "paramp").mkdir()
    (tmp_path / "paramp" / "module.py").write_text(before)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (mutant,) = (one for one in mutants.sites("area", "module.py") if f":{operator}:" in one.name)
    assert mutant.apply(before.encode()).decode() == after


def test_what_is_argued_about_is_there():
    named = {one.name for found in mutants.sites_by_area().values() for one in found}
    argued = tomllib.loads(mutants.ARGUED.read_text()).get("equivalent", [])
    assert {one["mutant"] for one in argued} <= named
    assert all(one["reason"] for one in argued)


def test_the_tests_that_are_to_find_mistakes_are_there():
    for modules, tests in mutants.AREAS.values():
        assert all((mutants.ROOT / "paramp" / module).exists() for module in modules)
        assert all((mutants.ROOT / test).exists() for test in tests)
