"""The whole training step of paramp's engine against the same model, layout and schedule written directly on torch.

    python benchmarks/overhead.py
    torchrun --standalone --nproc-per-node 2 benchmarks/overhead.py --tp 2
    torchrun --standalone --nproc-per-node 2 benchmarks/overhead.py --pp 2
    python benchmarks/overhead.py --layouts 1 tp2 pp2 pp2·tp2
    python benchmarks/overhead.py --width 128 --layers 4 --compile

Both train a GPT of 21 million parameters with an untied output layer: forward, backward, clipping to the norm of the
whole model, fused AdamW. The loop on torch uses torch.autocast, parallelize_module, a PipelineStage in a Schedule1F1B,
and a norm that counts every element once, over the plain local tensors of the shards. The gradient norms of the first
step are compared, to check that both do the same work. Every candidate makes one step in each round; medians are
reported. A layout with more ranks than cores (or GPUs) is skipped.

paramp computes more than the loop: the loss averaged over the world, a check for non-finite gradients on all ranks,
and, in bf16-mixed on a CPU, norms and softmax in fp32, which torch's autocast does on CUDA only.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

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
    write_json,
)
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import paramp
from paramp.base.errors import ConfigError
from paramp.models import GPT, GPTConfig
from paramp.parallel.partition import plan_stages, units
from paramp.parallel.tensor.sharding_plan import resolve_plan
from paramp.precision.modes import Precision

MAX_NORM = 1.0
ADAMW: dict[str, Any] = {"lr": 1e-4, "fused": True}
AUTOCAST = {"32-true": None, "bf16-mixed": torch.bfloat16}
"""Modes without a loss scaler -> the autocast dtype."""
TOLERANCE = {"32-true": 1e-4, "bf16-mixed": 2e-2}
"""The largest relative difference between the norms of the first gradients."""

STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "vocab": RowwiseParallel(input_layouts=Replicate()),
    "vocab_logits": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}
"""torch's own, for the names in the model's plan; those of paramp compute on local tensors."""


class Direct:
    """The training step, written directly on torch."""

    def __init__(self, model: GPT, context: paramp.ParallelContext, mode: str, num_microbatches: int) -> None:
        self.device, self.dtype = context.device, AUTOCAST.get(mode)
        self.tp, self.pp, self.world_size = context.tp, context.pp, context.world_size
        module: nn.Module = model.to(self.device)
        if self.pp.size > 1:
            names = plan_stages(list(units(model)), self.pp.size)[self.pp.rank]
            module = nn.Sequential(*(model.get_submodule(name) for name in names))
        if self.tp.size > 1:
            # The plan has the whole model's names; the modules of other stages are freed afterwards.
            styles = {name: STYLES[style] for name, style in model.tensor_parallel_plan(self.tp.size, False).items()}
            plan = resolve_plan(styles, [name for name, _ in model.named_modules()])
            parallelize_module(model, context.mesh["tp"], dict(plan))
        self._shard_data(module, context, mode)
        self.module = module
        self.parameters = list(module.parameters())
        # Fused optimizers take no mix of plain tensors and DTensors; stepping the local parts steps the weights.
        self.local = [nn.Parameter(_local(parameter).detach()) for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(self.local, **ADAMW)
        self.is_sharded = [_is_sharded_over_tensor_ranks(parameter) for parameter in self.parameters]
        self.schedule = None
        if self.pp.size > 1:
            stage = PipelineStage(module, self.pp.rank, self.pp.size, self.device, group=self.pp.group)
            self.schedule = Schedule1F1B(stage, num_microbatches, loss_fn=_loss)
        self.norm = torch.zeros(())

    def _shard_data(self, module: nn.Module, context: paramp.ParallelContext, mode: str) -> None:
        """Distribute ``module`` over data ranks; here there is one."""

    def train(self, x: torch.Tensor, y: torch.Tensor) -> None:
        autocast: AbstractContextManager[Any] = nullcontext()
        if self.dtype is not None:
            autocast = torch.autocast(self.device.type, dtype=self.dtype)
        with loss_parallel() if self.tp.size > 1 else nullcontext():
            if self.schedule is None:
                with autocast:
                    output = self.module(x)
                _loss(output, y).backward()
            else:
                with autocast:
                    inputs = (x,) if self.pp.rank == 0 else ()
                    target = y if self.pp.rank == self.pp.size - 1 else None
                    self.schedule.step(*inputs, target=target, return_outputs=False)
        for parameter, local in zip(self.parameters, self.local, strict=True):
            local.grad = _gradient(parameter)
        self.norm = self._clip()
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def _clip(self) -> torch.Tensor:
        gradients = [local.grad for local in self.local if local.grad is not None]
        if self.world_size == 1:
            return nn.utils.clip_grad_norm_(self.local, MAX_NORM)
        # Sharded gradients are summed over tp, replicated ones counted once; other ranks have different parameters.
        sharded, replicated = (
            [gradient for gradient, is_sharded in zip(gradients, self.is_sharded, strict=True) if is_sharded is wanted]
            for wanted in (True, False)
        )
        squares = nn.utils.get_total_norm(sharded).square()
        squares = squares + nn.utils.get_total_norm(replicated).square() / self.tp.size
        dist.all_reduce(squares)
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_(self.local, MAX_NORM, norm)
        return norm


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return GPT.loss(output.float(), target)


def _is_sharded_over_tensor_ranks(parameter: torch.Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        name == "tp" and placement.is_shard() for name, placement in zip(names, parameter.placements, strict=True)
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """The local gradient in the parameter's placements; that of a vocabulary-parallel embedding comes replicated."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return gradient.redistribute(placements=parameter.placements).to_local()
    return gradient


