"""The training step of paramp's engine against the same GPT written by hand, as Megatron-LM does it.

    torchrun --standalone --nproc-per-node 2 benchmarks/by_hand.py --tp 2
    torchrun --standalone --nproc-per-node 2 benchmarks/by_hand.py --pp 2
    python benchmarks/by_hand.py --layouts 1 tp2 pp2 dp2 --widths 128 512 --seq-lens 64 1024

hand_gpt.py has what is written by hand. The norms of the first gradients are compared, to check that both do the same
work.

Every candidate makes one step in each round; medians are reported. The hand-written step takes part twice: the ratio
of one to the other is the spread, by which the limit is widened.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack
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
from hand_gpt import ByHand
from overhead import AUTOCAST, MAX_NORM, TOLERANCE, Ours

import paramp
from paramp.models import GPT, GPTConfig

LIMIT = 1.05


def measure(layout: Layout, options: argparse.Namespace, mode: str, width: int, seq_len: int) -> dict[str, Any]:
    """The medians of one shape in one mode, in this process's layout.

    Raises:
        SystemExit: the two do not compute the same.
    """
    shape = GPTConfig(
        num_layers=options.layers,
        num_heads=width // 32,
        width=width,
        max_seq_len=seq_len,
        vocab_size=options.vocab_size,
        tied=False,
    )
    microbatches = options.microbatches if layout.pp > 1 else 1
    parallel = {"tensor": layout.tp, "pipeline": {"size": layout.pp, "microbatches": microbatches}}
    config = {"parallel": parallel, "precision": mode}
    with ExitStack() as stack:
        context = stack.enter_context(
            paramp.launch_from_torch({**config, "clip_grad_norm": MAX_NORM}, device=options.device)
        )
        candidates: dict[str, ByHand | Ours] = {}
        for name in ("hand", "again", "paramp"):
            torch.manual_seed(0)
            model = GPT(shape)
            candidates[name] = Ours(model) if name == "paramp" else ByHand(model, context, mode, microbatches)
        generator = torch.Generator().manual_seed(context.dp.rank)
        tokens = torch.randint(shape.vocab_size, (options.batch_size, seq_len + 1), generator=generator)
        batch = [tokens[:, :-1].to(context.device), tokens[:, 1:].contiguous().to(context.device)]
        for candidate in candidates.values():
            candidate.train(*batch)
        hand, ours = float(candidates["hand"].norm), float(candidates["paramp"].norm)
        if not abs(hand - ours) <= TOLERANCE[mode] * hand:
            raise SystemExit(f"{mode}: the gradient's norm is {hand} by hand, but {ours} in paramp")
        turns = {name: Turn(partial(candidate.train, *batch)) for name, candidate in candidates.items()}
        median = medians(take_turns(turns, options.rounds, context.device, warm_up=2))
        spread = max(median["hand"], median["again"]) / min(median["hand"], median["again"])
        ratio = median["paramp"] / ((median["hand"] + median["again"]) / 2)
        return {
            "machine": machine(context.device),
            "torch": torch.__version__,
            "mode": mode,
            "width": width,
            "tokens": options.batch_size * seq_len,
            "seconds": median,
            "ratio": ratio,
            "spread": spread,
            "holds": ratio <= LIMIT * spread,
        }


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{rows[0]['machine']}, torch {rows[0]['torch']}\n")
    cells = [
        (
            row["mode"],
            str(row["width"]),
            str(row["tokens"]),
            f"{row['seconds']['hand'] * 1e3:.1f}",
            f"{row['seconds']['paramp'] * 1e3:.1f}",
            f"{row['ratio']:.3f}",
            f"{row['spread']:.3f}",
            "yes" if row["holds"] else "no",
        )
        for row in rows
    ]
    head = ("", "width", "tokens", "by hand/ms", "paramp/ms", "paramp / hand", "hand / hand", f"within {LIMIT}")
    print(table(head, cells))


def own_arguments(options: argparse.Namespace, layout: Layout) -> list[str]:
    """The command line of the processes that run one of the ``--layouts``."""
    arguments = [f"--tp={layout.tp}", f"--pp={layout.pp}"]
    for name in ("layers", "vocab_size", "batch_size", "microbatches", "rounds", "device"):
        value = getattr(options, name)
        arguments += [] if value is None else [f"--{name.replace('_', '-')}={value}"]
    for name in ("precision", "widths", "seq_lens"):
        arguments += [f"--{name.replace('_', '-')}", *map(str, getattr(options, name))]
    return arguments


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1, help="other processes are data ranks")
    parser.add_argument("--layouts", nargs="*", type=Layout.parse, metavar="LAYOUT", help="such as 1 tp2 pp2 dp2")
    parser.add_argument("--precision", nargs="+", default=list(AUTOCAST), choices=list(AUTOCAST), metavar="MODE")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--widths", type=int, nargs="+", default=[128], help="multiples of 32, the size of a head")
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[64])
    parser.add_argument("--vocab-size", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=2, help="under a pipeline")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", choices=["cpu", "cuda"])
    add_json_option(parser)
    options = parser.parse_args(arguments)
    counts = "tp", "pp", "layers", "widths", "seq_lens", "vocab_size", "batch_size", "microbatches", "rounds"
    check_counts(parser, options, *counts)
    check_json_option(parser, options.json)
    if options.layers % options.pp or options.batch_size % options.microbatches:
        parser.error("--layers divides by --pp, and --batch-size by --microbatches")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.layouts:
        results = run_layouts(__file__, options.layouts, lambda layout: own_arguments(options, layout))
        write_json(options.json, results)
        return
    world = int(os.environ.get("WORLD_SIZE", 1))
    layout = Layout(options.pp, world // (options.pp * options.tp), options.tp)
    shapes = [
        (mode, width, seq_len) for width in options.widths for seq_len in options.seq_lens for mode in options.precision
    ]
    rows = [measure(layout, options, *shape) for shape in shapes]
    if int(os.environ.get("RANK", 0)) == 0:
        show(rows)
        write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
