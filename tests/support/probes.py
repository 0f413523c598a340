"""Which tests meet which mutant, in all processes of a test: a call stands before the statement of each mutant.

The call writes down the number of the mutant and the test, which pytest has in ``PYTEST_CURRENT_TEST``. Processes that
a test starts inherit it, and ranks are given it (``pool.py``). So one run of the tests, not much longer than without
the calls, tells which of them to run for each mutant.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from mutations import FUNCTION, Mutant

RAN = """\
import os

import torch

_known = set()


@torch.compiler.assume_constant_result
def ran(number):
    one = number, os.environ.get("PYTEST_CURRENT_TEST", "")
    if one not in _known:
        _known.add(one)
        with open(f"{folder}/{{os.getpid()}}", "a", encoding="utf-8") as file:
            file.write(f"{{number}} {{one[1]}}\\n")
"""


def insert(package: Path, mutants: Sequence[Mutant], folder: Path) -> None:
    """Change ``package`` so that it writes into the new ``folder``, by process, which of ``mutants`` a test meets.

    A mutant outside functions, whose statement runs when its module is imported, is met by each function of the module.
    """
    folder.mkdir()
    (package / "ran.py").write_text(RAN.format(folder=folder))
    by_module: dict[str, list[int]] = defaultdict(list)
    for number, mutant in enumerate(mutants):
        by_module[mutant.module].append(number)
    for module, numbers in by_module.items():
        tree = ast.parse((package / module).read_bytes())
        definitions = [(node.body, node.body[0]) for node in ast.walk(tree) if isinstance(node, FUNCTION)]
        found = {number: _statement(tree.body, mutants[number].line, False) for number in numbers}
        for number, place in found.items():
            for body, statement in definitions if place is None else [place]:
                call = ast.Expr(ast.Call(ast.Name("__ran__", ast.Load()), [ast.Constant(number)], []))
                body.insert(body.index(statement) + _is_docstring(statement), call)
        first = next(place for place, node in enumerate(tree.body) if not _comes_first(node))
        tree.body.insert(first, ast.ImportFrom("paramp.ran", [ast.alias("ran", "__ran__")], 0))
        (package / module).write_text(ast.unparse(ast.fix_missing_locations(tree)))


def _statement(body: list[ast.stmt], line: int, inside: bool) -> tuple[list[ast.stmt], ast.stmt] | None:
    """The innermost statement of ``body`` with ``line``, and the list that it is in; None if it is in no function.

    Of the head of a function, whose defaults count in its calls: the first of the function.
    """
    for statement in body:
        if statement.lineno <= line <= (statement.end_lineno or line):
            is_function = isinstance(statement, FUNCTION)
            for inner in _bodies(statement):
                if any(one.lineno <= line <= (one.end_lineno or line) for one in inner):
                    return _statement(inner, line, inside or is_function)
            if isinstance(statement, FUNCTION):
                return statement.body, statement.body[0]
            return (body, statement) if inside else None
    return None


def _bodies(statement: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements directly in ``statement``."""
    for name in ("body", "orelse", "finalbody"):
        if isinstance(found := getattr(statement, name, None), list):
            yield found
    for inner in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield inner.body


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _comes_first(statement: ast.stmt) -> bool:
    """Whether no other statement may stand before it."""
    return _is_docstring(statement) or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")


def read(folder: Path) -> dict[int, set[str]]:
    """The test cases that met each mutant, by its number."""
    met: dict[int, set[str]] = defaultdict(set)
    for path in folder.iterdir():
        for line in path.read_text(encoding="utf-8").splitlines():
            number, _, test = line.partition(" ")
            if "::" in test:  # else a file was being collected
                met[int(number)].add(test.rpartition(" (")[0])
    return met
