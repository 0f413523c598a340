"""The training step of layers of experts over two ranks or more: paramp's engine against the same by hand, in turn.

    torchrun --standalone --nproc-per-node 2 benchmarks/experts.py
    torchrun --standalone --nproc-per-node 2 benchmarks/experts.py --tokens 1024 --width 512 --hidden 512

Each rank has its own tokens and its part of the experts (``parallel.expert``: all ranks). By hand that is one
``all_to_all_single`` of counts, and one of rows to and from the experts, forward and backward; ``F.grouped_mm``; one
all-reduce of the other parameters' gradients, and one of the experts' squares for the norm; AdamW in fused kernels. The
norms of the first gradients are compared, to check that both do the same work.

Both make one step in each round; medians are reported. The step written by hand takes part twice: the ratio of one to
the other is the spread, by which the limit is widened.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from by_hand import Candidate, check_norms
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
from overhead import ADAMW, AUTOCAST, MAX_NORM
from torch import nn

import paramp

PLAN = {"*.experts": "experts"}
LIMIT = 1.05
"""The largest ratio of paramp's time to that by hand, before it is widened by the spread."""


class Experts(nn.Module):
    """Stacked experts, of two matrices each."""

    def __init__(self, num_experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.up, self.down):
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = index.flatten().argsort(stable=True)
        token = order // index.shape[1]
        rows = grouped(tokens[token], index.flatten().bincount(minlength=self.num_experts), self.up, self.down)
        rows = rows * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add_(0, token, rows.to(tokens.dtype))


