"""``make gpu``: the tests and benchmarks of one GPU, in parts of at most 9 minutes, into ``benchmarks/results``.

    make gpu
    make gpu PARTS="step table" PYTHON=/opt/torch/bin/python

The file is named after the GPU and torch, and is written when a part ends. A part that passed on the same sources is
not run again, so a second call goes on where the first one ended. A part that fails or takes too long is reported in
the file, and the next one runs. The exit status is 0 if all parts passed.

It runs in the Python that calls it and installs nothing: torch, numpy, safetensors and pytest have to be there. Other
packages are optional: what needs one that is missing is skipped, and the file has the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
MAX_LINES = 250
"""The lines of a command's output that are kept: the last ones."""
SECONDS_TO_REPORT = 15.0
"""The time that a command gets at its limit, in which pytest reports what failed until then."""

PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "cuda", "-rsfE", "--continue-on-collection-errors"]
PARALLEL = ["--numprocesses", "4", "--dist", "loadfile"] if importlib.util.find_spec("xdist") else []
BY_HAND = ["benchmarks/by_hand.py", "--layouts"]
TABLE = ["benchmarks/amp_table.py", "--model", "vit"]


@dataclass(frozen=True)
class Part:
    """What runs under one name."""

    minutes: float
    """The limit of all its commands together."""
    commands: Sequence[Sequence[str]]
    """Arguments of Python."""


PARTS = {
    "doctor": Part(1, [["-m", "paramp", "doctor"]]),
    "waits": Part(2, [[*PYTEST, "tests/system/test_one_gpu.py", "-k", "waits"]]),
    "tests": Part(9, [[*PYTEST, *PARALLEL, "--ignore", "tests/system"]]),
    "system": Part(9, [[*PYTEST, *PARALLEL, "tests/system", "--ignore", "tests/system/test_matrix.py"]]),
    "matrix": Part(9, [[*PYTEST, "tests/system/test_matrix.py"]]),
    "step": Part(5, [["benchmarks/step.py"], ["benchmarks/step.py", "--parameters", "500M", "--tensors", "2000"]]),
    "process": Part(
        8,
        [
            [*BY_HAND, "1", "--widths", "128", "512", "--seq-lens", "64", "1024", "--compile"],
            [*BY_HAND, "1", "--widths", "512", "--seq-lens", "1024", "--against", "accelerate", "fabric", "fsdp2"],
        ],
    ),
    "shapes": Part(
        5,
        [
            [*BY_HAND, "1", "--shape", "smollm-1.7b", "--layers", "8", "--rounds", "5", "--compile"],
            [*BY_HAND, "1", "--shape", "llama-2-7b", "--layers", "2", "--rounds", "5", "--compile"],
        ],
    ),
    "ranks": Part(5, [[*BY_HAND, "tp2", "pp2", "dp2", "--widths", "512", "--seq-lens", "1024"]]),
    "table": Part(5, [[*TABLE, "--preset", "vit-b16", "--batch-size", "128", "--rounds", "20"]]),
}
"""In the order of the file; 58 minutes at most. The ranks of a part share the GPU, over gloo."""


@dataclass(frozen=True)
class Section:
    """A part's result, as it stands in the file."""

    part: str
    passed: bool
    sources: str
    text: str

    @property
    def markdown(self) -> str:
        state = "passed" if self.passed else "failed"
        return f"## {self.part}\n<!-- {state} {self.sources} -->\n\n{self.text.strip()}\n"

    @staticmethod
    def read(path: Path) -> dict[str, Section]:
        """The sections of a file by part; none if there is no file."""
        if not path.is_file():
            return {}
        _, *sections = re.split(r"^## (.+)\n<!-- (passed|failed) (\w+) -->\n", path.read_text("utf-8"), flags=re.M)
        fields = zip(sections[::4], sections[1::4], sections[2::4], sections[3::4], strict=True)
        return {part: Section(part, state == "passed", sources, text) for part, state, sources, text in fields}


