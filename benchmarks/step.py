"""The optimizer step alone, from finished gradients to new weights: plain torch, other libraries, and paramp, in turn.

    python benchmarks/step.py
    python benchmarks/step.py --parameters 500M --tensors 2000 --rounds 20

Two kinds of step, each against its baseline in plain torch:

    fp32 weights                   unscale_, clip_grad_norm_, step of a fused AdamW, update: the chain of torch's recipe
    fp16 weights, fp32 masters     that chain on masters, with a copy of the gradients there and of the weights back

Every candidate has its own weights, gradients and optimizer. The gradient norm is 10 and is clipped to 1. Gradients are
filled in before each step, outside the measured time. Also reported: the rate of the bytes that the algorithm needs to
move (BYTES below, not what a candidate really moves), against a copy of a large tensor timed in the same rounds; the
number of collectives; reads of a tensor's value by the host, each of which synchronises with a GPU; and bytes per
parameter, kept between steps (gradients included) and at the peak of a step.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from unittest import mock

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
    watch_memory,
    why_not,
    write_json,
)
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import paramp
from paramp.base.compilers import why_not_inductor

SCALE = 1024.0
"""The loss scale that all gradients carry."""
MAX_NORM = 1.0
NORM = 10.0
"""The norm of the unscaled gradient; larger than the limit, so that every candidate clips."""
ADAMW: dict[str, Any] = {"lr": 1e-6, "fused": True}

# Bytes a parameter that AdamW with clipping has to move, in two passes that touch each value once: the norm reads the
# gradient (g), then the update reads g, weight or master (w) and both moments (m, v), and writes w, m and v, and the
# half weight (h) where there is one. r is what fp16 leaves of the master, in 16 bits.
BYTES = {
    "32-true": 4 + (4 + 4 + 4 + 4) + (4 + 4 + 4),  # g | g w m v | w m v
    "16-naive": 2 + (2 + 4 + 4 + 4) + (4 + 4 + 4 + 2),  # g | g w m v | w m v h
    "remainder": 2 + (2 + 2 + 2 + 4 + 4) + (2 + 2 + 4 + 4),  # g | g h r m v | h r m v
}


class Candidate(Protocol):
    """A row of the table: weights with gradients, and a step."""

    def fill(self, sources: Sequence[torch.Tensor]) -> None:
        """Set the gradients: ``sources``, one for each weight, fp32."""

    def step(self) -> object: ...


class Weights(nn.Module):
    """A model with parameters and no forward."""

    def __init__(self, sizes: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(size, device=device, dtype=dtype) for size in sizes)


def fill(parameters: Iterator[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for parameter, source in zip(parameters, sources, strict=True):
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(source)


class TorchChain:
    """fp32 weights: the steps after the backward in torch's recipe for mixed precision."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.model = Weights(sizes, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=SCALE)
        self.scaler.scale(torch.zeros((), device=device))  # creates the scaler's state

    def fill(self, sources: Sequence[torch.Tensor]) -> None:
        fill(self.model.parameters(), sources)

    def step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class HandWritten:
    """fp16 weights with fp32 masters in a loop over the parameters; the masters' gradients are allocated once."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.model = Weights(sizes, device, torch.float16)
        self.masters = [weight.detach().float() for weight in self.model.parameters()]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer = torch.optim.AdamW(self.masters, **ADAMW)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=SCALE)
        self.scaler.scale(torch.zeros((), device=device))

    def fill(self, sources: Sequence[torch.Tensor]) -> None:
        fill(self.model.parameters(), sources)

    @torch.no_grad()
    def step(self) -> None:
        for weight, master in zip(self.model.parameters(), self.masters, strict=True):
            assert weight.grad is not None
            assert master.grad is not None
            master.grad.copy_(weight.grad)
        self.scaler.unscale_(self.optimizer)  # also checks for non-finite values
        nn.utils.clip_grad_norm_(self.masters, MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        for weight, master in zip(self.model.parameters(), self.masters, strict=True):
            weight.copy_(master)


class Ours:
    """An engine of paramp, in the mode of the current context."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        model = Weights(sizes, device)
        self.engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters(), **ADAMW))

    def fill(self, sources: Sequence[torch.Tensor]) -> None:
        self.engine.zero_grad()
        fill((parameter for _, parameter in self.engine.named_parameters()), sources)

    def step(self) -> object:
        return self.engine.step()


