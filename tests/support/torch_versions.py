"""``make test TORCH=2.15.0``: the tests that use private names of torch, on that version, in an environment of its own.

The environment has what ``constraints.txt`` pins, with another torch. A host that does not install beside that torch is
left out and listed. ``docs/versions.md`` has a row for each version; a run of the whole selection writes its row anew.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOSTS = ("accelerate", "datasets", "lightning", "peft", "ray", "torchao", "torchtitan", "transformers", "trl")
"""What may refuse a version of torch; each is installed for itself, after everything else."""


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


def _refusal(output: str) -> str:
    """The line of pip's output that tells why it installed nothing."""
    lines = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    return lines[0] if lines else output.strip().splitlines()[-1]


def make_environment(torch: str, folder: Path) -> dict[str, str]:
    """Install ``torch`` and the tests' packages into ``folder``, once.

    Returns:
        Why each host that was left out was left out.
    """
    record = folder / "left-out.json"
    if record.exists():
        return json.loads(record.read_text(encoding="utf-8"))
    print(f"installing torch {torch} into {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    (folder / "constraints.txt").write_text(constraints(torch), encoding="utf-8")
    pip = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["-c", folder / "constraints.txt"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wanted = sorted({*requirements("test", extras), *requirements("hosts", extras), "peft>=0.21"})
    hosts = {each: re.match(r"[\w-]+", each)[0] for each in wanted}
    subprocess.run([*pip, "-e", ROOT, *(each for each, name in hosts.items() if name not in HOSTS)], check=True)
    left_out = {}
    for requirement, name in hosts.items():
        if name in HOSTS:
            done = subprocess.run([*pip, requirement], check=False, capture_output=True, text=True)
            if done.returncode:
                left_out[name] = _refusal(done.stderr)
                print(f"left out {name}: {left_out[name]}", flush=True)
    record.write_text(json.dumps(left_out), encoding="utf-8")
    return left_out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("torch", help="version of torch, such as 2.15.0")
    parser.add_argument("--environment", type=Path, help="folder of the environment, .venv-VERSION by default")
    arguments = parser.parse_args()
    folder = arguments.environment or ROOT / f".venv-{arguments.torch}"
    make_environment(arguments.torch, folder.absolute())
    return 0


if __name__ == "__main__":
    sys.exit(main())
