"""Pipeline parallelism: run the stages of a model in one of torch's schedules.

A stage computes in the mode's precision and talks to its neighbours in the compute dtype:

    x ─► to the compute dtype ─► [ autocast: the stage's modules ] ─► compute dtype ─► next stage
                                                                   └─► fp32 ─► loss     (last stage)

What crosses a cut may be any tree of tensors and numbers (:mod:`paramp.parallel.stage_io`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ..base.dtensor import wrap
from ..base.errors import ConfigError
from ..base.module_surgery import Joined, keeping_buffers
from ..base.spans import Observer, begin_call, span
from ..config.layout import PipelineConfig
from ..distributed.context import ParallelContext
from ..precision.autocast import computing, to_compute, to_outputs
from ..precision.policy import Precision
from .stage_io import StageOutput

__all__ = ["Pipeline", "Stage", "Stages"]


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

    def receive(self, stage_output: StageOutput, tensors: tuple[torch.Tensor, ...]) -> Any:
        """The input of this stage, from what the stage before sent."""

        def own(tensor: torch.Tensor) -> torch.Tensor:
            # What was received is a leaf of the graph, which the module could not change in place.
            return tensor.clone() if tensor.is_leaf and tensor.requires_grad else tensor

        values = stage_output.unpack(tensors, self.device, self.precision.weights)
        return tree_map_only(torch.Tensor, own, values)


class Stages(nn.Module):
    """The stages of one rank, in the model's order, with one mode of training or evaluation.

    Attributes:
        module: what all of them have, under the whole model's names (:class:`~paramp.base.module_surgery.Joined`).
    """

    def __init__(self, joined: Joined, stages: Sequence[Stage]) -> None:
        super().__init__()
        self.module = joined.module
        self.stages = nn.ModuleList(stages)
        self.training = self.module.training
        self._joined = joined

    def __iter__(self) -> Iterator[Stage]:
        return (cast(Stage, stage) for stage in self.stages)

    def align_modes(self) -> None:
        """Let every stage have the modes of training that the modules of :attr:`module` have."""
        self._joined.align_modes()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the only stage, the whole model."""
        (stage,) = self.stages
        return stage(*args, **kwargs)


class _LinkedStage(nn.Module):
    """A stage as torch's schedules see it: from plain tensors to plain tensors, its layout remembered for the loss.

    Args:
        without_views: whether what is sent must not be a view: torch detaches it in place where it splits the backward.
    """

    def __init__(self, stage: Stage, without_views: bool) -> None:
        super().__init__()
        self.stage = stage
        self.without_views = without_views
        self.received: StageOutput | None = None
        self.sent: StageOutput | None = None
        self.layout: DTensor | None = None

    def forward(self, *tensors: torch.Tensor) -> Any:
        inputs = tensors[0] if self.received is None else self.stage.receive(self.received, tensors)
        output = self.stage(inputs)
        if not self.stage.is_last:
            assert self.sent is not None
            packed = self.sent.pack(output, self.stage.link_device)
            return tuple(tensor.clone() if self.without_views and tensor._is_view() else tensor for tensor in packed)
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


