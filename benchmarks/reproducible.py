"""The cost of ``reproducible=True``: the same job in the same chunks with the mode and without it, in turn.

    python benchmarks/reproducible.py --layouts 1 tp2 tp2+sp dp2 dp2+zero pp2
    python benchmarks/reproducible.py --layouts 1 tp2 --widths 128 512 --dropout 0 0.1 --chunk 4
    torchrun --standalone --nproc-per-node 2 benchmarks/reproducible.py --layout tp2

Both train a GPT on one thread a process. Without the mode each microbatch has as many samples as a chunk, so only the
mode differs: slices, one call for each head, elementwise functions on padded memory, gradients added up chunk by chunk,
masks of dropout that do not depend on the layout.

Every candidate makes one step in each round; medians are reported. The one without the mode takes part twice: the ratio
of one to the other is the spread. The ratio of the processor's time, of rank 0, is beside that of the wall clock: other
programs on the machine change it less.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from common import (
    Layout,
    Turn,
    add_json_option,
    check_counts,
    check_json_option,
    machine,
    medians,
    run_layouts,
    table,
    take_turns,
    write_json,
)
from overhead import MAX_NORM, TOLERANCE, Ours

import paramp
from paramp.config.reproducible import MODES
from paramp.models import GPT, GPTConfig

GOAL = 2.0
"""The ratio that the mode is to stay below, at widths of ``GOAL_WIDTH`` and more."""
GOAL_WIDTH = 512


@dataclass(frozen=True)
class Way(Layout):
    """A layout, perhaps with sequence parallelism or ZeRO-1; written as ``tp2+sp`` or ``dp2+zero``."""

    sp: bool = False
    zero: bool = False

    @staticmethod
    def parse(text: str) -> Way:
        sizes, *options = text.split("+")
        layout = Layout.parse(sizes)
        way = Way(layout.pp, layout.dp, layout.tp, "sp" in options, "zero" in options)
        if set(options) - {"sp", "zero"} or (way.sp and way.tp == 1) or (way.zero and way.dp == 1):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected such as 1, tp2, tp2+sp, dp2+zero or pp2·tp2")
        return way

    def __str__(self) -> str:
        return super().__str__() + "+sp" * self.sp + "+zero" * self.zero


def measure(way: Way, options: argparse.Namespace, mode: str, width: int, dropout: float) -> dict[str, Any]:
    """The medians of one shape in one mode, in this process's layout.

    Raises:
        SystemExit: the candidates do not compute the same.
    """
    shape = GPTConfig(
        num_layers=options.layers,
        num_heads=width // options.head_size,
        width=width,
        max_seq_len=options.seq_len,
        vocab_size=options.vocab_size,
        dropout=dropout,
    )
    own = options.batch_size // way.dp
    parallel: dict[str, Any] = {
        "tensor": way.tp,
        "sequence_parallel": way.sp,
        "pipeline": {"size": way.pp, "microbatches": own // options.chunk},
        "zero": int(way.zero),
    }
    plain = {"parallel": parallel, "precision": mode, "clip_grad_norm": MAX_NORM}
    exact = {**plain, "reproducible": {"chunk": options.chunk, "slices": options.slices}}
    candidates: dict[str, Ours] = {}
    gc.collect()  # the engines of the last call are cycles
    torch.set_num_threads(1)
    with ExitStack() as stack:
        for name, config in {"without": plain, "again": plain, "with": exact}.items():
            context = stack.enter_context(paramp.launch_from_torch(config, device=options.device))
            torch.manual_seed(0)
            candidates[name] = Ours(GPT(shape))
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(shape.vocab_size, (options.batch_size, options.seq_len + 1), generator=generator)
        tokens = tokens.chunk(way.dp)[context.dp.rank].to(context.device)
        batch = [tokens[:, :-1], tokens[:, 1:].contiguous()]
        busy: dict[str, list[float]] = {name: [] for name in candidates}
        turns = {
            name: Turn(partial(_metered, partial(candidate.train, *batch), busy[name]))
            for name, candidate in candidates.items()
        }
        take_turns(turns, 1, context.device, warm_up=0)
        if not dropout:
            check_norms(candidates, mode)
        median = medians(take_turns(turns, options.rounds, context.device))
        busiest = {name: statistics.median(seconds[-options.rounds :]) for name, seconds in busy.items()}
        case = {"layout": str(way), "mode": mode, "width": width, "dropout": dropout}
        shown = {"machine": machine(context.device), "torch": torch.__version__}
        return {**case, **compare(median, busiest, width), **shown}


def _metered(run: Callable[[], object], seconds: list[float]) -> None:
    """``run``, whose seconds of the processor, in all threads of this process, are added to ``seconds``."""
    start = time.process_time()
    run()
    seconds.append(time.process_time() - start)


def check_norms(candidates: dict[str, Ours], mode: str) -> None:
    """A SystemExit if the norms of the first gradients differ by more than rounding; masks of dropout do differ."""
    norms = {name: float(candidate.norm) for name, candidate in candidates.items()}
    if not abs(norms["with"] - norms["without"]) <= TOLERANCE.get(mode, TOLERANCE["bf16-mixed"]) * norms["without"]:
        raise SystemExit(f"{mode}: the norm of the first gradient differs: {norms}")


def compare(median: dict[str, float], busy: dict[str, float], width: int) -> dict[str, Any]:
    """The ratio of the step with the mode to those without it, and of the latter to each other.

    ``median`` and ``busy`` are seconds of the wall clock and of the processor.
    """
    one, other = median["without"], median["again"]
    seconds = (one + other) / 2
    ratio, spread = median["with"] / seconds, max(one, other) / min(one, other)
    goal = GOAL if width >= GOAL_WIDTH else None
    holds = None if goal is None else ratio <= goal * spread
    times = {"seconds": median["with"], "seconds_without": seconds}
    processor = 2 * busy["with"] / (busy["without"] + busy["again"])
    return {**times, "ratio": ratio, "spread": spread, "processor": processor, "goal": goal, "holds": holds}


def show(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    print(f"{rows[0]['machine']}, torch {rows[0]['torch']}")
    print(
        f"GPT of {options.layers} layers, {options.batch_size} sequences of {options.seq_len} tokens, chunks of "
        f"{options.chunk}, {options.slices} slices, medians of {options.rounds} rounds\n"
    )
    cells = [
        (
            row["layout"],
            row["mode"],
            str(row["width"]),
            f"{row['dropout']:g}",
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['seconds_without'] * 1e3:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['spread']:.2f}",
            f"{row['processor']:.2f}",
            {None: "-", True: "yes", False: "no"}[row["holds"]],
        )
        for row in rows
    ]
    head = (
        "layout",
        "mode",
        "width",
        "dropout",
        "ms",
        "ms without",
        "ratio",
        "spread",
        "of the processor",
        "within goal",
    )
    print(table(head, cells))
    above = sum(row["holds"] is False for row in rows)
    print(f"\ngoal: {above or 'none'} of {len(rows)} ratios above {GOAL:g} x the spread")


def own_arguments(options: argparse.Namespace, way: Layout) -> list[str]:
    """The command line of the processes that run one of the ``--layouts``."""
    arguments = [f"--layout={way}"]
    for name in COUNTS:
        value = getattr(options, name)
        if not isinstance(value, list):
            arguments.append(f"--{name.replace('_', '-')}={value}")
    for name in ("precision", "widths", "dropout"):
        arguments += [f"--{name}", *map(str, getattr(options, name))]
    return arguments if options.device is None else [*arguments, f"--device={options.device}"]


COUNTS = ("layers", "widths", "head_size", "vocab_size", "seq_len", "batch_size", "chunk", "slices", "rounds")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", type=Way.parse, default=Way(), help="of the processes that run this: tp2+sp")
    parser.add_argument("--layouts", nargs="*", type=Way.parse, metavar="LAYOUT", help="start the processes of each")
    parser.add_argument(
        "--precision",
        nargs="+",
        default=["32-true", "bf16-mixed"],
        choices=MODES,
        metavar="MODE",
        help=", ".join(MODES),
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--widths", type=int, nargs="+", default=[512], help="multiples of --head-size")
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=512)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences, over all data ranks")
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0], metavar="PROBABILITY")
    parser.add_argument("--chunk", type=int, default=1, help="samples of a chunk, and of a microbatch without the mode")
    parser.add_argument("--slices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", choices=["cpu", "cuda"])
    add_json_option(parser)
    options = parser.parse_args(arguments)
    check_counts(parser, options, *COUNTS)
    check_json_option(parser, options.json)
    for way in options.layouts or [options.layout]:
        if options.batch_size % (way.dp * options.chunk) or options.layers % way.pp:
            parser.error(f"{way}: --batch-size divides by data ranks x --chunk, and --layers by pipeline stages")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.layouts:
        results = run_layouts(__file__, options.layouts, lambda way: own_arguments(options, way))
        rows = [row for result in results.values() for row in result["rows"]]
        print("\nall layouts")
        show(rows, options)
        write_json(options.json, {"rows": rows})
        return
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world != options.layout.size:
        raise SystemExit(
            f"--layout: got a world of {world}, expected {options.layout.size} for {options.layout}; start it with "
            f"torchrun --standalone --nproc-per-node {options.layout.size}, or use --layouts"
        )
    shapes = [
        (mode, width, dropout) for width in options.widths for dropout in options.dropout for mode in options.precision
    ]
    rows = [measure(options.layout, options, *shape) for shape in shapes]
    if int(os.environ.get("RANK", 0)) == 0:
        show(rows, options)
        write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
