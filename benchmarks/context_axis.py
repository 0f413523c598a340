"""A step with sequences over two ranks, against one whose ring attention is written by hand; memory of a block.

    torchrun --standalone --nproc-per-node 2 benchmarks/context_axis.py
    torchrun --standalone --nproc-per-node 4 benchmarks/context_axis.py --memory

Both train the same GPT on the same tokens with the ring. By hand, each rank computes its tokens, keys and values go
round by isend and irecv, and one all-reduce sums a flat buffer of gradients; nothing is checked. The step by hand takes
part twice: the ratio of one to the other is the spread. The time of a process on the CPU is reported too, because other
work on a machine with few cores delays ranks that wait for each other. The norms of the first gradients are compared.

With --memory: the bytes of one block of 16,384 tokens when they are most, over the ranks and on one rank, as counted by
torch.distributed._tools.mem_tracker.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import add_json_option, check_counts, check_json_option, machine, table, write_json
from torch import nn

import paramp
from paramp.base.replaced_in_torch import patched
from paramp.models import GPT, GPTConfig
from paramp.parallel.context_axis.context_attention import attention
from paramp.parallel.context_axis.tokens_of_ranks import SequenceLayout

MAX_NORM = 1.0
ADAMW: dict[str, Any] = {"lr": 1e-4, "fused": True}
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


# --------------------------------------------------------------------------------------------------------- by hand


def shift(buffer: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    """Start to send ``buffer`` to the next rank; what comes from the last one, and what to wait for."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(buffer)
    return received, [dist.isend(buffer, (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]


def seen(step: int, half: int) -> tuple[slice, slice, bool]:
    """Queries, the keys they see, and whether causally, of those of the rank ``step`` before; each has two parts."""
    if step == 0:
        return slice(None), slice(None), True
    before = dist.get_rank() - step >= 0
    return (slice(None), slice(half), False) if before else (slice(half, None), slice(None), False)


class RingByHand(torch.autograd.Function):
    """Causal attention of (batch, heads, tokens, features), of which a rank has the parts r and 2n - 1 - r of 2n."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        size, half = dist.get_world_size(), q.shape[2] // 2
        keys = torch.stack([k, v])
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -math.inf)
        for step in range(size):
            following, waiting = shift(keys) if step < size - 1 else (keys, [])
            queries, visible, causal = seen(step, half)
            one, its = FLASH(q[:, :, queries], keys[0][:, :, visible], keys[1][:, :, visible], 0.0, causal)
            total = torch.logaddexp(lse[:, :, queries], its)
            out[:, :, queries] = (lse[:, :, queries] - total).exp().unsqueeze(-1) * out[:, :, queries] + (
                its - total
            ).exp().unsqueeze(-1) * one
            lse[:, :, queries] = total
            for work in waiting:
                work.wait()
            keys = following
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        size, half = dist.get_world_size(), q.shape[2] // 2
        keys, of_keys, of_q = torch.stack([k, v]), torch.zeros_like(torch.stack([k, v])), torch.zeros_like(q)
        for step in range(size):
            following, waiting = shift(keys) if step < size - 1 else (keys, [])
            queries, visible, causal = seen(step, half)
            parts = (part[:, :, visible] for part in keys)
            found = FLASH_BACKWARD(
                *(gradient[:, :, queries], q[:, :, queries], *parts),
                *(out[:, :, queries], lse[:, :, queries], 0.0, causal),
            )
            of_q[:, :, queries] += found[0]
            of_keys[0][:, :, visible] += found[1]
            of_keys[1][:, :, visible] += found[2]
            passed, sending = shift(of_keys)
            for work in (*waiting, *sending):
                work.wait()
            keys, of_keys = following, passed
        return of_q, of_keys[0], of_keys[1]


def ring_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    result: torch.Tensor = RingByHand.apply(q, k, v)
    return result


class WithLoss(nn.Module):
    """A GPT that returns the sum of its tokens' losses, and their number."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        logits = self.model(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        return {"loss": (loss, torch.tensor(labels.numel()))}


class ByHand:
    """The step, written directly on torch."""

    def __init__(self, model: WithLoss, layout: SequenceLayout) -> None:
        self.model, self.places = model, layout.positions(layout.rank, "cpu")
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, **ADAMW)
        self.norm = torch.zeros(())
        table = model.model.get_submodule("embedding.positions")
        table.register_forward_pre_hook(lambda _, args: (self.places,))

    def train(self, x: torch.Tensor, y: torch.Tensor) -> None:
        with patched(F, "scaled_dot_product_attention", ring_by_hand):
            loss, _ = self.model(x[:, self.places], y[:, self.places])["loss"]
            (loss / y.numel()).backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in self.parameters if parameter.grad is not None])
        dist.all_reduce(flat)
        parts = flat.split([parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self.norm = nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Ours:
    """The engine."""

    def __init__(self, model: WithLoss) -> None:
        self.engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters(), **ADAMW), None)
        self.norm = torch.zeros(())

    def train(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.engine.forward_backward({"tokens": x, "labels": y})
        self.norm = torch.tensor(float(self.engine.step().grad_norm or math.nan))
        self.engine.zero_grad()


def measure_steps(options: argparse.Namespace) -> dict[str, Any] | None:
    config = {"parallel": {"context": {"size": dist_size(), "method": "ring"}}, "clip_grad_norm": MAX_NORM}
    shape = GPTConfig(
        num_layers=options.layers,
        num_heads=options.width // 64,
        width=options.width,
        max_seq_len=options.tokens,
        vocab_size=1024,
        tied=False,
    )

    def model() -> WithLoss:
        torch.manual_seed(0)
        return WithLoss(GPT(shape))

    with paramp.launch_from_torch(config) as context:
        layout = SequenceLayout.over(context.cp.group, options.tokens)
        steps: dict[str, ByHand | Ours] = {
            "by hand": ByHand(model(), layout),
            "again": ByHand(model(), layout),
            "paramp": Ours(model()),
        }
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(1024, (options.batch_size, options.tokens + 1), generator=generator)
        batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for number in range(options.rounds + 2):
            for name in list(steps) if number % 2 else list(steps)[::-1]:
                dist.barrier()
                start, cpu = time.perf_counter(), time.process_time()
                steps[name].train(*batch)
                if number >= 2:
                    seconds[name].append((time.perf_counter() - start, time.process_time() - cpu))
            norms = [float(step.norm) for step in steps.values()]
            if number == 0 and max(norms) - min(norms) > 1e-4 * norms[0]:
                raise SystemExit(f"the norms of the first gradients differ: {norms}")
        medians = {name: [statistics.median(one) for one in zip(*both, strict=True)] for name, both in seconds.items()}
        if not context.is_main:
            return None
        first = medians["by hand"]
        rows = [
            [
                name,
                *(text for pair in zip(both, first, strict=True) for text in (f"{1e3 * pair[0]:.1f}", _ratio(*pair))),
            ]
            for name, both in medians.items()
        ]
        print(machine(context.device), f"torch {torch.__version__}", sep=", ")
        print(table(["step", "ms", "over by hand", "CPU ms", "over by hand"], rows))
        return {"machine": machine(context.device), "medians": medians}


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.3f}"


