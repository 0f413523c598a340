"""Every pipeline schedule on the same ranks: a step's time, the measured bubble, and the theoretical one.

    torchrun --standalone --nproc-per-node 2 benchmarks/schedules.py
    torchrun --standalone --nproc-per-node 4 benchmarks/schedules.py --tensor 2 --microbatches 16 --rounds 10

All schedules train the same GPT on the same tokens in one run. They take turns, one step each, in every round; medians
are reported. Every stage has the same number of the 8 blocks. The bubble is the fraction of a batch's time in which
ranks compute nothing (paramp/observe/timeline.py): the idle time of the schedule, and also sending, starting operations
and waiting for stages with more work. The theoretical bubble is the schedule's alone
(paramp/config/pipeline_schedules.py).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from common import add_json_option, check_counts, check_json_option, machine, synchronize, table, write_json

import paramp
from paramp.config.layout import PipelineConfig
from paramp.config.pipeline_schedules import SCHEDULES
from paramp.distributed.launcher_variables import find_place
from paramp.models import GPT, GPTConfig


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--tensor", type=int, default=1, help="tensor ranks; the pipeline has the others")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    check_counts(parser, options, "tensor", "microbatches", "width", "seq_len", "rounds")
    check_json_option(parser, options.json)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with ExitStack() as stack:
        engines: dict[str, paramp.Engine] = {}
        shape = GPTConfig(
            num_layers=8, num_heads=4, width=options.width, max_seq_len=options.seq_len, vocab_size=256, tied=False
        )
        for schedule in options.schedules:
            context = stack.enter_context(paramp.launch_from_torch(layout(schedule, options), device=options.device))
            torch.manual_seed(0)
            model = GPT(shape)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            engines[schedule], *_ = paramp.initialize(model, optimizer, GPT.loss)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(256, (options.microbatches, options.seq_len + 1), generator=generator)
        measured = measure(engines, tokens, options.rounds)
        if context.is_main:
            report(engines, measured, shape, options, context)


def layout(schedule: str, options: argparse.Namespace) -> dict[str, Any]:
    """The configuration of one schedule, with the same number of blocks in each of its stages."""
    place = find_place()
    pipeline = (1 if place is None else place.world_size) // options.tensor
    stages = PipelineConfig(size=pipeline, schedule=schedule, microbatches=options.microbatches).num_stages
    split = [f"blocks.{8 * stage // stages}" for stage in range(1, stages)]
    return {
        "parallel": {
            "tensor": options.tensor,
            "pipeline": {
                "size": pipeline,
                "schedule": schedule,
                "microbatches": options.microbatches,
                "split": split,
            },
        },
        "precision": options.precision,
    }


def measure(
    engines: dict[str, paramp.Engine], tokens: torch.Tensor, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a step, and its bubble, for each schedule and round, after one unmeasured round."""
    measured: dict[str, list[tuple[float, float]]] = {schedule: [] for schedule in engines}
    for step in range(rounds + 1):
        for schedule, engine in engines.items():
            engine.zero_grad()
            with engine.recording() as timeline:
                start = time.perf_counter()
                engine.forward_backward(tokens[:, :-1], tokens[:, 1:])
                engine.step()
                synchronize(engine.context.device)
                seconds = time.perf_counter() - start
            if step:
                measured[schedule].append((seconds, timeline.bubble))
    return measured


def report(
    engines: dict[str, paramp.Engine],
    measured: dict[str, list[tuple[float, float]]],
    shape: GPTConfig,
    options: argparse.Namespace,
    context: paramp.ParallelContext,
) -> None:
    rows = []
    for schedule, engine in engines.items():
        pipeline = engine.context.config.parallel.pipeline
        seconds, bubbles = (list(values) for values in zip(*measured[schedule], strict=True))
        rows.append(
            {
                "schedule": schedule,
                "stages_per_rank": pipeline.num_local_stages,
                "median_seconds": statistics.median(seconds),
                "least_seconds": min(seconds),
                "median_bubble": statistics.median(bubbles),
                "least_bubble": min(bubbles),
                "theoretical_bubble": pipeline.theoretical_bubble,
            }
        )
    result = {
        "machine": machine(context.device),
        "torch": torch.__version__,
        "model": f"GPT, 8 blocks of width {shape.width}, {options.seq_len} tokens",
        "layout": f"pipeline {context.pp.size} x tensor {context.tp.size}, {options.microbatches} microbatches",
        "precision": options.precision,
        "rounds": options.rounds,
        "rows": rows,
    }
    print(f"{result['machine']}, torch {torch.__version__}")
    print(f"{result['model']}; {result['layout']}, {options.precision}, medians of {options.rounds} rounds")
    cells = [
        (
            row["schedule"],
            str(row["stages_per_rank"]),
            f"{row['median_seconds']:.3f}",
            f"{row['median_bubble']:.1%}",
            f"{row['least_bubble']:.1%}",
            "-" if row["theoretical_bubble"] is None else f"{row['theoretical_bubble']:.1%}",
        )
        for row in rows
    ]
    print(table(["schedule", "stages a rank", "s a step", "bubble", "least", "in theory"], cells))
    write_json(options.json, result)


if __name__ == "__main__":
    main()
