"""The training step of paramp's engine against the same GPT written by hand, and by other libraries, in turn.

    torchrun --standalone --nproc-per-node 2 benchmarks/by_hand.py --tp 2
    torchrun --standalone --nproc-per-node 2 benchmarks/by_hand.py --pp 2
    python benchmarks/by_hand.py --layouts 1 tp2 pp2 dp2 --widths 128 512 --seq-lens 64 1024
    python benchmarks/by_hand.py --layouts 1 dp2 tp2 --against accelerate fabric fsdp2
    python benchmarks/by_hand.py --layouts dp2 dp2·tp2 --sharded
    python benchmarks/by_hand.py --shape smollm-1.7b

hand_gpt.py has what is written by hand, as Megatron-LM does it; peers.py has the loops on other libraries. The norms of
the first gradients are compared, to check that all do the same work.

Every candidate makes one step in each round; medians are reported. The step written by hand takes part twice: the ratio
of one to the other is the spread, by which each limit is widened. The last line says how many are above it.

With --sharded the engine shards parameters over the data ranks, and the loop on torch's fully_shard takes the place of
the step written by hand.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

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
    why_not,
    write_json,
)
from hand_gpt import ByHand
from overhead import AUTOCAST, MAX_NORM, TOLERANCE, Ours
from peers import PEERS, FullyShard

import paramp
from paramp.models import GPT, GPTConfig

SHAPES = {
    "smollm-1.7b": {"layers": 24, "width": 2048, "head_size": 64, "vocab_size": 49152, "seq_len": 1024},
    "llama-2-7b": {"layers": 32, "width": 4096, "head_size": 128, "vocab_size": 32000, "seq_len": 1024},
}
"""The sizes of the models in picotron's README, and the length of its sequences, for this GPT."""
SHRINK = {"cpu": 16, "cuda": 1}
"""What the sizes of a ``--shape`` are divided by."""
MULTIPLE = 128
"""GPT pads its vocabulary to multiples of it, and masks the padding, which the step by hand does not."""
EAGER = 1 / 1.1
"""The limit of a compiled step against paramp's own without compilation."""
COMPILED = "paramp, compiled"
NAIVE = "bf16-naive"
"""What the loop on torch's fully_shard computes in half precision: norms too, without autocast."""
SHARDED = "fully_shard"
"""The name of the loop that --sharded compares with."""


class Candidate(Protocol):
    @property
    def norm(self) -> torch.Tensor:
        """0-dim, that of the last step's gradient."""

    def train(self, x: torch.Tensor, y: torch.Tensor) -> None: ...


def limit(against: str, layout: Layout, width: int) -> float:
    """The largest ratio of paramp's time to that of ``against``, before it is widened by the spread."""
    if against == "paramp":
        return EAGER
    if against == SHARDED:
        return 1.02
    if against in PEERS:
        return 1.0
    if layout.size == 1:
        return 1.03
    return 1.0 if width >= 512 else 1.05