# ---------------------------------------------------------------------------------------------------------- memory


class Block(nn.Module):
    """A transformer block without dropout."""

    def __init__(self, width: int, heads: int, layout: SequenceLayout) -> None:
        super().__init__()
        self.heads, self.attend = heads, partial(attention, layout=layout, method="ring", causal=True)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, length, width))
        hidden: torch.Tensor = self.down(F.gelu(self.up(self.second(x))))
        return x + hidden


def measure_memory(options: argparse.Namespace) -> dict[str, Any] | None:
    from torch.distributed._tools.mem_tracker import MemTracker

    with paramp.launch_from_torch({"parallel": {"context": dist_size()}}) as context:
        found: dict[int, dict[str, int]] = {}
        for size in (1, context.cp.size):
            layout = SequenceLayout(None, 0, 1, 16384)
            if size > 1:
                layout = SequenceLayout.over(context.cp.group, 16384)
            block = Block(options.width, options.width // 64, layout)
            x = torch.randn(1, layout.local_length, options.width, requires_grad=True)
            tracker = MemTracker()
            tracker.track_external(block, x)
            with tracker:
                block(x).sum().backward()
            peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
            found[size] = {str(kind).rpartition(".")[2]: number for kind, number in peak.items()}
            dist.barrier()
        if not context.is_main:
            return None
        for size, numbers in found.items():
            print(f"{size} rank(s):", ", ".join(f"{kind} {number:,}" for kind, number in numbers.items()))
        alone, over_ranks = (
            sum(numbers[kind] for kind in ("ACT", "TEMP", "OTH")) for numbers in (found[1], found[context.cp.size])
        )
        print(f"activations, what is temporary and inputs: {alone:,} and {over_ranks:,}, {over_ranks / alone:.3f}")
        return {"bytes": found}


def dist_size() -> int:
    from paramp.distributed.launcher_variables import find_place

    place = find_place()
    return 1 if place is None else place.world_size


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    add_json_option(parser)
    options = parser.parse_args(arguments)
    check_counts(parser, options, "layers", "width", "tokens", "batch_size", "rounds")
    check_json_option(parser, options.json)
    if dist_size() < 2:
        parser.error("start it by torchrun with 2 ranks or more")
    result = measure_memory(options) if options.memory else measure_steps(options)
    if result is not None:
        write_json(options.json, result)


if __name__ == "__main__":
    main()
