"""Folders, files, classes and functions that fit into a head."""

import ast
import statistics
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "paramp"
FILES = sorted(PACKAGE.rglob("*.py"))
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def lines(node):
    return node.end_lineno - node.lineno + 1


def nodes(kind):
    """Every class or function of the package, and where it is."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kind):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}", node


def test_folders_hold_at_most_14_modules():
    modules = Counter(path.parent for path in FILES if path.name != "__init__.py")
    assert {folder.name: count for folder, count in modules.items() if count > 14} == {}


def test_files_are_short():
    counts = {path.relative_to(PACKAGE): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: count for name, count in counts.items() if count > 400} == {}
    assert statistics.median(counts.values()) < 180


def test_functions_are_short():
    counts = {name: lines(node) for name, node in nodes(FUNCTION)}
    assert {name: count for name, count in counts.items() if count > 60} == {}
    long = {name: count for name, count in counts.items() if count > 40}
    assert len(long) <= 0.01 * len(counts), long


def is_plain_method(node):
    """A method that is neither a property nor a dunder method nor an overload's stub."""
    if not isinstance(node, FUNCTION):
        return False
    decorators = {getattr(decorator, "id", getattr(decorator, "attr", "")) for decorator in node.decorator_list}
    return not node.name.startswith("__") and not decorators & {"property", "setter", "cached_property", "overload"}


def test_classes_have_few_methods():
    methods = {name: sum(map(is_plain_method, node.body)) for name, node in nodes(ast.ClassDef)}
    assert {name: count for name, count in methods.items() if count > 20} == {}


def test_the_engine_class_is_short_and_whole():
    (engine,) = (node for _, node in nodes(ast.ClassDef) if node.name == "Engine")
    assert lines(engine) < 300
    assert engine.bases == []  # no part of it is hidden in another class