def measure(layout: Layout, options: argparse.Namespace, mode: str, width: int, seq_len: int) -> dict[str, Any]:
    """The medians of one shape in one mode, in this process's layout.

    Raises:
        SystemExit: two candidates do not compute the same.
    """
    shape = GPTConfig(
        num_layers=options.layers,
        num_heads=width // options.head_size,
        width=width,
        max_seq_len=seq_len,
        vocab_size=options.vocab_size,
        tied=False,
    )
    microbatches = options.microbatches if layout.pp > 1 else 1
    parallel: dict[str, Any] = {"tensor": layout.tp, "pipeline": {"size": layout.pp, "microbatches": microbatches}}
    parallel |= {"data": {"shard": layout.dp}} if options.sharded else {}
    config = {"parallel": parallel, "precision": mode, "clip_grad_norm": MAX_NORM}
    candidates: dict[str, Candidate] = {}
    skipped: dict[str, str] = {}
    gc.collect()  # the engines of the last call are cycles
    with ExitStack() as stack:
        context = stack.enter_context(paramp.launch_from_torch(config, device=options.device))
        for name in (SHARDED if options.sharded else "hand", "again"):
            candidates[name] = (
                FullyShard(_model(shape), context, mode)
                if options.sharded
                else ByHand(_model(shape), context, mode, microbatches)
            )
        for name in options.against:
            try:
                candidates[name] = PEERS[name](_model(shape), context, mode)
            except Exception as error:  # other libraries raise their own exceptions
                skipped[name] = why_not(error)
        candidates["paramp"] = Ours(_model(shape))
        if options.compile:
            stack.enter_context(paramp.launch_from_torch({**config, "compile": True}, device=options.device))
            candidates[COMPILED] = Ours(_model(shape))
        generator = torch.Generator().manual_seed(context.dp.rank)
        tokens = torch.randint(shape.vocab_size, (options.batch_size, seq_len + 1), generator=generator)
        batch = [tokens[:, :-1].to(context.device), tokens[:, 1:].contiguous().to(context.device)]
        check_norms(candidates, batch, mode)
        turns = {name: Turn(partial(candidate.train, *batch)) for name, candidate in candidates.items()}
        median = medians(take_turns(turns, options.rounds, context.device, warm_up=2))
        shown = {"machine": machine(context.device), "torch": torch.__version__, "layout": str(layout)}
        case = {"mode": mode, "width": width, "tokens": options.batch_size * seq_len}
        return {**shown, "seconds": median, "rows": compare(median, case, layout, width), "cannot_run": skipped}


def _model(shape: GPTConfig) -> GPT:
    torch.manual_seed(0)
    return GPT(shape)


def check_norms(candidates: dict[str, Candidate], batch: Sequence[torch.Tensor], mode: str) -> None:
    """Make the first step of each; a SystemExit if the norms of their gradients differ."""
    for candidate in candidates.values():
        candidate.train(*batch)
    hand = float(candidates["again"].norm)
    for name, candidate in candidates.items():
        norm = float(candidate.norm)
        if not abs(hand - norm) <= TOLERANCE.get(mode, TOLERANCE["bf16-mixed"]) * hand:
            raise SystemExit(f"{mode}: the gradient's norm is {hand} by hand, but {norm} in {name}")


def compare(median: dict[str, float], case: dict[str, Any], layout: Layout, width: int) -> list[dict[str, Any]]:
    """A row for each pair: paramp with every other candidate, and compiled paramp with paramp and the step by hand."""
    name = next(iter(median))  # of the step that takes part twice
    hand, again = median[name], median["again"]
    spread = max(hand, again) / min(hand, again)
    seconds = {**median, name: (hand + again) / 2}
    rows = []
    for ours in ("paramp", COMPILED):
        others = [name for name in seconds if name not in ("again", "paramp", COMPILED)]
        for name in others + ["paramp"] * (ours == COMPILED) if ours in seconds else []:
            ratio, bar = seconds[ours] / seconds[name], limit(name, layout, width)
            own = {"candidate": ours, "against": name, "ratio": ratio, "spread": spread, "limit": bar}
            times = {"seconds": seconds[ours], "against_seconds": seconds[name]}
            rows.append({**case, **own, **times, "holds": ratio <= bar * spread})
    return rows


def show(results: Sequence[dict[str, Any]]) -> None:
    first = results[0]
    print(f"{first['machine']}, torch {first['torch']}, layout {first['layout']}\n")
    rows = [row for result in results for row in result["rows"]]
    cells = [
        (
            f"{row['candidate']} / {row['against']}",
            row["mode"],
            str(row["width"]),
            str(row["tokens"]),
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['against_seconds'] * 1e3:.1f}",
            f"{row['ratio']:.3f}",
            f"{row['limit']:.2f} x {row['spread']:.3f}",
            "yes" if row["holds"] else "no",
        )
        for row in rows
    ]
    print(table(("", "mode", "width", "tokens", "ms", "ms of the other", "ratio", "limit x spread", "within"), cells))
    for name, reason in {name: reason for result in results for name, reason in result["cannot_run"].items()}.items():
        print(f"{name} does not run here: {reason}")
    above = sum(not row["holds"] for row in rows)
    print(f"\nlimits: {above or 'none'} of {len(rows)} ratios above")


