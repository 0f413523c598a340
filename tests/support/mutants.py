"""``make mutants``: small mistakes are made in modules of :data:`AREAS`, one at a time, and tests that should fail run.

A mutant is one place in a module changed by one of five operators: a comparison or a test of membership or identity
swapped; an operator of arithmetic swapped; a constant changed; a condition negated, or ``and`` and ``or`` swapped; a
statement deleted. They are drawn by a seed, as many from each area of :data:`AREAS`. Each is written into a copy of the
tree, where the area's tests run until the first fails; a run that does not end in time counts as failed too.

A mutant is named by its module, function, operator and number there. Results are kept in ``.mutants`` with a hash of
the module and its tests, so that a second call runs only what has changed. The mutants that live are listed, and fail
the call if they are more than 3 % of those that ``tests/mutants.toml`` does not argue to be equivalent.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import warm

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / ".mutants" / "results.json"
ARGUED = ROOT / "tests" / "mutants.toml"
LEAST_KILLED = 0.97
FACTOR, LEAST_SECONDS = 3, 40
"""A run may take as many times as long as one without a mistake, and at least so many seconds."""

SEQUENCES = "tests/system/test_sequences.py"
ENGINE = "tests/engine/test_engine.py"
AREAS: dict[str, tuple[list[str], list[str]]] = {
    "scaler": (
        ["optim/loss_scaler.py"],
        [
            *("tests/optim/test_loss_scaler.py", SEQUENCES, "tests/observe/test_replica_check.py", ENGINE),
            "tests/observe/test_overflow_trace.py",
        ],
    ),
    "norm": (
        ["optim/grad_norm.py"],
        [
            *("tests/optim/test_grad_norm.py", SEQUENCES, "tests/optim/test_flat_params.py", ENGINE),
            "tests/compat/test_colossalai_amp.py",
        ],
    ),
    "step": (
        ["optim/fused_step.py", "engine/step_decision.py", "engine/step_result.py", "engine/loss_window.py"],
        [
            *(SEQUENCES, ENGINE, "tests/optim/test_flat_params.py", "tests/engine/test_loss_window.py"),
            "tests/precision/test_float8.py",
        ],
    ),
    "matrices": (
        ["optim/matrices/exchange.py", "optim/matrices/step.py", "optim/matrices/trial.py"],
        ["tests/optim/test_matrices.py"],
    ),
    "flat buffers": (
        [
            *("optim/flat_params.py", "optim/flat_gradients.py", "optim/param_buffer.py", "optim/master_weights.py"),
            *("optim/master_storage.py", "precision/master_residuals.py", "optim/changes/in_place.py"),
        ],
        [
            *(SEQUENCES, "tests/precision/test_master_residuals.py", "tests/optim/test_flat_params.py", ENGINE),
            *("tests/optim/test_replaced_parameters.py", "tests/compat/test_colossalai_amp.py"),
            *("tests/optim/test_changed_weights.py", "tests/optim/test_master_storage.py"),
            *("tests/optim/test_zero.py", "tests/observe/test_grad_histogram.py"),
        ],
    ),
    "zero": (
        ["optim/zero.py"],
        [SEQUENCES, "tests/optim/test_zero.py"],
    ),
    "tensor styles": (
        [f"parallel/tensor/{name}.py" for name in ("styles", "plan", "linear", "exchange")],
        [
            *(SEQUENCES, "tests/parallel/test_materialize.py", "tests/parallel/test_tensor_plan.py"),
            *("tests/engine/test_model_setup.py", "tests/parallel/test_huggingface.py", ENGINE),
            *("tests/parallel/test_local_layers.py", "tests/precision/test_float8.py", "tests/parallel/test_lora.py"),
            "tests/parallel/test_activation_checkpointing.py",
        ],
    ),
    "ties": (
        ["optim/grad_reduce.py", "parallel/stage.py", "distributed/axes.py"],
        [
            *(SEQUENCES, "tests/optim/test_grad_norm.py", "tests/optim/test_loss_scaler.py"),
            *("tests/parallel/test_pipeline.py", "tests/parallel/test_tensor_plan.py", ENGINE),
        ],
    ),
    "checkpoint state": (
        [
            *("engine/train_state.py", "engine/state/model_tensors.py", "engine/state/optimizer_state.py"),
            *("engine/state/random_streams.py", "engine/state/full_state.py"),
        ],
        [
            *(SEQUENCES, "tests/engine/test_train_state.py", "tests/checkpoint/test_resume.py"),
            *("tests/checkpoint/test_dcp_storage.py", ENGINE),
        ],
    ),
    "schedule": (
        ["engine/lr_scheduler.py"],
        ["tests/engine/test_lr_scheduler.py", SEQUENCES, ENGINE],
    ),
}
"""By name: modules of the package, and the test files that should fail, first those that fail soonest."""


# ----------------------------------------------------------------------------------------------------- the operators

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


def _comparison(node: ast.AST) -> None:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        node.ops[0] = COMPARISONS[type(node.ops[0])]()


def _arithmetic(node: ast.AST) -> None:
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in ARITHMETIC:
        node.op = ARITHMETIC[type(node.op)]()


def _constant(node: ast.AST) -> None:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            node.value = not node.value
        elif isinstance(node.value, int):
            node.value += 1
        elif isinstance(node.value, float):
            node.value = node.value * 2 + 1


def _condition(node: ast.AST) -> None:
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.comprehension) and node.ifs:
        node.ifs[0] = ast.UnaryOp(ast.Not(), node.ifs[0])
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()


def _deleted(node: ast.AST) -> bool:
    """Whether ``node`` is a statement that may be left out and leaves a program that can be run."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Subscript) for target in node.targets)
    return isinstance(node, (ast.AugAssign, ast.Raise, ast.Delete, ast.Continue, ast.Break))


