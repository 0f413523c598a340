"""``make test TORCH=2.15.0``: the tests that use private names of torch, on that version, in an environment of its own.

The environment has what ``constraints.txt`` pins, with another torch. A host that does not install beside that torch is
left out and listed. ``docs/versions.md`` has a row for each version; a run of the whole selection writes its row anew.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "versions.md"
HOSTS = {
    "accelerate": ("accelerate", "integrations.test_accelerate"),
    "datasets": ("datasets", "launch.test_corpus"),
    "lightning": ("lightning.pytorch", "integrations.test_lightning"),
    "peft": ("peft", "parallel.test_lora"),
    "ray": ("ray", "integrations.test_recipes"),
    "torchao": ("torchao.float8", "precision.test_float8_conversion"),
    "torchtitan": ("torchtitan.trainer", "integrations.test_torchtitan"),
    "transformers": ("transformers", "integrations.test_transformers_trainer"),
    "trl": ("trl", "integrations.test_transformers_trainer"),
}
"""What may refuse a version of torch: the module that has to load, and tests that use it."""
TORCHTITAN = "it is written for torch 2.13 and newer: with this one it crashes in the backward under FSDP2"
"""Why it is not run with an older one: it has no such bound of its own."""
SELECTION = [
    *("tests/base", "tests/parallel", "tests/pipeline", "tests/precision", "tests/integrations"),
    *(
        "tests/checkpoint/test_sharded_save.py",
        "tests/checkpoint/test_resharding.py",
        "tests/checkpoint/test_resume.py",
    ),
    *("tests/launch/test_corpus.py", "tests/data/test_dataloader.py"),
    *("tests/base/test_collectives.py", "tests/distributed/test_from_mesh.py"),
    *(
        "tests/distributed/test_process_groups.py",
        "tests/engine/test_engine.py",
        "tests/engine/test_model_of_this_rank.py",
        "tests/exact/test_exact_function_mode.py",
        "tests/observe/test_overflow_diagnosis.py",
    ),
    *("tests/optim/test_compiled_step.py", "tests/optim/test_flat_weights.py", "tests/scaling/test_grad_norm.py"),
    *("tests/scaling/test_loss_scaler.py", "tests/optim/test_sharded_gradients.py"),
    *("tests/system/test_matrix.py", "tests/system/test_pool.py", "tests/system/test_schedules.py"),
    *("tests/system/test_sharded_overflow.py", "tests/models/test_moe_gpt.py", "tests/models/test_expert_weights.py"),
    "tests/observe/test_nonfinite_experts.py",
]
"""The tests that use the names of ``paramp/base/torch_internals.py``."""


def requirements(extra: str, extras: dict[str, list[str]]) -> list[str]:
    """What ``extra`` of pyproject.toml asks for, with the extras that it names in place of their names."""
    found = []
    for requirement in extras[extra]:
        if named := re.fullmatch(r"paramp\[(.+)\]", requirement):
            found += [each for name in named[1].split(",") for each in requirements(name, extras)]
        else:
            found.append(requirement)
    return found


def constraints(torch: str) -> str:
    """``constraints.txt`` with ``torch`` in place of its version."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return re.sub(r"^torch==.*$", f"torch=={torch}", text, flags=re.MULTILINE)


