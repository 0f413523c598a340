"""What a reader expects: one meaning of a class name, one file of a name, few arguments of a constructor, no crumbs.

The lists of exceptions only shrink: what was mended is taken out.
"""

import ast
from collections import defaultdict

from checks.test_layers import GRAPH, MODULES, TREES

import paramp

TWICE: set[str] = set()
"""Classes and files of one name that are still to be renamed."""
PUBLIC = {"DistributedGradScaler"}
"""Constructors whose arguments are a contract."""
CRUMBS = 10
"""At most so many short files with one importer."""


def area(module):
    return module.split(".")[0]


def in_several_modules(names):
    """Of pairs of a name and its module: the names of several modules, ``compat`` and ``integrations`` aside."""
    places = defaultdict(set)
    for name, module in names:
        if area(module) not in ("compat", "integrations"):
            places[name].add(module)
    return {name: modules for name, modules in places.items() if len(modules) > 1}


def classes():
    for module, tree in TREES.items():
        yield from ((node, module) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def arguments(node):
    """How many arguments the constructor of a class takes; of a dataclass with keywords only, which is a record: 0."""
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            taken = method.args
            return len([*taken.posonlyargs, *taken.args, *taken.kwonlyargs]) - 1
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if not any(text.startswith("dataclass") for text in decorators) or "kw_only=True" in "".join(decorators):
        return 0
    fields = (line for line in node.body if isinstance(line, ast.AnnAssign))
    return sum("init=False" not in ast.unparse(line) for line in fields)


def test_a_class_name_has_one_meaning_and_a_file_name_one_file():
    named = ((node.name, module) for node, module in classes() if node.name not in paramp.__all__)
    files = ((path.name, module) for module, path in MODULES.items() if path.name != "__init__.py")
    twice = in_several_modules(named) | in_several_modules(files)
    assert set(twice) == TWICE, twice


def test_constructors_of_the_core_take_few_arguments():
    core = (node for node, module in classes() if area(module) not in ("compat", "integrations", "tools"))
    assert {node.name for node in core if arguments(node) > 6} == PUBLIC


def test_few_files_are_short_and_have_one_importer():
    importers = {module: [other for other, imported in GRAPH.items() if module in imported] for module in MODULES}
    short = [
        module
        for module, path in MODULES.items()
        if path.name != "__init__.py"
        and len(importers[module]) < 2
        and len(path.read_text(encoding="utf-8").splitlines()) < 60
    ]
    assert len(short) <= CRUMBS, short
