"""The cost of a rank in a world of thousands: time and memory to build it, and the Python time of its step.

    python benchmarks/scale.py
    python benchmarks/scale.py --worlds 8 64 512 4096 --layouts tp2·pp2 pp2·tp2·ep2 --rounds 5

One process builds one rank of a world on torch's fake process group, whose collectives return at once without moving
data. The model is a GPT on the meta device, sharded over ``tp`` and partitioned over ``pp``; ``dp`` is the rest of the
world. With ``ep`` it is a MoEGPT, whose experts are shared by so many of the data ranks; with ``fsdp`` too, ``fsdp`` x
``ep`` of them shard the parameters (HSDP). All but ``dp`` of a layout, and so a rank's part of the model, are the same
in every world: costs that grow from row to row depend on the world size. Every world has its own process, which builds
its rank twice: bytes are those of the first time, seconds those of the second, which imports nothing. The worlds take
turns in each round; medians are reported. At the end the limits: a rank takes part in making at most 32 process groups
beside the world's, 8 with ``ep``, 12 with ``ep`` and ``fsdp``, and the largest world costs at most 1.3 times the
seconds and the memory of the smallest.

Not measured: the rendezvous in the store before the process group exists, the network, and forward and backward: the
stages of a pipeline exchange shapes in them, which the fake group does not deliver.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Layout, add_json_option, check_counts, check_json_option, machine, table, write_json
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import paramp
from paramp.base.errors import ConfigError
from paramp.models import GPT, GPTConfig, MoEGPT, MoEGPTConfig
from paramp.precision.modes import Precision

STEPS = 20
MAX_GROUPS, MAX_GROUPS_WITH_EXPERTS, MAX_GROUPS_WITH_SHARDED_EXPERTS = 32, 8, 12
MAX_RATIO = 1.3
"""Of the largest world to the smallest, in seconds and in bytes."""
MODEL = GPTConfig(num_layers=16, num_heads=8, width=128, max_seq_len=128, vocab_size=1024)
"""Small, so that Python takes most of a step's time, not the kernels."""
MIXTURE = MoEGPTConfig(**vars(MODEL), num_experts=8, expert_width=64)
AXES = "pp|dp|tp|ep|fsdp"
LAYOUTS = [
    *(Layout(pp=2, tp=2), Layout(pp=8, tp=8), Layout(pp=2, tp=2, ep=2)),
    *(Layout(fsdp=2, ep=2), Layout(pp=2, tp=2, fsdp=2, ep=2)),
]


def resident_bytes() -> int:
    """The current resident memory of this process, in bytes."""
    statm = Path("/proc/self/statm")
    if statm.is_file():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def counted_groups() -> Iterator[list[Any]]:
    """One item for each process group that this rank takes part in making, as a member or not."""
    c10d = dist.distributed_c10d
    made, new = [], c10d._new_process_group_helper

    def counted(*args: Any, **options: Any) -> Any:
        made.append(args)
        return new(*args, **options)

    c10d._new_process_group_helper = counted
    try:
        yield made
    finally:
        c10d._new_process_group_helper = new


def conclusion(layout: Layout, rows: Sequence[dict[str, Any]]) -> str:
    """The largest world of ``rows`` against the smallest, and whether it is within the limits."""
    small, large = rows[0], rows[-1]

    def ratio(kind: str) -> float:
        totals = [row[f"launch_{kind}"] + row[f"initialize_{kind}"] for row in (small, large)]
        return float(totals[1] / totals[0])

    seconds, memory, groups = ratio("seconds"), ratio("bytes"), max(row["groups"] for row in rows)
    with_experts = MAX_GROUPS_WITH_EXPERTS if layout.fsdp == 1 else MAX_GROUPS_WITH_SHARDED_EXPERTS
    most = MAX_GROUPS if layout.ep == 1 else with_experts
    met = groups <= most and seconds <= MAX_RATIO and memory <= MAX_RATIO
    return (
        f"{layout}, {large['world']} ranks against {small['world']}: launch and initialize take {seconds:.2f} times "
        f"the seconds and {memory:.2f} times the memory (limit {MAX_RATIO}), with at most {groups:g} groups (limit "
        f"{most}): {'met' if met else 'NOT MET'}"
    )


