"""One fp16 training step of the main job on a CPU: emulated products, torch's own, and fp32, in turn.

    torchrun --standalone --nproc-per-node 4 benchmarks/fp16_cpu.py

The three take turns in one run; medians are reported. On a CPU with fp16 arithmetic torch's own products are faster,
and paramp uses them by default.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
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
from paramp.config.files import load, merge, read_file
from paramp.precision.capabilities import has_native_fp16

VARIANTS: dict[str, dict[str, object]] = {
    "fp16, emulated": {"precision": "16-mixed", "emulate_fp16": True},
    "fp16, torch's products": {"precision": "16-mixed", "emulate_fp16": False},
    "fp32": {"precision": "32-true"},
}


def train(engine: Any, batch: list[torch.Tensor]) -> None:
    engine.forward_backward(*batch)
    engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(Path(__file__).parents[1] / "launch" / "tiny.toml"))
    parser.add_argument("--rounds", type=int, default=5)
    add_json_option(parser)
    options = parser.parse_args()
    check_counts(parser, options, "rounds")
    check_json_option(parser, options.json)
    job = read_file(options.config)
    settings = job.pop("train")

    with ExitStack() as stack:
        engines = {}
        for name, changes in VARIANTS.items():
            context = stack.enter_context(paramp.launch_from_torch(load(merge(job, changes)), device="cpu"))
            model = paramp.models.GPT.preset(settings["model"])
            optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"])
            engines[name], *_ = paramp.initialize(model, optimizer, model.loss)
        shape = settings["batch_size"] // context.dp.size, settings["seq_len"]
        batch: list[torch.Tensor] = []

        def load_batch(step: int) -> None:
            torch.manual_seed(step * context.dp.size + context.dp.rank)  # the ranks of a model group have one batch
            batch[:] = torch.randint(256, shape), torch.randint(256, shape)

        turns = {name: Turn(partial(train, engine, batch), load_batch) for name, engine in engines.items()}
        median = medians(take_turns(turns, options.rounds, context.device))
        if not context.is_main:
            return
        emulated, own, full = (median[name] for name in VARIANTS)
        result = {
            "machine": machine(context.device),
            "torch": torch.__version__,
            "native_fp16": has_native_fp16("cpu"),
            "rounds": options.rounds,
            "median_seconds": median,
            "torchs_products_over_emulated": own / emulated,
            "emulated_over_fp32": emulated / full,
        }
        print(f"{result['machine']}, torch {torch.__version__}")
        rows = [(name, f"{value:.3f}", f"{value / full:.2f}") for name, value in median.items()]
        print(table(("", "s a step", "against fp32"), rows))
        print(f"emulated is {own / emulated:.1f} times as fast as torch's fp16 products")
        print(json.dumps(result))
        write_json(options.json, result)


if __name__ == "__main__":
    main()
