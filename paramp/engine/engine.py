"""One training step over every layout: :meth:`Engine.forward_backward`, then :meth:`Engine.step`.

The parts have modules of their own: a batch in microbatches (``batch_runner``), what other loops call
(``user_loop_runner``), the accumulation window and its losses (``accumulation_window``), the step with its decision,
result and counters (``step``), failures of one rank (``shared_failure``), checkpoints (``state.training_state``), the
whole model (``state.full_state``), and what is reported about training (:mod:`paramp.observe`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, overload

import torch
from torch import nn

from ..base.observer_spans import Observer, span
from ..base.wrapped_models import class_name
from ..config.schema import Config
from ..distributed.phase_of_rank import BATCH
from ..observe.grad_histogram import GradientHistogram, histogram_of
from ..observe.replica_check import Difference, Replicas
from ..observe.timeline import Timeline, recording
from ..observe.window_replay import diagnose_overflow, divergence
from ..parallel.expert_balance import token_counts
from ..pipeline.stage import Stages
from ..scaling.loss_scaler import DistributedGradScaler
from ..scaling.loss_scaling_options import LossScaling
from ..scaling.overflow_report import OverflowReport
from .accumulation_window import AccumulationWindow, WindowLosses
from .batch_runner import CheckedCriterion, EngineContext, OwnLoss
from .moving_averages_of_weights import WeightAverages
from .power_of_two_loss_divisor import Criterion, Loss
from .shared_failure import SharedFailure
from .state.full_state import full_state_dict, save_pretrained
from .state.model_tensors import ParamChunks
from .state.training_state import Stateful, TrainingState
from .step import OptimizerStep, StepCounters, StepResult
from .user_loop_runner import LoopRunner

Method = TypeVar("Method", bound=Callable[..., Any])


def _on_every_rank(method: Method) -> Method:
    """Every rank calls ``method``: the error names one that has left (:mod:`paramp.distributed.first_failure`)."""

    @functools.wraps(method)
    def wrapper(self: Engine, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            if (explained := self.context.departures.explained(method.__name__, error)) is None:
                raise
            raise explained from error

    return cast(Method, wrapper)


class Engine:
    """A sharded model with its optimizer and loss scaler. :func:`paramp.initialize` returns one.

    Attributes:
        module: the modules of this rank's pipeline stages; the whole model without a pipeline.
        parameters, named_parameters: those of ``module``, so this rank's; with the whole model's names.
        optimizer: the user's, which steps this rank's weights or masters; a tuple if ``initialize`` got a sequence.
        scaler: the :class:`~paramp.DistributedGradScaler`, disabled in modes that do not scale.
        context: the :class:`~paramp.distributed.context.ParallelContext`.
        precision: the mode.
        ema: averages of the weights, with ``ema`` in the configuration; else None.
        observers: notified of each forward, backward and step of this rank.
        before_step: functions called before each optimizer step.
        weights_changed: a function to call on every rank after edits of weights by ``.data``, for masters to follow.
    """

    def __init__(
        self,
        stages: Stages,
        params: ParamChunks,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        criterion: Criterion | None,
        own_loss: OwnLoss,
        overflow: torch.Tensor,
    ) -> None:
        """``own_loss`` finds the model's own loss, for no criterion; modules that hide an overflow set ``overflow``."""
        context, weights, device = params.context, params.weights, params.context.device
        self.context = context
        self.precision = context.config.precision
        self.optimizer: Any = optimizer
        self.module: nn.Module = stages.module
        self.parameters, self.named_parameters = stages.module.parameters, stages.module.named_parameters
        self.scaler = DistributedGradScaler(device, **asdict(self.precision.scaling or LossScaling(enabled=False)))
        self.observers: list[Observer] = [] if context.heartbeat is None else [context.heartbeat]
        self._phases = list(self.observers)  # what the heartbeat says of this rank
        self.before_step: list[Callable[[], None]] = []
        self.weights_changed = weights.changes.announce
        self._stages, self._params, self._weights = stages, params, weights
        counts = token_counts(stages)
        for one in counts:
            one.by_labels = criterion is None
        waits = context.config.parallel.data_ranks_wait or bool(counts)
        self._failure = SharedFailure(context, data_ranks_wait=waits)
        weights.gradients.overflow, weights.gradients.fail = overflow, self._failure.record
        losses = self._losses = WindowLosses(self.scaler, self._failure, weights.numerics, context)
        losses.unit.sum_over_data_ = stages.sum_for_loss_ or losses.unit.sum_over_data_
        window = self._window = AccumulationWindow(weights.gradients, losses, stages, counts, context)
        self._counters = StepCounters(device)
        weights.numerics.connect(stages, params, window, self._counters.read)
        checked = CheckedCriterion(criterion, own_loss, EngineContext.of(context, weights.numerics))
        self._runner = LoopRunner(stages, weights, checked, losses, window, self.observers)
        self.ema = WeightAverages(params, window, context.config.ema.decay) if context.config.ema else None
        weights.round_stochastically(params.first_names, self._counters.made)
        step = OptimizerStep(params, self.scaler, losses, window, self._failure, self._counters)
        self._optimizer_step, step.averages = step, self.ema
        self._replicas = Replicas(self.module, weights, params.ties, self.scaler, context)
        self._state = TrainingState(params, stages, window, step, self.scaler, self.ema)
        context.num_engines += 1

    @overload
    def forward_backward(self, inputs: Any, target: Any = ..., *, return_loss: Literal[True] = ...) -> torch.Tensor: ...

    @overload
    def forward_backward(self, inputs: Any, target: Any = None, *, return_loss: Literal[False]) -> None: ...

    @_on_every_rank
    def forward_backward(self, inputs: Any, target: Any = None, *, return_loss: bool = True) -> torch.Tensor | None:
        """Run this data rank's part of the batch forward and backward, in microbatches, and accumulate gradients.

        Args:
            inputs: of the model: a tensor, a tuple (positional) or a mapping (keywords) of nested tensors, the same on
                every rank of the model group; split along dim 0 (:mod:`paramp.parallel.microbatches`).
            target: any tree of tensors, for the criterion.
            return_loss: False omits the all-reduce that makes the loss equal on every rank. The step's own all-reduce
                does so anyway: :attr:`StepResult.loss`.

        Returns:
            The true loss, 0-dim float32, equal on every rank: unscaled, the mean over the window so far.

        Raises:
            ValueError: the batch does not divide into microbatches; neither a criterion nor a ``loss`` in the output.
            Exception: of the model or the criterion, on every rank: by this call or, without ``return_loss``, by the
                next that returns a loss or steps; on a GPU by the :meth:`step` after that step, which is not made.
                :meth:`zero_grad` drops the window.
        """
        with span(self._phases, BATCH):
            self._runner.run(inputs, target, backward=True)
            return self._window.mean_loss() if return_loss else None

    @_on_every_rank
    def execute_schedule(
        self,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, torch.Tensor | None]:
        """Run the next batch of ``data_iter`` in any layout, as in Colossal-AI; no step, no switch of modes.

        Args:
            data_iter: yields this data rank's pairs ``(data, label)``, or mappings of inputs: ``iter(train_loader)``.
            forward_only: run no backward, which needs ``return_loss``.
            return_output_label: return output and label too.

        Returns:
            ``(output, label, loss)``. Output and label are of the whole batch, on this rank's device, detached; None on
            all but the last stage of a pipeline. The loss is as :meth:`forward_backward` returns it, on every rank; of
            this batch alone with ``forward_only``.

        Raises:
            StopIteration: there is no further batch.
            Exception: as :meth:`forward_backward`; on every rank, whatever ``data_iter`` raises on one.
        """
        return self._runner.run_next(data_iter, forward_only, return_loss, return_output_label)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output in fp32; with a pipeline in evaluation only. In training a sharded one is a DTensor."""
        return self._runner.output(*args, **kwargs)

    def __repr__(self) -> str:
        mesh = self.context.mesh
        sizes = " x ".join(f"{name} {size}" for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        count, mode = self._params.num_parameters, self.precision.name
        return f"Engine({class_name(self.module)}, {count:,} parameters, {mode}, {sizes})"

    def criterion(self, *args: Any, **kwargs: Any) -> Loss:
        """Call the criterion given to ``initialize``: this rank's loss, not reduced.

        Raises:
            ValueError: ``initialize`` got none, or it returned neither one element nor ``(sum, count)``.
        """
        with self._window.failing(incomplete=False):
            return self._runner.criterion(*args, **kwargs)

    @_on_every_rank
    def backward(self, loss: Loss) -> torch.Tensor:
        """Run the backward of ``loss``, as :meth:`criterion` returned it; return what :meth:`forward_backward` does."""
        with span(self._phases, BATCH):
            self._runner.run_backward(loss)
            return self._window.mean_loss()

    @_on_every_rank
    def evaluate(self, inputs: Any, target: Any = None) -> torch.Tensor:
        """The loss of a batch in evaluation mode, without gradients: a mean as in :meth:`forward_backward`.

        Or that of a loader of batches ``(inputs, target)``: the mean over samples, or over the counts of a criterion
        that returns ``(sum, count)``. Batches may have any size, and data ranks different numbers of them.
        """
        return self._runner.evaluate(inputs, target)

    @_on_every_rank
    def count_tokens(self, batches: Iterable[Any]) -> None:
        """Run the batches of the next step without gradients, for a mixture that is balanced over all of them.

        Call it before the first :meth:`forward_backward` of each step whose balance is to be that of the global batch.
        Buffers and random streams are put back, so that the batches have the same dropout again.

        Args:
            batches: of this step, in its order: pairs ``(inputs, target)``, or mappings of inputs.

        Raises:
            ConfigError: the model counts no tokens, or counts those of each chunk (``reproducible``).
            ValueError: ranks have different numbers of batches; :meth:`step` raises it, and makes no step, if its
                batches were others. On every rank.
        """
        if self._runner.check_counted not in self.before_step:
            self.before_step.insert(0, self._runner.check_counted)
        self._runner.count_tokens(batches)

    @_on_every_rank
    @torch.no_grad()
    def step(self) -> StepResult:
        """Step the optimizer, or skip the step on every rank if a gradient of any rank is not finite.

        With ``gradient_accumulation=k`` only every k-th call steps; :meth:`flush` ends a window with fewer calls.

        Raises:
            RuntimeError: there was no backward since the last call, and no gradient was set by hand.
            ReplicaDrift: replicas were compared after this step (``check_replicas_every``) and differ; on every rank.
            TrainingDiverged: too many steps in a row were skipped (``max_skipped_in_a_row``); on every rank.
        """
        with span(self.observers, "step"):
            scale = self.scaler.scale_tensor()
            if not self._window.end_call(scale):
                return StepResult(scale.double().reshape(1), stepping=False)
            may_stop = self._counters.stop_after_skip(self.context.config.max_skipped_in_a_row)
            with self._window.failing():
                for prepare in self.before_step:
                    prepare()
                result = self._optimizer_step.make(scale)
            if self._replicas.every is not None:
                self._replicas.check_in_turn(self._replicas.every, self._window.record())
            if may_stop and result.overflow:
                raise divergence(self._counters.skips(), self.diagnose_overflow)
            return result

    def flush(self) -> StepResult:
        """End an accumulation window with the calls that were made, by a step as :meth:`step` makes it.

        The gradient is the mean over these calls. Call it after the last batch of an epoch, and before :meth:`save`. A
        backward without a call of :meth:`step` counts too; without any, nothing happens, and ``stepped`` is False.
        """
        if self._window.shorten():
            return self.step()
        return StepResult(self.scaler.scale_tensor().double().reshape(1), stepping=False)

    @property
    def config(self) -> Config:
        """That of :attr:`context`."""
        return self.context.config

    @property
    def num_steps(self) -> int:
        """Optimizer steps made so far."""
        return self._counters.read()[0]

    @property
    def num_skipped(self) -> int:
        """Optimizer steps skipped for an overflow so far."""
        return self._counters.read()[1]

    @property
    def num_skipped_in_a_row(self) -> int:
        """Optimizer steps skipped one after the other, up to the last one."""
        return self._counters.read()[2]

    def zero_grad(self) -> None:
        """Zero all gradients. Within an accumulation window only if a batch failed, as plain loops accumulate."""
        self._window.drop()

    def train(self, mode: bool = True) -> Engine:
        """Set training mode, as ``nn.Module.train`` does."""
        self._stages.train(mode)
        return self

    def eval(self) -> Engine:
        """Set evaluation mode, as ``nn.Module.eval`` does."""
        return self.train(False)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model, on every rank: full tensors on the CPU, floating-point ones in fp32 (``64-true``: fp64).

        Weights have the values of their masters; buffers are the first data rank's. A collective.
        """
        self._failure.check_not_alone()
        return full_state_dict(self._params)

    state_dict = full_state_dict

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype | None = torch.float32) -> None:
        """Write a Hugging Face model to a folder that ``from_pretrained`` reads. A collective, in every layout.

        Floating-point tensors are written in ``dtype``; None: fp32, and fp64 where weights are. On every rank it raises
        a ConfigError for a model not of transformers, or a weight too large for ``dtype``; and what rank 0 raises.
        """
        save_pretrained(self._params, self._failure, folder, dtype)

    def recording(self) -> AbstractContextManager[Timeline]:
        """A context that records the operations of every rank in ``forward_backward`` and ``step``, with their times.

        Every rank enters and exits it. The :class:`~paramp.observe.timeline.Timeline` is complete on exit.
        """
        return recording(self.context, self.observers)

    def check_replicas(self) -> list[Difference]:
        """Compare replicas bit for bit: weights, masters, optimizer state and the loss scale.

        Every rank calls it, and gets the same differences. With ``check_replicas_every`` in the configuration, ``step``
        compares too, and stops or repairs.
        """
        self._failure.check_not_alone()
        return self._replicas.check()

    @property
    def replicas_found(self) -> list[Difference] | None:
        """What the last :meth:`step` found in its comparison of replicas; None if it made none."""
        return self._replicas.last

    def gradient_histogram(self) -> GradientHistogram:
        """The scaled gradients by exponent. Every rank calls it between ``forward_backward`` and ``step`` only."""
        self._window.check_unstepped()
        return histogram_of(self._weights, float(self.scaler.scale_tensor()), self.precision.compute)

    def diagnose_overflow(self) -> OverflowReport:
        """Why the last step was skipped: the module, microbatch, pass and rank of the first value that is not finite.

        Call it on every rank after ``step``, before the next batch. It reruns the batches of the step with hooks
        (:mod:`paramp.observe.window_replay`), and leaves gradients of zero; nothing else changes. After a loop of
        ``engine(x)`` and ``backward`` the batches are not known, and the report is on the gradients alone.

        Raises:
            RuntimeError: no step was taken since the last batch, or it was not skipped.
        """
        window, gradients, skipped = self._window.record(), self._weights.gradients, self.num_skipped_in_a_row > 0
        return diagnose_overflow(window, self._runner.rerun, gradients, self.context, skipped=skipped)

    def track(self, name: str, thing: Stateful, *, replace: bool = False) -> None:
        """Include the state of ``thing`` in checkpoints: saved from rank 0, loaded on every rank.

        Its ``state_dict()`` has numbers, strings, small tensors, lists and dicts; without one, a ConfigError, as for
        the name of another thing without ``replace``. ``initialize`` tracks the scheduler and loaders that it returns.
        After :meth:`load` it restores the state that was saved under this name, if no thing had the name then.
        """
        self._state.track(name, thing, replace=replace)

    def save(self, path: str | Path, *, wait: bool = True, then: Callable[[], None] | None = None) -> None:
        """Write a checkpoint to the folder ``path``; :meth:`load` reads it in any layout. Every rank calls it.

        It holds weights (or masters), optimizer, scaler, scheduler, random streams, loader positions, configuration.
        The folder, which all machines share, appears when it is complete, and replaces an older one.

        Args:
            wait: False returns when all values are copied to the CPU, and writes in the background. The next save,
                :meth:`finish_saving` and the end of the context without an error wait for it.
            then: called on every rank after writing; without ``wait`` from another thread.

        Raises:
            CheckpointError: on every rank, without ``wait`` by the next call: it cannot be written, or ``then`` failed.
        """
        self._state.save(path, wait=wait, then=then)

    def finish_saving(self) -> None:
        """Wait for the last :meth:`save`; raise a CheckpointError on every rank if it failed. A collective."""
        self._state.finish_saving()

    def load(self, path: str | Path, *, weights_only: bool = False, check: bool = True) -> None:
        """Load the checkpoint at ``path``, saved in this layout or another. Every rank calls it.

        In the layout that saved it, training continues bit for bit. All checksums are compared before anything changes.

        Args:
            weights_only: do not change optimizer, scaler, scheduler, random streams and loader positions.
            check: False skips the checksums, if they have just been compared.

        Raises:
            CheckpointError: on every rank: it is missing, damaged, or of another model or optimizer.
        """
        self._state.load(path, weights_only=weights_only, check=check)