def grouped(rows: torch.Tensor, counts: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Rows that are sorted by their expert, of which each has ``counts``."""
    ends = counts.cumsum(0).int()
    return F.grouped_mm(F.silu(F.grouped_mm(rows, up, offs=ends)), down, offs=ends)


class MixtureLayer(nn.Module):
    """Tokens (tokens, width), to which each token's experts add."""

    def __init__(self, num_experts: int, choices: int, width: int, hidden: int) -> None:
        super().__init__()
        self.choices = choices
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts: Experts | HandExperts = Experts(num_experts, width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        weights, index = self.router(h).float().softmax(-1).topk(self.choices)
        return x + self.experts(h, index, weights)


class Exchange(torch.autograd.Function):
    """Rows to and from each rank; of the backward the same, the other way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, taken: list[int], sent: list[int]) -> torch.Tensor:
        ctx.back = sent, taken
        result = rows.new_empty(sum(taken), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), taken, sent)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return Exchange.apply(gradient, *ctx.back), None, None


class HandExperts(nn.Module):
    """This rank's part of the experts, and their exchange with the other ranks."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype  # of rows on their way, and of the products: autocast has no grouped ones
        size, rank = dist.get_world_size(), dist.get_rank()
        assert isinstance(experts, Experts)
        self.size, self.num_local = size, experts.num_experts // size
        self.up, self.down = (
            nn.Parameter(one.detach().chunk(size)[rank].clone()) for one in (experts.up, experts.down)
        )

    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        chosen = index.flatten()
        order = chosen.argsort(stable=True)
        token = order // index.shape[1]
        counts = chosen.bincount(minlength=self.num_local * self.size).view(self.size, self.num_local)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        sent, taken = torch.stack([counts.sum(1), received.sum(1)]).tolist()
        rows = Exchange.apply(tokens.to(self.dtype)[token], taken, sent)
        experts = torch.arange(self.num_local, device=index.device).repeat(self.size)
        by_expert = experts.repeat_interleave(received.flatten()).argsort(stable=True)
        rows = grouped(rows[by_expert], received.sum(0), self.up.to(self.dtype), self.down.to(self.dtype))
        rows = Exchange.apply(torch.empty_like(rows).index_copy(0, by_expert, rows), sent, taken)
        rows = rows * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add_(0, token, rows.to(tokens.dtype))


class ByHand:
    """The training step of ``model``, a sequence of layers of experts, written by hand."""

    def __init__(self, model: nn.Sequential, mode: str, device: torch.device) -> None:
        self.dtype, self.device = AUTOCAST[mode], device
        layers = [layer for layer in model if isinstance(layer, MixtureLayer)]
        of_ranks = [HandExperts(layer.experts, self.dtype or torch.float32) for layer in layers]
        for layer, of_rank in zip(layers, of_ranks, strict=True):
            layer.experts = of_rank
        self.module = model.to(device)
        experts = [one for of_rank in of_ranks for one in of_rank.parameters()]
        others = [one for one in model.parameters() if not any(one is expert for expert in experts)]
        self.of_experts, self.of_others = (self._flat_gradients(parameters) for parameters in (experts, others))
        self.optimizer = torch.optim.AdamW([*others, *experts], **ADAMW)
        self.norm = torch.zeros(())

    def _flat_gradients(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        gradients = torch.zeros(sum(one.numel() for one in parameters), device=self.device)
        for one, part in zip(parameters, gradients.split([one.numel() for one in parameters]), strict=True):
            one.grad = part.view_as(one)
        return gradients

    def train(self, x: torch.Tensor, y: torch.Tensor) -> None:
        with torch.autocast(self.device.type, dtype=self.dtype) if self.dtype else nullcontext():
            output = self.module(x)
        F.mse_loss(output.float(), y).backward()
        dist.all_reduce(self.of_others)
        for gradients in (self.of_others, self.of_experts):
            gradients.div_(dist.get_world_size())
        squares = self.of_experts.norm().square()
        dist.all_reduce(squares)
        self.norm = (squares + self.of_others.norm().square()).sqrt()
        factor = torch.clamp(MAX_NORM / (self.norm + 1e-6), max=1.0)
        for gradients in (self.of_others, self.of_experts):
            gradients.mul_(factor)
        self.optimizer.step()
        for gradients in (self.of_others, self.of_experts):
            gradients.zero_()


class Ours:
    """The engine."""

    def __init__(self, model: nn.Sequential) -> None:
        adamw = torch.optim.AdamW(model.parameters(), **ADAMW)
        self.engine, *_ = paramp.initialize(model, adamw, F.mse_loss, plan=PLAN)
        self.result: Any = None

    def train(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.engine.forward_backward(x, y, return_loss=False)
        self.result = self.engine.step()
        self.engine.zero_grad()

    @property
    def norm(self) -> torch.Tensor:
        return torch.tensor(float(self.result.grad_norm))


def measure(options: argparse.Namespace, mode: str, world: int) -> dict[str, Any]:
    """The medians in one mode, in this process's ``world`` of so many ranks.

    Raises:
        SystemExit: the candidates do not compute the same.
    """
    config = {"parallel": {"expert": world}, "precision": mode, "clip_grad_norm": MAX_NORM}

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        sizes = options.experts, options.choices, options.width, options.hidden
        return nn.Sequential(*(MixtureLayer(*sizes) for _ in range(options.layers)))

    with paramp.launch_from_torch(config, device=options.device) as context:
        candidates: dict[str, Candidate] = {name: ByHand(model(), mode, context.device) for name in ("hand", "again")}
        candidates["paramp"] = Ours(model())
        generator = torch.Generator().manual_seed(context.dp.rank)
        x, y = (torch.randn(2, options.tokens, options.width, generator=generator)).to(context.device)
        check_norms(candidates, (x, y), mode)
        turns = {name: Turn(partial(candidate.train, x, y)) for name, candidate in candidates.items()}
        median = medians(take_turns(turns, options.rounds, context.device, warm_up=2))
        hand, again = median["hand"], median["again"]
        spread = max(hand, again) / min(hand, again)
        ratio = median["paramp"] / ((hand + again) / 2)
        row = {"mode": mode, "seconds": median, "ratio": ratio, "spread": spread, "holds": ratio <= LIMIT * spread}
        return {"machine": machine(context.device), "torch": torch.__version__, "world": world, **row}


def show(options: argparse.Namespace, results: Sequence[dict[str, Any]]) -> None:
    first = results[0]
    print(f"{first['machine']}, torch {first['torch']}, ep{first['world']}")
    sizes = f"{options.experts} experts of {options.width} x {options.hidden}, {options.choices} for each token"
    print(f"{options.layers} layer(s), {sizes}, {options.tokens} tokens a rank\n")
    cells = [
        (
            row["mode"],
            *(f"{row['seconds'][name] * 1e3:.1f}" for name in ("hand", "again", "paramp")),
            f"{row['ratio']:.3f}",
            f"{LIMIT:.2f} x {row['spread']:.3f}",
            "yes" if row["holds"] else "no",
        )
        for row in results
    ]
    print(table(("mode", "by hand, ms", "again, ms", "paramp, ms", "ratio", "limit x spread", "within"), cells))


def parse(arguments: Sequence[str] | None, world: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", default=list(AUTOCAST), choices=list(AUTOCAST), metavar="MODE")
    numbers = {"layers": 1, "experts": 8, "choices": 2, "width": 256, "hidden": 256, "tokens": 512, "rounds": 9}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=["cpu", "cuda"])
    add_json_option(parser)
    options = parser.parse_args(arguments)
    check_counts(parser, options, *numbers)
    check_json_option(parser, options.json)
    if options.experts % world:
        parser.error(f"--experts: got {options.experts}, expected a multiple of the number of ranks, {world}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    world = int(os.environ.get("WORLD_SIZE", 1))
    options = parse(arguments, world)
    results = [measure(options, mode, world) for mode in options.precision]
    if int(os.environ.get("RANK", 0)) == 0:
        show(options, results)
        write_json(options.json, {"results": results})


if __name__ == "__main__":
    main()
