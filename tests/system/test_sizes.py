"""Folders and classes that fit into a head. How long a file or a function is, is left to judgement."""

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "paramp"
FILES = sorted(PACKAGE.rglob("*.py"))


def test_folders_hold_few_modules():
    modules = Counter(path.parent for path in FILES if path.name != "__init__.py")
    assert {folder.name: count for folder, count in modules.items() if count > 14} == {}


def test_the_engine_is_one_class():
    """No part of it is hidden in another class."""
    classes = [
        node for path in FILES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]
    (engine,) = (node for node in classes if node.name == "Engine")
    assert engine.bases == []
