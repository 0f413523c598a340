"""Runs batches of a data rank in microbatches, with a pipeline or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ..base.dtensor import full_tensor
from ..base.errors import ConfigError
from ..base.spans import Observer, begin_call, span
from ..base.trees import map_tensors, tensors
from ..distributed.phases import BATCH
from ..observe.overflow_hooks import Tracer
from ..observe.replay import Call
from ..observe.same_data import SameBatches
from ..optim.flat_weights import FlatWeights
from ..parallel.batches import Batch, join
from ..pipeline.pipeline import Pipeline
from ..pipeline.stage import Stages
from ..pipeline.stage_output import broadcast_tree
from .criterion import CheckedCriterion, Loss
from .evaluation import evaluation_mode, is_loader, run_loader
from .losses import LossTotals, WindowLosses
from .shared_failure import SharedFailure
from .window import AccumulationWindow

LossFunction = Callable[[Any, Batch], torch.Tensor]
"""Maps the model's output for a microbatch to the 0-dim tensor that its backward starts from."""
Seen = list[tuple[Any, Any]]
"""The detached output and the target of each microbatch."""


class BatchRunner:
    """Runs batches through this rank's stages.

    Attributes:
        criterion: the user's.
        pipeline: None if there is one stage only.
        num_microbatches: how many parts each batch is split into.
    """

    def __init__(
        self,
        stages: Stages,
        weights: FlatWeights,
        criterion: CheckedCriterion,
        losses: WindowLosses,
        window: AccumulationWindow,
        observers: list[Observer],
    ) -> None:
        context, failure, numerics = losses.context, losses.failure, weights.numerics
        config = context.config.parallel.pipeline
        self.num_microbatches = config.num_microbatches
        self.pipeline = None
        if config.size > 1:
            self.pipeline = Pipeline(stages, context, config, observers, failure.raise_if_alone, numerics)
        self.criterion = criterion
        self._compute = criterion.compute
        self._numerics = numerics
        self._observers = observers
        self._stages = stages
        self._weights = weights
        self._gradients = weights.gradients
        self._losses, self._window = losses, window
        self._failure = failure
        self._context = context
        is_split = context.stage_axis.size * context.tensor_axis.size > 1
        self._same_batches = SameBatches(context, failure.raise_alone) if is_split else None

    # ------------------------------------------------------------------------------------------------------- batches

    def run(
        self,
        inputs: Any,
        target: Any,
        *,
        backward: bool = False,
        totals: LossTotals | None = None,
        seen: Seen | None = None,
    ) -> None:
        """Run a batch (:mod:`paramp.parallel.batches`); append outputs and targets to ``seen``. Failures are recorded.

        Args:
            backward: add losses and gradients to the accumulation window.
            totals: without a backward, add the losses to it; None: compute no losses.
        """
        losses = self._losses
        if self._failure.is_alone:
            self._failure.refuse()
        batch, microbatches = self._split(inputs, target, training=backward)

        def loss(output: Any, microbatch: Batch) -> torch.Tensor:
            if seen is not None:
                seen.append((map_tensors(torch.Tensor.detach, output), microbatch.target))
            if backward:
                return losses.scaled(self.criterion.of(output, microbatch))
            if totals is None:
                return _no_loss(output, microbatch)
            value, added = losses.split(self.criterion.of(output, microbatch))
            totals.add_(added)
            return value

        if not backward:
            self._run(microbatches, loss)
            return
        self._window.begin_backward(batch)
        microbatches = self._numerics.begin_batch(microbatches)  # now that the gradients of a past step are dropped
        with self._window.failing():
            self._run(microbatches, loss, backward=True, overlap=self._window.in_last_call)

    @torch.no_grad()
    def evaluate(self, inputs: Any, target: Any) -> torch.Tensor:
        """The loss of a batch, or of a loader, as :meth:`Engine.evaluate` returns it."""
        totals = LossTotals(self._context)
        with self._context.phase("evaluation"), evaluation_mode(self._stages):
            if target is None and is_loader(inputs):
                run_loader(inputs, self.run, totals, self.num_microbatches, self._failure, self._context)
            else:
                self.run(inputs, target, totals=totals)
        return self._losses.mean(totals)

    def run_next(
        self, data_iter: Iterator[Any], forward_only: bool, return_loss: bool, return_output_label: bool
    ) -> tuple[Any, Any, torch.Tensor | None]:
        """Run the next batch of ``data_iter``, as :meth:`Engine.execute_schedule` does."""
        inputs, target = next_batch(data_iter, self._failure)
        if not forward_only and not return_loss:
            raise ValueError("return_loss: got False, but a backward needs the loss; pass forward_only=True too")
        totals = LossTotals(self._context) if forward_only and return_loss else None
        seen: Seen | None = [] if return_output_label else None
        with self._context.phase("evaluation" if forward_only else BATCH), torch.set_grad_enabled(not forward_only):
            self.run(inputs, target, backward=not forward_only, totals=totals, seen=seen)
        shown: tuple[Any, Any] = (None, None)
        try:
            shown = joined(seen) if seen else shown
        except Exception as error:  # outputs that do not join; on the last stage only
            self._failure.record(error)
        if not return_loss:
            self._failure.agree(self._failure.take())
        if not return_loss:
            return *shown, None
        return *shown, self._window.mean_loss() if totals is None else self._losses.mean(totals)

    def rerun(self, call: Call, scale: torch.Tensor, tracer: Tracer) -> None:
        """Run a batch of the window again, forward and backward, at the loss scale ``scale`` (0-dim), with ``tracer``.

        It adds gradients to the buffers and nothing to the window.
        """

        def loss(output: Any, microbatch: Batch) -> torch.Tensor:
            value, _ = self._losses.split(self.criterion.of(output, microbatch))
            tracer.see_loss(output, microbatch.target, value)
            scaled = value * scale / self._losses.size
            tracer.see_scaled(scaled)
            return scaled

        self._numerics.begin_rerun(call.number)
        self._observers.append(tracer)
        try:
            self._run(call.batch.split(self._num_parts(call.batch)), loss, backward=True)
        finally:
            self._observers.remove(tracer)
        if (failure := self._failure.take()) is not None:
            tracer.failure = str(failure)

    def run_backward(self, loss: Loss) -> None:
        """Run the backward of ``loss``, as the criterion or the model returned it, in the accumulation window."""
        window, loss = self._window, self.criterion.counted(loss)
        self._numerics.check_own_forward()
        window.begin_backward(None)
        taking_part = self._taking_part(window.in_last_call)
        with self._context.phase("backward"), window.failing(), taking_part as begin_reductions, self._compute.enter():
            value = self._losses.scaled(map_tensors(full_tensor, loss))
            begin_reductions()
            with window.foreign.ours(), self._stages.resetting():
                value.backward()

    def output(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, as :meth:`Engine.__call__` returns it."""
        training = self._stages.module.training
        if training:
            self._numerics.check_own_forward()
        if self.pipeline is None:
            batch = Batch.called_with(args, kwargs).unwrapped()
            self._check_same(training, batch)
            self._weights.put_back()
            failing = self._window.failing(incomplete=False) if training else nullcontext()
            running = self._stages.running(backward=training)
            with failing, self._context.phase("forward" if training else "evaluation"), self._computing(), running:
                output = self._stages(*batch.args, **batch.kwargs)
            if not training:
                return map_tensors(full_tensor, output)
            self.criterion.find_count(output, batch)
            for tensor in tensors(output):
                self._window.foreign.watch(tensor)
            return output
        if training:
            raise RuntimeError(
                "engine(x) cannot train under pipeline > 1, where forward and backward of several microbatches "
                "interleave; call engine.forward_backward(x, y), or engine.eval() first to look at outputs"
            )
        return self._pipelined_output(*args, **kwargs)

    # -------------------------------------------------------------------------------------------------- microbatches

    def _split(self, inputs: Any, target: Any, *, training: bool) -> tuple[Batch, list[Batch]]:
        """The batch and its microbatches; none if it cannot be split, which is recorded as a failure."""
        batch, problem = Batch(), None
        try:
            batch = Batch.of(inputs, target)
        except ConfigError as error:
            problem = error
        try:
            self._check_same(training, batch)
            if problem is None:
                return batch, batch.split(self._num_parts(batch) if training else self.num_microbatches)
        except ConfigError as error:
            problem = error
        assert problem is not None
        self._failure.record(problem)
        return batch, []

    def _check_same(self, training: bool, batch: Batch) -> None:
        """Check that all ranks of the model group were given the same batch."""
        if self._same_batches is not None:
            self._same_batches.check(training, batch)

    def _num_parts(self, batch: Batch) -> int:
        """The number of microbatches of a batch that is trained on."""
        return self._numerics.num_microbatches(batch.size, self.num_microbatches)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """The context of forwards; without a criterion the model computes its loss there too."""
        own_loss = nullcontext() if self.criterion.is_given else self._compute.sharded_loss(in_model=True)
        with self._compute.enter(), own_loss:
            yield

    def _run(
        self, microbatches: list[Batch], loss: LossFunction, *, backward: bool = False, overlap: bool = False
    ) -> None:
        """Run each microbatch forward, through ``loss`` on the last stage and, if asked, backward.

        Without ``microbatches``, after a failure, this rank only takes part in the reductions. With ``overlap`` the
        reductions over data ranks start during the last backward.
        """
        overlap = overlap and (self.pipeline is None or self.pipeline.overlaps)
        leaves = self._gradients.local_leaves() if backward else nullcontext()
        running = self._stages.running(backward=backward)
        with self._taking_part(overlap, backward) as before_last_backward, self._computing(), leaves, running:
            if not microbatches:
                before_last_backward()
                return
            try:
                self._gradients.before_batch()
            except RuntimeError as error:  # on this stage only: the others wait for it in the schedule
                self._failure.record(error)
            if self.pipeline is None:
                self._run_plain(microbatches, loss, before_last_backward if backward else None)
            else:
                self.pipeline.run(microbatches, loss, backward=backward, before_last_backward=before_last_backward)

    @contextmanager
    def _taking_part(self, overlap: bool, backward: bool = True) -> Iterator[Callable[[], None]]:
        """Record an exception raised inside, and take part in what data ranks do together in any case.

        Yields a function to call before the last backward; with ``overlap`` it starts the reductions.
        """
        if self._failure.is_shared:
            self._failure.begin_batch()
        begun = not overlap

        def before_last_backward() -> None:
            nonlocal begun
            if backward and self._losses.unit.is_used:
                self._losses.unit.choose(None, self._losses.size)  # other data ranks wait for it
            if not begun:
                begun = True
                self._gradients.reduction.begin_last_backward()

        try:
            yield before_last_backward
        except Exception as error:
            if self.pipeline is not None and not self.pipeline.in_step:
                raise
            self._failure.record(error)
            before_last_backward()
        self._gradients.reduction.end_last_backward()

    def _run_plain(
        self, microbatches: list[Batch], loss: LossFunction, before_last_backward: Callable[[], None] | None
    ) -> None:
        """Run without a pipeline; no backward if ``before_last_backward`` is None."""
        begin_call(self._observers)
        for index, microbatch in enumerate(microbatches):
            self._numerics.begin_forward(index)
            with span(self._observers, "forward", 0, index):
                output = self._stages(*microbatch.args, **microbatch.kwargs)
            with span(self._observers, "loss", 0, index):
                value = loss(output, microbatch)
            if before_last_backward is not None:
                if index == len(microbatches) - 1:
                    before_last_backward()
                self._numerics.begin_backward(index)
                with span(self._observers, "backward", 0, index):
                    value.backward()
                self._numerics.end_backward(0, index)

    @torch.no_grad()
    def _pipelined_output(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for one batch, on every rank of the pipeline; gathered if it is sharded.

        Raises:
            ConfigError: the batch does not divide into microbatches.
        """
        assert self.pipeline is not None
        batch = Batch.called_with(args, kwargs)
        self._check_same(False, batch)
        microbatches = batch.split(self.num_microbatches)
        outputs: list[Any] = []

        def see(output: Any, microbatch: Batch) -> torch.Tensor:
            outputs.append(map_tensors(full_tensor, output))
            return _no_loss(output, microbatch)

        self._failure.begin_batch()
        output, failure = None, None
        with self._context.phase("evaluation"), self._computing(), self._stages.running(backward=False):
            try:
                self.pipeline.run(microbatches, see, backward=False)
                output = join(outputs) if outputs else None
            except Exception as error:
                if not self.pipeline.in_step:
                    raise
                failure = error
        group, last_rank = self._context.stage_axis.group, self.pipeline.last_rank
        self._failure.agree(failure, group)
        return broadcast_tree(output, self._context.device, group, last_rank)


def next_batch(data_iter: Iterator[Any], failure: SharedFailure) -> tuple[Any, Any]:
    """The next pair ``(data, label)`` of ``data_iter``; a mapping has no label. A collective of the world.

    Raises:
        StopIteration: there is no further batch; on every rank.
        ValueError: on every rank: on one, ``data_iter`` is exhausted, not an iterator, or yields something else.
        Exception: on every rank: whatever ``data_iter`` raises on one.
    """
    batch, problem = None, None
    try:
        batch = _next_pair(data_iter)
    except Exception as error:
        problem = error
    failure.agree(problem)
    assert batch is not None
    return batch


def _next_pair(data_iter: Iterator[Any]) -> tuple[Any, Any]:
    if not hasattr(data_iter, "__next__"):
        raise ValueError(f"data_iter: got {type(data_iter).__name__}, expected an iterator, such as iter(loader)")
    batch = next(data_iter)
    if isinstance(batch, Mapping):
        return batch, None
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(
            f"data_iter: yielded {type(batch).__name__}, expected a pair (data, label), or a mapping of the model's "
            "keyword inputs"
        )
    return batch[0], batch[1]


def joined(seen: Seen) -> tuple[Any, Any]:
    """The outputs and targets of all microbatches, concatenated; outputs are gathered if they are sharded."""
    outputs, targets = zip(*seen, strict=True)
    return join([map_tensors(full_tensor, output) for output in outputs]), join(list(targets))


def _no_loss(output: Any, _: Batch) -> torch.Tensor:
    """The loss function if no loss is computed."""
    return torch.zeros(())
