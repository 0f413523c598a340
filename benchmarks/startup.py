"""The time from the first import to the end of the first step, against the same loop in plain torch.

    python benchmarks/startup.py

The loops run in turn, each in a new process: the README's example, ``examples/own_model.py``, and the same model in
plain torch, with autocast, ``GradScaler`` and ``clip_grad_norm_``. Beside the time on the clock stands that on the
processor, which other programs on the machine change less.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from common import add_json_option, check_counts, check_json_option, machine, medians, table, write_json

ROOT = Path(__file__).parents[1]
BEGIN = "import time; begin = time.perf_counter(), time.process_time()\n"
END = """
import json, os, sys
times = [time.perf_counter() - begin[0], time.process_time() - begin[1]]
print(json.dumps(times), flush=True)
os._exit(0)
"""
PLAIN = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


model = nn.Sequential(*(Block() for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(1, 41):
    x = torch.randn(16, 32)
    with torch.autocast("cpu", torch.float16):
        output = model(x)
    loss = nn.functional.mse_loss(output.float(), x.roll(1, dims=1))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


def until_first_step(source: str) -> str:
    """``source``, a script whose loop ends with ``zero_grad()``, that prints its times there and exits."""
    before, found, _ = source.partition("zero_grad()\n")
    assert found, "the loop has no zero_grad()"
    indent = before.splitlines()[-1]
    indent = indent[: len(indent) - len(indent.lstrip())]
    return BEGIN + before + found + END.replace("\n", f"\n{indent}")


def run(script: Path, cache: str) -> list[float]:
    """Seconds on the clock and on the processor."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": cache, "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script.name} failed:\n{done.stderr}")
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    add_json_option(parser)
    options = parser.parse_args(arguments)
    check_counts(parser, options, "rounds")
    check_json_option(parser, options.json)
    sources = {"plain torch": PLAIN, "paramp": (ROOT / "examples/own_model.py").read_text(encoding="utf-8")}
    clock: dict[str, list[float]] = {name: [] for name in sources}
    processor: dict[str, list[float]] = {name: [] for name in sources}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds + 1):
            for name, source in sources.items():
                script = Path(folder) / f"loop_of_{name.replace(' ', '_')}.py"
                script.write_text(until_first_step(source), encoding="utf-8")
                times = run(script, f"{folder}/cache")
                if number:  # the first round fills the caches of the file system and of Python
                    clock[name].append(times[0])
                    processor[name].append(times[1])
    seconds = {"clock": medians(clock), "processor": medians(processor)}
    ratios = {kind: each["paramp"] / each["plain torch"] for kind, each in seconds.items()}
    print(machine(torch.device("cpu")))
    rows = [
        [kind, *(f"{value:.2f}" for value in each.values()), f"{ratios[kind]:.2f}"] for kind, each in seconds.items()
    ]
    print(table(["seconds", *sources, "ratio"], rows))
    write_json(options.json, {"clock": clock, "processor": processor, "ratios": ratios})


if __name__ == "__main__":
    main()