class Compiled(Ours):
    """An engine with a compiled step; its context's configuration has ``compile``."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        if reason := why_not_inductor(device.type, {}):
            raise ValueError(reason)
        super().__init__(sizes, device)


class Accelerate:
    """fp32 weights in Hugging Face Accelerate: fp16 with its scaler on a GPU; on a CPU, where it has none, bf16."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        accelerate = importlib.import_module("accelerate")
        on_cpu = device.type == "cpu"
        handlers = [] if on_cpu else [accelerate.utils.GradScalerKwargs(init_scale=SCALE)]
        self.accelerator = accelerate.Accelerator(
            mixed_precision="bf16" if on_cpu else "fp16", cpu=on_cpu, kwargs_handlers=handlers
        )
        model = Weights(sizes, device)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.scale(torch.zeros((), device=device))

    def fill(self, sources: Sequence[torch.Tensor]) -> None:
        fill(self.model.parameters(), sources)

    def step(self) -> None:
        self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()


class DeepSpeed:
    """fp16 weights with fp32 masters in DeepSpeed's fp16 optimizer, without ZeRO."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        deepspeed = importlib.import_module("deepspeed")
        if not deepspeed.accelerator.get_accelerator().is_fp16_supported():
            raise ValueError("DeepSpeed has no fp16 on this device")  # it raises this only after minutes of compiling
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": MAX_NORM,
            "fp16": {"enabled": True, "initial_scale_power": int(math.log2(SCALE))},
        }
        model = Weights(sizes, device)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        with mock.patch.dict(os.environ, LOCAL_RANK="0"):  # it expects a launcher's variables
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        self.model, self.optimizer = engine.module, engine.optimizer

    def fill(self, sources: Sequence[torch.Tensor]) -> None:
        fill(self.model.parameters(), sources)

    def step(self) -> None:
        self.optimizer.step()


@dataclass(frozen=True)
class Row:
    """One candidate: its name, its baseline, and the function that makes it."""

    name: str
    baseline: str
    bytes_needed: int
    make: Callable[[Sequence[int], torch.device], Candidate]
    config: dict[str, Any]
    """The configuration of its context."""


FULL, HALF = "torch: unscale_, clip, step, update", "torch: loop with fp32 masters"


def ours(mode: str, **options: Any) -> dict[str, Any]:
    precision = {"mode": mode, "init_scale": SCALE}
    return {"precision": precision, "clip_grad_norm": MAX_NORM} | options


ROWS = [
    Row(FULL, FULL, BYTES["32-true"], TorchChain, {}),
    Row("paramp 16-mixed", FULL, BYTES["32-true"], Ours, ours("16-mixed")),
    Row("paramp 16-mixed, compiled", FULL, BYTES["32-true"], Compiled, ours("16-mixed", compile=True)),
    Row("Accelerate", FULL, BYTES["32-true"], Accelerate, {}),
    Row(HALF, HALF, BYTES["16-naive"], HandWritten, {}),
    Row("paramp 16-naive", HALF, BYTES["16-naive"], Ours, ours("16-naive")),
    Row("paramp 16-naive, remainder", HALF, BYTES["remainder"], Ours, ours("16-naive", masters="remainder")),
    Row("paramp 16-naive, compiled", HALF, BYTES["16-naive"], Compiled, ours("16-naive", compile=True)),
    Row(
        "paramp 16-naive, remainder, compiled",
        HALF,
        BYTES["remainder"],
        Compiled,
        ours("16-naive", masters="remainder", compile=True),
    ),
    Row("DeepSpeed fp16", HALF, BYTES["16-naive"], DeepSpeed, {}),
]


# ------------------------------------------------------------------------------------------------------- counting


class HostReads(TorchDispatchMode):
    """Counts reads of a single tensor value by the host, as by ``item()``, ``float()`` and ``if``."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class ListReads(TorchFunctionMode):
    """Counts ``tolist()``, which calls no operator on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.Tensor.tolist
        return func(*args, **(kwargs or {}))


@contextmanager
def cuda_waits(device: torch.device) -> Iterator[list[warnings.WarningMessage]]:
    """Collects a warning for each synchronisation with the GPU; on a CPU none."""
    with warnings.catch_warnings(record=True) as waits:
        if device.type == "cuda":
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def count(step: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """The number of collectives and of host reads of a step. On a GPU only reads that synchronise count."""
    with CommDebugMode() as collectives, HostReads() as single, ListReads() as lists, cuda_waits(device) as waits:
        step()
    on_gpu = sum("called a synchronizing" in str(wait.message) for wait in waits)
    reads = single.count + lists.count if device.type == "cpu" else on_gpu
    return collectives.get_total_counts(), reads


# -------------------------------------------------------------------------------------------------------- running


def sizes_of(num_parameters: int, num_tensors: int) -> list[int]:
    size, rest = divmod(num_parameters, num_tensors)
    return [size + (index < rest) for index in range(num_tensors)]


def run(
    rows: Sequence[Row], num_parameters: int, num_tensors: int, rounds: int, device: torch.device
) -> dict[str, Any]:
    """Step every row's candidate in turn."""
    sizes = sizes_of(num_parameters, num_tensors)
    generator = torch.Generator(device).manual_seed(0)
    noise = torch.randn(num_parameters, device=device, generator=generator).mul_(
        SCALE * NORM / math.sqrt(num_parameters)
    )
    sources = noise.split(sizes)
    found: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    turns: dict[str, Turn] = {}
    with ExitStack() as stack:
        for row in rows:
            inner = ExitStack()
            try:
                inner.enter_context(paramp.launch_from_torch(row.config, device=device))
                with watch_memory(device) as own:
                    candidate = row.make(sizes, device)
                    for _ in range(2):  # the first step makes the optimizer's state
                        candidate.fill(sources)
                        candidate.step()
                    candidate.fill(sources)
                with watch_memory(device) as step:
                    candidate.step()
                candidate.fill(sources)
                collectives, reads = count(candidate.step, device)
            except Exception as error:  # other libraries raise their own exceptions
                inner.close()
                skipped[row.name] = why_not(error)
                continue
            stack.enter_context(inner)
            turns[row.name] = Turn(candidate.step, partial(_refill, candidate, sources))
            found[row.name] = {
                "collectives": collectives,
                "host_reads": reads,
                "bytes_kept": own.kept / num_parameters,
                "bytes_at_peak": (own.kept + step.peak) / num_parameters,
            }
        copied = torch.empty_like(noise)
        seconds = medians(take_turns({**turns, "copy": Turn(partial(copied.copy_, noise))}, rounds, device, warm_up=2))
        bandwidth = 2 * noise.nbytes / seconds["copy"]
        measured = []
        for row in rows:
            if row.name in found:
                rate = row.bytes_needed * num_parameters / seconds[row.name]
                measured.append(
                    {
                        "row": row.name,
                        "baseline": row.baseline,
                        "median_seconds": seconds[row.name],
                        "against_baseline": seconds[row.name] / seconds[row.baseline],
                        "bytes_needed": row.bytes_needed,
                        "bytes_per_second": rate,
                        "against_copy": rate / bandwidth,
                        **found[row.name],
                    }
                )
        return {
            "machine": machine(device),
            "device": device.type,
            "torch": torch.__version__,
            "parameters": num_parameters,
            "tensors": num_tensors,
            "rounds": rounds,
            "copy_bytes_per_second": bandwidth,
            "rows": measured,
            "cannot_run": skipped,
        }


