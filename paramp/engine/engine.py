"""One training step over every layout, straight down.

Scaling. A microbatch's loss is multiplied by the loss scale and divided by the number of microbatches in the window
(microbatches x accumulation x data ranks), so that every later reduction is a plain sum. A criterion that returns
``(sum, count)`` is divided by a fixed power of two near its count instead, and the true total count is put right at
the step: gradient = sum of gradients / sum of counts, whatever the counts of the ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ..base.errors import CheckpointError, ConfigError, TrainingDiverged
from ..base.spans import Observer, begin_call, observed, span
from ..checkpoint.async_save import Saver
from ..checkpoint.chunks import Chunk
from ..checkpoint.dcp_storage import Header, problems_together, read, read_header_of
from ..config.schema import Config, flatten
from ..distributed.collectives import gather_objects
from ..distributed.context import ParallelContext, TiedParameter
from ..observe.grad_histogram import GradientHistogram, histogram_of
from ..observe.overflow_trace import Tracer, Window, investigate, stages_by_parameter
from ..observe.replica_check import Difference, Replicas
from ..observe.timeline import Timeline, recording
from ..optim.flat_params import FlatWeights
from ..optim.fused_step import FusedStep, choose_step
from ..optim.grad_norm import clip_coefficient, count_zeros, norm_power
from ..optim.loss_scaler import DistributedGradScaler
from ..optim.overflow_report import OverflowReport, find_gradients
from ..optim.param_buffer import FlatParam
from ..parallel.loss import vocab_parallel_loss
from ..parallel.pipeline import Pipeline
from ..parallel.stage import Stages
from ..precision.autocast import widening
from ..precision.capabilities import has_native_fp16
from ..precision.fp16_emulation import emulate_fp16
from ..precision.policy import LossScaling, Precision
from .step_result import StepResult
from .train_state import TrainingState

__all__ = ["Engine"]

Loss = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Criterion = Callable[[torch.Tensor, torch.Tensor], Loss]


class Stateful(Protocol):
    """What :meth:`Engine.track` takes."""

    def state_dict(self) -> dict[str, Any]:
        """What is to be saved."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Go on from what :meth:`state_dict` gave."""


