"""Colossal-AI's table of AMP methods, for every mode of paramp and for plain torch: memory, iterations/s, samples/s.

    python benchmarks/amp_table.py
    python benchmarks/amp_table.py --model vit --preset vit-b16 --batch-size 128 --rounds 20
    torchrun --standalone --nproc-per-node 4 benchmarks/amp_table.py --tensor 2 --pipeline 2
    python benchmarks/amp_table.py --layouts 1 tp2 pp2 dp2

All candidates train the same model on the same images in one run. They take turns, one step each, in every round; the
medians are reported. Plain torch is torch.autocast with torch.amp.GradScaler, and DistributedDataParallel on several
ranks; with tensor or pipeline ranks it has no row. Modes that cannot run on this machine are listed with the reason.

--layouts starts the processes of each layout, one layout after the other. Only rows of one layout take turns, so
compare rows of different layouts relative to a row that both have.

Memory is that of rank 0 by torch's allocator: what the candidate keeps (weights, gradients, masters, optimizer state)
plus the peak of what a step allocates in addition.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
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
    watch_memory,
    why_not,
    write_json,
)
from torch import nn

import paramp
from paramp.base.errors import ConfigError
from paramp.models import ResNet, ViT
from paramp.precision.capabilities import has_native_fp16
from paramp.precision.modes import PRESETS, Precision

MODELS: dict[str, type[ResNet] | type[ViT]] = {"vit": ViT, "resnet": ResNet}

DOCUMENTED = {
    "FP32 training": "32-true",
    "AMP_TYPE.TORCH": "16-mixed",
    "AMP_TYPE.NAIVE": "16-naive",
    "AMP_TYPE.APEX O1": "O1",
}
"""Rows of Colossal-AI's document -> paramp's modes."""

MAX_WARM_UP = 40


class Candidate(Protocol):
    """A row of the table: trains a model."""

    def forward_backward(self, x: torch.Tensor, y: torch.Tensor) -> Any: ...

    def step(self) -> bool:
        """Make or skip a step. Returns whether it was made."""


class Plain:
    """Plain torch: autocast to ``dtype`` unless it is None, a GradScaler for fp16, DDP on several ranks."""

    def __init__(self, model: ResNet | ViT, dtype: torch.dtype | None, context: paramp.ParallelContext) -> None:
        self.device = context.device
        self.model: nn.Module = model.to(self.device)
        if context.world_size > 1:
            self.model = nn.parallel.DistributedDataParallel(self.model)
        self.loss = model.loss
        self.optimizer = make_optimizer(self.model.parameters())
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype is torch.float16)

    def forward_backward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        autocast: AbstractContextManager[Any] = nullcontext()
        if self.dtype is not None:
            autocast = torch.autocast(self.device.type, dtype=self.dtype)
        with autocast:
            output = self.model(x.to(self.device))
        self.scaler.scale(self.loss(output.float(), y.to(self.device))).backward()

    def step(self) -> bool:
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= scale


class Ours:
    """An engine of paramp."""

    def __init__(self, model: ResNet | ViT) -> None:
        self.engine, *_ = paramp.initialize(model, make_optimizer(model.parameters()), model.loss)

    def forward_backward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.engine.zero_grad()
        self.engine.forward_backward(x, y)

    def step(self) -> bool:
        return self.engine.step().stepped


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # In modes without masters, Adam's eps has to be representable in fp16.
    return torch.optim.AdamW(parameters, lr=1e-4, eps=1e-4)


def warm_up(candidate: Candidate, x: torch.Tensor, y: torch.Tensor) -> None:
    """Train until a step is made, so that the loss scale is low enough and the optimizer's state exists."""
    for attempt in range(MAX_WARM_UP):
        candidate.forward_backward(x, y)
        if candidate.step() and attempt:
            return
    raise RuntimeError(f"all {MAX_WARM_UP} steps were skipped; the loss scale found no value without overflow")


