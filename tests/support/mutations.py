"""Small mistakes in the modules of the package: where they can be made, and which tests meet them.

A mutant is one place in a module changed by one of five operators: a comparison or a test of membership or identity
swapped; an operator of arithmetic swapped; a constant changed; a condition negated, or ``and`` and ``or`` swapped; a
statement deleted. It is named by its module, function, operator and number there.

:func:`insert` puts a call before the statement of each, which writes down the mutant's number and the test, which
pytest has in ``PYTEST_CURRENT_TEST``; processes that a test starts inherit it, and ranks are given it (``pool.py``). So
one run of the tests, not much longer than without the calls, tells which of them to run for each mutant.
"""

import ast
import copy
import functools
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
PAIRS += [(ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitOr, ast.BitAnd), (ast.And, ast.Or)]
SWAPPED = dict(PAIRS) | {other: one for one, other in PAIRS}
SWAPPED |= dict.fromkeys((ast.FloorDiv, ast.Mod, ast.Pow), ast.Mult)


class Mutant(NamedTuple):
    """One mistake: ``text`` in the place of the characters from ``start`` to ``end`` of a module."""

    module: str
    name: str
    line: int
    start: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        """The module with the mistake."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def show(self, source: bytes) -> str:
        before = " ".join(source[self.start : self.end].decode().split())
        return f"paramp/{self.module}:{self.line}: {before[:90]!r} -> {self.text[:90]!r}"


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Of each mistake in ``node`` itself the operator, the part that is replaced, and what it is replaced by."""
    if (
        isinstance(node, (ast.AugAssign, ast.Raise, ast.Delete, ast.Continue, ast.Break))
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
        or (isinstance(node, ast.Assign) and all(isinstance(target, ast.Subscript) for target in node.targets))
    ):
        yield "deletion", node, ast.Pass()
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        ops = [SWAPPED[type(node.ops[0])](), *node.ops[1:]]
        yield "comparison", node, ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and type(node.op) in SWAPPED:
        changed = copy.copy(node)
        changed.op = SWAPPED[type(node.op)]()
        yield "condition" if isinstance(node, ast.BoolOp) else "arithmetic", node, changed
    elif isinstance(node, ast.Constant) and isinstance(value := node.value, (int, float)):
        new = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value * 2 + 1
        yield "constant", node, ast.Constant(new)
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)) or (isinstance(node, ast.comprehension) and node.ifs):
        condition = node.ifs[0] if isinstance(node, ast.comprehension) else node.test
        yield "condition", condition, ast.UnaryOp(ast.Not(), condition)


def _walk(node: ast.AST, function: str = "") -> Iterator[tuple[ast.AST, str]]:
    """The nodes in ``node`` where a mistake can be made, each with the name of its function."""
    skipped: list[ast.AST | None] = []
    if isinstance(node, FUNCTION):
        skipped = [node.returns, *node.decorator_list]
    elif isinstance(node, (ast.AnnAssign, ast.arg)):
        skipped = [node.annotation]
    elif isinstance(node, ast.Raise):  # its message
        skipped = [node.exc, node.cause]
    elif isinstance(node, ast.keyword) and node.arg == "strict":  # of a zip: an assertion
        skipped = [node.value]
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    for child in ast.iter_child_nodes(node):
        if not any(child is one for one in skipped):
            named = isinstance(child, (*FUNCTION, ast.ClassDef)) and child.name != "__repr__"
            inner = f"{function}.{child.name}".strip(".") if named else function
            yield child, inner
            yield from _walk(child, inner)


@functools.cache
def sites(module: str) -> list[Mutant]:
    """Every mutant of ``module``, a path in the package."""
    source = (ROOT / "paramp" / module).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    counts: Counter[tuple[str, str]] = Counter()
    found = []
    for node, function in _walk(ast.parse(source)):
        for operator, part, new in _changes(node):
            counts[function, operator] += 1
            name = f"{module}:{function or 'module'}:{operator}:{counts[function, operator]}"
            text = f"({ast.unparse(new)})" if isinstance(new, ast.expr) else ast.unparse(new)
            start, end = starts[part.lineno - 1] + part.col_offset, starts[part.end_lineno - 1] + part.end_col_offset
            found.append(Mutant(module, name, part.lineno, start, end, text))
    return found


def all_sites() -> list[Mutant]:
    """Every mutant of the package."""
    package = ROOT / "paramp"
    return [one for path in sorted(package.rglob("*.py")) for one in sites(str(path.relative_to(package)))]


def drawn(num: int, seed: str, only: Sequence[str] = ("",)) -> list[Mutant]:
    """``num`` mutants whose names have one of ``only`` in them. A change of the package changes few of them."""

    def place(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.name}".encode()).digest()

    return sorted((one for one in all_sites() if any(part in one.name for part in only)), key=place)[:num]


# ---------------------------------------------------------------------------------------------- which tests meet them

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

    A mutant outside functions, whose statement runs when its module is imported, is met by each function of the module
    and of those that import it.
    """
    folder.mkdir()
    trees = {path: ast.parse(path.read_bytes()) for path in package.rglob("*.py")}
    functions = {path: [node for node in ast.walk(tree) if isinstance(node, FUNCTION)] for path, tree in trees.items()}
    changed = set()
    paths = [package / mutant.module for mutant in mutants]
    places = [_place(functions[path], mutant.line) for path, mutant in zip(paths, mutants, strict=True)]
    for number, (path, place) in enumerate(zip(paths, places, strict=True)):
        met_in = {path} if place else {path, *(one for one, tree in trees.items() if _imports(tree, path.stem))}
        starts = [(node.body, node.body[0]) for one in met_in for node in functions[one]]
        for body, statement in [place] if place else starts:
            call = ast.Expr(ast.Call(ast.Name("__ran__", ast.Load()), [ast.Constant(number)], []))
            body.insert(body.index(statement) + _is_docstring(statement), call)
        changed.update(met_in)
    for path in changed:
        tree = trees[path]
        is_future = [isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body]
        first = len(is_future) - is_future[::-1].index(True) if any(is_future) else _is_docstring(tree.body[0])
        tree.body.insert(first, ast.ImportFrom("paramp.ran", [ast.alias("ran", "__ran__")], 0))
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    (package / "ran.py").write_text(RAN.format(folder=folder))


def _imports(tree: ast.AST, name: str) -> bool:
    """Whether ``tree`` imports a module ``name``, or of one."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return any(name in {(node.module or "").rpartition(".")[2], *(one.name for one in node.names)} for node in found)


def _place(functions: Sequence[ast.AST], line: int) -> tuple[list[ast.stmt], ast.stmt] | None:
    """The innermost statement with ``line`` in a function, and the list that it is in; None if it is in no function.

    Of the head of a function, whose defaults count in its calls: the first of the function.
    """
    found = None
    for function in functions:  # those inside others come after them
        if function.lineno <= line <= function.end_lineno:
            found = function.body, function.body[0]
            lists = [getattr(node, name, ()) for node in ast.walk(function) for name in ("body", "orelse", "finalbody")]
            for body in (one for one in lists if isinstance(one, list)):
                found = next(((body, one) for one in body if one.lineno <= line <= one.end_lineno), found)
    return found


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def read(folder: Path) -> dict[int, set[str]]:
    """The test cases that met each mutant, by its number."""
    met: dict[int, set[str]] = defaultdict(set)
    for path in folder.iterdir():
        for line in path.read_text(encoding="utf-8").splitlines():
            number, _, test = line.partition(" ")
            if "::" in test:  # else a file was being collected
                met[int(number)].add(test.rpartition(" (")[0])
    return met