def sources() -> str:
    """A hash of the code that the parts run; also without git."""
    digest = hashlib.sha256()
    code = [path for folder in ("paramp", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")]
    for path in sorted([ROOT / "pyproject.toml", *code]):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def run(name: str, part: Part, state: str) -> Section:
    """Run the commands of ``part``, also after one that fails."""
    end = time.monotonic() + 60 * part.minutes
    texts, passed = [], True
    for command in part.commands:
        start = time.monotonic()
        output, outcome = _run([sys.executable, *command], end - start)
        passed &= outcome == "passed"
        lines = output.splitlines()
        left_out = f"... ({len(lines) - MAX_LINES} lines before)\n" if len(lines) > MAX_LINES else ""
        shown = left_out + "\n".join(lines[-MAX_LINES:])
        texts.append(
            f"`python {shlex.join(command)}`: {outcome}, {time.monotonic() - start:.0f} s\n\n```\n{shown}\n```\n"
        )
    return Section(name, passed, state, "\n".join(texts))


def _run(command: Sequence[str], seconds: float) -> tuple[str, str]:
    """The output of ``command`` and what became of it.

    Before ``seconds`` are over it is interrupted, and then it and the processes that it started are ended.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    output = outcome = ""
    try:
        output, _ = process.communicate(timeout=max(0.0, seconds - SECONDS_TO_REPORT))
    except subprocess.TimeoutExpired:
        outcome = "ended at its limit"
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            output, _ = process.communicate(timeout=SECONDS_TO_REPORT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also after Ctrl-C, and ranks that outlive their command
    if process.returncode is None:
        output, _ = process.communicate()
    return output, outcome or ("passed" if not process.returncode else f"failed with status {process.returncode}")


def describe() -> tuple[str, str]:
    """The name of the result's file, and the lines about the machine; a SystemExit if there is no GPU."""
    if importlib.util.find_spec("torch") is None:
        sys.exit(f"make gpu: {sys.executable} has no torch; name the Python that has it: make gpu PYTHON=...")
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"make gpu: torch {torch.__version__} in {sys.executable} sees no GPU on this machine")
    sys.path.insert(0, str(ROOT))  # paramp need not be installed
    from common import machine

    found = torch.cuda.get_device_properties(0)
    name = re.sub(r"[^a-z0-9._-]+", "-", f"{found.name}-{torch.__version__}".lower())
    system = f"Python {platform.python_version()}, CUDA {torch.version.cuda}, {platform.platform()}"
    gpu = f"{found.total_memory / 2**30:.0f} GiB, compute capability {found.major}.{found.minor}"
    return name, f"{machine(torch.device('cuda', 0))}; {gpu}; torch {torch.__version__}; {system}"


def write(path: Path, about: str, sections: dict[str, Section]) -> None:
    date = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    states = [f"| {part} | {'passed' if section.passed else '**failed**'} |" for part, section in sections.items()]
    overview = "\n".join(["| part | |", "|---|---|", *states])
    head = f"# {path.stem}\n\n{about}\n\nWritten by `make gpu`, {date} UTC.\n\n{overview}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([head, *(section.markdown for section in sections.values())]), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; by default all")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"got {', '.join(unknown)}, expected some of {', '.join(PARTS)}")
    name, about = describe()
    path = options.results / f"{name}.md"
    state, sections = sources(), Section.read(path)
    wanted = options.parts or list(PARTS)
    for part in wanted:
        old = sections.get(part)
        if old is not None and old.passed and old.sources == state:
            print(f"{part}: has passed", flush=True)
            continue
        print(f"{part}: at most {PARTS[part].minutes:g} minutes", flush=True)
        sections[part] = run(part, PARTS[part], state)
        print(sections[part].text, flush=True)
        write(path, about, {key: sections[key] for key in PARTS if key in sections})
    failed = [part for part in wanted if not sections[part].passed]
    print(f"{path}: {'all parts passed' if not failed else f'failed: {chr(44).join(failed)}'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