class _RecordedStage(PipelineStage):
    """torch's stage, which tells the pipeline's observers of its forwards and backwards."""

    pipeline: Pipeline

    def _span(self, kind: str, microbatch: int) -> AbstractContextManager[None]:
        return span(self.pipeline.observers, kind, self.stage_index, microbatch)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._span("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if last_backward and full_backward and self.pipeline.num_local_stages == 1:
            self.pipeline.before_last_backward()
        with self._span("backward" if full_backward else "backward input", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        without = [parameter for parameter in self.submod.parameters() if parameter.grad is None]
        with self._span("backward weight", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            # torch keeps what autograd gives, which may be one tensor for two parameters, and adds to it in place.
            for parameter in without:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()


@dataclass(frozen=True)
class _Ready:
    """A schedule for one shape of the batch, and what each stage of this rank receives and sends in it."""

    schedule: Any
    received: list[StageOutput | None]
    sent: list[StageOutput | None]


MAX_SCHEDULES = 8
"""Batch shapes that are kept ready."""
FORWARD_ACTIONS = ("FORWARD", "SEND_F", "RECV_F")


class Pipeline:
    """Runs a rank's stages in its schedule. Every rank of the model group calls it with the same shapes.

    Attributes:
        last_rank: the pipeline rank that has the last stage.
        observers: told what runs.
    """

    def __init__(
        self, stages: Stages, context: ParallelContext, config: PipelineConfig, observers: Sequence[Observer] = ()
    ) -> None:
        self._stages = stages
        self._linked = [_LinkedStage(stage, config.row.splits_backward) for stage in stages]
        self._places = config.stages_of(context.pp.rank)
        self._context = context
        self._config = config
        self._schedule_class = get_schedule_class(config.row.torch_name)
        self._num_microbatches = config.num_microbatches
        self.num_local_stages = config.num_local_stages
        self.before_last_backward: Callable[[], None] = lambda: None
        self.last_rank = config.rank_of(config.num_stages - 1)
        self.observers = observers
        if context.device.type == "cuda" and dist.get_backend(context.pp.group) == "gloo":
            for stage in stages:
                stage.link_device = torch.device("cpu")  # gloo does not send CUDA tensors reliably
        self._link_device = self._linked[0].stage.link_device
        self._schedules: dict[tuple[torch.Size, torch.dtype, bool, bool], _Ready] = {}
        self._loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        self._num_losses = 0
        self.failure: Exception | None = None
        """What the loss of the last :meth:`run` raised, on the last stage; the schedule went on, so that none waits."""

    def run(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        backward: bool,
        before_last_backward: Callable[[], None] = lambda: None,
    ) -> torch.Tensor | None:
        """Every microbatch forward, through ``loss`` and, if asked, backward.

        Args:
            before_last_backward: called on each rank before its last backward, where that has all of a microbatch's
                gradients: where a rank has one stage.

        Returns:
            The outputs of the whole local batch on the rank of the last stage without backward, else None.
        """
        self._loss, self._num_losses, self.failure = loss, 0, None
        self.before_last_backward = before_last_backward
        self._stages.align_modes()
        schedule = self._schedule(x, backward)
        first, last = self._linked[0].stage, self._linked[-1].stage
        inputs = (x.to(first.link_device),) if first.is_first else ()
        targets = {"target": y.to(last.device)} if last.is_last else {}
        begin_call(self.observers)
        if backward:
            schedule.step(*inputs, **targets, losses=[] if last.is_last else None, return_outputs=False)
            return None
        output = schedule.eval(*inputs, **targets, losses=[] if last.is_last else None)
        return self._linked[-1].whole(output) if last.is_last else None

    def _call_loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        microbatch, self._num_losses = self._num_losses, self._num_losses + 1
        try:
            with span(self.observers, "loss", self._places[-1], microbatch):
                return self._loss(self._linked[-1].whole(output), target)
        except Exception as error:
            self.failure = self.failure or error
            return output.sum() * 0.0

    def _schedule(self, x: torch.Tensor, backward: bool) -> Any:
        key = (x.shape, x.dtype, backward, self._stages.module.training)
        if key not in self._schedules:
            if len(self._schedules) == MAX_SCHEDULES:  # each holds buffers for what it receives
                self._schedules.pop(next(iter(self._schedules)))
            self._schedules[key] = self._new_schedule(x, backward)
        ready = self._schedules[key]
        for linked, received, sent in zip(self._linked, ready.received, ready.sent, strict=True):
            linked.received, linked.sent = received, sent
        return ready.schedule

    def _new_schedule(self, x: torch.Tensor, backward: bool) -> _Ready:
        part = torch.empty(x.shape[0] // self._num_microbatches, *x.shape[1:], dtype=x.dtype, device="meta")
        received, sent = self._probe(part)
        stages = [
            self._recorded_stage(
                linked,
                place,
                (part,) if takes is None else takes.metas(backward),
                gives.metas(backward) if isinstance(gives, StageOutput) else (gives.requires_grad_(backward),),
            )
            for linked, place, takes, gives in zip(self._linked, self._places, received, sent, strict=True)
        ]
        single = not self._config.row.any_stages and self._config.row.stages_per_rank == 1
        schedule = self._schedule_class(
            stages[0] if single else stages, self._num_microbatches, loss_fn=self._call_loss, scale_grads=False
        )
        if not backward and not single:
            _leave_out_backwards(schedule)
        return _Ready(schedule, received, [gives if isinstance(gives, StageOutput) else None for gives in sent])

    def _recorded_stage(
        self, linked: _LinkedStage, place: int, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]
    ) -> _RecordedStage:
        stage = _RecordedStage(
            linked,
            place,
            self._config.num_stages,
            self._link_device,
            input_args=inputs,
            output_args=outputs,
            group=self._context.pp.group,
        )
        stage.pipeline = self
        return stage

    def _probe(self, part: torch.Tensor) -> tuple[list[StageOutput | None], list[StageOutput | torch.Tensor]]:
        """What each stage of this rank receives, None for the first, and returns, for one microbatch like ``part``.

        Each stage of the model in turn runs once on zeros. torch's schedules can find this out themselves, but do it
        with uninitialised values, draw random numbers and leave running statistics changed; here nothing is left
        behind.

        Raises:
            ConfigError: a stage handed on what cannot travel, or failed; on every rank of the pipeline.
        """
        pp = self._context.pp
        received: list[StageOutput | None] = []
        sent: list[StageOutput | torch.Tensor] = []
        stage_output: StageOutput | None = None
        failure: Exception | None = None
        for place in range(self._config.num_stages):
            described: list[Any] = [None]
            if place in self._places:
                received.append(stage_output)
                try:
                    sent.append(self._try(self._linked[self._places.index(place)].stage, stage_output, part))
                    described = [sent[-1] if isinstance(sent[-1], StageOutput) else None]
                except Exception as error:
                    failure = error
                    described = [
                        str(error)
                        if isinstance(error, ConfigError)
                        else f"pipeline: stage {place} of {self._config.num_stages} fails on zeros of the shape of a "
                        f"microbatch, {tuple(part.shape)}: {type(error).__name__}: {error}"
                    ]
            dist.broadcast_object_list(described, group=pp.group, group_src=self._config.rank_of(place))
            if isinstance(described[0], str):
                raise ConfigError(described[0]) from failure
            stage_output = described[0]
        return received, sent

    def _try(self, stage: Stage, received: StageOutput | None, part: torch.Tensor) -> StageOutput | torch.Tensor:
        """What ``stage`` returns, having received zeros; of the last one, the tensor on ``meta``."""
        random, stage.random = stage.random, nullcontext()
        cuda = [self._context.device] if self._context.device.type == "cuda" else []
        try:
            with keeping_buffers(stage), torch.random.fork_rng(devices=cuda), torch.enable_grad():
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
                    return StageOutput.describe(output, stage.precision)
                output = _single(output)
                return (output.to_local() if isinstance(output, DTensor) else output).detach().to("meta")
        finally:
            stage.random = random


def _leave_out_backwards(schedule: Any) -> None:
    """Let one of torch's schedules run forwards only.

    Without a backward its own ``eval`` walks through all of its actions, and fails where stages of one rank hand
    gradients to each other. What is left of each rank's actions is still in an order in which sends and receives meet.
    """
    order = schedule.pipeline_order_with_comms
    for rank, actions in order.items():
        single = [one for action in actions for one in (action.sub_actions or (action,))]
        order[rank] = [one for one in single if one.computation_type.name in FORWARD_ACTIONS]
