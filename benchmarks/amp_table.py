"""Colossal-AI's table of AMP methods, for every mode of paramp and for plain torch: memory, iterations/s, samples/s.

    python benchmarks/amp_table.py
    python benchmarks/amp_table.py --model vit --preset vit-b16 --batch-size 128 --rounds 20
    torchrun --standalone --nproc-per-node 4 benchmarks/amp_table.py --tensor 2 --pipeline 2

All candidates train the same model on the same images in one run. They take turns, one step each, in every round; the
medians are reported. Plain torch is torch.autocast with torch.amp.GradScaler, and DistributedDataParallel on several
ranks; with tensor or pipeline ranks it has no row. What cannot run here is named with its reason.

Memory is that of rank 0. On CUDA: the candidate's own state and what its step allocates on top at the most
(max_memory_allocated). On a CPU, where nothing measures it: the bytes of weights, gradients, masters and optimizer
state, and of all that the forward saves for the backward, each storage once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from fp16_cpu import cpu_name
from torch import nn
from torch.distributed.tensor import DTensor

import paramp
from paramp.emulation import has_native_fp16
from paramp.models import ResNet, ViT
from paramp.precision import PRESETS, ConfigError, Precision

MODELS: dict[str, type[ResNet] | type[ViT]] = {"vit": ViT, "resnet": ResNet}

DOCUMENTED = {
    "FP32 training": "32-true",
    "AMP_TYPE.TORCH": "16-mixed",
    "AMP_TYPE.NAIVE": "16-naive",
    "AMP_TYPE.APEX O1": "O1",
}
"""The rows of the document, and the modes that they are."""

MAX_WARM_UP = 40


class Candidate(Protocol):
    """Something that trains a model."""

    def forward_backward(self, x: torch.Tensor, y: torch.Tensor) -> Any: ...

    def step(self) -> bool:
        """Step, or skip; whether it stepped."""

    def state(self) -> Iterable[torch.Tensor]:
        """All tensors that it keeps, gradients included."""


def kept_by(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    stepped = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    for parameter in (*module.parameters(), *stepped):
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()
    for values in optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, torch.Tensor))


class Plain:
    """torch's own: autocast to ``dtype`` if there is one, a GradScaler for fp16, DDP over several ranks."""

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

    def state(self) -> Iterable[torch.Tensor]:
        return kept_by(self.model, self.optimizer)


class Ours:
    """An engine in one mode."""

    def __init__(self, model: ResNet | ViT) -> None:
        self.engine, *_ = paramp.initialize(model, make_optimizer(model.parameters()), model.loss)

    def forward_backward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.engine.zero_grad()
        self.engine.forward_backward(x, y)

    def step(self) -> bool:
        return self.engine.step().stepped

    def state(self) -> Iterable[torch.Tensor]:
        return kept_by(self.engine.module, self.engine.optimizer)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # Adam's eps has to survive fp16 in the modes without masters.
    return torch.optim.AdamW(parameters, lr=1e-4, eps=1e-4)


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """The bytes of each storage behind ``tensors``, by its address."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}


def warm_up(candidate: Candidate, x: torch.Tensor, y: torch.Tensor) -> None:
    """Find shapes, let the loss scale fall until a step is made, and so create the optimizer's state."""
    for attempt in range(MAX_WARM_UP):
        candidate.forward_backward(x, y)
        if candidate.step() and attempt:
            return
    raise RuntimeError(f"its loss scale found no value at which a step is made, in {MAX_WARM_UP} steps")


def memory_of(candidate: Candidate, x: torch.Tensor, y: torch.Tensor, device: torch.device) -> int:
    """Bytes that the candidate takes on this rank for a step; it has made one before."""
    own = sum(storages(candidate.state()).values())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        candidate.forward_backward(x, y)
        candidate.step()
        return own + torch.cuda.max_memory_allocated(device) - before
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.update(storages([tensor]))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        candidate.forward_backward(x, y)
    state = storages(candidate.state())
    candidate.step()
    return sum((saved | state).values())


