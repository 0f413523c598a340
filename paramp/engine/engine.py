"""One training step over every layout: :meth:`Engine.forward_backward`, then :meth:`Engine.step`.

The parts have modules of their own: a batch in microbatches (``batch_runner``), the losses of an accumulation window
(``loss_window``), the decision of all ranks about the step (``step_decision``), its result and counters
(``step_result``), failures of one rank (``shared_failure``), checkpoints (``train_state``), the whole model
(``state.full_state``), and what is reported about training (:mod:`paramp.observe`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn

from ..base.spans import Observer, observed
from ..config.schema import Config
from ..observe.grad_histogram import GradientHistogram, histogram_of
from ..observe.overflow_trace import diagnose_overflow, divergence
from ..observe.replay import Window
from ..observe.replica_check import Difference, Replicas
from ..observe.timeline import Timeline, recording
from ..optim.fused_step import choose_step
from ..optim.loss_scaler import DistributedGradScaler
from ..optim.overflow_report import OverflowReport
from ..optim.user_optimizer import ONLY_THE_ENGINE_STEPS, StepGuard, replace_zero_grad
from ..parallel.stage import Stages
from ..precision.policy import LossScaling
from .batch_runner import BatchRunner, Seen, evaluation_mode, joined, next_batch
from .evaluation import is_loader, run_loader
from .loss_window import Criterion, Loss, LossWindow, OwnLoss
from .shared_failure import SharedFailure
from .state.full_state import full_state_dict, save_pretrained
from .state.model_tensors import ParamChunks
from .step_decision import StepGradients, decide_step
from .step_result import StepCounters, StepResult
from .train_state import Stateful, TrainingState


class Engine:
    """A sharded model with its optimizer and loss scaler. :func:`paramp.initialize` returns one.

    Attributes:
        module: the modules of this rank's pipeline stages; the whole model without a pipeline.
        parameters, named_parameters: those of ``module``, so this rank's; with the whole model's names.
        optimizer: the user's, which steps this rank's weights or masters.
        scaler: the :class:`~paramp.DistributedGradScaler`, disabled in modes that do not scale.
        context: the :class:`~paramp.distributed.context.ParallelContext`.
        precision: the mode.
        observers: notified of each forward, backward and step of this rank.
        before_step: functions called before each optimizer step.
    """

    def __init__(
        self,
        stages: Stages,
        params: ParamChunks,
        optimizer: torch.optim.Optimizer,
        criterion: Criterion | None,
        own_loss: OwnLoss,
        overflow: torch.Tensor,
    ) -> None:
        """``own_loss``: finds the loss in the model's output, where there is no ``criterion``.

        ``overflow``: 0-dim float32, set to 1 by modules that hide an overflow from their gradients (float8)."""
        context, weights, device = params.context, params.weights, params.context.device
        self.context = context
        self.precision = context.config.precision
        self.optimizer = optimizer
        self.module: nn.Module = stages.module
        self.parameters, self.named_parameters = stages.module.parameters, stages.module.named_parameters
        self.scaler = DistributedGradScaler(device, **asdict(self.precision.scaling or LossScaling(enabled=False)))
        self.observers: list[Observer] = [] if context.heartbeat is None else [context.heartbeat]
        self.before_step: list[Callable[[], None]] = []
        self._stages = stages
        self._params = params
        self._weights = weights
        self._failure = SharedFailure(context)
        gradients = StepGradients(weights.gradients, params.ties, overflow, self._failure)
        self._losses = LossWindow(self.scaler, gradients, Window(stages, device), self._failure, context)
        self._runner = BatchRunner(
            stages, weights, criterion, own_loss, self._losses, self._failure, self.observers, context
        )
        self._counters = StepCounters(device)
        self._update = choose_step(optimizer, weights)
        self._guard = StepGuard(optimizer, ONLY_THE_ENGINE_STEPS)  # after choose_step, which looks for the user's hooks
        replace_zero_grad(optimizer, self._losses.drop)
        batches = self._losses.batches
        self._replicas = Replicas(self.module, weights, params.ties, optimizer, self.scaler, batches, context)
        self._state = TrainingState(params, stages, optimizer, self._update, self._counters, self._losses, self.scaler)
        context.num_engines += 1

    @overload
    def forward_backward(
        self, inputs: Any, target: Any = None, *, return_loss: Literal[True] = True
    ) -> torch.Tensor: ...

    @overload
    def forward_backward(self, inputs: Any, target: Any = None, *, return_loss: Literal[False]) -> None: ...

    def forward_backward(self, inputs: Any, target: Any = None, *, return_loss: bool = True) -> torch.Tensor | None:
        """Run this data rank's part of the batch forward and backward, in microbatches, and accumulate gradients.

        Args:
            inputs: of the model: a tensor, a tuple (positional) or a mapping (keywords) of nested tensors, the same on
                every rank of the model group; split into microbatches along dim 0 (:mod:`paramp.parallel.batches`).
            target: any tree of tensors, for the criterion.
            return_loss: False omits the all-reduce that makes the loss equal on every rank. The step's own all-reduce
                does so anyway: :attr:`StepResult.loss`.

        Returns:
            The true loss, 0-dim float32, equal on every rank: unscaled, the mean over microbatches, data ranks and
            the calls of this accumulation window so far.

        Raises:
            ValueError: the batch does not divide into the microbatches, or there is neither a criterion nor a ``loss``
                in the model's output.
            Exception: of the model or the criterion. A failure on one rank is raised on every rank, by this call or,
                without ``return_loss``, by the next that returns a loss or steps. :meth:`zero_grad` drops the window.
        """
        self._runner.run(inputs, target, backward=True)
        return self._losses.mean() if return_loss else None

    def execute_schedule(
        self,
        data_iter: Iterator[tuple[Any, Any]],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, torch.Tensor | None]:
        """Run the next batch of ``data_iter`` in any layout, as in Colossal-AI; no step, no switch of modes.

        Args:
            data_iter: yields pairs ``(data, label)`` of this data rank, such as ``iter(train_dataloader)``.
            forward_only: run no backward.
            return_loss: compute the loss; needed for a backward.
            return_output_label: return output and label too.

        Returns:
            ``(output, label, loss)``. Output and label are of the whole batch, on this rank's device, detached; None on
            all but the last stage of a pipeline. The loss is as :meth:`forward_backward` returns it, on every rank; of
            this batch alone with ``forward_only``.

        Raises:
            StopIteration: there is no further batch.
            Exception: as :meth:`forward_backward`; on every rank, whatever ``data_iter`` raises on one.
        """
        inputs, target = next_batch(data_iter, self._failure)
        if not forward_only and not return_loss:
            raise ValueError("return_loss: got False, but a backward needs the loss; pass forward_only=True too")
        totals = self._losses.no_losses() if forward_only and return_loss else None
        seen: Seen | None = [] if return_output_label else None
        with torch.set_grad_enabled(not forward_only):
            self._runner.run(inputs, target, backward=not forward_only, totals=totals, seen=seen)
        if not return_loss:
            self._failure.agree(self._failure.take())
        mean = self._losses.mean(totals) if return_loss else None
        return *(joined(seen) if seen else (None, None)), mean

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output in fp32, for the loop ``output = engine(x)``; with a pipeline, in evaluation only.

        In training, an output that the plan leaves sharded (``vocab_logits``) is a DTensor, which :meth:`criterion`
        takes; in evaluation it is gathered.
        """
        return self._runner.output(*args, **kwargs)

    def __repr__(self) -> str:
        mesh = self.context.mesh
        sizes = " x ".join(f"{name} {size}" for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        count, mode = self._params.num_parameters, self.precision.name
        return f"Engine({type(self.module).__name__}, {count:,} parameters, {mode}, {sizes})"

    def criterion(self, *args: Any, **kwargs: Any) -> Loss:
        """Call the criterion given to ``initialize``: this rank's loss, not reduced.

        Raises:
            ValueError: ``initialize`` got none, or it returned neither one element nor ``(sum, count)``.
        """
        with self._losses.failing(incomplete=False):
            return self._runner.criterion(*args, **kwargs)

    def backward(self, loss: Loss) -> torch.Tensor:
        """Run the backward of ``loss``, as :meth:`criterion` returned it; return what :meth:`forward_backward` does."""
        self._runner.run_backward(loss)
        return self._losses.mean()

    @torch.no_grad()
    def evaluate(self, inputs: Any, target: Any = None) -> torch.Tensor:
        """The loss of a batch in evaluation mode, without gradients: a mean as in :meth:`forward_backward`.

        Or that of a loader over all its batches ``(inputs, target)``: the mean over samples, or over the counts of a
        criterion that returns ``(sum, count)``; each sample of a loader that ``initialize`` sharded counts once. Its
        batches may have any size, and data ranks different numbers of them (:mod:`paramp.engine.evaluation`).
        """
        totals, runner = self._losses.no_losses(), self._runner
        with self.context.phase("evaluation"), evaluation_mode(self._stages):
            if target is None and is_loader(inputs):
                run_loader(inputs, runner.run, totals, runner.num_microbatches, self._failure, self.context)
            else:
                runner.run(inputs, target, totals=totals)
        return self._losses.mean(totals)

    @observed("step")
    @torch.no_grad()
    def step(self) -> StepResult:
        """Step the optimizer, or skip the step on every rank if a gradient of any rank is not finite.

        With ``gradient_accumulation=k`` only every k-th call steps; the others let gradients accumulate. :meth:`flush`
        ends a window with fewer calls.

        Raises:
            RuntimeError: there was no backward since the last call, and no gradient was set by hand.
            ReplicaDrift: replicas were compared after this step (``check_replicas_every``) and differ; on every rank.
            TrainingDiverged: too many steps in a row were skipped (``max_skipped_in_a_row``); on every rank.
        """
        scale = self.scaler.scale_tensor()
        if not self._losses.end_call(scale):
            return StepResult(scale.double().reshape(1), stepping=False)
        may_stop = self._counters.stop_after_skip(self.context.config.max_skipped_in_a_row)
        for prepare in self.before_step:
            prepare()
        losses, names = self._losses, self._params.first_names
        found_inf = losses.gradients.complete()
        window = losses.findings(), losses.size, losses.mean_factor
        decision = decide_step(found_inf, scale, losses.gradients.flat, *window, names, self.context)
        self._failure.publish(decision.num_failed)
        with self._guard:
            self._update(decision.divisor, decision.skip.float(), decision.absent)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers step even after a skipped step
        self.scaler.update_from_flag(decision.overflow, ~decision.skip)
        self._counters.add(decision.skip, decision.overflow, self.scaler.at_floor())
        result = StepResult(decision.values, with_zeros=self.precision.log_num_zeros)
        if self.precision.verbose and self.context.is_main and self.scaler.get_scale() != result.loss_scale:
            print(f"paramp: loss scale changes from {result.loss_scale:g} to {self.scaler.get_scale():g}", flush=True)
        self._replicas.check_in_turn()
        if may_stop and result.overflow:
            raise divergence(self._counters.read(), self.diagnose_overflow)
        return result

    def flush(self) -> StepResult:
        """End an accumulation window with the calls that were made, by a step as :meth:`step` makes it.

        The gradient is the mean over these calls, as without ``gradient_accumulation`` over one batch of all their
        samples. Call it after the last batch of an epoch, and before :meth:`save`. A backward without a call of
        :meth:`step` counts too. If there was none since the last step, nothing happens, and ``stepped`` is False.

        Raises:
            Exception: as :meth:`step`.
        """
        if self._losses.shorten():
            return self.step()
        return StepResult(self.scaler.scale_tensor().double().reshape(1), stepping=False)

    @property
    def config(self) -> Config:
        """The configuration: that of :attr:`context`."""
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
        self._losses.drop()

    def train(self, mode: bool = True) -> Engine:
        """Set training mode, as ``nn.Module.train`` does."""
        self._stages.train(mode)
        return self

    def eval(self) -> Engine:
        """Set evaluation mode, as ``nn.Module.eval`` does."""
        return self.train(False)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model, on every rank: full tensors on the CPU, floating-point ones in fp32.

        Weights have their masters' values if the mode has masters; buffers are the first data rank's. A collective.
        """
        return full_state_dict(self._params)

    state_dict = full_state_dict

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype | None = torch.float32) -> None:
        """Write a Hugging Face model to a folder that ``from_pretrained`` reads. A collective, in every layout.

        Args:
            folder: rank 0 writes it. Other files in it stay.
            dtype: of floating-point tensors. None: fp32, and fp64 where weights are.

        Raises:
            ConfigError: the model is not of the transformers library; on every rank.
            Exception: rank 0 could not write; on every rank.
        """
        save_pretrained(self._params, self._failure, folder, dtype)

    def recording(self) -> AbstractContextManager[Timeline]:
        """A context that records the operations of every rank in ``forward_backward`` and ``step``, with their times.

        Every rank enters and exits it. The :class:`~paramp.observe.timeline.Timeline` is complete on exit.
        """
        return recording(self.context, self.observers)

    def check_replicas(self) -> list[Difference]:
        """Compare replicas bit for bit: weights, masters, optimizer state and the loss scale.

        Every rank calls it, and gets the same differences; none if all is well. It changes nothing. With
        ``check_replicas_every`` in the configuration, ``step`` compares automatically, and stops or repairs.
        """
        return self._replicas.check()

    def gradient_histogram(self) -> GradientHistogram:
        """The distribution of the scaled gradients in the range of the mode's compute dtype, by binary exponent.

        Call it on every rank between ``forward_backward`` and ``step``.
        """
        return histogram_of(self._weights, float(self.scaler.scale_tensor()), self.precision.compute)

    def diagnose_overflow(self) -> OverflowReport:
        """Why the last step was skipped: the module, microbatch, pass and rank of the first value that is not finite.

        Call it on every rank after ``step``, before the next batch. It reruns the batches of the step with hooks
        (:mod:`paramp.observe.overflow_trace`), which takes a few times as long as the step did, and leaves gradients of
        zero; nothing else changes, neither random streams nor running statistics. After a loop of ``engine(x)`` and
        ``backward`` the batches are not known, and the report is on the gradients alone.

        Raises:
            RuntimeError: no step was taken since the last batch, or it was not skipped.
        """
        losses, skipped = self._losses, self.num_skipped_in_a_row > 0
        return diagnose_overflow(losses.batches, self._runner.rerun, losses.gradients, self.context, skipped=skipped)

    def track(self, name: str, thing: Stateful) -> None:
        """Include the state of ``thing`` in checkpoints: saved from rank 0, loaded on every rank.

        Its ``state_dict()`` consists of numbers, strings, small tensors, lists and dicts. :func:`paramp.initialize`
        tracks the learning-rate scheduler and the loaders that it returns.

        Raises:
            ConfigError: ``thing`` has no ``state_dict`` or no ``load_state_dict``.
        """
        self._state.track(name, thing)

    def save(self, path: str | Path, *, wait: bool = True, then: Callable[[], None] | None = None) -> None:
        """Write a checkpoint to the folder ``path``; :meth:`load` reads it in any layout. Every rank calls it.

        It holds weights (or their masters), optimizer, scaler with all counters, scheduler, random streams,
        loader positions and the configuration. The folder appears when it is complete, and replaces an older one.

        Args:
            path: on a file system that all machines share.
            wait: False returns when all values are copied to the CPU, and writes in the background. The next save,
                :meth:`finish_saving` and the end of the context wait for it.
            then: called on every rank after writing; without ``wait`` from another thread.

        Raises:
            CheckpointError: on every rank: something cannot be saved or written, ``then`` failed, or gradients are
                being accumulated; without ``wait``, raised by the next call.
        """
        self._state.save(path, wait=wait, then=then)

    def finish_saving(self) -> None:
        """Wait for the last :meth:`save`; raise a CheckpointError on every rank if it failed. A collective."""
        self._state.finish_saving()

    def load(self, path: str | Path, *, weights_only: bool = False, check: bool = True) -> None:
        """Load the checkpoint at ``path``, saved in this layout or another. Every rank calls it.

        In the layout that saved it, training continues bit for bit. Nothing is changed before every file has been
        compared with its checksum. An imported checkpoint has weights only.

        Args:
            weights_only: do not change optimizer, scaler, scheduler, random streams and loader positions.
            check: False skips the checksums, if they have just been compared.

        Raises:
            CheckpointError: on every rank: it is missing, damaged, or of another model or optimizer.
        """
        self._state.load(path, weights_only=weights_only, check=check)