def own_arguments(options: argparse.Namespace, layout: Layout) -> list[str]:
    """The command line of the processes that run one of the ``--layouts``."""
    arguments = [f"--tp={layout.tp}", f"--pp={layout.pp}"]
    arguments += [f"--{name}" for name in ("compile", "sharded") if getattr(options, name)]
    for name in ("layers", "head_size", "vocab_size", "batch_size", "microbatches", "rounds", "device"):
        value = getattr(options, name)
        arguments += [] if value is None else [f"--{name.replace('_', '-')}={value}"]
    for name in ("precision", "widths", "seq_lens", "against"):
        arguments += [f"--{name.replace('_', '-')}", *map(str, getattr(options, name))]
    return arguments


DEFAULTS = {"layers": 4, "widths": [128], "head_size": 32, "vocab_size": 512, "seq_lens": [64]}


def sizes_of(shape: str | None, device: str) -> dict[str, Any]:
    """The sizes of one of ``SHAPES``, divided by what the device calls for; the defaults without one."""
    if shape is None:
        return DEFAULTS
    full, shrink = SHAPES[shape], SHRINK[device]
    return {
        "layers": max(2, full["layers"] // shrink // 2 * 2),
        "widths": [full["width"] // shrink],
        "head_size": min(full["head_size"], full["width"] // shrink // 2),
        "vocab_size": -(-full["vocab_size"] // shrink // MULTIPLE) * MULTIPLE,
        "seq_lens": [full["seq_len"] // shrink],
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1, help="other processes are data ranks")
    parser.add_argument("--layouts", nargs="*", type=Layout.parse, metavar="LAYOUT", help="such as 1 tp2 pp2 dp2")
    modes = [*AUTOCAST, NAIVE]
    parser.add_argument("--precision", nargs="+", default=list(AUTOCAST), choices=modes, metavar="MODE")
    parser.add_argument(
        "--against", nargs="*", default=[], choices=list(PEERS), help="other libraries, in the same run"
    )
    parser.add_argument("--sharded", action="store_true", help="shard parameters over data ranks, against fully_shard")
    parser.add_argument("--compile", action="store_true", help="also the engine with compile=true, against without")
    shapes = f"sizes of a model: {', '.join(SHAPES)}; divided by {SHRINK['cpu']} on a CPU. Other options override them"
    parser.add_argument("--shape", choices=list(SHAPES), help=shapes)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--widths", type=int, nargs="+", help="multiples of --head-size")
    parser.add_argument("--head-size", type=int)
    parser.add_argument("--seq-lens", type=int, nargs="+")
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=2, help="under a pipeline")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", choices=["cpu", "cuda"])
    add_json_option(parser)
    options = parser.parse_args(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name, value in sizes_of(options.shape, device).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    counts = "tp", "pp", *DEFAULTS, "batch_size", "microbatches", "rounds"
    check_counts(parser, options, *counts)
    check_json_option(parser, options.json)
    if options.vocab_size % MULTIPLE:
        parser.error(f"--vocab-size: got {options.vocab_size}, expected a multiple of {MULTIPLE}")
    if NAIVE in options.precision and not options.sharded:
        parser.error(f"--precision: {NAIVE} is compared with --sharded only")
    if options.sharded and (options.pp > 1 or options.against):
        parser.error("--sharded: compared without --pp and --against")
    if options.layers % options.pp or options.batch_size % options.microbatches:
        parser.error("--layers divides by --pp, and --batch-size by --microbatches")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.layouts:
        write_json(options.json, run_layouts(__file__, options.layouts, lambda layout: own_arguments(options, layout)))
        return
    world = int(os.environ.get("WORLD_SIZE", 1))
    layout = Layout(options.pp, world // (options.pp * options.tp), options.tp)
    shapes = [
        (mode, width, seq_len) for width in options.widths for seq_len in options.seq_lens for mode in options.precision
    ]
    results = [measure(layout, options, *shape) for shape in shapes]
    if int(os.environ.get("RANK", 0)) == 0:
        show(results)
        write_json(options.json, {"results": results})


if __name__ == "__main__":
    main()
