"""The package table: which package may import which. Inside a package, imports have an order too (no cycles)."""

import ast
import graphlib
import importlib.util
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "paramp"

PARTS = {
    "base",
    "scaling",
    "precision",
    "config",
    "distributed",
    "data",
    "parallel",
    "optim",
    "checkpoint",
    "observe",
    "engine",
}
ALLOWED = {
    "base": set(),
    "scaling": {"base"},
    "precision": {"base", "scaling"},
    "config": {"base", "precision"},
    "distributed": {"base", "scaling", "config"},
    "data": {"base", "distributed"},
    "parallel": {"base", "scaling", "precision", "config", "distributed"},
    "optim": {"base", "scaling", "precision", "config", "distributed"},
    "checkpoint": {"base", "distributed"},
    "models": {"base", "parallel", "distributed"},
    "observe": {"base", "scaling", "config", "distributed", "parallel", "optim"},
    "engine": PARTS - {"engine"},
    "compat": PARTS | {"models"},
    "integrations": PARTS | {"models", "compat"},
    "tools": PARTS | {"models", "compat", "integrations"},
    "": PARTS | {"models", "compat", "integrations", "tools"},
}
"""The root's own modules are facades."""

CORE = {"torch", "numpy", "safetensors"}
EXTRAS = {
    *("rich", "mpi4py", "tokenizers", "datasets", "pyarrow", "transformers", "tensorboard", "matplotlib"),
    *("torchao", "transformer_engine", "lightning", "lightning_utilities", "apex", "sklearn", "peft", "accelerate"),
}
"""What may be missing, so that only functions import it."""


def _imports(path, modules):
    """The modules of the package that ``path`` imports, wherever in the file it does so."""
    package = ".".join(path.relative_to(PACKAGE.parent).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        found = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found = [f"{source}.{name}" for name in found]
        for dotted in found:
            first, *parts = dotted.split(".")
            if first == "paramp":
                while ".".join(parts) not in modules:  # a name of the module
                    parts.pop()
                yield ".".join(parts)


def _graph():
    """What each module imports, by dotted names below the package: "" is the package itself."""
    files = {path.relative_to(PACKAGE).with_suffix(""): path for path in sorted(PACKAGE.rglob("*.py"))}
    modules = {".".join(part for part in name.parts if part != "__init__"): path for name, path in files.items()}
    return {name: set(_imports(path, modules)) - {name} for name, path in modules.items()}


def _package(name):
    """The package that the module ``name`` is in; "" for the root's own modules."""
    first = name.split(".")[0]
    return first if first in ALLOWED else ""


def test_packages_import_what_the_table_allows():
    graph = _graph()
    assert len(graph) > 100
    wrong = [
        f"{name or 'paramp'} imports {imported or 'paramp'}"
        for name, found in graph.items()
        for imported in found
        if _package(imported) not in ALLOWED[_package(name)] | {_package(name)}
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_have_an_order():
    graph = _graph() | {"": set()}  # the root loads what is asked for
    graphlib.TopologicalSorter(graph).prepare()


def test_the_core_needs_torch_numpy_and_safetensors_only():
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        inside = {id(child) for function in functions for child in ast.walk(function)}
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            allowed = sys.stdlib_module_names | CORE | (EXTRAS if id(node) in inside else set())
            assert {name.split(".")[0] for name in names} <= allowed, f"{path.name} imports {names}"
