"""Imports go strictly downward: a module may import only modules of lower layers, or earlier ones of its own."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "paramp"

ORDER = [
    # L0: what the user asks for
    "errors",
    "typed",
    "spellings",
    "precision",
    "schedules",
    "config",
    "environment",
    "network",
    "processes",
    "backends",
    "encoding",
    "tensorfile",
    "manifest",
    # L1: who is where, what a rank holds
    "surgery",
    "randomness",
    "whereabouts",
    "heartbeat",
    "mesh",
    "launching",
    "shards",
    "loaders",
    # L2: the parts
    "emulation",
    "autocast",
    "building",
    "diagnosis",
    "scaler",
    "norms",
    "tensor",
    "float8",
    "parcels",
    "stages",
    "tracing",
    "huggingface",
    "timeline",
    "pipeline",
    "forensics",
    # L3: gradients and what the optimizer steps
    "grads",
    "masters",
    "remainders",
    "flat",
    "histogram",
    "stepping",
    "optimizers",
    "replicas",
    # what is saved
    "pieces",
    "checkpoint",
    "state",
    "saving",
    # L4: the engine
    "engine",
    "initialization",
    "restarts",
    "fabric",
    # L5: around it
    "tokens",
    "text",
    "arrow",
    "data",
    "images",
    "utilization",
    "metrics",
    "plot",
    "exchange",
    "doctor",
    # L6: models and the seeds' spellings
    "models",
    "context",
    "core",
    "logging",
    "utils",
    "amp",
    "nn",
    "functional",
    "algorithms",
    "apex",
    "witness",
    "verify_run",
    "verify",
    "",
    "__main__",
]

CORE = {"torch", "numpy"}
EXTRAS = {
    *("rich", "mpi4py", "tokenizers", "datasets", "pyarrow", "transformers", "tensorboard", "matplotlib"),
    *("torchao", "transformer_engine", "lightning", "lightning_utilities", "apex", "sklearn"),
}
"""What may be missing, so that only functions import it."""


def _module(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return "" if relative.name == "__init__.py" and len(relative.parts) == 1 else relative.parts[0].removesuffix(".py")


def _imports(path: Path):
    """The top-level names of the package that the file imports, wherever in the file it does so."""
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            if node.level < depth:
                continue  # within a subpackage
            module = node.module or ""
            yield from ([module.split(".")[0]] if module else [alias.name for alias in node.names])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "paramp":
            yield (node.module + ".").split(".")[1]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "paramp":
                    yield (alias.name + ".").split(".")[1]


def test_every_module_has_its_place():
    assert {_module(path) for path in PACKAGE.rglob("*.py")} == set(ORDER)


def test_imports_go_strictly_downward():
    for path in PACKAGE.rglob("*.py"):
        own = ORDER.index(_module(path))
        for name in _imports(path):
            assert ORDER.index(name) < own, f"{path.name} imports {name}, which is not below it"


def test_the_core_needs_torch_and_numpy_only():
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