def make_environment(torch: str, folder: Path) -> dict[str, str]:
    """Install ``torch`` and the tests' packages into ``folder``, once. Why each host that was left out was left out."""
    record = folder / "left-out.json"
    if record.exists():
        return json.loads(record.read_text(encoding="utf-8"))
    print(f"installing torch {torch} into {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    (folder / "constraints.txt").write_text(constraints(torch), encoding="utf-8")
    pip = [folder / "bin/python", "-m", "pip"]
    install = [*pip, "install", "--quiet", "--disable-pip-version-check", "-c", folder / "constraints.txt"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wanted = sorted({*requirements("test", extras), *requirements("hosts", extras), "peft>=0.21"})
    hosts = {each: re.match(r"[\w-]+", each)[0] for each in wanted}
    subprocess.run([*install, "-e", ROOT, *(each for each, name in hosts.items() if name not in HOSTS)], check=True)
    left_out = {}
    for requirement, name in hosts.items():
        if name not in HOSTS:
            continue
        reason = TORCHTITAN if name == "torchtitan" and torch < "2.13" else _failure([*install, requirement])
        if not reason and (reason := _failure([folder / "bin/python", "-c", f"import {HOSTS[name][0]}"])):
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", name], check=True)
            reason = f"it does not load: {reason}"
        if reason:
            left_out[name] = reason
            print(f"left out {name}: {reason}", flush=True)
    record.write_text(json.dumps(left_out), encoding="utf-8")
    return left_out


def _failure(command: list[Any]) -> str:
    """The line of a failed program's output that names the reason: pip's first error, or the last line."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if not done.returncode:
        return ""
    lines = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    return re.sub(r" \(/.*\)$", "", lines[0] if lines else done.stderr.strip().splitlines()[-1])  # without the path


def run_tests(folder: Path, arguments: list[str]) -> tuple[int, list[ElementTree.Element]]:
    """Run pytest of the environment in ``folder``; its exit status, and a record of each test."""
    report = folder / "results.xml"
    report.unlink(missing_ok=True)
    command = [folder / "bin/python", "-m", "pytest", "-q", "--numprocesses", "2", "--dist", "loadfile"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, f"--junitxml={report}", *arguments], cwd=ROOT, env=environment, check=False)
    return done.returncode, list(ElementTree.parse(report).iter("testcase")) if report.exists() else []


def outcome(test: ElementTree.Element) -> str:
    """Whether a test passed, failed or was skipped."""
    kinds = {child.tag for child in test}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def row(folder: Path, tests: list[ElementTree.Element], left_out: dict[str, str]) -> str:
    """The line of the page for one run."""
    pip = [folder / "bin/python", "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
    listed = subprocess.run(pip, check=True, capture_output=True, text=True)
    versions = {package["name"].lower(): package["version"] for package in json.loads(listed.stdout)}
    ran, reasons = [], [f"{name}: {reason}" for name, reason in left_out.items()]
    for name in [name for name in HOSTS if name not in left_out]:
        if any(outcome(test) == "passed" for test in tests if HOSTS[name][1] in test.get("classname", "")):
            ran.append(f"{name} {versions[name]}")
        else:
            reasons.append(f"{name} {versions[name]}: no test of it passed")
    counts = Counter(map(outcome, tests))
    torch = versions["torch"].split("+")[0]
    cells = [torch, datetime.date.today().isoformat(), *(str(counts[kind]) for kind in ("passed", "failed", "skipped"))]
    cells += [", ".join(ran), "; ".join(reasons).replace("|", "\\|") or "none"]
    return f"| {' | '.join(cells)} |"


def write(line: str) -> None:
    """Put the ``line`` of a version into the page, in place of its earlier one; rows are in the order of versions."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    version = line.split(" | ")[0]
    rows = [one for one in lines if re.match(r"\| \d", one) and not one.startswith(f"{version} |")]
    rows.append(line)
    rows.sort(key=lambda one: [int(part) for part in one.split()[1].split(".")])
    head = next(index for index, one in enumerate(lines) if one.startswith("|---")) + 1
    rest = [one for one in lines[head:] if not re.match(r"\| \d", one)]
    PAGE.write_text("\n".join([*lines[:head], *rows, *rest]) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("torch", help="version of torch, such as 2.15.0")
    parser.add_argument("--environment", type=Path, help="folder of the environment, .venv-VERSION by default")
    given, arguments = parser.parse_known_args()  # of pytest, in place of the selection: the page is not written then
    folder = (given.environment or ROOT / f".venv-{given.torch}").absolute()
    left_out = make_environment(given.torch, folder)
    status, tests = run_tests(folder, arguments or SELECTION)
    if tests and not arguments:
        write(row(folder, tests, left_out))
        print(f"{PAGE.relative_to(ROOT)} has a row for torch {given.torch}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
