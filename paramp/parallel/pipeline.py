"""Pipeline parallelism: run the stages of a model in one of torch's schedules.

torch's schedules take seconds to import, so they are imported only when a :class:`Pipeline` is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from ..base.dtensor import is_dtensor, local, wrap
from ..base.errors import ConfigError
from ..base.module_surgery import keeping_buffers, unfrozen
from ..base.spans import Observer, begin_call, span
from ..config.layout import PipelineConfig
from ..distributed.context import ParallelContext
from ..distributed.failures import is_lost_connection
from .stage import Stage, Stages
from .stage_io import StageOutput

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from .stage_recorder import RecordedStage


class _LinkedStage(nn.Module):
    """A stage for torch's schedules: its inputs and outputs are plain tensors.

    If the forward fails, it calls ``failed`` and returns zeros, so that the schedule continues and no rank waits.
    """

    def __init__(self, stage: Stage, failed: Callable[[Exception], None]) -> None:
        super().__init__()
        self.failed = failed
        self.stage = stage
        self.received: StageOutput | None = None
        self.sent: StageOutput | torch.Tensor | None = None
        """The stage's input and output; None for the model's input, a tensor on ``meta`` for the model's output."""
        self.layout: DTensor | None = None
        """A DTensor with the layout of the model's output, if that is one."""

    def forward(self, *tensors: torch.Tensor) -> Any:
        try:
            return self._run(*tensors)
        except Exception as error:
            if is_lost_connection(error):
                raise
            self.failed(error)
            return self._zeros(tensors)

    def _zeros(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """The substitute for an output; it depends on ``tensors``, so that these get gradients."""
        own = torch.zeros((), requires_grad=torch.is_grad_enabled())
        # Multiplied first: the gradient of a plain sum is an expanded tensor, which cannot be sent.
        anchor = sum(((tensor * 0.0).sum() for tensor in tensors if tensor.requires_grad), own * 0.0)
        metas = self.sent.metas(False) if isinstance(self.sent, StageOutput) else [cast(torch.Tensor, self.sent)]
        device = self.stage.device if self.stage.is_last else self.stage.link_device
        zeros = tuple(torch.zeros_like(meta, device=device) + anchor.to(device, meta.dtype) for meta in metas)
        return zeros[0].view_as(zeros[0]) if self.stage.is_last else zeros

    def _run(self, *tensors: torch.Tensor) -> Any:
        inputs = tensors[0] if self.received is None else self.stage.receive(self.received, tensors)
        output = self.stage(inputs)
        if not self.stage.is_last:
            assert isinstance(self.sent, StageOutput)
            return self.sent.pack(output, self.stage.link_device)
        output = _single(output)
        if is_dtensor(output):
            self.layout = cast("DTensor", output.detach())
            output = output.to_local()
        return output.view_as(output)  # torch detaches outputs in place before the backward is complete, but not views

    def whole(self, output: torch.Tensor) -> torch.Tensor:
        """``output`` of one or several concatenated microbatches, as a DTensor if the model returned one."""
        if self.layout is None:
            return output
        return wrap(output, self.layout, shape=torch.Size([output.shape[0], *self.layout.shape[1:]]))


def _single(output: Any) -> torch.Tensor:
    if not isinstance(output, torch.Tensor):
        raise ConfigError(f"pipeline: the model returned {type(output).__name__}, expected one tensor, for the loss")
    return output


class _Ready(NamedTuple):
    """A schedule for one shape of the batch, and the input and output of each stage of this rank.

    None: the model's input; a tensor on ``meta``: the model's output.
    """

    schedule: Any
    received: list[StageOutput | None]
    sent: list[StageOutput | torch.Tensor]


MAX_SCHEDULES = 8
"""The number of batch shapes whose schedules are cached."""
FORWARD_ACTIONS = ("FORWARD", "SEND_F", "RECV_F")


class Pipeline:
    """Runs the stages of one rank in their schedule. Every rank of the model group calls it with the same shapes.

    ``check`` is called with the first failure in a :meth:`run`, and raises it where the schedule cannot go on.
    """

    def __init__(
        self,
        stages: Stages,
        context: ParallelContext,
        config: PipelineConfig,
        observers: Sequence[Observer] = (),
        check: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        from torch.distributed.pipelining.schedules import get_schedule_class

        self._stages = stages
        self._stage_indices = config.stages_of(context.pp.rank)
        self._linked = [
            _LinkedStage(stage, partial(self._stage_failed, index))
            for index, stage in zip(self._stage_indices, stages, strict=True)
        ]
        named = list(stages.module.named_parameters())
        self._trained = [parameter for _, parameter in named if parameter.requires_grad]
        self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        self._context = context
        self._config = config
        self._schedule_class = get_schedule_class(config.row.torch_name)
        self._before_last_backward: Callable[[], None] = lambda: None
        self.last_rank = config.rank_of(config.num_stages - 1)
        """The pipeline rank that has the last stage."""
        self.observers = observers
        if context.device.type == "cuda" and dist.get_backend(context.pp.group) == "gloo":
            for stage in stages:
                stage.link_device = torch.device("cpu")  # gloo does not send CUDA tensors reliably
        self._link_device = self._linked[0].stage.link_device
        self._schedules: dict[tuple[torch.Size, torch.dtype, bool, bool], _Ready] = {}
        self._loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        self._num_losses = 0
        self._failure: Exception | None = None
        self._check = check
        self.in_step = True
        """False after a :meth:`run` that was interrupted, so that other ranks may wait for this one."""

    def run(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        backward: bool,
        before_last_backward: Callable[[], None] = lambda: None,
    ) -> torch.Tensor | None:
        """Run every microbatch forward, through ``loss`` and, if asked, backward.

        Args:
            x, y: the local batch; dim 0 is split into microbatches.
            loss: of a microbatch's output and target, a 0-dim tensor.
            before_last_backward: called before this rank's last backward, if it :attr:`overlaps`.

        Returns:
            Without backward, on the rank of the last stage: the outputs of the whole local batch. Else None.

        Raises:
            ConfigError: a stage fails on zeros; on every rank of the pipeline.
            ValueError: ``loss`` failed. On this rank only, after all microbatches have run, so that no rank waits.
            RuntimeError: a stage of this rank failed; also on this rank only, after all microbatches.
        """
        self._loss, self._num_losses = loss, 0
        self._failure = self._thawed_later() if backward else None
        if self.overlaps:
            self._before_last_backward = before_last_backward
        self._stages.align_modes()
        schedule = self._schedule(x, backward)
        first, last = self._linked[0].stage, self._linked[-1].stage
        inputs = (x.to(first.link_device),) if first.is_first else ()
        targets = {"target": y.to(last.device)} if last.is_last else {}
        begin_call(self.observers)
        self.in_step = False
        if backward:
            schedule.step(*inputs, **targets, losses=[] if last.is_last else None, return_outputs=False)
        else:
            output = schedule.eval(*inputs, **targets, losses=[] if last.is_last else None)
        self.in_step = True
        if self._failure is not None:
            raise self._failure
        return self._linked[-1].whole(output) if last.is_last and not backward else None

    @property
    def overlaps(self) -> bool:
        """Whether this rank's last backward in a batch completes all of its gradients."""
        return self._config.num_local_stages == 1 and not self._config.row.splits_backward

    def _call_loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        microbatch, self._num_losses = self._num_losses, self._num_losses + 1
        if self._failure is not None:
            return output.sum() * 0.0
        try:
            with span(self.observers, "loss", self._stage_indices[-1], microbatch):
                return self._loss(self._linked[-1].whole(output), target)
        except Exception as error:
            self._record(_criterion_failure(error))
            return output.sum() * 0.0

    def _stage_failed(self, index: int, error: Exception) -> None:
        what = f"stage {index} of {self._config.num_stages} failed: {type(error).__name__}: {error}"
        failure = error if isinstance(error, ConfigError) else RuntimeError(f"pipeline: {what}")
        failure.__cause__ = None if failure is error else error
        self._record(failure)

    def _record(self, failure: Exception) -> None:
        if self._failure is None:
            self._failure = failure
            self._check(failure)

    def _thawed_later(self) -> ValueError | None:
        """The error for a parameter that was frozen at initialize and requires a gradient now; None without one."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                return ValueError(unfrozen(name, "requires a gradient"))
        return None

    def _schedule(self, x: torch.Tensor, backward: bool) -> Any:
        key = (x.shape, x.dtype, backward, self._stages.module.training)
        if key not in self._schedules:
            if len(self._schedules) == MAX_SCHEDULES:  # each holds receive buffers
                self._schedules.pop(next(iter(self._schedules)))
            self._schedules[key] = self._new_schedule(x, backward)
        ready = self._schedules[key]
        for linked, received, sent in zip(self._linked, ready.received, ready.sent, strict=True):
            linked.received, linked.sent = received, sent
        return ready.schedule

    def _new_schedule(self, x: torch.Tensor, backward: bool) -> _Ready:
        num_microbatches = self._config.num_microbatches
        part = torch.empty(x.shape[0] // num_microbatches, *x.shape[1:], dtype=x.dtype, device="meta")
        received, sent = self._probe(part)
        stages = [
            self._stage_recorder(
                linked,
                index,
                (part,) if takes is None else takes.metas(backward),
                gives.metas(backward) if isinstance(gives, StageOutput) else (gives.requires_grad_(backward),),
            )
            for linked, index, takes, gives in zip(self._linked, self._stage_indices, received, sent, strict=True)
        ]
        single = not self._config.row.any_stages and self._config.row.stages_per_rank == 1
        schedule = self._schedule_class(
            stages[0] if single else stages, num_microbatches, loss_fn=self._call_loss, scale_grads=False
        )
        if not backward and not single:
            _remove_backwards(schedule)
        return _Ready(schedule, received, sent)

    def _stage_recorder(
        self, linked: _LinkedStage, index: int, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]
    ) -> RecordedStage:
        from .stage_recorder import RecordedStage

        place = (index, self._config.num_stages, self._link_device)
        stage = RecordedStage(linked, *place, input_args=inputs, output_args=outputs, group=self._context.pp.group)
        stage.observers, stage.failed = self.observers, linked.failed
        stage.before_last_backward = lambda: self._before_last_backward()
        return stage

    def _probe(self, part: torch.Tensor) -> tuple[list[StageOutput | None], list[StageOutput | torch.Tensor]]:
        """The input (None for the first stage) and output of each stage of this rank, for a microbatch like ``part``.

        Each stage of the model in turn runs once on zeros; if one fails, every rank raises. torch's schedules infer
        shapes with uninitialised values, draw random numbers and change running statistics; this changes no state.
        """
        received: list[StageOutput | None] = []
        sent: list[StageOutput | torch.Tensor] = []
        stage_output: StageOutput | None = None
        failure: Exception | None = None
        for index in range(self._config.num_stages):
            described: list[Any] = [None]
            if index in self._stage_indices:
                received.append(stage_output)
                try:
                    sent.append(self._try(self._linked[self._stage_indices.index(index)].stage, stage_output, part))
                    described = [sent[-1] if isinstance(sent[-1], StageOutput) else None]
                except Exception as error:
                    failure = error
                    what = f"stage {index} of {self._config.num_stages} fails on zeros of the shape of a microbatch"
                    described = [f"pipeline: {what}, {tuple(part.shape)}: {type(error).__name__}: {error}"]
                    if isinstance(error, ConfigError):
                        described = [str(error)]
            dist.broadcast_object_list(described, group=self._context.pp.group, group_src=self._config.rank_of(index))
            if isinstance(described[0], str):
                raise ConfigError(described[0]) from failure
            stage_output = described[0]
        return received, sent

    def _try(self, stage: Stage, received: StageOutput | None, part: torch.Tensor) -> StageOutput | torch.Tensor:
        """The output of ``stage`` for zeros; for the last stage, a tensor on ``meta``.

        Temporarily frozen parameters count as trained, because other ranks are not notified when that changes.
        """
        random, stage.random = stage.random, nullcontext()
        cuda = [self._context.device] if self._context.device.type == "cuda" else []
        try:
            with keeping_buffers(stage), _thawed(self._trained), torch.random.fork_rng(cuda), torch.enable_grad():
                metas = (part,) if received is None else received.metas(True)
                zeros_like = partial(torch.zeros_like, device=stage.link_device)
                zeros = tuple(zeros_like(meta, requires_grad=meta.requires_grad) for meta in metas)
                output = stage(zeros[0] if received is None else stage.receive(received, zeros))
                if not stage.is_last:
                    return StageOutput.describe(output, stage.precision)
                return local(_single(output)).detach().to("meta")
        finally:
            stage.random = random


def _criterion_failure(error: Exception) -> ValueError:
    """The exception to raise when the criterion raised ``error``."""
    if isinstance(error, ValueError) and str(error).startswith("criterion: "):
        return error
    failure = ValueError(f"criterion: it failed on the last stage: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


@contextmanager
def _thawed(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """A context in which all of ``parameters`` require a gradient."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _remove_backwards(schedule: Any) -> None:
    """Remove the backward actions from one of torch's schedules, for evaluation.

    The schedule's ``eval`` executes all actions, and fails if stages of one rank pass gradients to each other. The
    forward actions keep their order, in which sends match receives.
    """
    order = schedule.pipeline_order_with_comms
    for rank, actions in order.items():
        single = [one for action in actions for one in (action.sub_actions or (action,))]
        order[rank] = [one for one in single if one.computation_type.name in FORWARD_ACTIONS]
