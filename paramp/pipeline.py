"""Pipeline parallelism: cut a sequential model into stages, and run them in one of torch's schedules.

A stage computes in the mode's precision and talks to its neighbours in the compute dtype:

    x ─► to the weights' dtype ─► [ autocast: the stage's modules ] ─► compute dtype ─► next stage
                                                                   └─► fp32 ─► loss     (last stage)
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from .mesh import ParallelContext
from .precision import ConfigError, Precision, nearest
from .shards import wrap

__all__ = ["SCHEDULES", "Pipeline", "Stage", "cut", "is_sequential", "plan_stages"]

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def is_sequential(module: nn.Module) -> bool:
    """Whether ``module`` is an ``nn.Sequential`` whose forward is still that of ``nn.Sequential``."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def units(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that ``model`` applies one after the other, nested ``nn.Sequential`` ones opened, by name."""
    for name, child in model._modules.items():  # named_children() would pass over a module that comes again
        if child is None:
            continue
        if is_sequential(child):
            yield from units(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def plan_stages(model: nn.Module, num_stages: int, split: Sequence[str] | None = None) -> list[list[str]]:
    """The names of the modules of each stage.

    Args:
        split: the names at which the second and each later stage begins. None: the cut whose largest stage is
            smallest, by the parameters that are multiplied (looking up an embedding costs nothing).

    Raises:
        ConfigError: the model is not sequential, has fewer modules than stages, or has no module of a name given.
    """
    if not is_sequential(model):
        raise ConfigError(
            f"parallel.pipeline.size: got {num_stages}, but {type(model).__name__} is not sequential; make it an "
            "nn.Sequential (which may contain others) with the forward of nn.Sequential, or set the size to 1"
        )
    names, modules = zip(*units(model), strict=True)
    if len(names) < num_stages:
        raise ConfigError(
            f"parallel.pipeline.size: got {num_stages} stages, but {type(model).__name__} has {len(names)} "
            f"modules in sequence; expected at most {len(names)}"
        )
    starts = [0, *(_balanced(list(modules), num_stages) if split is None else _positions(names, split))]
    return [list(names[start:end]) for start, end in zip(starts, [*starts[1:], len(names)], strict=True)]


def _positions(names: Sequence[str], split: Sequence[str]) -> list[int]:
    positions: list[int] = []
    for name in split:
        # "blocks" stands for the first of its modules.
        found = next((i for i, known in enumerate(names) if known == name or known.startswith(f"{name}.")), None)
        if found is None:
            raise ConfigError(
                f"parallel.pipeline.split: got {name!r}, expected one of {', '.join(names)}{nearest(name, names)}"
            )
        if found <= (positions[-1] if positions else 0):
            raise ConfigError(
                f"parallel.pipeline.split: got {list(split)}, where {name!r} leaves the stage before it empty; "
                "name the modules in the model's order, and not its first"
            )
        positions.append(found)
    return positions


def _balanced(modules: Sequence[nn.Module], num_stages: int) -> list[int]:
    """Where the later stages begin so that the heaviest stage is lightest (linear partition)."""
    costs = [1 + _multiplied_parameters(module) for module in modules]
    total = [0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[n] is the least possible heaviest stage for the first n modules, and where its last stage begins.
    best = [(float(total[n]), [0]) for n in range(len(costs) + 1)]
    for stage in range(1, num_stages):
        best = [
            min(
                (
                    (max(best[start][0], total[end] - total[start]), [*best[start][1], start])
                    for start in range(stage, end)
                ),
                default=(float("inf"), []),
            )
            for end in range(len(costs) + 1)
        ]
    return best[-1][1][1:]


def _multiplied_parameters(module: nn.Module) -> int:
    looked_up = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    return sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in looked_up)


def cut(model: nn.Module, names: Sequence[str], prefix: str = "") -> nn.Module:
    """``model`` with only the modules called ``names``, which keep their names and their weights."""
    kept = OrderedDict()
    for name, child in model._modules.items():
        path = f"{prefix}{name}"
        if child is None:
            continue
        if path in names:
            kept[name] = child
        elif any(wanted.startswith(f"{path}.") for wanted in names):
            kept[name] = cut(child, names, f"{path}.")
    part = copy.copy(model)
    part._modules = dict(kept)
    return part


class Stage(nn.Module):
    """The modules of one pipeline stage, computing in a mode's precision; the whole model without a pipeline."""

    def __init__(
        self,
        module: nn.Module,
        precision: Precision,
        device: torch.device,
        *,
        is_first: bool,
        is_last: bool,
        random: AbstractContextManager[Any] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.precision = precision
        self.device = device
        self.is_first = is_first
        self.is_last = is_last
        self.link_device = device
        """Where activations are handed over: the CPU where the transport cannot send from the device."""

        self.random = random or nullcontext()
        """Entered for the forward: dropout's own random stream."""
        self.training = module.training
        self._changes_input = any(getattr(child, "inplace", False) for child in module.modules())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self._enter, (args, kwargs))
        with self.random, self.precision.autocast_context(self.device.type):
            output = self.module(*args, **kwargs)
        return tree_map_only(torch.Tensor, self._leave, output)

    def _enter(self, tensor: torch.Tensor) -> torch.Tensor:
        entered = tensor.to(self.device, self.precision.weights if tensor.is_floating_point() else None)
        if entered is tensor and self._changes_input and not self.is_first:
            return tensor.clone()  # what was received is a leaf of the graph, which may not be changed in place
        return entered

    def _leave(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.is_last:
            dtype = self.precision.compute if tensor.is_floating_point() else None
            return tensor.to(self.link_device, dtype).contiguous()
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if tensor.is_floating_point() else tensor


class _LinkedStage(nn.Module):
    """A stage as torch's schedules see it: its output a plain tensor, its layout remembered for the loss."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.layout: DTensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.stage(x)
        if not isinstance(output, torch.Tensor):
            raise ConfigError(
                f"pipeline: a stage returned {type(output).__name__}, expected one tensor; "
                "modules between stages pass a single tensor on"
            )
        if isinstance(output, DTensor):
            self.layout = cast(DTensor, output.detach())
            return output.to_local()
        return output

    def whole(self, output: torch.Tensor) -> torch.Tensor:
        """``output``, of one microbatch or of several put together, as the model returned it."""
        if self.layout is None:
            return output
        return wrap(output, self.layout, shape=torch.Size([output.shape[0], *self.layout.shape[1:]]))


MAX_SCHEDULES = 8
"""Batch shapes that are kept ready."""


class Pipeline:
    """Runs a rank's stage in its schedule. Every rank of the model group calls it with the same shapes."""

    def __init__(self, stage: Stage, context: ParallelContext, schedule: str, num_microbatches: int) -> None:
        if context.device.type == "cuda" and dist.get_backend(context.pp.group) == "gloo":
            stage.link_device = torch.device("cpu")  # gloo does not send CUDA tensors reliably
        self._stage = _LinkedStage(stage)
        self._context = context
        self._schedule_class = SCHEDULES[schedule]
        self._num_microbatches = num_microbatches
        self._schedules: dict[tuple[torch.Size, torch.dtype, bool], Any] = {}
        self._loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def run(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        backward: bool,
    ) -> torch.Tensor | None:
        """Every microbatch forward, through ``loss`` and, if asked, backward.

        Returns:
            The outputs of the whole local batch on the last stage without backward, else None.
        """
        self._loss = loss
        schedule = self._schedule(x, backward)
        stage = self._stage.stage
        inputs = (x.to(stage.link_device),) if stage.is_first else ()
        targets = {"target": y.to(stage.device)} if stage.is_last else {}
        if backward:
            schedule.step(*inputs, **targets, losses=[] if stage.is_last else None, return_outputs=False)
            return None
        output = schedule.eval(*inputs, **targets, losses=[] if stage.is_last else None)
        return self._stage.whole(output) if stage.is_last else None

    def _call_loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        return self._loss(self._stage.whole(output), target)

    def _schedule(self, x: torch.Tensor, backward: bool) -> Any:
        key = (x.shape, x.dtype, backward)
        if key not in self._schedules:
            if len(self._schedules) == MAX_SCHEDULES:  # each holds buffers for what it receives
                self._schedules.pop(next(iter(self._schedules)))
            received, sent = self._probe(x, backward)
            pp = self._context.pp
            stage = PipelineStage(
                self._stage,
                pp.rank,
                pp.size,
                self._stage.stage.link_device,
                input_args=received,
                output_args=sent,
                group=pp.group,
            )
            self._schedules[key] = self._schedule_class(
                stage, self._num_microbatches, loss_fn=self._call_loss, scale_grads=False
            )
        return self._schedules[key]

    @torch.no_grad()
    def _probe(self, x: torch.Tensor, backward: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """What this stage receives and sends for one microbatch of ``x``, as tensors on ``meta``.

        Each stage in turn runs once on zeros. torch's schedules can find this out themselves, but do it with
        uninitialised values, draw random numbers and leave running statistics changed; here nothing is left behind.
        """
        pp, stage = self._context.pp, self._stage.stage
        random, stage.random = stage.random, nullcontext()
        shape = (x.shape[0] // self._num_microbatches, *x.shape[1:])
        meta = torch.empty(shape, dtype=x.dtype, device="meta")
        received = sent = meta
        buffers = {name: buffer.clone() for name, buffer in stage.named_buffers()}
        cuda = [self._context.device] if self._context.device.type == "cuda" else []
        for rank in range(pp.size):
            described: list[Any] = [None]
            if rank == pp.rank:
                with torch.random.fork_rng(devices=cuda):
                    output = self._stage(torch.zeros_like(meta, device=stage.link_device))
                received, sent = meta, output.to("meta")
                described = [(tuple(output.shape), output.dtype)]
            dist.broadcast_object_list(described, group=pp.group, group_src=rank)
            meta = torch.empty(described[0][0], dtype=described[0][1], device="meta")
        stage.random = random
        for name, buffer in stage.named_buffers():
            buffer.copy_(buffers[name])
        if backward:
            received.requires_grad_(received.is_floating_point() and not stage.is_first)
            sent.requires_grad_(sent.is_floating_point())
        return received, sent
