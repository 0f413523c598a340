"""``paramp doctor``: which parts of paramp run on this machine, and why the others do not.

It imports no optional package and starts no process group: packages are looked up on disk, launchers in the
environment. So it runs anywhere, also where training does not start. A problem is a line of the report, never an
exception.

``--json`` prints one object. Its keys are stable between versions; later versions may add some:

    versions      {"paramp", "python", "torch", and each optional package: its version, or null}
    device        the device that ``launch`` would choose: "cpu" or "cuda"
    devices       [{"kind": "cuda" | "cpu", "name", "capability": "9.0" or null}], the GPUs first
    backends      {"gloo", "nccl", "mpi": whether torch has it, "chosen": by ``launch`` for one rank a GPU}
    launcher      {"name": "torchrun" | "mpi" | "slurm" | null, "rank", "world_size", "problem": null or a sentence}
    mpi           {"mpirun": its kind, or null, "path", "mpi4py": its version, or null}
    slurm         {"job", "nodes", "tasks": each null outside of a job, "srun": its path, or null}
    apex          {"kind": "real" | "wrong" | "none", "version", "reason"}
    torchao, transformer_engine    {"found", "version", "reason"}
    modes         {mode: {"runs": "natively" | "emulated" | "no", "why"}}
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..base.errors import LaunchError
from ..base.optional_packages import find_apex, find_torchao, find_transformer_engine
from ..distributed.launcher_env import find_place
from ..precision.capabilities import NATIVE_BF16, NATIVE_FLOAT8, has_bf16_on_cpu, has_native_fp16
from ..precision.policy import PRESETS, Precision

PACKAGES = (
    *("numpy", "rich", "mpi4py", "transformers", "datasets", "tokenizers", "tensorboard", "matplotlib"),
    *("torchao", "transformer_engine", "lightning", "scikit-learn", "apex"),
)
"""Distributions whose versions are reported, by pip's names."""

IN_FP32 = "products are computed in fp32 and rounded"
WIDER = "operands are rounded to it and multiplied in a wider dtype"
SECONDS_FOR_MPIRUN = 10.0


def doctor(as_json: bool = False) -> str:
    """The report as text, or as one JSON object with the keys above."""
    found = examine()
    return json.dumps(found, indent=2) if as_json else "\n".join(_lines(found))


def examine() -> dict[str, Any]:
    """The report as an object with the keys above."""
    devices = _devices()
    return {
        "versions": _versions(),
        "device": devices[0]["kind"],
        "devices": devices,
        "backends": _backends(devices[0]["kind"]),
        "launcher": _launcher(),
        "mpi": _mpi(),
        "slurm": _slurm(),
        "apex": {key: value for key, value in asdict(find_apex()).items() if key in ("kind", "version", "reason")},
        "torchao": asdict(find_torchao()),
        "transformer_engine": asdict(find_transformer_engine()),
        "modes": {name: _mode(precision, devices) for name, precision in PRESETS.items()},
    }


# ---------------------------------------------------------------------------------------------------- the machine


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, str | None]:
    own = {"paramp": _version("paramp"), "python": platform.python_version(), "torch": torch.__version__}
    return own | {package: _version(package) for package in PACKAGES}


def _devices() -> list[dict[str, Any]]:
    devices: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count()):
        try:
            found = torch.cuda.get_device_properties(index)
        except RuntimeError:  # the driver lists a GPU that it cannot start
            continue
        devices.append({"kind": "cuda", "name": found.name, "capability": f"{found.major}.{found.minor}"})
    return [*devices, {"kind": "cpu", "name": _cpu_name(), "capability": None}]


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    named = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _backends(device: str) -> dict[str, Any]:
    there = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "mpi": dist.is_available() and dist.is_mpi_available(),
    }
    return there | {"chosen": "nccl" if device == "cuda" and there["nccl"] else "gloo"}


def _launcher() -> dict[str, Any]:
    try:
        place, problem = find_place(), None
    except LaunchError as error:
        place, problem = None, str(error)
    return {
        "name": place and place.launcher,
        "rank": place and place.rank,
        "world_size": place and place.world_size,
        "problem": problem,
    }


MPI_KINDS = {"open mpi": "Open MPI", "open-mpi": "Open MPI", "openrte": "Open MPI", "hydra": "MPICH", "mpich": "MPICH"}
"""Text in the output of ``mpirun --version`` -> the kind of MPI."""


def _mpi() -> dict[str, Any]:
    path, kind = shutil.which("mpirun"), None
    if path is not None:
        try:
            answer = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=SECONDS_FOR_MPIRUN, check=False
            )
            text = (answer.stdout + answer.stderr).lower()
        except (OSError, subprocess.SubprocessError):
            text = ""
        kind = next((kind for word, kind in MPI_KINDS.items() if word in text), "an unknown kind")
    return {"mpirun": kind, "path": path, "mpi4py": _version("mpi4py")}


def _slurm() -> dict[str, Any]:
    variables = {"job": "SLURM_JOB_ID", "nodes": "SLURM_JOB_NODELIST", "tasks": "SLURM_NTASKS"}
    return {key: os.environ.get(name) or None for key, name in variables.items()} | {"srun": shutil.which("srun")}


