"""How long saving a checkpoint stops the training.

    python benchmarks/checkpoints.py
    torchrun --standalone --nproc-per-node 2 benchmarks/checkpoints.py --precision 16-naive

Four ways take turns in one run: a plain copy of everything that is saved, the lower bound of a save in the background;
``engine.save(path, wait=False)``, until it returns; ``engine.save(path)``, until all files are written with checksums;
and ``torch.save`` of the same tensors.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="16-mixed", metavar="MODE")
    parser.add_argument("--tensors", type=int, default=20)
    parser.add_argument("--width", type=int, default=1024, help="each tensor has width x width elements")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    check_counts(parser, options, "tensors", "width", "rounds")
    check_json_option(parser, options.json)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with paramp.launch_from_torch({"precision": options.precision}, device=options.device) as context:
        layers = (torch.nn.Linear(options.width, options.width, bias=False) for _ in range(options.tensors))
        model = torch.nn.Sequential(*layers)
        engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters()), torch.nn.functional.mse_loss)
        folders = [tempfile.mkdtemp(prefix="paramp-benchmark-") if context.is_main else ""]
        dist.broadcast_object_list(folders)
        folder = Path(folders[0])
        try:
            row = measure(engine, folder, options)
        finally:
            if context.is_main:
                shutil.rmtree(folder)
    if context.is_main:
        report(row, options)


def measure(engine: paramp.Engine, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The median of each way, in seconds."""
    context = engine.context
    # Full-precision weights and optimizer state: a checkpoint without its few other values.
    held = [value for state in engine.optimizer.state.values() for value in state.values()]
    held += [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
    copies = [torch.empty_like(value, device="cpu") for value in held]

    def copy() -> None:
        for target, value in zip(copies, held, strict=True):
            target.copy_(value)

    turns = {
        "copy": Turn(copy),
        "save, wait=False": Turn(
            lambda: engine.save(folder / "beside", wait=False), prepare=lambda _: engine.finish_saving()
        ),
        "save": Turn(lambda: engine.save(folder / "waited"), prepare=lambda _: engine.finish_saving()),
        "torch.save": Turn(
            lambda: torch.save(held, folder / f"pickled-{context.rank}"), prepare=lambda _: engine.finish_saving()
        ),
    }
    seconds = medians(take_turns(turns, options.rounds, context.device))
    engine.finish_saving()
    return {
        "machine": machine(context.device),
        "bytes": sum(value.numel() * value.element_size() for value in held),
        "seconds": seconds,
        "stall": seconds["save, wait=False"] / seconds["copy"],
    }


def report(row: dict[str, Any], options: argparse.Namespace) -> None:
    print(f"{row['machine']}, torch {torch.__version__}")
    print(f"{options.precision}, {row['bytes'] / 1e6:,.0f} MB a rank, medians of {options.rounds} rounds")
    copy = row["seconds"]["copy"]
    cells = [(name, f"{value * 1e3:.0f}", f"{value / copy:.2f}") for name, value in row["seconds"].items()]
    print(table(("way", "ms", "x copy"), cells))
    write_json(options.json, {"torch": torch.__version__, "rounds": options.rounds, **row})


if __name__ == "__main__":
    main()
