"""The cells of the family ``gpu-ways``, what a step may make the host wait for, and the processes that run cells.

A cell trains a small GPT for three steps on the fake device (:mod:`fake_cuda`): a mode, a layout and a feature, on the
first rank of the layout's world and on the last one.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from matrix import LAYOUTS, MODES, SCHEDULE_MODES

import paramp
from paramp.base.errors import ConfigError
from paramp.config.pipeline_schedules import SCHEDULES

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("train_gpu_cells.py")
IS_THERE = shutil.which("g++") and torch.__version__.startswith("2.13.") and not torch.backends.cuda.is_built()
on_fake_device = pytest.mark.skipif(not IS_THERE, reason="the fake device needs g++ and a CPU build of torch 2.13")


class Documented(NamedTuple):
    """Functions of the package, by qualified names, in which any step may wait, and the sentence that says so."""

    functions: tuple[str, ...]
    page: str
    sentence: str


ALWAYS = "Inside Fabric, Accelerate and the Trainers, torchtitan's too, it always does"
DOCUMENTED: list[Documented] = [
    Documented(("SameBatches._compare_bits",), "docs/step.md", "The host waits for their bits"),
    Documented(("ComparedGradients._compare",), "docs/step.md", "On a GPU the host waits for these sums"),
    Documented(("PlainStep.__call__", "MatrixStep.__call__"), "docs/step.md", "after the host has read one flag"),
    Documented(("DistributedGradScaler.step",), "docs/scaler.md", "`step` reads one flag, unless the optimizer has"),
    Documented(("SharedGradScaler.step", "ParampTrainer._clip"), "docs/scaler.md", ALWAYS),
    Documented(("MicrochunkRun.begin",), "docs/reproducible.md", "and the host waits for them"),
    Documented(("Replicas.check",), "docs/replicas.md", "the host reads its result"),
]
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "every second": {"activation_checkpointing": 2},
    "ema": {"ema": {"decay": 0.9}},
    "remainders": {"masters": "remainder"},
    "stochastic rounding": {"rounding": "stochastic"},
    "bf16 state": {"optimizer_state": "bf16"},
    "no clip": {"clip_grad_norm": None},
    "accumulation": {"gradient_accumulation": 2},
    "zeros": {"num_zeros": True},
    "fp32 gradients": {"grad_dtype": "float32"},
    "fp32 sums": {"reduce_dtype": "float32"},
    "two optimizers": {"optimizer": "two"},
    "momentum": {"optimizer": "sgd"},
    "untied": {"model": {"tied": False}},
    "dropout": {"model": {"dropout": 0.1}, "activation_checkpointing": "full"},
    "freezing": {"frozen": "norm.bias"},
    "own loop": {"loop": "by hand"},
    "sums": {"criterion": "sum and count"},
    "no loss": {"loop": "without the loss"},
    "pinned batches": {"batches": "pinned"},
    "own step": {"optimizer": "foreach"},
    "matrices": {"optimizer": "matrices"},
    "replicas": {"check_replicas_every": 1},
    "exact": {"reproducible": {"chunk": 2, "slices": 2}},  # 4 chunks, as many as dualpipev needs
    "compiled": {"compile": {"backend": "aot_eager"}},
    "compiled, selective": {"compile": {"backend": "aot_eager"}, "activation_checkpointing": "selective"},
    **{name: {"program": name, "optimizer": "fused"} for name in ("fabric", "accelerate")},
    **{name: {"program": name} for name in ("scaler", "transformers", "lightning", "torchtitan")},
    **{name: {"program": name} for name in ("fabric, clipped", "accelerate, clipped", "lightning, masters")},
    "scaler, fused": {"program": "scaler", "optimizer": "fused"},
}
"""What is added to a cell's configuration, or, by a key of :data:`OTHER_KEYS`, to how it is trained."""
OTHER_KEYS = ("optimizer", "model", "frozen", "criterion", "loop", "num_zeros", "batches", "program")
PROGRAM_LAYOUTS = {"torchtitan": ("1", "dp2", "tp2", "fsdp2")}
HOSTS = ("accelerate", "lightning", "torchtitan", "transformers")
"""Packages whose own lines may wait."""