def builders(world_size: int, sharded: bool, modes: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Row label -> the mode of its context, and a function that builds its candidate, or the reason why it has none."""
    plain = "plain torch" if world_size == 1 or sharded else "plain torch, DDP"
    rows: dict[str, tuple[str, Any]] = {}
    for name, dtype in (("fp32", None), ("autocast fp16", torch.float16), ("autocast bf16", torch.bfloat16)):

        def make(model: ResNet | ViT, context: paramp.ParallelContext, dtype: torch.dtype | None = dtype) -> Candidate:
            return Plain(model, dtype, context)

        rows[f"{plain}, {name}"] = ("32-true", "plain torch has no tensor or pipeline ranks" if sharded else make)
    labels = {mode: label for label, mode in DOCUMENTED.items()}
    for mode in [*DOCUMENTED.values(), *(mode for mode in PRESETS if mode not in labels)]:
        if not modes or mode in modes:
            label = f"{labels[mode]} ({mode})" if mode in labels else mode
            rows[label] = (mode, lambda model, context: Ours(model))
    return rows


def train(label: str, candidate: Candidate, x: torch.Tensor, y: torch.Tensor, passed_over: dict[str, int]) -> None:
    candidate.forward_backward(x, y)
    passed_over[label] += not candidate.step()


def run(
    rows: dict[str, tuple[str, Any]],
    parallel: dict[str, Any],
    build: Callable[[], ResNet | ViT],
    shape: tuple[int, ...],
    num_classes: int,
    rounds: int,
    device: str | None,
) -> dict[str, Any] | None:
    """Train the candidates in turn. Returns the result on rank 0, None on the others."""
    skipped: dict[str, str] = {}
    memory: dict[str, int] = {}
    turns: dict[str, Turn] = {}
    passed_over: dict[str, int] = {}
    with ExitStack() as stack:
        context = None
        for label, (mode, make) in rows.items():
            if isinstance(make, str):
                skipped[label] = make
                continue
            inner = ExitStack()
            try:
                context = inner.enter_context(
                    paramp.launch_from_torch({"parallel": parallel, "precision": mode}, device=device)
                )
                torch.manual_seed(0)
                generator = torch.Generator().manual_seed(context.dp.rank)
                x = torch.randn(shape[0] // context.dp.size, *shape[1:], generator=generator)
                y = torch.randint(num_classes, (len(x),), generator=generator)
                with watch_memory(context.device) as own:
                    candidate: Candidate = make(build(), context)
                    warm_up(candidate, x, y)
                with watch_memory(context.device) as step:
                    candidate.forward_backward(x, y)
                    candidate.step()
                memory[label] = own.kept + step.peak
            except (ValueError, ImportError, RuntimeError, TypeError) as error:
                inner.close()
                skipped[label] = why_not(error)
                continue
            stack.enter_context(inner)
            passed_over[label] = 0
            turns[label] = Turn(partial(train, label, candidate, x, y, passed_over))
        if context is None or not turns:
            raise SystemExit("no row can run:\n" + "\n".join(dict.fromkeys(skipped.values())))
        median = medians(take_turns(turns, rounds, context.device, warm_up=0))
        if dist.get_rank() != 0:
            return None
        measured = [
            {
                "row": label,
                "mode": rows[label][0],
                "memory_bytes": memory[label],
                "iterations_per_second": 1 / seconds,
                "samples_per_second": shape[0] / seconds,
                "skipped_steps": passed_over[label],
            }
            for label, seconds in median.items()
        ]
        return {
            "machine": machine(context.device),
            "device": context.device.type,
            "native_fp16": has_native_fp16(context.device),
            "torch": torch.__version__,
            "batch_size": shape[0],
            "rounds": rounds,
            "rows": measured,
            "cannot_run": skipped,
        }


def show(result: dict[str, Any]) -> None:
    print(f"{result['machine']}, torch {result['torch']}")
    print(f"{result['model']}, batch {result['batch_size']}, medians of {result['rounds']} rounds\n")
    rows = [
        (
            row["row"],
            f"{row['memory_bytes'] / 1e6:.1f}",
            f"{row['iterations_per_second']:.3f}",
            f"{row['samples_per_second']:.1f}",
            str(row["skipped_steps"]),
        )
        for row in result["rows"]
    ]
    print(table(("", "memory/MB", "iterations/s", "samples/s", "skipped steps"), rows))
    reasons: dict[str, list[str]] = {}
    for label, reason in result["cannot_run"].items():
        reasons.setdefault(reason, []).append(label)
    for reason, labels in reasons.items():
        print(f"does not run here: {'; '.join(labels)}: {reason}")
    if not result["native_fp16"]:
        print("This CPU has no fp16 arithmetic: paramp computes fp16 products in fp32, plain torch with a slow kernel.")


def show_layouts(results: dict[str, Any]) -> None:
    """Samples per second of each mode in each layout."""
    found = {
        layout: {row["row"]: row["samples_per_second"] for row in result["rows"]} for layout, result in results.items()
    }
    labels = dict.fromkeys(label for rows in found.values() for label in rows)
    rows = [[label, *(f"{rows[label]:.1f}" if label in rows else "-" for rows in found.values())] for label in labels]
    print(f"\nsamples/s by layout\n\n{table(['', *found], rows)}")


def mode_of(name: str) -> str:
    """The mode with the name or alias ``name``; the document's modes are kept, because they have rows of their own.

    Raises:
        ConfigError: there is no such mode.
    """
    return name if name in DOCUMENTED.values() else Precision.parse(name).name


def check(parser: argparse.ArgumentParser, options: argparse.Namespace, world_size: int) -> None:
    """Exit with an error that names the invalid option, before anything runs."""
    check_counts(parser, options, "batch_size", "image_size", "tensor", "pipeline", "rounds")
    if options.layouts and (world_size > 1 or options.tensor * options.pipeline > 1):
        parser.error("--layouts: it starts the processes of each layout; remove torchrun, --tensor and --pipeline")
    sharded = options.tensor * options.pipeline
    if world_size % sharded:
        parser.error(
            f"--tensor {options.tensor} --pipeline {options.pipeline}: got a world of {world_size}, expected a "
            f"multiple of {sharded}; start it with torchrun, or name the layout in --layouts"
        )
    own = Layout(options.pipeline, world_size // sharded, options.tensor)
    for layout in options.layouts or [own]:
        if options.batch_size % (layout.dp * layout.pp):
            parser.error(
                f"--batch-size: got {options.batch_size}, expected a multiple of the {layout.dp} data ranks x "
                f"{layout.pp} microbatches of layout {layout}"
            )
    check_json_option(parser, options.json)


def own_arguments(options: argparse.Namespace, layout: Layout) -> list[str]:
    """The command line of the processes that run one of the ``--layouts``."""
    arguments = [f"--tensor={layout.tp}", f"--pipeline={layout.pp}"]
    for name in ("model", "preset", "batch_size", "image_size", "rounds", "device"):
        value = getattr(options, name)
        arguments += [] if value is None else [f"--{name.replace('_', '-')}={value}"]
    return [*arguments, "--modes", *options.modes]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="vit")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--batch-size", type=int, default=64, help="of all data ranks together")
    parser.add_argument("--image-size", type=int, help="of a side; by default 32 for a resnet, the preset's for a vit")
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--modes", nargs="*", default=[], help="of paramp; by default all")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument(
        "--layouts", nargs="*", type=Layout.parse, metavar="LAYOUT", help="such as 1 tp2 pp2 dp2; one after the other"
    )
    add_json_option(parser)
    options = parser.parse_args(arguments)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    check(parser, options, world_size)
    resized = {"image_size": options.image_size} if options.model == "vit" and options.image_size is not None else {}

    def build() -> ResNet | ViT:
        return MODELS[options.model].preset(options.preset, **resized)

    try:
        with torch.device("meta"):
            shape = build().config
        modes = [mode_of(name) for name in options.modes]
    except ConfigError as error:
        parser.error(str(error))
    side = 32 if options.image_size is None else options.image_size
    if isinstance(shape, paramp.models.ViTConfig):
        side = shape.image_size
    if options.layouts:
        results = run_layouts(__file__, options.layouts, partial(own_arguments, options))
        show_layouts(results)
        write_json(options.json, {"layouts": results})
        return
    sharded = options.tensor * options.pipeline > 1
    parallel = {"tensor": options.tensor, "pipeline": options.pipeline}
    result = run(
        builders(world_size, sharded, modes),
        parallel,
        build,
        (options.batch_size, shape.in_channels, side, side),
        shape.num_classes,
        options.rounds,
        options.device,
    )
    if result is None:
        return
    result["model"] = f"{options.model} {options.preset}, {side} x {side}"
    show(result)
    write_json(options.json, result)


if __name__ == "__main__":
    main()
