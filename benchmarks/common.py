"""Common parts of the benchmarks: the machine's name, turns, memory, layouts, tables and the result file."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paramp.base.errors import first_line
from paramp.distributed.local_launcher import start_processes

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler reports its start and stop on stderr

# ---------------------------------------------------------------------------------------------------- the machine


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine(device: torch.device) -> str:
    """A description of the machine: GPU, CPU, threads and processes."""
    num_processes = dist.get_world_size() if dist.is_initialized() else 1
    threads = f"{torch.get_num_threads()} thread(s) in each of {num_processes} process(es)"
    name = f"{cpu_name()}, {threads}, {os.cpu_count()} core(s)"
    return f"{torch.cuda.get_device_name(device)}, {name}" if device.type == "cuda" else name


def why_not(error: BaseException) -> str:
    """An error in one line, as the reason why something cannot run."""
    return f"{type(error).__name__}: {first_line(error)}"


# --------------------------------------------------------------------------------------------------------- turns


@dataclass(frozen=True)
class Turn:
    """The work of one candidate in each round."""

    run: Callable[[], object]
    """The timed part."""
    prepare: Callable[[int], object] = lambda _round: None
    """Called with the number of the round before :attr:`run`; not timed."""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_turns(
    turns: Mapping[str, Turn], rounds: int, device: torch.device, *, warm_up: int = 1
) -> dict[str, list[float]]:
    """The seconds of each of ``turns`` in each round. All run once a round; the order is reversed in every other round.

    Args:
        warm_up: the number of unmeasured rounds before.
    """
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(warm_up + rounds):
        for name in list(turns) if number % 2 == 0 else list(turns)[::-1]:  # vary predecessors
            turns[name].prepare(number)
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.barrier()
            synchronize(device)
            start = time.perf_counter()
            turns[name].run()
            synchronize(device)
            if number >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in seconds.items()}


# -------------------------------------------------------------------------------------------------------- memory


@dataclass
class Memory:
    """Bytes of tensors that a block of code allocated, relative to its begin; set when it ends."""

    kept: int = 0
    """Still allocated at the end."""
    peak: int = 0
    """The maximum at any time, also within an operation."""


@contextmanager
def watch_memory(device: torch.device) -> Iterator[Memory]:
    """Measure the allocations of torch's allocator of ``device`` inside, temporaries included.

    On a CPU the allocator keeps no counts, but reports each allocation to the profiler.
    """
    memory = Memory()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield memory
        gc.collect()
        torch.cuda.synchronize(device)
        memory.kept = torch.cuda.memory_allocated(device) - before
        memory.peak = torch.cuda.max_memory_allocated(device) - before
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        yield memory
        gc.collect()
    for size in _allocations(profile):
        memory.kept += size
        memory.peak = max(memory.peak, memory.kept)


def _allocations(profile: Any) -> list[int]:
    """Allocations in bytes, frees as negative numbers, in the order of time."""
    waiting = list(profile.profiler.kineto_results.experimental_event_tree())
    found: list[tuple[int, int]] = []
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        kind, fields = event.typed
        if kind == torch._C._profiler._EventType.Allocation and fields.device.type == "cpu":
            found.append((event.start_time_ns, fields.alloc_size))
    return [size for _, size in sorted(found, key=lambda pair: pair[0])]


# ------------------------------------------------------------------------------------------------------- layouts


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes; written as ``1``, ``tp2`` or ``pp2·dp2·tp2`` (``x`` is accepted for ``·``).

    The data ranks are ``dp`` x ``fsdp`` x ``ep``.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    ep: int = 1
    """Data ranks that share the experts."""
    fsdp: int = 1
    """With more than one, the ``fsdp`` x ``ep`` ranks shard the parameters."""

    @staticmethod
    def parse(text: str) -> Layout:
        """As argparse's ``type``.

        Raises:
            argparse.ArgumentTypeError: ``text`` is not a layout.
        """
        return Layout.parse_axes(text, "pp|dp|tp")

    @staticmethod
    def parse_axes(text: str, axes: str) -> Layout:
        """As :meth:`parse`, with the ``axes`` that may be given, such as ``pp|dp``."""
        sizes: dict[str, int] = {}
        for part in [] if text == "1" else re.split(r"[·.x*]", text):
            match = re.fullmatch(rf"({axes})([1-9]\d*)", part)
            if match is None or match[1] in sizes:
                raise argparse.ArgumentTypeError(f"got {text!r}, expected 1, or such as tp2, dp4 or pp2·tp2")
            sizes[match[1]] = int(match[2])
        return Layout(**sizes)

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.tp * self.ep * self.fsdp

    def __str__(self) -> str:
        sizes = (("pp", self.pp), ("dp", self.dp), ("tp", self.tp), ("fsdp", self.fsdp), ("ep", self.ep))
        return "·".join(f"{name}{size}" for name, size in sizes if size > 1) or "1"


def run_layouts(script: str, layouts: Iterable[Layout], arguments: Callable[[Layout], Sequence[str]]) -> dict[str, Any]:
    """The result of ``script`` in each of ``layouts``, one after the other, in processes of their own.

    Args:
        arguments: returns the script's arguments for a layout; ``--json`` is added.

    Raises:
        SystemExit: it failed in one of them.
    """
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        for layout in layouts:
            print(f"\nlayout {layout}", flush=True)
            path.unlink(missing_ok=True)
            code = start_processes([sys.executable, script, *arguments(layout), "--json", str(path)], layout.size)
            if code:
                sys.exit(code)
            results[str(layout)] = json.loads(path.read_text(encoding="utf-8"))
    return results


# -------------------------------------------------------------------------------------------------------- output


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: the first to the left, the others (numbers) to the right."""
    cells = [list(head), *(list(row) for row in rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(head))]
    lines = [
        "| " + " | ".join(f"{cell:{'>' if i else '<'}{widths[i]}}" for i, cell in enumerate(row)) + " |"
        for row in cells
    ]
    rule = "| " + " | ".join("-" * (width - (i > 0)) + ":" * (i > 0) for i, width in enumerate(widths)) + " |"
    return "\n".join([lines[0], rule, *lines[1:]])


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")


def check_json_option(parser: argparse.ArgumentParser, path: Path | None) -> None:
    """Exit with an error, before anything runs, if the result could not be written."""
    if path is not None and not path.absolute().parent.is_dir():
        parser.error(f"--json: no folder {str(path.parent)!r}; make it first")
    if path is not None and path.is_dir():
        parser.error(f"--json: {str(path)!r} is a folder, expected a file")


def check_counts(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """Exit with an error if one of the options ``names``, numbers or lists of numbers, is below 1."""
    for name in names:
        value = getattr(options, name)
        for count in value if isinstance(value, list) else [value]:
            if count is not None and count < 1:
                parser.error(f"--{name.replace('_', '-')}: got {count}, expected 1 or more")


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