OPERATORS: dict[str, Callable[[ast.AST], None]] = {
    "comparison": _comparison,
    "arithmetic": _arithmetic,
    "constant": _constant,
    "condition": _condition,
}
"""All but the deletion: each changes a node in place where it applies."""
CHANGED = (ast.Compare, ast.BinOp, ast.BoolOp, ast.AugAssign, ast.Constant)
CHANGED += (ast.If, ast.IfExp, ast.While, ast.comprehension)
"""The nodes that an operator may change."""


# ----------------------------------------------------------------------------------------------------------- the sites


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One mistake: ``text`` in the place of the characters from ``start`` to ``end`` of a module."""

    area: str
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
        return f"{self.module}:{self.line}: {before[:90]!r} -> {self.text[:90]!r}"


def _children(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """The nodes directly in ``node`` where a mistake can be made, each with the name of the function it begins."""
    skipped: list[ast.AST | None] = []
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
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


def sites(area: str, module: str) -> list[Mutant]:
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
        found.append(Mutant(area, module, name, node.lineno, start, end, text))  # type: ignore[attr-defined]

    for node, function in _walk(ast.parse(source), ""):
        if _deleted(node):
            add(function, "deletion", node, "pass")
        for operator, change in OPERATORS.items() if isinstance(node, CHANGED) else ():
            changed = copy.deepcopy(node)
            change(changed)
            if ast.dump(changed) == ast.dump(node):
                continue
            part, new = _smallest(node, changed)
            add(function, operator, part, f"({ast.unparse(new)})" if isinstance(new, ast.expr) else ast.unparse(new))
    return found


def _smallest(node: ast.AST, changed: ast.AST) -> tuple[ast.AST, ast.AST]:
    """The part of ``node`` that has a place in the source of its own and holds the whole change, and the new one."""
    if isinstance(node, ast.comprehension):
        return node.ifs[0], changed.ifs[0]  # type: ignore[attr-defined]
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        return node.test, changed.test  # type: ignore[attr-defined]
    return node, changed


@functools.cache
def sites_by_area() -> dict[str, list[Mutant]]:
    """Every mutant of every area."""
    return {area: [one for module in modules for one in sites(area, module)] for area, (modules, _) in AREAS.items()}


def drawn(num: int, seed: str) -> list[Mutant]:
    """``num`` mutants of all areas in turn."""
    piles = {area: random.Random(f"{seed} {area}").sample(found, len(found)) for area, found in sites_by_area().items()}
    chosen: list[Mutant] = []
    while len(chosen) < num and any(piles.values()):
        chosen += [pile.pop() for pile in piles.values() if pile]
    return chosen[:num]


# ------------------------------------------------------------------------------------------------------------- running


class Tree:
    """A copy of the tree, in which the tests of an area are run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, folder / name)
        self._clock = time.time() - 10**6
        for path in folder.rglob("*.py"):
            os.utime(path, (self._clock, self._clock))

    def run(self, tests: Iterable[str], seconds: float) -> tuple[str, float]:
        """``passed``, ``failed`` or ``timeout``, and the seconds that it took."""
        command = [warm.python(), "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
        environment = os.environ | {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        environment |= {"PARAMP_TEST_SHRINK": "0", "PARAMP_TEST_DEVICE": "cpu"}
        start = time.monotonic()
        with open(self.folder / "mutant.log", "wb") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()  # and so the processes that it has started, by the server that started them
                process.wait()
                return "timeout", time.monotonic() - start
        return {0: "passed"}.get(code, "failed"), time.monotonic() - start

    @contextlib.contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """Inside, the tree has the mistake."""
        path = self.folder / "paramp" / mutant.module
        source = path.read_bytes()
        self._write(path, mutant.apply(source))
        try:
            yield
        finally:
            self._write(path, source)

    def _write(self, path: Path, source: bytes) -> None:
        path.write_bytes(source)
        self._clock += 2  # so that compiled files of another version are not taken for this one's
        os.utime(path, (self._clock, self._clock))


def _hash(mutant: Mutant) -> str:
    paths = [f"paramp/{mutant.module}", *AREAS[mutant.area][1]]
    text = b"\0".join((ROOT / path).read_bytes() for path in paths)
    return hashlib.sha256(text + mutant.text.encode()).hexdigest()[:16]


def run_all(mutants: list[Mutant]) -> dict[str, dict[str, object]]:
    """The result of each of ``mutants``, by its name; those that are known already are not run."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    todo = [mutant for mutant in mutants if results.get(mutant.name, {}).get("hash") != _hash(mutant)]
    warm.start()
    with tempfile.TemporaryDirectory(prefix="paramp-mutants-") as folder:
        tree = Tree(Path(folder)) if todo else None
        limits: dict[str, float] = {}
        for number, mutant in enumerate(todo, 1):
            assert tree is not None
            tests = AREAS[mutant.area][1]
            if mutant.area not in limits:
                result, seconds = tree.run(tests, 600)
                if result != "passed":
                    sys.exit(
                        f"{' '.join(tests)}: {result} without a mistake\n{(tree.folder / 'mutant.log').read_text()}"
                    )
                limits[mutant.area] = max(LEAST_SECONDS, FACTOR * seconds)
                print(f"{mutant.area}: {seconds:.0f} s without a mistake", flush=True)
            with tree.changed(mutant):
                result, seconds = tree.run(tests, limits[mutant.area])
            results[mutant.name] = {"hash": _hash(mutant), "killed": result != "passed", "how": result}
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1))
            print(f"{number}/{len(todo)} {result} in {seconds:.0f} s: {mutant.name}", flush=True)
    return {mutant.name: results[mutant.name] for mutant in mutants}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=150, help="how many are drawn")
    parser.add_argument("--seed", default="1", help="by which they are drawn")
    parser.add_argument("--only", default="", help="a part of the names of those that are run")
    arguments = parser.parse_args()
    mutants = [one for one in drawn(arguments.num, arguments.seed) if arguments.only in one.name]
    results = run_all(mutants)
    argued = {one["mutant"]: one["reason"] for one in tomllib.loads(ARGUED.read_text()).get("equivalent", [])}
    living = [mutant for mutant in mutants if not results[mutant.name]["killed"] and mutant.name not in argued]
    counted = [mutant for mutant in mutants if mutant.name not in argued or results[mutant.name]["killed"]]
    for mutant in living:
        print(f"lives: {mutant.name}\n    {mutant.show((ROOT / 'paramp' / mutant.module).read_bytes())}")
    wrong = [mutant.name for mutant in mutants if mutant.name in argued and results[mutant.name]["killed"]]
    for name in wrong:
        print(f"{ARGUED.name}: {name} is argued to be equivalent, but a test fails")
    killed = 1 - len(living) / max(1, len(counted))
    print(f"{len(counted) - len(living)} of {len(counted)} killed ({killed:.1%}), {len(mutants) - len(counted)} argued")
    return int(killed < LEAST_KILLED or bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