# ------------------------------------------------------------------------------------------------------- the modes


def _mode(precision: Precision, devices: list[dict[str, Any]]) -> dict[str, str]:
    """How ``precision`` runs on the first of ``devices``."""
    device = devices[0]
    lack = _lacking(precision.compute, device)
    if precision.float8 is None:
        return {"runs": "emulated" if lack else "natively", "why": lack or f"{_called(precision.compute)} products"}
    torchao, engine = find_torchao(), find_transformer_engine()
    wanted = precision.float8.transformer_engine
    missing = _lacking_float8(device)
    if wanted and engine.found and not missing:
        return {"runs": "natively", "why": f"Transformer Engine {engine.version or ''}".rstrip()}
    instead = " in place of Transformer Engine" if wanted else ""
    if not torchao.found:
        return {"runs": "no", "why": f"{torchao.reason}{', or Transformer Engine' if wanted else ''}"}
    why = [f"torchao{instead}", *([missing] if missing else []), *([lack] if lack else [])]
    return {"runs": "emulated" if missing or lack else "natively", "why": "; ".join(why)}


def _called(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _lacking(dtype: torch.dtype, device: Mapping[str, Any]) -> str | None:
    """Why products of ``dtype`` are not native on ``device``; None where they are."""
    return LACKS.get(dtype, lambda _: None)(device)


def _lacking_fp16(device: Mapping[str, Any]) -> str | None:
    if has_native_fp16(device["kind"]):
        return None
    return f"this CPU has no fp16 arithmetic: {IN_FP32}"


def _lacking_bf16(device: Mapping[str, Any]) -> str | None:
    if device["kind"] == "cpu":
        return None if has_bf16_on_cpu() else f"this CPU has no bfloat16 arithmetic: {IN_FP32}"
    if _capability(device) >= NATIVE_BF16:
        return None
    return f"{device['name']}{_capability_text(device)} has no bfloat16 arithmetic, from 8.0 on"


def _lacking_float8(device: Mapping[str, Any]) -> str | None:
    if device["kind"] == "cpu":
        return f"no CPU multiplies in float8: {WIDER}"
    if _capability(device) >= NATIVE_FLOAT8:
        return None
    return f"{device['name']}{_capability_text(device)} has no float8 arithmetic, from 8.9 on: {WIDER}"


LACKS: dict[torch.dtype, Callable[[Mapping[str, Any]], str | None]] = {
    torch.float16: _lacking_fp16,
    torch.bfloat16: _lacking_bf16,
}


def _capability(device: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(part) for part in device["capability"].split("."))


# ------------------------------------------------------------------------------------------------------ the screen


def _lines(found: Mapping[str, Any]) -> list[str]:
    versions, launcher, mpi, slurm = found["versions"], found["launcher"], found["mpi"], found["slurm"]
    rows = [
        ("paramp", f"{versions['paramp'] or 'not installed'}, Python {versions['python']}, torch {versions['torch']}")
    ]
    rows += [
        ("device" if index == 0 else "", f"{device['name']}{_capability_text(device)}")
        for index, device in enumerate(found["devices"])
    ]
    there = ", ".join(name for name in ("gloo", "nccl", "mpi") if found["backends"][name]) or "none"
    rows.append(("backends", f"{there}; launch chooses {found['backends']['chosen']} on {found['device']}"))
    rows.append(("launcher", _launcher_text(launcher)))
    mpi_text = "no mpirun on the path" if mpi["path"] is None else f"mpirun of {mpi['mpirun']} at {mpi['path']}"
    rows.append(("MPI", f"{mpi_text}; {'mpi4py ' + mpi['mpi4py'] if mpi['mpi4py'] else 'no mpi4py'}"))
    job = "no job" if slurm["job"] is None else f"job {slurm['job']} on {slurm['nodes']}, tasks {slurm['tasks']}"
    rows.append(("Slurm", f"{job}; {'srun at ' + slurm['srun'] if slurm['srun'] else 'no srun on the path'}"))
    rows.append(("Apex", found["apex"]["reason"]))
    rows += [("torchao", found["torchao"]["reason"]), ("TE", found["transformer_engine"]["reason"])]
    others = [f"{name} {versions[name] or 'none'}" for name in PACKAGES if name not in NAMED_ABOVE]
    rows.append(("packages", ", ".join(others)))
    lines = [f"{name:<10}{text}".rstrip() for name, text in rows]
    lines += ["", f"{'mode':<28}{'runs':<10}why"]
    return lines + [f"{name:<28}{mode['runs']:<10}{mode['why']}" for name, mode in found["modes"].items()]


NAMED_ABOVE = ("mpi4py", "torchao", "transformer_engine", "apex")


def _capability_text(device: Mapping[str, Any]) -> str:
    return "" if device["capability"] is None else f" (compute capability {device['capability']})"


def _launcher_text(launcher: Mapping[str, Any]) -> str:
    if launcher["problem"]:
        return str(launcher["problem"])
    if launcher["name"] is None:
        return "none: a world of one"
    return f"{launcher['name']}: rank {launcher['rank']} of {launcher['world_size']}"
