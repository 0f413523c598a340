"""Pipeline parallelism: run the stages of a model in one of torch's schedules.

A stage computes in the mode's precision and talks to its neighbours in the compute dtype:

    x ─► to the compute dtype ─► [ autocast: the stage's modules ] ─► compute dtype ─► next stage
                                                                   └─► fp32 ─► loss     (last stage)

What crosses a cut may be any tree of tensors and numbers (:mod:`paramp.parcels`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from .autocast import computing, to_compute, to_outputs
from .mesh import ParallelContext
from .parcels import Parcel
from .precision import ConfigError, Precision
from .shards import wrap

__all__ = ["SCHEDULES", "Pipeline", "Stage"]

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_first:
            args, kwargs = tree_map_only(torch.Tensor, self._enter, (args, kwargs))
        with self.random, computing(self.precision, self.device.type):
            output = self.module(*args, **kwargs)
        return tree_map_only(torch.Tensor, self._leave, output) if self.is_last else output

    def _enter(self, tensor: torch.Tensor) -> torch.Tensor:
        return to_compute(tensor, self.precision, self.device)

    def _leave(self, tensor: torch.Tensor) -> torch.Tensor:
        return to_outputs(tensor, self.precision)

    def receive(self, parcel: Parcel, tensors: tuple[torch.Tensor, ...]) -> Any:
        """The input of this stage, from what the stage before sent."""

        def own(tensor: torch.Tensor) -> torch.Tensor:
            # What was received is a leaf of the graph, which the module could not change in place.
            return tensor.clone() if tensor.is_leaf and tensor.requires_grad else tensor

        values = parcel.unpack(tensors, self.device, self.precision.weights)
        return tree_map_only(torch.Tensor, own, values)


class _LinkedStage(nn.Module):
    """A stage as torch's schedules see it: from plain tensors to plain tensors, its layout remembered for the loss."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.received: Parcel | None = None
        self.sent: Parcel | None = None
        self.layout: DTensor | None = None

    def forward(self, *tensors: torch.Tensor) -> Any:
        inputs = tensors[0] if self.received is None else self.stage.receive(self.received, tensors)
        output = self.stage(inputs)
        if not self.stage.is_last:
            assert self.sent is not None
            return self.sent.pack(output, self.stage.link_device)
        output = _single(output)
        if isinstance(output, DTensor):
            self.layout = cast(DTensor, output.detach())
            return output.to_local()
        return output

    def whole(self, output: torch.Tensor) -> torch.Tensor:
        """``output``, of one microbatch or of several put together, as the model returned it."""
        if self.layout is None:
            return output
        return wrap(output, self.layout, shape=torch.Size([output.shape[0], *self.layout.shape[1:]]))


def _single(output: Any) -> torch.Tensor:
    if not isinstance(output, torch.Tensor):
        raise ConfigError(f"pipeline: the model returned {type(output).__name__}, expected one tensor, for the loss")
    return output


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
        self._schedules: dict[tuple[torch.Size, torch.dtype, bool, bool], tuple[Any, Parcel | None, Parcel | None]] = {}
        self._loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        self.failure: Exception | None = None
        """What the loss of the last :meth:`run` raised, on the last stage; the schedule went on, so that none waits."""

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
        self._loss, self.failure = loss, None
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
        try:
            return self._loss(self._stage.whole(output), target)
        except Exception as error:
            self.failure = self.failure or error
            return output.sum() * 0.0

    def _schedule(self, x: torch.Tensor, backward: bool) -> Any:
        key = (x.shape, x.dtype, backward, self._stage.stage.training)
        if key not in self._schedules:
            if len(self._schedules) == MAX_SCHEDULES:  # each holds buffers for what it receives
                self._schedules.pop(next(iter(self._schedules)))
            self._schedules[key] = self._new_schedule(x, backward)
        schedule, self._stage.received, self._stage.sent = self._schedules[key]
        return schedule

    def _new_schedule(self, x: torch.Tensor, backward: bool) -> tuple[Any, Parcel | None, Parcel | None]:
        pp = self._context.pp
        part = torch.empty(x.shape[0] // self._num_microbatches, *x.shape[1:], dtype=x.dtype, device="meta")
        received, sent = self._probe(part)
        stage = PipelineStage(
            self._stage,
            pp.rank,
            pp.size,
            self._stage.stage.link_device,
            input_args=(part,) if received is None else received.metas(backward),
            output_args=sent.metas(backward) if isinstance(sent, Parcel) else (sent.requires_grad_(backward),),
            group=pp.group,
        )
        schedule = self._schedule_class(stage, self._num_microbatches, loss_fn=self._call_loss, scale_grads=False)
        return schedule, received, sent if isinstance(sent, Parcel) else None

    def _probe(self, part: torch.Tensor) -> tuple[Parcel | None, Parcel | torch.Tensor]:
        """What this stage receives, None for the first, and what it returns, for one microbatch like ``part``.

        Each stage in turn runs once on zeros. torch's schedules can find this out themselves, but do it with
        uninitialised values, draw random numbers and leave running statistics changed; here nothing is left behind.

        Raises:
            ConfigError: a stage handed on what cannot travel, or failed; on every rank of the pipeline.
        """
        pp = self._context.pp
        received = parcel = None
        sent: Any = None
        failure: Exception | None = None
        for rank in range(pp.size):
            described: list[Any] = [None]
            if rank == pp.rank:
                received = parcel
                try:
                    sent = self._try(parcel, part)
                    described = [sent if isinstance(sent, Parcel) else None]
                except Exception as error:
                    failure = error
                    described = [
                        str(error)
                        if isinstance(error, ConfigError)
                        else f"pipeline: stage {rank} of {pp.size} fails on zeros of the shape of a microbatch, "
                        f"{tuple(part.shape)}: {type(error).__name__}: {error}"
                    ]
            dist.broadcast_object_list(described, group=pp.group, group_src=rank)
            if isinstance(described[0], str):
                raise ConfigError(described[0]) from failure
            parcel = described[0]
        return received, sent

    def _try(self, received: Parcel | None, part: torch.Tensor) -> Parcel | torch.Tensor:
        """What this stage returns, having received zeros; of the last one, the tensor on ``meta``."""
        stage = self._stage.stage
        random, stage.random = stage.random, nullcontext()
        buffers = [(module, dict(module._buffers)) for module in stage.modules()]
        values = {buffer: buffer.clone() for _, own in buffers for buffer in own.values() if buffer is not None}
        cuda = [self._context.device] if self._context.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=cuda), torch.enable_grad():
                if received is None:
                    inputs = torch.zeros_like(part, device=stage.link_device)
                else:
                    zeros = [
                        torch.zeros_like(meta, device=stage.link_device, requires_grad=True)
                        for meta in received.metas(True)
                    ]
                    inputs = stage.receive(received, tuple(zeros))
                output = stage(inputs)
                if not stage.is_last:
                    return Parcel.describe(output, stage.precision)
                output = _single(output)
                return (output.to_local() if isinstance(output, DTensor) else output).detach().to("meta")
        finally:
            stage.random = random
            for module, own in buffers:  # the forward may have put others in their place
                module._buffers.clear()
                module._buffers.update(own)
            with torch.no_grad():
                for buffer, value in values.items():
                    if buffer.shape == value.shape:
                        buffer.copy_(value)
                    else:  # resized in place
                        buffer.data = value
