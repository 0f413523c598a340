"""``make test-all``: all tests with every case of the long families, a part after another, each started from cold.

A part that has passed leaves a mark in ``.pytest-parts`` with the commit, so that the next call goes on after it. With
uncommitted changes nothing is marked, and everything runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARKS = ROOT / ".pytest-parts"
PARTS = {
    "matrix": ["tests/system/test_matrix.py"],
    "schedules": ["tests/system/test_schedules.py"],
    "parity": ["tests/system/test_parity.py"],
    "overflow": ["tests/system/test_overflow.py", "tests/observe"],
    "checkpoints": ["tests/checkpoint"],
    "chaos": ["tests/system/test_chaos.py", "tests/engine/test_checkpoint_manager.py"],
    "fuzz": ["tests/system/test_fuzz.py"],
    "reproducible": ["tests/system/test_reproducible.py", "tests/tools/test_verify_exact.py"],
    "gpu-ways": ["tests/system/test_gpu_ways.py"],
    "sequences": ["tests/system/test_sequences.py"],
    "compat": ["tests/compat", "tests/integrations"],
    "models": ["tests/models", "tests/parallel"],
    "launchers": ["tests/system/test_launch_commands.py", "tests/system/test_train_script.py", "tests/distributed"],
    "documents": ["tests/system/test_docs.py", "tests/system/test_examples.py", "tests/system/test_benchmarks.py"],
    "others": [],
}
"""Files and folders of each part; the last one is what no other part has."""


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def arguments(part: str) -> list[str]:
    """What pytest is given to run ``part``."""
    others = [f"--ignore={path}" for name, paths in PARTS.items() if name != part for path in paths]
    return PARTS[part] or ["tests", *others]


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        sys.exit(f"got {', '.join(unknown)}, expected some of {', '.join(PARTS)}")
    commit = "" if _git("status", "--porcelain") else _git("rev-parse", "HEAD")
    failed = []
    for name in names or PARTS:
        mark = MARKS / name
        if commit and mark.exists() and mark.read_text() == commit:
            print(f"{name}: has passed", flush=True)
            continue
        print(f"{name}:", flush=True)
        start = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", *arguments(name)]
        environment = os.environ | {"PARAMP_TEST_WHOLE": "1", "PARAMP_TEST_COLD": "1"}
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        print(f"{name}: {'passed' if not code else 'failed'} in {time.monotonic() - start:.0f} s", flush=True)
        if code:
            failed.append(name)
        elif commit:
            MARKS.mkdir(exist_ok=True)
            mark.write_text(commit)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