class Ours:
    """The engine."""

    def __init__(self, model: GPT) -> None:
        self.engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters(), **ADAMW), GPT.loss)
        self.result: Any = None

    def train(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.engine.forward_backward(x, y)
        self.result = self.engine.step()
        self.engine.zero_grad()

    @property
    def norm(self) -> torch.Tensor:
        return torch.tensor(float(self.result.grad_norm))


def batches(
    model: GPTConfig, batch_size: int, seq_len: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Random tokens and the next tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    while True:
        tokens = torch.randint(model.vocab_size, (batch_size, seq_len + 1), generator=generator)
        yield tokens[:, :-1].to(device), tokens[:, 1:].contiguous().to(device)


def run(
    modes: Sequence[str],
    layout: Layout,
    shape: GPTConfig,
    batch_size: int,
    seq_len: int,
    num_microbatches: int,
    rounds: int,
    device: str | None,
    compiled: bool = False,
) -> dict[str, Any] | None:
    """Train both in turn, in each of ``modes``. Returns the result on rank 0, None on the others.

    Raises:
        SystemExit: the two do not compute the same.
    """
    pipeline = {"size": layout.pp, "microbatches": num_microbatches if layout.pp > 1 else 1}
    with ExitStack() as stack:
        candidates: dict[str, Direct | Ours] = {}
        for mode in modes:
            config = {
                "parallel": {"tensor": layout.tp, "pipeline": pipeline},
                "precision": mode,
                "clip_grad_norm": MAX_NORM,
            }
            context = stack.enter_context(paramp.launch_from_torch(config, device=device))
            for name in ("direct", "paramp", *(["compiled"] if compiled else [])):
                if name == "compiled":
                    config["compile"] = True
                    context = stack.enter_context(paramp.launch_from_torch(config, device=device))
                torch.manual_seed(0)
                model = GPT(shape)
                num_parameters = sum(parameter.numel() for parameter in model.parameters())
                candidates[f"{name}, {mode}"] = (
                    Direct(model, context, mode, num_microbatches) if name == "direct" else Ours(model)
                )
                del model
        source = batches(shape, batch_size, seq_len, context.device)
        batch = list(next(source))
        for candidate in candidates.values():
            candidate.train(*batch)
        norms = {name: float(candidate.norm) for name, candidate in candidates.items()}
        for mode in modes:
            direct, ours = norms[f"direct, {mode}"], norms[f"paramp, {mode}"]
            for norm in (ours, norms.get(f"compiled, {mode}", ours)):
                if not abs(direct - norm) <= TOLERANCE[mode] * direct:
                    raise SystemExit(f"{mode}: the gradient's norm is {direct} directly, but {norm} in paramp")
        turns = {name: Turn(partial(candidate.train, *batch)) for name, candidate in candidates.items()}
        median = medians(take_turns(turns, rounds, context.device))
        if not context.is_main:
            return None
        return {
            "machine": machine(context.device),
            "torch": torch.__version__,
            "layout": str(layout),
            "parameters": num_parameters,
            "batch": [batch_size, seq_len],
            "microbatches": pipeline["microbatches"],
            "rounds": rounds,
            "rows": [
                {
                    "mode": mode,
                    "direct_seconds": median[f"direct, {mode}"],
                    "paramp_seconds": median[f"paramp, {mode}"],
                    "paramp_over_direct": median[f"paramp, {mode}"] / median[f"direct, {mode}"],
                    **_compiled(median, mode),
                    "first_norms": [norms[f"direct, {mode}"], norms[f"paramp, {mode}"]],
                }
                for mode in modes
            ],
        }


def _compiled(median: dict[str, float], mode: str) -> dict[str, float]:
    """The row's entries about the engine with ``compile=True``, if that was measured."""
    seconds = median.get(f"compiled, {mode}")
    return {} if seconds is None else {"compiled_seconds": seconds, "speedup": median[f"paramp, {mode}"] / seconds}


def show(result: dict[str, Any]) -> None:
    print(f"{result['machine']}, torch {result['torch']}")
    batch, seq_len = result["batch"]
    print(
        f"{result['parameters'] / 1e6:.1f} M parameters, {batch} x {seq_len} tokens in {result['microbatches']} "
        f"microbatch(es), layout {result['layout']}, medians of {result['rounds']} rounds\n"
    )
    rows = [
        (
            row["mode"],
            f"{row['direct_seconds'] * 1e3:.1f}",
            f"{row['paramp_seconds'] * 1e3:.1f}",
            f"{row['paramp_over_direct']:.3f}",
            *([f"{row['compiled_seconds'] * 1e3:.1f}", f"{row['speedup']:.2f}"] if "speedup" in row else []),
        )
        for row in result["rows"]
    ]
    compiled = ("compiled/ms", "paramp / compiled") if "speedup" in result["rows"][0] else ()
    print(table(("", "torch/ms", "paramp/ms", "paramp / torch", *compiled), rows))


def why_not(layout: Layout, device: str | None) -> str | None:
    """Why ``layout`` cannot be measured: its ranks would share cores or GPUs. None if each has its own."""
    on_gpu = device != "cpu" and torch.cuda.is_available()
    places = torch.cuda.device_count() if on_gpu else len(os.sched_getaffinity(0))
    if layout.size <= places:
        return None
    kind = "GPUs" if on_gpu else "cores"
    return f"{layout} does not run here: it has {layout.size} ranks, and there are {places} {kind}"


def check(parser: argparse.ArgumentParser, options: argparse.Namespace, world_size: int) -> None:
    """Exit with an error that names the invalid option, before anything runs."""
    check_counts(
        parser,
        options,
        "tp",
        "pp",
        "layers",
        "width",
        "heads",
        "vocab_size",
        "batch_size",
        "seq_len",
        "microbatches",
        "rounds",
    )
    own = Layout(options.pp, 1, options.tp)
    if options.layouts and (world_size > 1 or own.size > 1):
        parser.error("--layouts: it starts the processes of each layout; remove torchrun, --tp and --pp")
    if not options.layouts and world_size != own.size:
        parser.error(
            f"--tp {options.tp} --pp {options.pp}: got a world of {world_size}, expected {own.size}; "
            f"start it with torchrun --standalone --nproc-per-node {own.size}"
        )
    for layout in options.layouts or [own]:
        if layout.dp > 1:
            parser.error(f"--layouts: got {layout}, expected tp and pp only")
        if layout.pp > 1 and options.batch_size % options.microbatches:
            parser.error(
                f"--batch-size: got {options.batch_size}, expected a multiple of --microbatches {options.microbatches}"
            )
    check_json_option(parser, options.json)


SIZES = ("layers", "width", "heads", "vocab_size", "batch_size", "seq_len", "microbatches", "rounds", "device")


def own_arguments(options: argparse.Namespace, layout: Layout) -> list[str]:
    """The command line of the processes that run one of the ``--layouts``."""
    arguments = [f"--tp={layout.tp}", f"--pp={layout.pp}"]
    for name in SIZES:
        value = getattr(options, name)
        arguments += [] if value is None else [f"--{name.replace('_', '-')}={value}"]
    return [*arguments, *(["--compile"] if options.compile else []), "--precision", *options.precision]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument(
        "--layouts", nargs="*", type=Layout.parse, metavar="LAYOUT", help="such as 1 tp2 pp2; one after the other"
    )
    parser.add_argument("--precision", nargs="+", default=list(AUTOCAST), metavar="MODE")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=4, help="under a pipeline")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--compile", action="store_true", help="also the engine with compile=True")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    add_json_option(parser)
    options = parser.parse_args(arguments)
    check(parser, options, int(os.environ.get("WORLD_SIZE", 1)))
    try:
        modes = [Precision.parse(name).name for name in options.precision]
        shape = GPTConfig(
            num_layers=options.layers,
            num_heads=options.heads,
            width=options.width,
            max_seq_len=options.seq_len,
            vocab_size=options.vocab_size,
            tied=False,
        )
    except ConfigError as error:
        parser.error(str(error))
    for mode in modes:
        if mode not in AUTOCAST:
            parser.error(
                f"--precision: got {mode!r}, expected one of {', '.join(AUTOCAST)}: the torch loop has no scaler"
            )
    is_main = os.environ.get("RANK", "0") == "0"
    layouts = options.layouts or [Layout(options.pp, 1, options.tp)]
    skipped = {str(layout): reason for layout in layouts if (reason := why_not(layout, options.device))}
    for reason in skipped.values():
        if is_main:
            print(reason)
    runnable = [layout for layout in layouts if str(layout) not in skipped]
    if options.layouts:
        results = run_layouts(__file__, runnable, partial(own_arguments, options))
        write_json(options.json, {"layouts": results, "cannot_run": skipped})
    elif runnable:
        sizes = (options.batch_size, options.seq_len, options.microbatches, options.rounds)
        result = run(modes, runnable[0], shape, *sizes, options.device, options.compile)
        if result is not None:
            show(result)
            write_json(options.json, result)
    elif is_main:
        write_json(options.json, {"cannot_run": skipped})


if __name__ == "__main__":
    main()