class _Tally:
    """Counts of what happened on the device, which the host reads without stopping it.

    Optimizer steps made; steps skipped; those skipped in a row up to now; and of these, those that left the loss scale
    at its floor.
    """

    SIZE = 4

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(self.SIZE, dtype=torch.int64, device=device)
        self._copy = torch.zeros(self.SIZE, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def add(self, overflow: torch.Tensor, at_floor: torch.Tensor) -> None:
        """A step was made, or skipped for an ``overflow``; the scale is now ``at_floor``. Both are 0-dim bool."""
        self._counts[2:].mul_(overflow)
        self._counts += torch.stack([~overflow, overflow, overflow, overflow & at_floor])
        self._publish()

    def load(self, counts: Sequence[int]) -> None:
        """Go on from ``counts``, as :meth:`read` gave them; those left out at the end are 0."""
        rest = [0] * (self.SIZE - len(counts))
        self._counts.copy_(torch.tensor([*counts, *rest]))
        self._publish()

    def read(self) -> list[int]:
        """The counts, once the last :meth:`add` is through."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy.tolist()

    def _publish(self) -> None:
        self._copy.copy_(self._counts, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class Engine:
    """A model on its shards, with its optimizer and its loss scaler. :func:`paramp.initialize` makes one.

    Attributes:
        module: the modules of this rank's pipeline stages; the whole model without a pipeline.
        optimizer: steps this rank's weights or masters.
        scaler: the :class:`~paramp.DistributedGradScaler`, disabled in modes that do not scale.
        context: the :class:`~paramp.distributed.context.ParallelContext`.
        precision: the mode.
    """

    def __init__(
        self,
        stages: Stages,
        weights: FlatWeights,
        ties: list[TiedParameter],
        optimizer: torch.optim.Optimizer,
        criterion: Criterion | None,
        context: ParallelContext,
        first_names: Mapping[str, str],
        shapes: Mapping[str, torch.Size],
        overflow: torch.Tensor,
    ) -> None:
        config: Config = context.config
        precision: Precision = config.precision
        self.context = context
        self.precision = precision
        self.optimizer = optimizer
        self.module: nn.Module = stages.module
        scaling = precision.scaling or LossScaling(enabled=False)
        self.scaler = DistributedGradScaler(context.device, **asdict(scaling))
        self._tally = _Tally(context.device)
        self._before_step: list[Callable[[], None]] = []
        self._criterion = criterion
        self._stage = stages
        self._weights = weights
        self._ties = ties
        self._names = list(first_names)  # of all parameters of the whole model
        self._shapes = shapes  # of whole parameters, as the model has them
        self._overflow = overflow  # 0-dim; modules that hide an overflow from their gradients raise it (float8)
        self.observers: list[Observer] = [] if context.heartbeat is None else [context.heartbeat]
        """Told what this rank does: each forward and backward, and the step."""
        pipeline = config.parallel.pipeline
        self._num_microbatches = pipeline.num_microbatches
        self._pipeline = Pipeline(stages, context, pipeline, self.observers) if pipeline.size > 1 else None
        self._accumulation = config.gradient_accumulation
        self._emulate = precision.compute is torch.float16 and (
            not has_native_fp16(context.device) if config.emulate_fp16 == "auto" else config.emulate_fp16
        )
        self._update = choose_step(optimizer, weights)
        self._state = TrainingState(self.module, stages, weights, optimizer, ties, context, first_names, shapes)
        self._saver = Saver(context)
        self._tracked: dict[str, Stateful] = {}
        self._replicas = Replicas(self.module, weights, ties, optimizer, self.scaler, context)
        self._windows = 0  # ended so far, with a step or without
        self._stepping = False
        optimizer.register_step_pre_hook(self._check_caller)
        self._window = Window(stages, context.device)
        self._places = pipeline.stages_of(context.pp.rank)
        self._calls = 0  # of step() in this window
        self._spent = False  # the gradients belong to a window that has ended
        # of this window: sum of the losses, of their weights, and of those weights that are counts
        self._totals = torch.zeros(3, dtype=torch.float64, device=context.device)
        self._count_unit: float | None = None

    # ------------------------------------------------------------------------------------------ forward and backward

    @overload
    def forward_backward(
        self, x: torch.Tensor, y: torch.Tensor, *, return_loss: Literal[True] = True
    ) -> torch.Tensor: ...

    @overload
    def forward_backward(self, x: torch.Tensor, y: torch.Tensor, *, return_loss: Literal[False]) -> None: ...

    def forward_backward(self, x: torch.Tensor, y: torch.Tensor, *, return_loss: bool = True) -> torch.Tensor | None:
        """Run this data rank's part of the batch forward and backward, in microbatches, and gather gradients.

        Args:
            x, y: the same on every rank of the model group; split into microbatches along dim 0.
            return_loss: False leaves out the all-reduce that makes the loss equal on every rank. The step's own
                all-reduce brings it anyway: :attr:`StepResult.loss`.

        Returns:
            The true loss, 0-dim float32, equal on every rank: unscaled, the mean over microbatches, data ranks and
            the calls of this accumulation window so far.

        Raises:
            ValueError: the batch does not divide into the microbatches, there is no criterion, or it failed; under a
                pipeline on every rank, and the gradients of this window are to be dropped.
        """
        self._check_batch(x, y)
        self._begin_window(y.numel() / self._num_microbatches, (x, y))
        self._run(x, y, self._scaled_loss, backward=True)
        if return_loss:
            return self._window_loss()
        if self._pipeline is not None and self._pipeline.failure is not None:
            raise ValueError(_message(self._pipeline.failure)) from self._pipeline.failure
        return None

    def execute_schedule(
        self,
        data_iter: Iterator[tuple[torch.Tensor, torch.Tensor]],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Run the next batch of ``data_iter``, in every layout: Colossal-AI's way to train and to evaluate.

        ``step()``, ``zero_grad()``, ``train()`` and ``eval()`` stay the caller's.

        Args:
            data_iter: yields pairs ``(data, label)`` of this data rank, such as ``iter(train_dataloader)``.
            forward_only: run no backward.
            return_loss: compute the loss; needed for a backward.
            return_output_label: return output and label, too.

        Returns:
            ``(output, label, loss)``. Output and label are those of the whole batch, on this rank's device, detached,
            in the order of the batch; None on all but the last stage of a pipeline. The loss is the true one, as
            :meth:`forward_backward` returns it, on every rank; of this batch alone with ``forward_only``.

        Raises:
            StopIteration: there is no further batch.
            ValueError: as :meth:`forward_backward`; ``data_iter`` is no iterator or yields no pairs; or
                ``return_loss=False`` without ``forward_only``.
        """
        x, y = _next_pair(data_iter)
        if not (forward_only or return_loss):
            raise ValueError("return_loss: got False, but a backward needs the loss; pass forward_only=True too")
        self._check_batch(x, y, criterion=return_loss)
        totals = torch.zeros_like(self._totals)
        outputs: list[torch.Tensor] = []
        labels: list[torch.Tensor] = []

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            if return_output_label:
                outputs.append(output.detach())
                labels.append(target)
            if not return_loss:
                return torch.zeros((), device=self.context.device)
            return self._added(output, target, totals) if forward_only else self._scaled_loss(output, target)

        if not forward_only:
            self._begin_window(y.numel() / self._num_microbatches, (x, y))
        with torch.set_grad_enabled(not forward_only):
            self._run(x, y, loss, backward=not forward_only)
        mean = self._mean_over_ranks(totals if forward_only else self._totals) if return_loss else None
        if not outputs:
            return None, None, mean
        whole = [output.full_tensor() if isinstance(output, DTensor) else output for output in outputs]
        return torch.cat(whole), torch.cat(labels), mean

    def _run(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        backward: bool,
        reduce: bool = True,
    ) -> None:
        """The batch in microbatches: forward, through ``loss`` on the last stage, and backward.

        Args:
            reduce: begin reductions over data ranks beside the window's last backward.
        """
        before_last_backward = self._before_last_backward if reduce else _do_nothing
        with self._computing():
            if self._pipeline is not None:
                self._pipeline.run(x, y, loss, backward=backward, before_last_backward=before_last_backward)
                self._weights.end_last_backward()
                return
            begin_call(self.observers)
            parts = zip(x.chunk(self._num_microbatches), y.chunk(self._num_microbatches), strict=True)
            for index, (part, target) in enumerate(parts):
                with span(self.observers, "forward", 0, index):
                    output = self._stage(part)
                with span(self.observers, "loss", 0, index):
                    value = loss(output, target.to(self.context.device))
                if backward:
                    if index == self._num_microbatches - 1:
                        before_last_backward()
                    with span(self.observers, "backward", 0, index):
                        value.backward()
            self._weights.end_last_backward()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output in fp32, for the loop ``output = engine(x)``; with a pipeline, in evaluation only.

        In training, an output that the plan leaves sharded (``vocab_logits``) is a DTensor, which :meth:`criterion`
        takes; in evaluation it is gathered.
        """
        if self._pipeline is None:
            with self.context.phase("forward"), self._computing():
                output = self._stage(*args, **kwargs)
            if self._stage.training:
                return output
            return tree_map_only(DTensor, lambda value: value.full_tensor(), output)
        if self._stage.training:
            raise RuntimeError(
                "engine(x) cannot train under pipeline > 1, where forward and backward of several microbatches "
                "interleave; call engine.forward_backward(x, y), or engine.eval() first to look at outputs"
            )
        return self._pipelined_output(*args, **kwargs)

    def criterion(self, output: torch.Tensor, target: torch.Tensor) -> Loss:
        """The criterion given to ``initialize``, of this rank's output and target; not reduced over ranks."""
        if self._criterion is None:
            raise ValueError("criterion: initialize got none; pass one as its third argument")
        with vocab_parallel_loss(self.context.tp.size > 1):
            loss = self._criterion(output, target.to(self.context.device))
        if isinstance(loss, (tuple, list)) and len(loss) == 2:
            loss = (loss[0], torch.as_tensor(loss[1]))
        parts = loss if isinstance(loss, (tuple, list)) else (loss,)
        single = all(isinstance(part, torch.Tensor) and part.numel() == 1 for part in parts)
        if not single or len(parts) != (2 if isinstance(loss, (tuple, list)) else 1):
            raise ValueError(
                "criterion: expected a tensor of one element, or (sum, count) of two, got "
                + ", ".join(str(tuple(part.shape)) if isinstance(part, torch.Tensor) else repr(part) for part in parts)
            )
        plain: Loss = tree_map_only(torch.Tensor, _plain_scalar, loss)
        return plain

    def backward(self, loss: Loss) -> torch.Tensor:
        """Scale ``loss``, as :meth:`criterion` returned it, and run its backward.

        Returns:
            The true loss, as :meth:`forward_backward` does.
        """
        self._begin_window(float(loss[1]) if isinstance(loss, tuple) else 1.0, None)
        scaled = self._scale(loss)
        self._before_last_backward()
        with self.context.phase("backward"), self._computing():
            scaled.backward()
        self._weights.end_last_backward()
        return self._window_loss()

    @torch.no_grad()
    def evaluate(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of a batch in evaluation mode, without gradients: a mean as in :meth:`forward_backward`."""
        self._check_batch(x, y)
        totals = torch.zeros_like(self._totals)
        was_training = {module: module.training for module in self._stage.modules()}
        self._stage.eval()
        try:
            with self.context.phase("evaluation"):
                self._run(x, y, lambda output, target: self._added(output, target, totals), backward=False)
        finally:
            for module, training in was_training.items():  # some may have been frozen in evaluation mode
                module.training = training
        return self._mean_over_ranks(totals)

    def recording(self) -> AbstractContextManager[Timeline]:
        """A context that notes what every rank does inside, :meth:`forward_backward` and :meth:`step`, and when.

        It gives a :class:`~paramp.observe.timeline.Timeline`, complete when the context is left; every rank enters and leaves.
        """

        return recording(self.context, self.observers)

    # ---------------------------------------------------------------------------------------------------- the step

    @observed("step")
    @torch.no_grad()
    def step(self) -> StepResult:
        """Step the optimizer, or skip the step on every rank if a gradient of any rank is not finite.

        With ``gradient_accumulation=k`` only every k-th call does so; the others leave the gradients to accumulate.

        Raises:
            ReplicaDrift: replicas were compared after this step (``check_replicas_every``) and differ; on every rank.
        """
        scale = self.scaler.scale_tensor()
        self._calls += 1
        if self._calls < self._accumulation:
            return StepResult(scale.double().reshape(1), stepping=False)
        self._calls, self._spent = 0, True
        self._window.end(scale)
        at_limit = self._at_limit()
        for prepare in self._before_step:
            prepare()
        found_inf = self._complete_gradients()
        agreed = self._agree(found_inf)
        overflow, norm, factor = self._judge(agreed, scale)
        self._stepping = True
        try:
            self._update(scale.double() / factor, overflow.float(), self._absent(agreed))
        finally:
            self._stepping = False
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # skipped or not, schedulers come after it
        values = torch.stack([scale.double(), overflow.double(), norm, agreed.zeros, agreed.loss / agreed.weight])
        self.scaler.update_from_flag(overflow)
        self._tally.add(overflow, self.scaler.at_floor())
        if self.precision.verbose and self.context.is_main and self.scaler.get_scale() != (old := float(values[0])):
            print(f"paramp: the loss scale goes from {old:g} to {self.scaler.get_scale():g}", flush=True)
        self._check_replicas_in_turn()
        result = StepResult(values, with_zeros=self.precision.log_num_zeros)
        if at_limit and result.overflow:
            self._stop()
        return result

    def check_replicas(self) -> list[Difference]:
        """Compare what several ranks hold: weights, masters, optimizer state and the loss scale, bit for bit.

        Every rank calls it, and gets the same answer: nothing if all is well. It changes nothing. With
        ``check_replicas_every`` in the configuration, :meth:`step` compares by itself, and stops or repairs.
        """
        return self._replicas.check()

    def _check_replicas_in_turn(self) -> None:
        """Compare after every so many optimizer steps, made or skipped.

        Raises:
            ReplicaDrift: there is a difference, and it is not to be repaired.
        """
        config = self.context.config
        self._windows += 1
        if config.check_replicas_every is not None and self._windows % config.check_replicas_every == 0:
            self._replicas.stop_or_repair(repair=config.repair_replicas)

    @property
    def num_steps(self) -> int:
        """Optimizer steps made so far."""
        return self._tally.read()[0]

    @property
    def num_skipped(self) -> int:
        """Optimizer steps skipped for an overflow so far."""
        return self._tally.read()[1]

    @property
    def num_skipped_in_a_row(self) -> int:
        """Optimizer steps skipped one after the other, up to the last one."""
        return self._tally.read()[2]

    def _at_limit(self) -> bool:
        """Whether training stops if the step to come is skipped too.

        That is known from the steps before, so that the host waits for a step itself only where it comes to this.
        """
        most = self.context.config.max_skipped_in_a_row
        if most is None:
            return False
        _, _, in_a_row, at_floor = self._tally.read()
        return in_a_row >= most - 1 or at_floor > 0

    def _stop(self) -> NoReturn:
        steps, skipped, in_a_row, at_floor = self._tally.read()
        report: OverflowReport | str
        try:
            report = self.diagnose_overflow()
        except Exception as error:  # the stop has to come all the same, and on every rank
            report = f"no diagnosis could be made: {type(error).__name__}: {error}"
        floor = " with the loss scale at its floor" if at_floor else ""
        raise TrainingDiverged(
            f"training stopped after optimizer step {steps + skipped}, because {in_a_row} steps in a row were "
            f"skipped{floor}: {report}",
            report,
        )

    def diagnose_overflow(self) -> OverflowReport:
        """Why the last step was skipped: the module, microbatch, pass and rank that gave the first value that is not
        finite (:mod:`paramp.observe.overflow_trace`).

        Call it on every rank after :meth:`step`, before the next batch. It runs the batches of the step again with
        hooks, which takes a few times as long as the step did, and leaves gradients of zero. Everything else is as it
        was, random streams and running statistics included, so that training goes on as if it had not been called.
        After a loop of ``engine(x)`` and ``backward`` the batches are not known, and the report is on the gradients
        alone.

        Raises:
            RuntimeError: no step was taken since the last batch, or it was not skipped.
        """
        if self._window.scale is None or not self.num_skipped_in_a_row:
            raise RuntimeError(
                "diagnose_overflow: no step was skipped; call it after one that was, before the next batch"
            )
        stages = stages_by_parameter(self._stage, self._places)
        try:
            return investigate(
                self._window,
                self._run_again,
                lambda: find_gradients(self.named_parameters(), self.context, stages),
                self._complete_gradients,
            )
        finally:
            self._drop_gradients()

    def gradient_histogram(self) -> GradientHistogram:
        """Where the scaled gradients lie in the range of the mode's compute dtype, by their binary exponents.

        Call it on every rank between :meth:`forward_backward` and :meth:`step`.
        """
        return histogram_of(self._weights, float(self.scaler.scale_tensor()), self.precision.compute)

    def _run_again(self, scale: torch.Tensor) -> Tracer:
        """The batches of the last window, watched, at the loss scale ``scale``."""
        tracer = Tracer(self._stage, self._places, self.context)

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            value, _ = self._split(self.criterion(output, target))
            tracer.see_loss(output, target, value)
            scaled = value * scale / self._window_size
            tracer.see_scaled(scaled)
            return scaled

        self._drop_gradients()
        self.observers.append(tracer)
        try:
            with torch.enable_grad(), self._window.again() as calls, tracer:
                for call in calls:
                    tracer.see_batch(call.x)
                    self._run(call.x, call.y, loss, backward=True, reduce=False)
                    if self._pipeline is not None and self._pipeline.failure is not None:
                        tracer.failure = _message(self._pipeline.failure)
        finally:
            self.observers.remove(tracer)
        return tracer

    def _drop_gradients(self) -> None:
        self._weights.zero_grad()
        for tie in self._ties:
            tie.summed = None
        self._overflow.zero_()

    def before_step(self, function: Callable[[], None]) -> None:
        """Call ``function`` before each optimizer step from now on."""
        self._before_step.append(function)

    def _check_caller(self, *_: Any) -> None:
        """The optimizer's own step would take gradients that are scaled, and of this rank alone."""
        if not self._stepping:
            raise RuntimeError(
                "optimizer.step(): the optimizer belongs to an engine; call engine.step(), which first completes, "
                "unscales and judges the gradients"
            )

    def _complete_gradients(self) -> torch.Tensor:
        """Complete each gradient: its placements, its tied copies, its data ranks.

        Returns:
            1 if a gradient that was cut, or cast to float8, was not finite, which nobody would see any more; else 0.
            0-dim, this rank's.
        """
        found_inf = self._overflow.clone()
        self._overflow.zero_()
        self._weights.collect(found_inf)
        self._weights.reduce()
        return found_inf

    def _agree(self, found_inf: torch.Tensor) -> _Agreed:
        """Put together what every rank found, in the one control all-reduce of a step."""
        device = self.context.device
        zeros = torch.zeros((), dtype=torch.float64, device=device)
        if self.precision.log_num_zeros:
            zeros = count_zeros(*self._weights.counted(), device)
        found = [found_inf.double(), norm_power(*self._weights.judged(), 2.0, device), zeros]
        control = torch.cat([torch.stack(found), self._counted(self._totals), self._presence()])
        if self.context.world_size > 1:
            dist.all_reduce(control)
        found_any, squares, zeros, loss, weight, count = control[:6].unbind()
        return _Agreed(found_any, squares, zeros, loss, weight, count, present=control[6:])

    def _judge(self, agreed: _Agreed, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Whether to skip; the norm of the true gradient; and the factor that clips and averages the unscaled one."""
        overflow = (agreed.found_inf > 0) | ~agreed.squares.isfinite()
        # Means were divided by their number beforehand; sums are divided by their counts only here.
        factor = torch.where(agreed.count > 0, self._window_size / agreed.count, 1.0)
        norm = agreed.squares.sqrt() / scale.double() * factor
        if self.context.config.clip_grad_norm is not None:
            factor = factor * clip_coefficient(norm, self.context.config.clip_grad_norm)
        return overflow, norm, torch.where(overflow, 1.0, factor)

    def _presence(self) -> torch.Tensor:
        """Which of the whole model's parameters got a gradient on this rank, where data ranks may differ in that."""
        if self.context.dp.size == 1:
            return self._totals[:0]
        return self._weights.presence(self._names)

    def _absent(self, agreed: _Agreed) -> list[FlatParam]:
        """The parameters for which no data rank has a gradient: an optimizer does not step them."""
        absent = self._weights.absent()
        if absent and self.context.dp.size > 1:  # only then does it matter what the others have
            present = dict(zip(self._names, agreed.present.tolist(), strict=True))
            absent = [param for param in absent if not present[param.name]]
        return absent

    def zero_grad(self) -> None:
        """Make all gradients zero; within an accumulation window this changes nothing, so a plain loop accumulates."""
        if self._calls == 0:
            self._drop_gradients()
            self._totals.zero_()
            self._window.drop()
            self._spent = False

    # ------------------------------------------------------------------------------------------------- the model

    def train(self, mode: bool = True) -> Engine:
        self._stage.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the whole model's names."""
        return self.module.named_parameters()

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model, on every rank: full tensors on the CPU, floating-point ones in fp32.

        Where the mode has masters, their values; buffers are those of the first data rank. Every rank has to call it.
        """
        own = self.module.state_dict(keep_vars=True)
        masters = self._weights.full_precision()
        by_parameter = {
            id(p): masters[name] for name, p in zip(self._weights.names, self._weights.parameters, strict=True)
        }
        whole: dict[str, torch.Tensor] = {}
        for name, value in own.items():
            if not isinstance(value, torch.Tensor) or name.endswith("_extra_state"):  # Transformer Engine's scales
                continue
            if self.context.dp.size > 1 and not isinstance(value, nn.Parameter):  # running statistics: the first's
                value = value.clone()
                dist.broadcast(value, group=self.context.dp.group, group_src=0)
            value = by_parameter.get(id(value), value).detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value
            value = value.reshape(self._shapes.get(name, value.shape))
            whole[name] = (
                value.to(torch.promote_types(value.dtype, torch.float32)) if value.is_floating_point() else value
            )
        pp = self.context.pp
        result: dict[str, torch.Tensor] = {}
        for rank in range(pp.size):
            listing: list[Any] = [[(name, value.shape, value.dtype) for name, value in whole.items()]]
            if pp.size > 1:
                dist.broadcast_object_list(listing, group=pp.group, group_src=rank)
            for name, shape, dtype in listing[0]:
                value = (
                    whole[name].contiguous()
                    if rank == pp.rank
                    else torch.empty(shape, dtype=dtype, device=self.context.device)
                )
                if pp.size > 1:
                    dist.broadcast(value, group=pp.group, group_src=rank)
                result[name] = value.cpu().clone()
        return result

    # ------------------------------------------------------------------------------------------------ checkpoints

    def track(self, name: str, thing: Stateful) -> None:
        """Save the state of ``thing`` with the engine's from now on, as of rank 0, and load it on every rank.

        :func:`paramp.initialize` tracks the learning-rate scheduler and the loaders that it returns.

        Args:
            thing: its ``state_dict()`` is made of numbers, strings, small tensors, lists and dicts.
        """
        if not callable(getattr(thing, "state_dict", None)) or not callable(getattr(thing, "load_state_dict", None)):
            raise ConfigError(
                f"track: got {type(thing).__name__}, expected something with state_dict() and load_state_dict()"
            )
        self._tracked[name] = thing

    def save(self, path: str | Path, *, wait: bool = True, then: Callable[[], None] | None = None) -> None:
        """Write a checkpoint, which :meth:`load` reads in any layout, to the folder ``path``. Every rank calls it.

        It holds weights (masters where there are), optimizer, scaler with all counters, scheduler, random streams,
        the position in loaders and the configuration. The folder appears when it is whole; a checkpoint that was there
        is replaced.

        Args:
            path: on a file system that all machines share.
            wait: False returns as soon as all is copied to the CPU, and writes it beside the training. The next save,
                :meth:`finish_saving` and the end of the context wait for it.
            then: called on every rank when it is written; from another thread without ``wait``.

        Raises:
            CheckpointError: on every rank: something cannot be saved or written, or gradients are being accumulated;
                without ``wait`` by the next call.
        """
        with self.context.phase("checkpoint"):
            self._saver.save(path, self._what_to_save, wait=wait, then=then)

    def finish_saving(self) -> None:
        """Wait until what :meth:`save` began is written. Every rank calls it.

        Raises:
            CheckpointError: on every rank, if it failed.
        """
        with self.context.phase("checkpoint"):
            self._saver.finish()

    def load(self, path: str | Path, *, weights_only: bool = False, check: bool = True) -> None:
        """Take up the checkpoint at ``path``, saved in this layout or another. Every rank calls it.

        In the layout that saved it training goes on bit by bit as if it had never stopped. Nothing is changed before
        every file of it has been compared with its checksum. One that was imported has weights only.

        Args:
            weights_only: leave optimizer, scaler, scheduler, random streams and position as they are.
            check: False trusts that the files have just been compared with their checksums.

        Raises:
            CheckpointError: on every rank: it is not there, damaged, or of another model or optimizer.
        """
        with self.context.phase("checkpoint"):
            self._saver.finish()
            group = self._saver.group
            damage = problems_together(path, group) if check else []
            if damage:
                raise CheckpointError(damage[0])
            header = self._state.by_first_names(read_header_of(path))
            self._take_up(header, functools.partial(read, path, header=header, group=group), weights_only=weights_only)

    def _take_up(self, header: Header, fill: Callable[[list[Chunk]], None], *, weights_only: bool) -> None:
        """Load what ``header`` says is there; ``fill`` fills pieces from it."""
        self._state.check_model(header)
        everything = not weights_only and not header.only_weights
        if everything:
            self._state.check_optimizer(header)
        self._state.load_model(fill, header)
        if everything:
            self._state.load_optimizer(fill, header, begins_at_zero=isinstance(self._update, FusedStep))
            self._update.state_loaded()
            self._load_values(header.values)
            self._state.load_random(fill, header, self.num_steps)
        self._calls = 0
        self.zero_grad()

    def _what_to_save(self) -> tuple[Sequence[Chunk], Mapping[str, Any]]:
        if self._calls or self._window.is_open:
            raise CheckpointError(
                f"save: got a call with gradients that wait for a step, after {self._calls} of {self._accumulation} "
                "accumulation steps; they are not saved: save after the step that takes them"
            )
        values = {
            "layout": self._state.layout(),
            "config": flatten(self.context.config),
            "counts": self._tally.read(),
            "count_unit": self._count_unit,
            "scaler": self.scaler.state_dict(),
            "optimizer": type(self.optimizer).__name__,
            "groups": self._state.groups(),
            "numbers": self._state.numbers(),
            "tracked": {name: thing.state_dict() for name, thing in self._tracked.items()},
        }
        return self._state.chunks(), values

    def _load_values(self, values: Mapping[str, Any]) -> None:
        self._tally.load(values["counts"])
        self._count_unit = values["count_unit"]
        if values["scaler"] and self.scaler.is_enabled():
            self._load_scaler(values["scaler"], same_mode=values["config"].get("precision") == self.precision.name)
        failure: Exception | None = None
        try:
            for name, thing in self._tracked.items():
                if name in values["tracked"]:
                    thing.load_state_dict(values["tracked"][name])
        except Exception as error:
            failure = error
        failures = gather_objects(failure and f"{type(failure).__name__}: {failure}", self._saver.group)
        if failure is not None:
            raise failure
        if any(failures):
            raise CheckpointError(f"load: another rank failed: {next(message for message in failures if message)}")

    def _load_scaler(self, state: dict[str, Any], *, same_mode: bool) -> None:
        """Take up a scaler's state; in another mode only where the scale stands, if it moves in both."""
        own = self.scaler.state_dict()
        if same_mode:
            self.scaler.load_state_dict(state)
        elif all(one["min_scale"] is None or one["min_scale"] != one["max_scale"] for one in (own, state)):
            where = ("scale", "_growth_tracker", "_overflow_tracker")
            self.scaler.load_state_dict(own | {key: state[key] for key in where})

    # ------------------------------------------------------------------------------------------------- inner parts

    @property
    def _window_size(self) -> int:
        """Microbatches in a window, over all data ranks."""
        return self._num_microbatches * self._accumulation * self.context.dp.size

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with (
            emulate_fp16(self._emulate),
            widening(self.precision, self.context.device.type),
            vocab_parallel_loss(self.context.tp.size > 1),
        ):
            yield

    def _before_last_backward(self) -> None:
        """Called before the last backward of a batch: if it is the window's last, reductions may begin beside it."""
        if self._calls == self._accumulation - 1:
            self._weights.begin_last_backward()

    def _begin_window(self, count: float, batch: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        if self._spent:
            self.zero_grad()
        self._window.add(batch)
        self._weights.begin_window()
        if self._count_unit is None:
            # One unit for all ranks, so that their sums add up; a power of two, so that dividing by it is exact.
            largest = torch.tensor(max(count, 1.0), dtype=torch.float64, device=self.context.device)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            self._count_unit = 2.0 ** round(math.log2(float(largest)))

    def _scaled_loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self._scale(self.criterion(output, target))

    def _added(self, output: torch.Tensor, target: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
        """The loss, noted in ``totals``."""
        value, parts = self._split(self.criterion(output, target))
        totals.add_(parts)
        return value

    def _scale(self, loss: Loss) -> torch.Tensor:
        """``loss`` ready for its backward, and noted in the window's totals."""
        value, parts = self._split(loss)
        if not value.requires_grad:
            raise ValueError(
                "criterion: its loss does not depend on the model's output, so nothing can be learned from it; "
                "do not detach it, and compute it in torch"
            )
        self._totals += parts
        return self.scaler.scale(value) / self._window_size

    def _split(self, loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
        """What of a loss is differentiated, and its part in the totals; sums and counts over the unit of counts."""
        if not isinstance(loss, tuple):
            one = torch.ones((), dtype=torch.float64, device=self.context.device)
            return loss, torch.stack([loss.detach().double().to(one.device), one, torch.zeros_like(one)])
        unit = self._count_unit or 1.0
        value, count = loss[0] / unit, loss[1].detach().double().to(self.context.device) / unit
        return value, torch.stack([value.detach().double(), count, count])

    def _counted(self, totals: torch.Tensor) -> torch.Tensor:
        """``totals`` on the one rank of each tensor group whose losses count, zeros on the others."""
        return totals if self.context.is_last_stage and self.context.tp.rank == 0 else torch.zeros_like(totals)

    def _window_loss(self) -> torch.Tensor:
        return self._mean_over_ranks(self._totals)

    def _mean_over_ranks(self, totals: torch.Tensor) -> torch.Tensor:
        """The mean loss in ``totals`` of all ranks.

        Raises:
            ValueError: the criterion failed on the last stage of a pipeline.
        """
        failure = None if self._pipeline is None else self._pipeline.failure
        summed = torch.cat([self._counted(totals), totals.new_full((1,), float(failure is not None))])
        dist.all_reduce(summed)
        if self._pipeline is not None and summed[3]:
            messages = gather_objects(failure and _message(failure))
            raise ValueError(next(message for message in messages if message is not None)) from failure
        return (summed[0] / summed[1]).float()

    def _check_batch(self, x: torch.Tensor, y: torch.Tensor, *, criterion: bool = True) -> None:
        if criterion and self._criterion is None:
            raise ValueError("criterion: initialize got none; pass one as its third argument")
        for name, value in (("x", x), ("y", y)):
            if not isinstance(value, torch.Tensor) or value.ndim == 0:
                raise ValueError(f"{name}: got {type(value).__name__}, expected a tensor with the batch in dim 0")
        if x.shape[0] != y.shape[0]:
            raise ConfigError(f"batch: got {x.shape[0]} samples in x and {y.shape[0]} in y, expected as many")
        self._check_divides(x.shape[0])

    def _check_divides(self, size: int) -> None:
        if size % self._num_microbatches or size == 0:
            raise ConfigError(
                f"batch: got {size} samples on each data rank, expected a multiple of the {self._num_microbatches} "
                "microbatches (parallel.pipeline.microbatches)"
            )

    @torch.no_grad()
    def _pipelined_output(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The model's output for its one input on every rank of the pipeline; gathered whole if it is sharded."""
        assert self._pipeline is not None
        if kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor) or args[0].ndim == 0:
            given = [type(value).__name__ for value in args] + [f"{name}=" for name in kwargs]
            raise ConfigError(
                f"engine(x): got {', '.join(given) or 'nothing'}, expected one tensor with the batch in dim 0: a "
                "pipeline's first stage takes one input only; compute the others in the model, or set "
                "parallel.pipeline.size to 1"
            )
        (x,) = args
        self._check_divides(x.shape[0])
        with self._computing():
            output = self._pipeline.run(
                x, torch.zeros(x.shape[0]), lambda output, _: output.new_zeros(()), backward=False
            )
        if isinstance(output, DTensor):
            output = output.full_tensor()
        pp = self.context.pp
        listing: list[Any] = [None if output is None else (output.shape, output.dtype)]
        dist.broadcast_object_list(listing, group=pp.group, group_src=self._pipeline.last_rank)
        if output is None:
            output = torch.empty(listing[0][0], dtype=listing[0][1], device=self.context.device)
        dist.broadcast(output, group=pp.group, group_src=self._pipeline.last_rank)
        return output


@dataclass(frozen=True)
class _Agreed:
    """Sums over the world, each 0-dim float64 on the device."""

    found_inf: torch.Tensor
    squares: torch.Tensor
    """Of the scaled gradient of the logical model."""
    zeros: torch.Tensor
    loss: torch.Tensor
    weight: torch.Tensor
    """What the sum of the losses is to be divided by."""
    count: torch.Tensor
    """The part of that which is counts; 0 where the criterion returns means."""
    present: torch.Tensor
    """For each parameter of the whole model, on how many ranks it has a gradient; nothing where ranks cannot differ."""


def _next_pair(data_iter: Iterator[Any]) -> tuple[Any, Any]:
    if not hasattr(data_iter, "__next__"):
        raise ValueError(f"data_iter: got {type(data_iter).__name__}, expected an iterator, such as iter(loader)")
    batch = next(data_iter)
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(f"data_iter: it yielded {type(batch).__name__}, expected a pair (data, label)")
    return batch[0], batch[1]


def _message(error: Exception) -> str:
    text = str(error)
    if isinstance(error, ValueError) and text.startswith("criterion: "):
        return text
    return f"criterion: it failed on the last stage: {type(error).__name__}: {text}"


def _do_nothing() -> None:
    pass


def _plain_scalar(value: torch.Tensor) -> torch.Tensor:
    """A tensor of one element as a plain 0-dim one."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).reshape(())