class Cell(NamedTuple):
    """One training."""

    mode: str
    layout: str
    feature: str

    def __str__(self) -> str:
        return " - ".join(self)

    def job(self) -> dict[str, Any]:
        """What :mod:`train_gpu_cells` reads. A ConfigError if the feature is none of the mode and layout."""
        size, parallel = ALL_LAYOUTS[self.layout]
        job = dict(FEATURES[self.feature])
        has_program = self.mode == "16-mixed" and self.layout in PROGRAM_LAYOUTS.get(self.feature, "1")
        if ("pipeline" in parallel and self.feature == "own loop") or ("program" in job and not has_program):
            raise ConfigError("not in a pipeline, or not in an engine")
        if self.feature == "freezing" and parallel:
            raise ConfigError("not on several ranks, which read whether all of them have frozen the same")
        config = {key: job.pop(key) for key in [*job] if key not in OTHER_KEYS}
        config |= {"parallel": parallel, "precision": self.mode}
        paramp.Config(**config)
        return job | {"size": size, "config": config}

    def is_one(self) -> bool:
        try:
            self.job()
        except ConfigError:
            return False
        return True


OTHER_SCHEDULES = [name for name in SCHEDULES if name != "1f1b"]
ALL_LAYOUTS = LAYOUTS | {name: (2, {"pipeline": {"size": 2, "schedule": name}}) for name in OTHER_SCHEDULES}
PART = [
    *(Cell("16-mixed", "1", "freezing"), Cell("bf16-mixed", "fsdp2", "ema"), Cell("16-naive", "1", "remainders")),
    *(Cell("O2", "dp2 + zero1", "bf16 state"), Cell("32-true", "dualpipev", "sums")),
    *(Cell("16-mixed", "1", "compiled"), Cell("16-mixed", "1", "accelerate, clipped")),
]
"""The cells of ``make test``."""


@functools.cache
def every() -> list[Cell]:
    """Every pair of a mode, a layout and a feature that there can be: modes take turns on the layouts of a feature.

    It takes seconds to ask which can be.
    """
    plain = [Cell(mode, layout, "plain") for layout in LAYOUTS for mode in MODES]
    plain += [Cell(mode, name, "plain") for name in OTHER_SCHEDULES for mode in SCHEDULE_MODES]
    cells = [*PART, *(cell for cell in plain if cell.is_one())]
    for number, feature in enumerate(FEATURES):
        first, chosen = {}, []
        for place, layout in enumerate(ALL_LAYOUTS):
            able = [cell for mode in MODES if (cell := Cell(mode, layout, feature)).is_one()]
            chosen += able[(number + place) % len(able) :][:1] if able else []
            first = {cell.mode: cell for cell in able} | first
        cells += [*chosen, *(cell for mode, cell in first.items() if mode not in {cell.mode for cell in chosen})]
    return list(dict.fromkeys(cells))


class Runs:
    """Runs cells in ``workers`` processes, which start with the first."""

    def __init__(self, cells: list[Cell], workers: int) -> None:
        self._threads, self._own = ThreadPoolExecutor(workers), threading.local()
        self._processes: list[subprocess.Popen[str]] = []
        self._results = {cell: self._threads.submit(self._run, cell) for cell in cells}

    def __getitem__(self, cell: Cell) -> dict[str, Any]:
        return self._results[cell].result()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
            process.communicate()
        self._threads.shutdown()

    def _run(self, cell: Cell) -> dict[str, Any]:
        """What came of ``cell``, by rank, in this thread's process."""
        process = getattr(self._own, "process", None)
        if process is None or process.poll() is not None:
            own = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, PROGRAM.parent))), "OMP_NUM_THREADS": "1"}
            own["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # CUDA is in use when a cell of the exact mode begins
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": os.environ | own, "text": True}
            process = self._own.process = subprocess.Popen([sys.executable, str(PROGRAM)], **pipes)
            self._processes.append(process)
        try:
            print(json.dumps(cell.job()), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())
        except (OSError, ValueError) as error:
            process.kill()
            process.wait()
            raise RuntimeError(f"the process of the cell has ended: {error}") from error


def problems(result: dict[str, Any]) -> list[str]:
    """What is wrong in the outcome of a cell: on which rank, what the host waits for and where, or the error."""
    allowed = {name for row in DOCUMENTED for name in row.functions}
    found = []
    for rank, of_rank in result.items():
        if of_rank["error"] is not None:
            found.append(f"rank {rank} failed:\n{of_rank['error']}")
        for what, lines in of_rank["waits"]:
            if any(f"{os.sep}site-packages{os.sep}{host}{os.sep}" in lines[0] for host in HOSTS):
                continue
            if not allowed.intersection(line.split()[-1] for line in lines):
                at = " < ".join(line.replace(f"{ROOT}{os.sep}", "") for line in lines)
                found.append(f"rank {rank} waits: {what} at {at}")
    return list(dict.fromkeys(found))