def _refill(candidate: Candidate, sources: Sequence[torch.Tensor], _round: int) -> None:
    candidate.fill(sources)


def show(result: dict[str, Any]) -> None:
    print(f"{result['machine']}, torch {result['torch']}")
    print(
        f"{result['parameters'] / 1e6:g} M parameters in {result['tensors']} tensors, medians of {result['rounds']} "
        f"rounds; a copy moves {result['copy_bytes_per_second'] / 1e9:.1f} GB/s\n"
    )
    head = ("", "ms", "against torch", "GB/s", "of a copy", "collectives", "host reads", "bytes kept", "bytes at peak")
    rows = [
        (
            row["row"],
            f"{row['median_seconds'] * 1e3:.2f}",
            f"{row['against_baseline']:.2f}",
            f"{row['bytes_per_second'] / 1e9:.1f}",
            f"{row['against_copy']:.2f}",
            str(row["collectives"]),
            str(row["host_reads"]),
            f"{row['bytes_kept']:.1f}",
            f"{row['bytes_at_peak']:.1f}",
        )
        for row in result["rows"]
    ]
    print(table(head, rows))
    for name, reason in result["cannot_run"].items():
        print(f"{name} does not run here: {reason}")


def amount(text: str) -> int:
    """``100M``, ``2.5e6`` or ``1000``, as argparse's ``type``."""
    try:
        number = float(text[:-1]) * 1e6 if text[-1:].upper() == "M" else float(text)
        if number >= 1 and number.is_integer():
            return int(number)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number above 0, such as 100M")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=amount, default=100_000_000, metavar="N", help="such as 100M")
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", choices=["cpu", "cuda"])
    add_json_option(parser)
    options = parser.parse_args(arguments)
    check_counts(parser, options, "tensors", "rounds")
    check_json_option(parser, options.json)
    if options.tensors > options.parameters:
        parser.error(f"--tensors: got {options.tensors}, expected at most --parameters {options.parameters}")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        parser.error("the step is measured in one process; start it with python, without torchrun")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    result = run(ROWS, options.parameters, options.tensors, options.rounds, device)
    show(result)
    write_json(options.json, result)


if __name__ == "__main__":
    main()