def builders(world_size: int, sharded: bool, modes: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Each row's label, the mode of its context, and what builds its candidate; or why it has none."""
    plain = "plain torch" if world_size == 1 else "plain torch, DDP"
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


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def run(
    rows: dict[str, tuple[str, Any]],
    parallel: dict[str, Any],
    build: Callable[[], ResNet | ViT],
    shape: tuple[int, ...],
    num_classes: int,
    rounds: int,
    device: str | None,
) -> dict[str, Any] | None:
    """Train each row's candidate in turn; the result on rank 0, None on the others."""
    candidates: dict[str, Candidate] = {}
    skipped: dict[str, str] = {}
    memory: dict[str, int] = {}
    seconds: dict[str, list[float]] = {}
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
                candidate: Candidate = make(build(), context)
                generator = torch.Generator().manual_seed(context.dp.rank)
                x = torch.randn(shape[0] // context.dp.size, *shape[1:], generator=generator)
                y = torch.randint(num_classes, (len(x),), generator=generator)
                warm_up(candidate, x, y)
                memory[label] = memory_of(candidate, x, y, context.device)
            except (ValueError, ImportError, RuntimeError, NotImplementedError, TypeError) as error:
                inner.close()
                skipped[label] = first_line(error)
                continue
            stack.enter_context(inner)
            candidates[label], seconds[label], passed_over[label] = candidate, [], 0
        if context is None or not candidates:
            raise SystemExit("no row can run:\n" + "\n".join(dict.fromkeys(skipped.values())))
        for _ in range(rounds):
            for label, candidate in candidates.items():
                dist.barrier()
                synchronize(context.device)
                start = time.perf_counter()
                candidate.forward_backward(x, y)
                passed_over[label] += not candidate.step()
                synchronize(context.device)
                seconds[label].append(time.perf_counter() - start)
        if dist.get_rank() != 0:
            return None
        measured = [
            {
                "row": label,
                "mode": rows[label][0],
                "memory_bytes": memory[label],
                "iterations_per_second": 1 / statistics.median(times),
                "samples_per_second": shape[0] / statistics.median(times),
                "skipped_steps": passed_over[label],
            }
            for label, times in seconds.items()
        ]
        threads = f"{torch.get_num_threads()} thread(s) in each of {dist.get_world_size()} process(es)"
        machine = f"{cpu_name()}, {threads}"
        if context.device.type == "cuda":
            machine = f"{torch.cuda.get_device_name(context.device)}, {machine}"
        return {
            "machine": machine,
            "device": context.device.type,
            "native_fp16": has_native_fp16(context.device),
            "torch": torch.__version__,
            "batch_size": shape[0],
            "rounds": rounds,
            "rows": measured,
            "cannot_run": skipped,
        }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def show(result: dict[str, Any]) -> None:
    how = "own state and peak of a step" if result["device"] == "cuda" else "state and what the backward needs, counted"
    print(f"{result['machine']}, torch {result['torch']}")
    print(f"{result['model']}, batch {result['batch_size']}, medians of {result['rounds']} rounds; memory: {how}\n")
    print(f"| {'':32} | memory/MB | iterations/s | samples/s | skipped steps |")
    print(f"| {'-' * 32} | --------: | -----------: | --------: | ------------: |")
    for row in result["rows"]:
        print(
            f"| {row['row']:32} | {row['memory_bytes'] / 1e6:9.1f} | {row['iterations_per_second']:12.3f} "
            f"| {row['samples_per_second']:9.1f} | {row['skipped_steps']:13} |"
        )
    for label, reason in result["cannot_run"].items():
        print(f"{label} does not run here: {reason}")
    if not result["native_fp16"]:
        print("This CPU has no fp16 arithmetic: paramp computes fp16 products in fp32, plain torch in a slow loop.")


def mode_of(name: str) -> str:
    """The mode that ``name`` is a spelling of. One of the document's has a row of its own under the document's name.

    Raises:
        ConfigError: there is none.
    """
    return name if name in DOCUMENTED.values() else Precision.parse(name).name


def check(parser: argparse.ArgumentParser, options: argparse.Namespace, world_size: int) -> None:
    """End with an error that says which option cannot be, before anything runs."""
    for name in ("batch_size", "image_size", "tensor", "pipeline", "rounds"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')}: got {value}, expected 1 or more")
    data_ranks = max(1, world_size // (options.tensor * options.pipeline))
    if options.batch_size % data_ranks:
        parser.error(f"--batch-size: got {options.batch_size}, expected a multiple of the {data_ranks} data ranks")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: no folder {str(options.json.parent)!r}; make it first")
    if options.json is not None and options.json.is_dir():
        parser.error(f"--json: {str(options.json)!r} is a folder, expected a file")


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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
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
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
