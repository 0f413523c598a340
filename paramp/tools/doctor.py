"""``paramp doctor``: which parts of paramp run on this machine, and why the others do not.

It looks up packages on disk and launchers in the environment, without importing optional packages or starting a process
group. So it runs anywhere, also where training does not start. A problem is a line of the report, never an exception.

``--json`` prints one object, whose keys the page "Doctor" of the documentation lists. They are stable between versions.
"""

import importlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..base.compilers import why_not_inductor
from ..base.errors import LaunchError, first_line
from ..base.installed_packages import find_apex, find_torchao, find_transformer_engine, installed_version
from ..distributed.launcher_variables import find_place
from ..precision.capabilities import NATIVE_BF16, NATIVE_FLOAT8, has_bf16_on_cpu, has_native_fp16
from ..precision.modes import PRESETS, Precision

PACKAGES = (
    *("numpy", "rich", "mpi4py", "transformers", "datasets", "tokenizers", "tensorboard", "matplotlib", "bokeh"),
    *("torchao", "transformer_engine", "lightning", "scikit-learn", "apex"),
)
"""Distributions whose versions are reported, by their names on PyPI."""

NAMED_ABOVE = ("mpi4py", "torchao", "transformer_engine", "apex")
"""Packages with a line of the text of their own."""
COMPILED = "with compile, the optimizer step is compiled; without, torch's fused kernels in blocks"
NOT_COMPILED = "cannot be set here: {}; the optimizer step runs in torch's fused kernels, in blocks"
IN_FP32 = "products are computed in fp32 and rounded"
EAGERLY = "compiled blocks run eagerly"
WIDER = "operands are rounded to it and multiplied in a wider dtype"
SECONDS_FOR_A_COMMAND = 10.0
LENGTH_OF_COMMIT = 10


def doctor(as_json: bool = False) -> str:
    """The report as text, or as one JSON object: that of :func:`examine`."""
    found = examine()
    return json.dumps(found, indent=2) if as_json else "\n".join(_lines(found))


def examine() -> dict[str, Any]:
    """The report as one object of plain values. Later versions may add keys."""
    devices, gpu_problems = _devices()
    why_not_compiled = why_not_inductor(devices[0]["kind"], {})
    slurm = {"job": "SLURM_JOB_ID", "nodes": "SLURM_JOB_NODELIST", "tasks": "SLURM_NTASKS"}
    return {
        "versions": {
            "paramp": importlib.import_module("paramp").__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        | {package: installed_version(package) for package in PACKAGES},
        "commit": _commit(Path(__file__).parents[2]),
        "device": devices[0]["kind"],
        "devices": devices,
        "gpu_problems": gpu_problems,
        "backends": _backends(devices[0]["kind"]),
        "launcher": _launcher(),
        "mpi": _mpi(),
        "slurm": {key: os.environ.get(name) or None for key, name in slurm.items()} | {"srun": shutil.which("srun")},
        "apex": {key: value for key, value in asdict(find_apex()).items() if key in ("kind", "version", "reason")},
        "torchao": asdict(find_torchao()),
        "transformer_engine": asdict(find_transformer_engine()),
        "compile": {"runs": why_not_compiled is None, "why": why_not_compiled},
        "modes": {name: _mode(precision, devices) for name, precision in PRESETS.items()},
    }


def _commit(clone: Path) -> str | None:
    """The abbreviated commit of ``clone``, read from its files, as git need not be there; None if it is no clone."""
    git = clone / ".git"
    try:
        if git.is_file():  # of a worktree; branches are in the repository's folder
            git = clone / git.read_text(encoding="utf-8").partition(":")[2].strip()
        common = git / "commondir"
        branches = git / common.read_text(encoding="utf-8").strip() if common.is_file() else git
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head[:LENGTH_OF_COMMIT]
        name = head.removeprefix("ref: ")
        loose, packed = branches / name, branches / "packed-refs"
        if loose.is_file():
            return loose.read_text(encoding="utf-8")[:LENGTH_OF_COMMIT]
        lines = packed.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line[:LENGTH_OF_COMMIT] for line in lines if line.endswith(f" {name}")), None)


