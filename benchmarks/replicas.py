"""The cost of comparing replicas, against the training step of the same model.

    torchrun --standalone --nproc-per-node 2 benchmarks/replicas.py
    torchrun --standalone --nproc-per-node 4 benchmarks/replicas.py --tensor 2 --precision 16-naive

A step and a comparison (``engine.check_replicas``) take turns in one run. The result is the fraction of
the training time that a comparison every 100 steps takes (``check_replicas_every=100``). Several data ranks are needed,
so that all weights, masters and optimizer state have replicas.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from common import (
    Turn,
    add_json_option,
    check_counts,
    check_json_option,
    machine,
    medians,
    table,
    take_turns,
    write_json,
)

import paramp
from paramp.distributed.launcher_variables import rank_by_any_variable
from paramp.models import GPT, GPTConfig

EVERY = 100
"""Steps between comparisons."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", default=["32-true", "bf16-naive"], metavar="MODE")
    parser.add_argument("--tensor", type=int, default=1, help="tensor ranks; the others are data ranks")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences of each data rank")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    check_counts(parser, options, "tensor", "layers", "width", "seq_len", "batch_size", "rounds")
    check_json_option(parser, options.json)
    return options


def measure(precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """One mode."""
    config = {"precision": precision, "parallel": {"tensor": options.tensor}, "clip_grad_norm": 1.0}
    with paramp.launch_from_torch(config, device=options.device) as context:
        shape = GPTConfig(
            num_layers=options.layers, num_heads=6, width=options.width, max_seq_len=options.seq_len, vocab_size=8192
        )
        model = GPT(shape)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-4), GPT.loss)
        generator = torch.Generator().manual_seed(context.dp.rank)
        tokens = torch.randint(8192, (options.batch_size, options.seq_len + 1), generator=generator)
        step = partial(_step, engine, tokens[:, :-1], tokens[:, 1:])
        turns = {"step": Turn(step), "check": Turn(engine.check_replicas)}
        seconds = medians(take_turns(turns, options.rounds, context.device, warm_up=2))
        return {
            "precision": precision,
            "machine": machine(context.device),
            "parameters": num_parameters,
            "layout": f"tensor {context.tp.size} x data {context.dp.size}",
            "step_seconds": seconds["step"],
            "check_seconds": seconds["check"],
            "fraction": seconds["check"] / (EVERY * seconds["step"]),
        }


def _step(engine: paramp.Engine, x: torch.Tensor, y: torch.Tensor) -> None:
    engine.forward_backward(x, y, return_loss=False)
    engine.step()
    engine.zero_grad()


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    rows = [measure(precision, options) for precision in options.precision]
    if rank_by_any_variable() > 0:
        return
    first = rows[0]
    print(f"{first['machine']}, torch {torch.__version__}")
    print(
        f"GPT of {first['parameters'] / 1e6:.1f} M parameters, {first['layout']}, {options.batch_size} sequences of "
        f"{options.seq_len} tokens a data rank, medians of {options.rounds} rounds"
    )
    cells = [
        (
            row["precision"],
            f"{row['step_seconds'] * 1e3:.1f}",
            f"{row['check_seconds'] * 1e3:.1f}",
            f"{row['fraction']:.3%}",
        )
        for row in rows
    ]
    print(table(("mode", "ms a step", "ms a comparison", f"of training, every {EVERY} steps"), cells))
    write_json(options.json, {"torch": torch.__version__, "rounds": options.rounds, "every": EVERY, "rows": rows})


if __name__ == "__main__":
    main()
