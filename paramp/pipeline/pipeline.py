"""Pipeline parallelism: run the stages of a model in one of torch's schedules.

torch's schedules take seconds to import, so this is imported only where a :class:`Pipeline` is made.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class

from ..base.collectives import largest_over_ranks, sends_by_host
from ..base.dtensor import refusing_changes
from ..base.errors import ConfigError, at_users_line
from ..base.module_surgery import thawed_since
from ..base.observer_spans import Observer, begin_call, span
from ..base.state_over_trials import keeping_state
from ..base.trees import map_tensors
from ..distributed.context import ParallelContext
from ..distributed.exact_mode_protocol import Numerics
from ..distributed.trials import without_draws
from ..parallel.batch_key import batch_key
from ..parallel.expert_balance import counted_alone
from ..parallel.microbatches import Batch
from .shared_buffers import SharedBuffers
from .stage import Stage, Stages
from .stage_output import StageOutput
from .torch_stage import LinkedStage, RecordedStage, StageSetting


class _Ready(NamedTuple):
    """A schedule for one kind of microbatch, and the input and output of each stage of this rank.

    None: the model's inputs, the model's output.
    """

    schedule: Any
    received: list[StageOutput | None]
    sent: list[StageOutput | None]


MAX_SCHEDULES = 8
"""The number of kinds of microbatches whose schedules are cached."""
FORWARD_ACTIONS = ("FORWARD", "SEND_F", "WAIT_SEND_F", "RECV_F")  # torch 2.15 has the third one


class Pipeline:
    """Runs the stages of one rank in their schedule. Every rank of the model group calls it with the same shapes.

    ``check`` is called with the first failure in a :meth:`run`, and raises it where the schedule cannot go on.
    """

    def __init__(
        self,
        stages: Stages,
        context: ParallelContext,
        observers: Sequence[Observer],
        check: Callable[[Exception], None],
        numerics: Numerics,
    ) -> None:
        config = context.config.parallel.pipeline
        self._stages = stages
        self._stage_indices = config.stages_of(context.pp.rank)
        self._linked = [
            LinkedStage(stage, partial(self._stage_failed, index))
            for index, stage in zip(self._stage_indices, stages, strict=True)
        ]
        self._shared = {stage: SharedBuffers(stage.module, stage.shared_buffers) for stage in stages}
        named = list(stages.module.named_parameters())
        self._trained = [parameter for _, parameter in named if parameter.requires_grad]
        self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        self._context = context
        self._config = config
        self._schedule_class = get_schedule_class(config.row.torch_name)
        self._setting = StageSetting(context, observers, numerics)
        asks_all = context.cp.size > 1 and (context.ep.size > 1 or context.config.parallel.shard > 1)
        self._probing = context.dp if asks_all else context.ep
        """The ranks that wait for each other in a probe, which sends tokens to experts. Where sequences are cut, and
        ranks share experts or shards, each forward asks all data ranks whether to try its stage."""
        self.last_rank = config.rank_of(config.num_stages - 1)
        """The pipeline rank that has the last stage."""
        if sends_by_host(context.device, context.pp.group):
            for stage in stages:
                stage.link_device = torch.device("cpu")
        self._schedules: dict[tuple[Any, int, bool, bool], _Ready] = {}
        self._loss: Callable[[Any, Batch], torch.Tensor] | None = None
        self._failure: Exception | None = None
        self._check = check
        self.in_step = True
        """False after a :meth:`run` that was interrupted, so that other ranks may wait for this one."""

    def run(
        self,
        microbatches: list[Batch],
        loss: Callable[[Any, Batch], torch.Tensor],
        *,
        backward: bool,
        before_last_backward: Callable[[], None] = lambda: None,
    ) -> None:
        """Run every microbatch forward, through ``loss`` and, if asked, backward.

        Args:
            microbatches: the parts of the local batch; inputs and target of the same kinds and shapes.
            loss: of the model's output and its microbatch, a 0-dim tensor.
            before_last_backward: called before this rank's last backward, if it :attr:`overlaps`.

        Raises:
            ConfigError: a stage fails on the first microbatch of a kind; on every rank of the pipeline. Or a later one
                changes a buffer that several stages have; on this rank only, after all microbatches.
            ValueError: ``loss`` failed. On this rank only, after all microbatches have run, so that no rank waits.
            RuntimeError: a stage of this rank failed; also on this rank only, after all microbatches.
        """
        self._loss = loss
        self._failure = thawed_since(self._frozen) if backward else None
        thawed = [parameter for _, parameter in self._frozen if backward and parameter.requires_grad]
        with _requiring_gradients(thawed, False):  # FSDP2 would refuse them in a stage for which others wait
            self._run_schedule(microbatches, backward, before_last_backward)
        if backward and (name := self._drop_gradients_elsewhere()) is not None and self._failure is None:
            self._failure = ConfigError(
                f"criterion: it uses {name!r} of the model that initialize was given, which another stage trains, so "
                "that its gradient would be lost; compute what depends on weights in the model's forward, or use the "
                "optimizer's weight_decay"
            )
        if self._failure is not None:
            raise self._failure

    def _drop_gradients_elsewhere(self) -> str | None:
        """The name of a parameter of another rank's stage that has got a gradient here; None if none has.

        On every rank: a stage's forward, too, may use one that the model keeps outside of its modules.
        """
        found = None
        for name, reference in self._stages.elsewhere:
            if (parameter := reference()) is not None and parameter.grad is not None:
                parameter.grad, found = None, found or name
        return found

    def _run_schedule(
        self, microbatches: list[Batch], backward: bool, before_last_backward: Callable[[], None]
    ) -> None:
        if self.overlaps:
            self._setting.before_last_backward = before_last_backward
        self._stages.align_modes()
        schedule = self._schedule(microbatches, backward)
        first, last = self._linked[0].stage, self._linked[-1].stage
        for linked in self._linked:
            linked.microbatches = microbatches
        # The stages take their inputs themselves, so torch's schedule only splits the numbers of the microbatches.
        numbers = torch.arange(len(microbatches))
        # Made there: a copy to a GPU would wait for it.
        inputs = (torch.arange(len(microbatches), device=first.link_device),) if first.is_first else ()
        targets = {"target": numbers} if last.is_last else {}
        begin_call(self._setting.observers)
        before = [(shared, shared.states()) for shared in self._shared.values()]
        self.in_step = False
        if backward:
            schedule.step(*inputs, **targets, losses=[] if last.is_last else None, return_outputs=False)
        else:
            schedule.eval(*inputs, **targets, losses=[] if last.is_last else None)
        self.in_step = True
        for linked in self._linked:
            linked.microbatches, linked.output = [], None
        if self._failure is None:
            for shared, states in before:  # a forward may change its state in later batches only
                shared.check_unchanged(states)

    @property
    def overlaps(self) -> bool:
        """Whether this rank's last backward in a batch completes all of its gradients."""
        return self._config.num_local_stages == 1 and not self._config.row.splits_backward

    def _call_loss(self, stand_in: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        linked, index = self._linked[-1], int(number)
        if self._failure is not None:
            return linked.no_loss(stand_in)
        try:
            with span(self._setting.observers, "loss", self._stage_indices[-1], index):
                return self._loss(linked.output, linked.microbatches[index])
        except Exception as error:
            self._record(_criterion_failure(error))
            return linked.no_loss(stand_in)

    def _stage_failed(self, index: int, error: Exception) -> None:
        what = f"stage {index} of {self._config.num_stages} failed: {type(error).__name__}: {error}"
        failure = error if isinstance(error, ConfigError) else RuntimeError(f"pipeline: {what}")
        failure.__cause__ = None if failure is error else error
        self._record(failure)

    def _record(self, failure: Exception) -> None:
        if self._failure is None:
            self._failure = failure
            self._check(failure)

    def _schedule(self, microbatches: Sequence[Batch], backward: bool) -> Any:
        key = (batch_key(microbatches[0]), len(microbatches), backward, self._stages.module.training)
        if self._is_new(key):
            if len(self._schedules) == MAX_SCHEDULES:  # each holds receive buffers
                self._schedules.pop(next(iter(self._schedules)))
            self._schedules[key] = self._new_schedule(microbatches, backward)
        ready = self._schedules[key]
        for linked, received, sent in zip(self._linked, ready.received, ready.sent, strict=True):
            linked.received, linked.sent = received, sent
        return ready.schedule

    def _is_new(self, key: tuple[Any, int, bool, bool]) -> bool:
        """Whether a schedule is made for ``key``: if one of the ranks that probe together has none yet.

        These may have batches of other lengths.
        """
        is_new = key not in self._schedules
        if self._probing.size == 1:
            return is_new
        return any(largest_over_ranks([is_new], self._context.device, self._probing.group))

    def _new_schedule(self, microbatches: Sequence[Batch], backward: bool) -> _Ready:
        received, sent = self._probe(microbatches[0])
        number = torch.empty(1, dtype=torch.int64, device="meta")
        stand_in = torch.empty(1, device="meta")
        stages = [
            RecordedStage(
                linked,
                index,
                self._setting,
                (number,) if takes is None else takes.metas(backward),
                (stand_in,) if gives is None else gives.metas(backward),
            )
            for linked, index, takes, gives in zip(self._linked, self._stage_indices, received, sent, strict=True)
        ]
        single = not self._config.row.any_stages and self._config.row.stages_per_rank == 1
        schedule = self._schedule_class(
            stages[0] if single else stages, len(microbatches), loss_fn=self._call_loss, scale_grads=False
        )
        if not backward and not single:
            _remove_backwards(schedule)
        return _Ready(schedule, received, sent)

    def _probe(self, microbatch: Batch) -> tuple[list[StageOutput | None], list[StageOutput | None]]:
        """The input (None for the first stage) and output (None for the last) of each stage of this rank.

        Each stage of the model in turn runs once, on the inputs of ``microbatch`` and zeros for what it receives; if
        one fails, every rank raises. torch's schedules infer shapes with uninitialised values, draw random numbers and
        change running statistics; this changes no state.
        """
        received: list[StageOutput | None] = []
        sent: list[StageOutput | None] = []
        stage_output: StageOutput | None = None
        failure: Exception | None = None
        for index in range(self._config.num_stages):
            described: list[Any] = [None]
            if index in self._stage_indices:
                received.append(stage_output)
                try:
                    sent.append(
                        self._try(self._linked[self._stage_indices.index(index)].stage, stage_output, microbatch)
                    )
                    described = [sent[-1]]
                    pickle.dumps(described)
                except Exception as error:
                    failure = error
                    what = f"stage {index} of {self._config.num_stages} fails on a microbatch of {microbatch}"
                    described = [f"pipeline: {what}: {type(error).__name__}: {error}{at_users_line(error)}"]
                    if isinstance(error, ConfigError):
                        described = [str(error)]
            dist.broadcast_object_list(described, group=self._context.pp.group, group_src=self._config.rank_of(index))
            if isinstance(described[0], str):
                raise ConfigError(described[0]) from failure
            stage_output = described[0]
        return received, sent

    def _try(self, stage: Stage, received: StageOutput | None, microbatch: Batch) -> StageOutput | None:
        """The output of ``stage``, for zeros of what it ``received``; None for the last stage.

        Temporarily frozen parameters count as trained, because other ranks are not notified when that changes.
        """
        random, stage.random = stage.random, nullcontext()
        frozen = [parameter for parameter in self._trained if not parameter.requires_grad]
        try:
            alone, thawed = counted_alone(stage), _requiring_gradients(frozen, True)
            with alone, thawed, keeping_state(stage), without_draws(self._context.device), torch.enable_grad():
                # Copied, because a stage that changes its inputs in place is to do so once.
                args, kwargs = map_tensors(torch.clone, (microbatch.args, microbatch.kwargs))
                overlapping: list[torch.Tensor] = []
                if received is not None:
                    zeros_like = partial(torch.zeros_like, device=stage.link_device)
                    zeros = (zeros_like(meta, requires_grad=meta.requires_grad) for meta in received.metas(True))
                    args = (stage.receive(received, tuple(zeros)),)
                    overlapping = received.overlapping(args[0])
                before = self._shared[stage].states(copied=True)
                with refusing_changes([(str(tuple(one.shape)), one) for one in overlapping], _changed_view):
                    output = stage(*args, **kwargs)
                self._shared[stage].check_unchanged(before)
                return None if stage.is_last else stage.describe(output, overlapping)
        finally:
            stage.random = random
            if frozen and self._stages.units is not None:
                self._stages.units.follow_shards()  # what the batch has gathered required a gradient


def _changed_view(shape: str) -> ConfigError:
    return ConfigError(
        f"parallel.pipeline.split: a stage changes a tensor of shape {shape} in place, of which it has also got a "
        "view, or a tensor that this is a view of: as a copy, which keeps the old values; write y = y + x for y += x, "
        "make the view later, or split so that one stage has the view and the sum"
    )


def _criterion_failure(error: Exception) -> ValueError:
    """The exception to raise when the criterion raised ``error``."""
    if isinstance(error, ValueError) and str(error).startswith("criterion: "):
        return error
    failure = ValueError(f"criterion: it failed on the last stage: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


@contextmanager
def _requiring_gradients(changed: Sequence[nn.Parameter], required: bool) -> Iterator[None]:
    """A context in which parameters, all of which are to be ``changed``, require a gradient or not."""
    try:
        for parameter in changed:
            parameter.requires_grad_(required)
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not required)


def _remove_backwards(schedule: Any) -> None:
    """Remove the backward actions from one of torch's schedules, for evaluation.

    The schedule's ``eval`` executes all actions, and fails if stages of one rank pass gradients to each other. The
    forward actions keep their order, in which sends match receives.
    """
    order = schedule.pipeline_order_with_comms
    for rank, actions in order.items():
        single = [one for action in actions for one in (action.sub_actions or (action,))]
        order[rank] = [one for one in single if one.computation_type.name in FORWARD_ACTIONS]