def _answer(*command: str) -> tuple[str, str]:
    """What ``command`` writes to its output and its errors; nothing if it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_FOR_A_COMMAND, check=False)
    except (OSError, subprocess.SubprocessError):
        return "", ""
    return done.stdout, done.stderr


def _devices() -> tuple[list[dict[str, Any]], list[str]]:
    """The devices, and why each GPU that the driver lists beside them cannot be initialised."""
    devices, problems = [], []
    for index in range(torch.cuda.device_count()):
        try:
            found = torch.cuda.get_device_properties(index)
        except Exception as error:  # DeferredCudaCallError, for one, is no RuntimeError
            problems.append(f"GPU {index} cannot be used: {first_line(error)}")
            continue
        devices.append({"kind": "cuda", "name": found.name, "capability": f"{found.major}.{found.minor}"})
    return [*devices, {"kind": "cpu", "name": _cpu_name(), "capability": None}], problems


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")  # of Linux
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    named = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _backends(device: str) -> dict[str, Any]:
    there: dict[str, Any] = {
        name: dist.is_available() and getattr(dist, f"is_{name}_available")() for name in ("gloo", "nccl", "mpi")
    }
    return there | {"chosen": "nccl" if device == "cuda" and there["nccl"] else "gloo"}


def _launcher() -> dict[str, Any]:
    try:
        place = find_place()
    except LaunchError as error:
        return {"name": None, "rank": None, "world_size": None, "problem": str(error)}
    name, rank, world_size = (place.launcher, place.rank, place.world_size) if place else (None, None, None)
    return {"name": name, "rank": rank, "world_size": world_size, "problem": None}


MPI_KINDS = {"open mpi": "Open MPI", "open-mpi": "Open MPI", "openrte": "Open MPI", "hydra": "MPICH", "mpich": "MPICH"}
"""Text in the output of ``mpirun --version`` -> the kind of MPI."""


def _mpi() -> dict[str, Any]:
    path, kind = shutil.which("mpirun"), None
    if path is not None:
        text = "".join(_answer(path, "--version")).lower()
        kind = next((kind for word, kind in MPI_KINDS.items() if word in text), "an unknown kind")
    return {"mpirun": kind, "path": path, "mpi4py": installed_version("mpi4py")}


def _mode(precision: Precision, devices: list[dict[str, Any]]) -> dict[str, str]:
    """Whether and how ``precision`` runs on the first of ``devices``."""
    device = devices[0]
    lack = _lacking(precision.compute, device)
    if precision.float8 is None:
        products = f"{str(precision.compute).removeprefix('torch.')} products"
        return {"runs": "emulated" if lack else "natively", "why": lack or products}
    torchao, engine = find_torchao(), find_transformer_engine()
    wanted = precision.float8.transformer_engine
    missing = _lacking_float8(device)
    if wanted and engine.found and not missing:
        return {"runs": "natively", "why": f"Transformer Engine {engine.version or ''}".rstrip()}
    instead = " in place of Transformer Engine" if wanted else ""
    if not torchao.found:
        return {"runs": "no", "why": f"{torchao.reason}{', or Transformer Engine' if wanted else ''}"}
    why = "; ".join(filter(None, (f"torchao{instead}", missing, lack)))
    return {"runs": "emulated" if missing or lack else "natively", "why": why}


def _lacking(dtype: torch.dtype, device: Mapping[str, Any]) -> str | None:
    """Why products of ``dtype`` are not native on ``device``; None if they are."""
    kind = device["kind"]
    if dtype is torch.float16 and not has_native_fp16(kind):
        return f"this CPU has no fp16 arithmetic: {IN_FP32}; {EAGERLY}"
    if dtype is torch.bfloat16 and kind == "cpu" and not has_bf16_on_cpu():
        return f"this CPU has no bfloat16 arithmetic: {IN_FP32}"
    if dtype is torch.bfloat16 and kind == "cuda" and _capability(device) < NATIVE_BF16:
        return f"{_titled(device)} has no bfloat16 arithmetic, which needs 8.0 or higher"
    return None


def _lacking_float8(device: Mapping[str, Any]) -> str | None:
    if device["kind"] == "cpu":
        return f"no CPU multiplies in float8: {WIDER}"
    if _capability(device) >= NATIVE_FLOAT8:
        return None
    return f"{_titled(device)} has no float8 arithmetic, which needs 8.9 or higher: {WIDER}"


def _capability(device: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(part) for part in device["capability"].split("."))


def _lines(found: Mapping[str, Any]) -> list[str]:
    versions, backends, mpi, slurm = found["versions"], found["backends"], found["mpi"], found["slurm"]
    there = ", ".join(name for name in ("gloo", "nccl", "mpi") if backends[name]) or "none"
    mpi_text = "no mpirun on the path" if mpi["path"] is None else f"mpirun of {mpi['mpirun']} at {mpi['path']}"
    job = "no job" if slurm["job"] is None else f"job {slurm['job']} on {slurm['nodes']}, tasks {slurm['tasks']}"
    devices = [*map(_titled, found["devices"]), *found["gpu_problems"]]
    others = [f"{name} {versions[name] or 'none'}" for name in PACKAGES if name not in NAMED_ABOVE]
    commit = f" (commit {found['commit']})" if found["commit"] else ""
    rows = [
        ("paramp", f"{versions['paramp']}{commit}, Python {versions['python']}, torch {versions['torch']}"),
        *zip(("device", *[""] * len(devices)), devices, strict=False),
        ("backends", f"{there}; launch chooses {backends['chosen']} on {found['device']}"),
        ("launcher", _launcher_text(found["launcher"])),
        ("MPI", f"{mpi_text}; {'mpi4py ' + mpi['mpi4py'] if mpi['mpi4py'] else 'no mpi4py'}"),
        ("Slurm", f"{job}; {'srun at ' + slurm['srun'] if slurm['srun'] else 'no srun on the path'}"),
        ("Apex", found["apex"]["reason"]),
        ("torchao", found["torchao"]["reason"]),
        ("TE", found["transformer_engine"]["reason"]),
        ("compile", COMPILED if found["compile"]["runs"] else NOT_COMPILED.format(found["compile"]["why"])),
        ("packages", ", ".join(others)),
    ]
    lines = [f"{name:<10}{text}".rstrip() for name, text in rows]
    lines += ["", f"{'mode':<28}{'runs':<10}why"]
    return lines + [f"{name:<28}{mode['runs']:<10}{mode['why']}" for name, mode in found["modes"].items()]


def _titled(device: Mapping[str, Any]) -> str:
    capability = device["capability"]
    return device["name"] + ("" if capability is None else f" (compute capability {capability})")


def _launcher_text(launcher: Mapping[str, Any]) -> str:
    started = "{name}: rank {rank} of {world_size}".format(**launcher) if launcher["name"] else "none: a world of one"
    return launcher["problem"] or started