def build(world_size: int, rank: int, layout: Layout, precision: str) -> dict[str, float]:
    """Build ``rank`` of the world in this process, and time its steps."""
    data = {"shard": layout.fsdp * layout.ep} if layout.fsdp > 1 else "auto"
    config = {
        "parallel": {"tensor": layout.tp, "pipeline": layout.pp, "data": data, "expert": layout.ep},
        "precision": precision,
        "clip_grad_norm": 1.0,
    }
    gc.collect()
    memory = [resident_bytes()]
    times = [time.perf_counter()]

    def measure() -> None:
        times.append(time.perf_counter())
        gc.collect()
        memory.append(resident_bytes())

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    with counted_groups() as groups, paramp.launch(config, rank, world_size, "localhost", 1, device="cpu"):
        measure()
        with torch.device("meta"):
            model = GPT(MODEL) if layout.ep == 1 else MoEGPT(MIXTURE)
        engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters(), fused=True), model.loss)
        measure()
        seconds = []
        for number in range(STEPS + 2):
            engine.zero_grad()
            for _, parameter in engine.named_parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.fill_(0.01)
            start = time.perf_counter()
            if number == 0:
                with CommDebugMode() as collectives:
                    engine.step()
            else:
                engine.step()
            seconds.append(time.perf_counter() - start)
        measure()
    dist.destroy_process_group()
    return {
        "launch_seconds": times[1] - times[0],
        "initialize_seconds": times[2] - times[1],
        "launch_bytes": memory[1] - memory[0],
        "initialize_bytes": memory[2] - memory[1],
        "steps_bytes": memory[3] - memory[2],
        "step_seconds": statistics.median(seconds[2:]),
        "collectives": collectives.get_total_counts(),
        "groups": len(groups),
    }


def build_elsewhere(world_size: int, layout: Layout, precision: str, rank: int) -> dict[str, float]:
    """:func:`build` in a process of its own.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, __file__, f"--worlds={world_size}", f"--layouts={layout}", f"--precision={precision}"]
    done = subprocess.run([*command, f"--only-rank={rank}"], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with an error that names the invalid option, before anything runs."""
    check_counts(parser, options, "worlds", "rounds")
    try:
        Precision.parse(options.precision)
    except ConfigError as error:
        parser.error(str(error))
    for layout in options.layouts:
        if layout.dp > 1:
            parser.error(f"--layouts: got {layout}, but dp follows from the world; remove it")
        if not any(world % layout.size == 0 for world in options.worlds):
            parser.error(f"--layouts: none of the worlds {options.worlds} is a multiple of {layout}'s {layout.size}")
    check_json_option(parser, options.json)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 512, 4096], metavar="RANKS")
    parser.add_argument(
        "--layouts", type=partial(Layout.parse_axes, axes=AXES), nargs="+", default=LAYOUTS, metavar="LAYOUT"
    )
    parser.add_argument("--precision", default="16-mixed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only-rank", type=int, help=argparse.SUPPRESS)
    add_json_option(parser)
    options = parser.parse_args(arguments)
    check(parser, options)
    if options.only_rank is not None:
        case = options.worlds[0], options.only_rank, options.layouts[0], options.precision
        first, second = build(*case), build(*case)
        print(json.dumps(second | {key: value for key, value in first.items() if key.endswith("bytes")}))
        return
    cases = [(layout, world) for layout in options.layouts for world in options.worlds if world % layout.size == 0]
    found: dict[tuple[Layout, int], list[dict[str, float]]] = {case: [] for case in cases}
    for number in range(options.rounds):
        for layout, world in cases if number % 2 == 0 else cases[::-1]:
            # The last rank: the last stage, which holds a copy of the tied embedding.
            found[layout, world].append(build_elsewhere(world, layout, options.precision, world - 1))
    rows: list[dict[str, Any]] = [
        {
            "base": str(layout),
            "layout": str(replace(layout, dp=world // layout.size)),
            "world": world,
            **{key: statistics.median(each[key] for each in results) for key in results[0]},
        }
        for (layout, world), results in found.items()
    ]
    result: dict[str, Any] = {
        "machine": machine(torch.device("cpu")),
        "torch": torch.__version__,
        "precision": options.precision,
        "rounds": options.rounds,
        "rows": rows,
    }
    print(f"{result['machine']}, torch {result['torch']}; {options.precision}, medians of {options.rounds} rounds\n")
    head = (
        "world",
        "layout",
        "launch/s",
        "initialize/s",
        "launch/MB",
        "initialize/MB",
        "step/ms",
        "collectives",
        "groups",
    )
    cells = [
        (
            str(row["world"]),
            str(row["layout"]),
            f"{row['launch_seconds']:.3f}",
            f"{row['initialize_seconds']:.3f}",
            f"{row['launch_bytes'] / 1e6:.1f}",
            f"{row['initialize_bytes'] / 1e6:.1f}",
            f"{row['step_seconds'] * 1e3:.2f}",
            f"{row['collectives']:g}",
            f"{row['groups']:g}",
        )
        for row in rows
    ]
    print(table(head, cells), end="\n\n")
    for layout in options.layouts:
        print(conclusion(layout, [row for row in rows if row["base"] == str(layout)]))
    write_json(options.json, result)


if __name__ == "__main__":
    torch.set_num_threads(1)  # Python's time is measured
    main()
