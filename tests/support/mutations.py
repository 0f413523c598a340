"""Small mistakes in the modules of the package: where they can be made.

A mutant is one place in a module changed by one of five operators: a comparison or a test of membership or identity
swapped; an operator of arithmetic swapped; a constant changed; a condition negated, or ``and`` and ``or`` swapped; a
statement deleted. It is named by its module, function, operator and number there.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


# ----------------------------------------------------------------------------------------------------- the operators

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


def _comparison(node: ast.AST) -> bool:
    if not isinstance(node, ast.Compare) or type(node.ops[0]) not in COMPARISONS:
        return False
    node.ops = [COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
    return True


def _arithmetic(node: ast.AST) -> bool:
    if not isinstance(node, (ast.BinOp, ast.AugAssign)) or type(node.op) not in ARITHMETIC:
        return False
    node.op = ARITHMETIC[type(node.op)]()
    return True


def _constant(node: ast.AST) -> bool:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, (int, float)):
        return False
    if isinstance(node.value, bool):
        node.value = not node.value
    else:
        node.value = node.value + 1 if isinstance(node.value, int) else node.value * 2 + 1
    return True


def _condition(node: ast.AST) -> bool:
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.comprehension) and node.ifs:
        node.ifs = [ast.UnaryOp(ast.Not(), node.ifs[0]), *node.ifs[1:]]
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    else:
        return False
    return True


def _deleted(node: ast.AST) -> bool:
    """Whether ``node`` is a statement that may be left out and leaves a program that can be run."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Subscript) for target in node.targets)
    return isinstance(node, (ast.AugAssign, ast.Raise, ast.Delete, ast.Continue, ast.Break))


OPERATORS: dict[str, Callable[[ast.AST], bool]] = {
    "comparison": _comparison,
    "arithmetic": _arithmetic,
    "constant": _constant,
    "condition": _condition,
}
"""All but the deletion: each changes a node where it applies, and says whether it does. It changes no other node."""
CHANGED = (ast.Compare, ast.BinOp, ast.BoolOp, ast.AugAssign, ast.Constant)
CHANGED += (ast.If, ast.IfExp, ast.While, ast.comprehension)
"""The nodes that an operator may change."""


# ----------------------------------------------------------------------------------------------------------- the sites


@dataclasses.dataclass(frozen=True)
class Mutant:
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


def _children(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """The nodes directly in ``node`` where a mistake can be made, each with the name of the function it begins."""
    skipped: list[ast.AST | None] = []
    if isinstance(node, FUNCTION):
        skipped = [node.returns, *node.decorator_list]
    elif isinstance(node, (ast.AnnAssign, ast.arg)):
        skipped = [node.annotation]
    elif isinstance(node, ast.Raise):  # its message
        skipped = [node.exc, node.cause]
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    for child in ast.iter_child_nodes(node):
        if not any(child is one for one in skipped):
            named = isinstance(child, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))
            yield child, child.name if named and child.name != "__repr__" else ""  # type: ignore[attr-defined]


def _walk(node: ast.AST, function: str) -> Iterator[tuple[ast.AST, str]]:
    for child, name in _children(node):
        inner = f"{function}.{name}".strip(".") if name else function
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

    def add(function: str, operator: str, node: ast.AST, text: str) -> None:
        counts[function, operator] += 1
        start, end = (
            starts[getattr(node, f"{name}lineno") - 1] + getattr(node, f"{name}col_offset") for name in ("", "end_")
        )
        name = f"{module}:{function or 'module'}:{operator}:{counts[function, operator]}"
        found.append(Mutant(module, name, node.lineno, start, end, text))  # type: ignore[attr-defined]

    for node, function in _walk(ast.parse(source), ""):
        if _deleted(node):
            add(function, "deletion", node, "pass")
        for operator, change in OPERATORS.items() if isinstance(node, CHANGED) else ():
            changed = copy.copy(node)
            if change(changed):
                part, new = _smallest(node, changed)
                text = f"({ast.unparse(new)})" if isinstance(new, ast.expr) else ast.unparse(new)
                add(function, operator, part, text)
    return found


def _smallest(node: ast.AST, changed: ast.AST) -> tuple[ast.AST, ast.AST]:
    """The part of ``node`` that has a place in the source of its own and holds the whole change, and the new one."""
    if isinstance(node, ast.comprehension):
        return node.ifs[0], changed.ifs[0]  # type: ignore[attr-defined]
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        return node.test, changed.test  # type: ignore[attr-defined]
    return node, changed


def all_sites() -> list[Mutant]:
    """Every mutant of the package."""
    package = ROOT / "paramp"
    return [one for path in sorted(package.rglob("*.py")) for one in sites(str(path.relative_to(package)))]


def drawn(num: int, seed: str, only: Sequence[str] = ("",)) -> list[Mutant]:
    """``num`` mutants whose names have one of ``only`` in them. A change of the package changes few of them."""

    def place(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.name}".encode()).digest()

    return sorted((one for one in all_sites() if any(part in one.name for part in only)), key=place)[:num]
