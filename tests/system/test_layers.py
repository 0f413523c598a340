"""The package table: which package may import which. Inside a package, imports have an order too (no cycles)."""

import ast
import graphlib
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "paramp"

PARTS = {"base", "precision", "config", "distributed", "data", "parallel", "optim", "checkpoint", "observe", "engine"}
ALLOWED = {
    "base": set(),
    "precision": {"base"},
    "config": {"base", "precision"},
    "distributed": {"base", "config"},
    "data": {"base", "distributed"},
    "parallel": {"base", "precision", "config", "distributed"},
    "optim": {"base", "precision", "config", "distributed"},
    "checkpoint": {"base", "distributed"},
    "models": {"base", "parallel", "distributed"},
    "observe": {"base", "config", "distributed", "parallel", "optim"},
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


def _modules():
    """Each module's path, by its dotted name below the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip("."), path


def _imports(name, path, modules):
    """The modules of the package that ``path`` imports, wherever in the file it does so."""
    package = ["paramp", *name.split(".")] if name else ["paramp"]
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for dotted in found:
            if dotted.split(".")[0] == "paramp":
                parts = dotted.split(".")[1:]
                while ".".join(parts) not in modules:
                    parts.pop()
                yield ".".join(parts)


def _package(name):
    """The package that the module ``name`` is in; "" for the root's own modules."""
    first = name.split(".")[0]
    return first if first in ALLOWED else ""


def test_packages_import_what_the_table_allows():
    modules = dict(_modules())
    wrong = []
    for name, path in modules.items():
        package = _package(name)
        for imported in _imports(name, path, modules):
            to = _package(imported)
            if to != package and to not in ALLOWED[package]:
                wrong.append(f"{name or 'paramp'} imports {imported or 'paramp'}")
    assert not wrong, "\n".join(wrong)


def test_imports_have_an_order():
    modules = dict(_modules())
    graph = {name: {to for to in _imports(name, path, modules) if to != name} for name, path in modules.items()}
    graph[""] = set()  # the root loads what is asked for
    graphlib.TopologicalSorter(graph).prepare()


def test_the_core_needs_torch_numpy_and_safetensors_only():
    import sys

    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        inside = {id(child) for function in functions for child in ast.walk(function)}
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            allowed = sys.stdlib_module_names | CORE | (EXTRAS if id(node) in inside else set())
            for name in names:
                assert name.split(".")[0] in allowed, f"{path.name} imports {name}"
