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
    "pipeline",
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
    "pipeline": {"base", "scaling", "precision", "config", "distributed", "parallel"},
    "optim": {"base", "scaling", "precision", "config", "distributed"},
    "checkpoint": {"base", "distributed"},
    "models": {"base", "parallel", "distributed"},
    "observe": {"base", "scaling", "precision", "config", "distributed", "parallel", "pipeline", "optim"},
    "engine": PARTS - {"engine"},
    "compat": PARTS | {"models"},
    "integrations": PARTS | {"models", "compat"},
    "tools": PARTS | {"models", "compat", "integrations"},
    "exact": PARTS | {"tools"},
    "": PARTS | {"models", "compat", "integrations", "tools"},
}
"""The root's own modules are facades."""

CORE = {"torch", "numpy", "safetensors"}
EXTRAS = {
    *(
        "rich",
        "mpi4py",
        "tokenizers",
        "datasets",
        "pyarrow",
        "transformers",
        "tensorboard",
        "matplotlib",
        "bokeh",
        "jinja2",
    ),
    *("torchao", "transformer_engine", "lightning", "lightning_utilities", "apex", "sklearn", "peft", "accelerate"),
    "cloudpickle",
}
"""What may be missing, so that only functions import it."""
FOR_TYPES = {"typing_extensions"}
"""What type checkers have themselves, so that it is imported for them only."""

FILES = {path.relative_to(PACKAGE).with_suffix("").parts: path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = {".".join(part for part in parts if part != "__init__"): path for parts, path in FILES.items()}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
"""By dotted names below the package: "" is the package itself."""


def imports(name):
    """The modules of the package that the module ``name`` imports, wherever in the file it does so."""
    package = ".".join(MODULES[name].relative_to(PACKAGE.parent).parent.parts)
    for node in ast.walk(TREES[name]):
        found = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found = [f"{source}.{name}" for name in found]
        for first, *parts in (dotted.split(".") for dotted in found):
            if first == "paramp":
                while ".".join(parts) not in MODULES:  # a name of the module
                    parts.pop()
                yield ".".join(parts)


GRAPH = {name: set(imports(name)) - {name} for name in MODULES}


def package_of(name):
    """The package that the module ``name`` is in; "" for the root's own modules."""
    first = name.split(".")[0]
    return first if first in ALLOWED else ""


def test_the_table_of_packages_has_each_below_those_it_imports():
    page = (PACKAGE.parent / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    table = page.partition("| package | what lives there |")[2].partition("\n\n")[0]
    order = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(order) == sorted({*ALLOWED} - {""})
    assert [name for at, name in enumerate(order) if not ALLOWED[name] <= {*order[:at]}] == []


def test_packages_import_what_the_table_allows():
    assert len(GRAPH) > 100
    pairs = [(name, imported) for name, found in GRAPH.items() for imported in found]
    allowed = {package: {*others, package} for package, others in ALLOWED.items()}
    assert [pair for pair in pairs if package_of(pair[1]) not in allowed[package_of(pair[0])]] == []
    graphlib.TopologicalSorter(GRAPH | {"": set()}).prepare()  # no cycle; the root loads what is asked for


def test_the_core_needs_torch_numpy_and_safetensors_only():
    for name, tree in TREES.items():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        inside = {id(child) for function in functions for child in ast.walk(function)}
        checked = [
            node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        ]
        for_types = {id(child) for block in checked for child in ast.walk(block)}
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            allowed = sys.stdlib_module_names | CORE | (EXTRAS if id(node) in inside else set())
            allowed |= FOR_TYPES if id(node) in for_types else set()
            assert {one.split(".")[0] for one in names} <= allowed, f"{name} imports {names}"
