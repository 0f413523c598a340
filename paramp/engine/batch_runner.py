"""Runs batches of a data rank in microbatches, with a pipeline or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map, tree_map_only

from ..base.dtensor import full_tensor
from ..base.errors import ConfigError
from ..base.spans import Observer, begin_call, span
from ..distributed.collectives import broadcast_
from ..distributed.context import ParallelContext
from ..observe.overflow_hooks import Tracer
from ..observe.replay import Call
from ..observe.same_data import FirstBatches
from ..optim.flat_params import FlatWeights
from ..parallel.pipeline import Pipeline
from ..parallel.stage import Stages
from .compute_context import ComputeContext
from .loss_window import CheckedCriterion, Criterion, Loss, LossWindow
from .shared_failure import SharedFailure

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps a microbatch's output and target to the 0-dim tensor that its backward starts from."""


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
        criterion: Criterion | None,
        losses: LossWindow,
        failure: SharedFailure,
        observers: list[Observer],
        context: ParallelContext,
    ) -> None:
        config = context.config.parallel.pipeline
        self.num_microbatches = config.num_microbatches
        pipeline = Pipeline(stages, context, config, observers, failure.raise_if_alone) if config.size > 1 else None
        self.pipeline = pipeline
        self._compute = ComputeContext.in_layout(context)
        self.criterion = CheckedCriterion(criterion, self._compute)
        self._observers = observers
        self._stages = stages
        self._weights = weights
        self._gradients = weights.gradients
        self._losses = losses
        self._failure = failure
        self._context = context
        self._first_batches = FirstBatches(context)

    # ------------------------------------------------------------------------------------------------------- batches

    def run(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        *,
        backward: bool = False,
        totals: torch.Tensor | None = None,
        seen: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> None:
        """Run a batch; append outputs and targets to ``seen``. Failures are recorded.

        Args:
            backward: add losses and gradients to the accumulation window.
            totals: without a backward, add the losses to it; None: compute no losses.
        """
        losses = self._losses
        if backward or totals is not None:
            self.criterion.require()
        self._failure.refuse_if_alone()
        problem: Exception | None
        try:
            self._first_batches.check(backward, inputs=x, target=y)
            problem = self._problem_of(x, y)
        except ConfigError as error:
            problem = error
        if problem is not None:
            self._failure.record(problem)

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            if seen is not None:
                seen.append((output.detach(), target))
            if backward:
                return losses.scaled(self.criterion(output, target))
            if totals is None:
                return _no_loss(output, target)
            value, added = losses.split(self.criterion(output, target))
            totals.add_(added)
            return value

        if not backward:
            self._run(x, y, loss, problem)
            return
        losses.begin_backward(y.numel() / self.num_microbatches if isinstance(y, torch.Tensor) else 1.0, (x, y))
        with losses.failing():
            self._run(x, y, loss, problem, backward=True, overlap=losses.in_last_call)

    def rerun(self, call: Call, scale: torch.Tensor, tracer: Tracer) -> None:
        """Run a batch of the window again, forward and backward, at the loss scale ``scale`` (0-dim), with ``tracer``.

        It adds gradients to the buffers and nothing to the window.
        """

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            value, _ = self._losses.split(self.criterion(output, target))
            tracer.see_loss(output, target, value)
            scaled = value * scale / self._losses.size
            tracer.see_scaled(scaled)
            return scaled

        self._observers.append(tracer)
        try:
            self._run(call.x, call.y, loss, self._problem_of(call.x, call.y), backward=True)
        finally:
            self._observers.remove(tracer)
        if (failure := self._failure.take()) is not None:
            tracer.failure = str(failure)

    def run_backward(self, loss: Loss) -> None:
        """Run the backward of ``loss``, as the criterion returned it, in the accumulation window."""
        losses = self._losses
        losses.begin_backward(float(loss[1]) if isinstance(loss, tuple) else 1.0, None)
        taking_part = self._taking_part(losses.in_last_call)
        with self._context.phase("backward"), losses.failing(), taking_part as begin_reductions, self._compute.enter():
            value = losses.scaled(tree_map_only(torch.Tensor, full_tensor, loss))
            begin_reductions()
            losses.in_backward = True
            try:
                value.backward()
            finally:
                losses.in_backward = False

    def output(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, as :meth:`Engine.__call__` returns it."""
        training = self._stages.module.training
        if self.pipeline is None:
            self._first_batches.check(training, inputs={**dict(enumerate(args)), **kwargs})
            self._weights.put_back()
            failing = self._losses.failing(incomplete=False) if training else nullcontext()
            with failing, self._context.phase("forward"), self._compute.enter():
                output = self._stages(*args, **kwargs)
            if not training:
                return tree_map(full_tensor, output)
            tree_map_only(torch.Tensor, self._losses.watch, output)
            return output
        if training:
            raise RuntimeError(
                "engine(x) cannot train under pipeline > 1, where forward and backward of several microbatches "
                "interleave; call engine.forward_backward(x, y), or engine.eval() first to look at outputs"
            )
        return self._pipelined_output(*args, **kwargs)

    # -------------------------------------------------------------------------------------------------- microbatches

    def _problem_of(self, x: torch.Tensor, y: torch.Tensor) -> ValueError | None:
        """Why a batch cannot be split into microbatches along dim 0; None if it can."""
        for name, value in (("x", x), ("y", y)):
            if not isinstance(value, torch.Tensor) or value.ndim == 0:
                return ValueError(f"{name}: got {type(value).__name__}, expected a tensor with the batch in dim 0")
        if x.shape[0] != y.shape[0]:
            return ConfigError(f"batch: got {x.shape[0]} samples in x and {y.shape[0]} in y, expected equal numbers")
        if x.shape[0] % self.num_microbatches or x.shape[0] == 0:
            return ConfigError(
                f"batch: got {x.shape[0]} samples on each data rank, expected a multiple of the "
                f"{self.num_microbatches} microbatches (parallel.pipeline.microbatches)"
            )
        return None

    def _run(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        loss: LossFunction,
        problem: Exception | None,
        *,
        backward: bool = False,
        overlap: bool = False,
    ) -> None:
        """Run each microbatch forward, through ``loss`` on the last stage and, if asked, backward.

        Args:
            problem: why the batch cannot be run. Then this rank only takes part in the reductions.
            overlap: start the reductions over data ranks during the last backward.
        """
        overlap = overlap and (self.pipeline is None or self.pipeline.overlaps)
        with self._taking_part(overlap) as before_last_backward, self._compute.enter():
            if problem is not None:
                raise problem
            try:
                self._gradients.before_batch()
            except RuntimeError as error:  # on this stage only: the others wait for it in the schedule
                self._failure.record(error)
            if self.pipeline is None:
                self._run_plain(x, y, loss, before_last_backward if backward else None)
            else:
                self.pipeline.run(x, y, loss, backward=backward, before_last_backward=before_last_backward)

    @contextmanager
    def _taking_part(self, overlap: bool) -> Iterator[Callable[[], None]]:
        """Record an exception raised inside, and take part in the reductions over data ranks in any case.

        Yields a function to call before the last backward; with ``overlap`` it starts the reductions.
        """
        self._failure.begin_batch()
        begun = not overlap

        def before_last_backward() -> None:
            nonlocal begun
            if not begun:
                begun = True
                self._gradients.begin_last_backward()

        try:
            yield before_last_backward
        except Exception as error:
            if self.pipeline is not None and not self.pipeline.in_step:
                raise
            self._failure.record(error)
            before_last_backward()
        self._gradients.end_last_backward()

    def _run_plain(
        self, x: torch.Tensor, y: torch.Tensor, loss: LossFunction, before_last_backward: Callable[[], None] | None
    ) -> None:
        """Run without a pipeline; no backward if ``before_last_backward`` is None."""
        begin_call(self._observers)
        microbatches = zip(x.chunk(self.num_microbatches), y.chunk(self.num_microbatches), strict=True)
        for index, (inputs, target) in enumerate(microbatches):
            with span(self._observers, "forward", 0, index):
                output = self._stages(inputs)
            with span(self._observers, "loss", 0, index):
                value = loss(output, target.to(self._context.device))
            if before_last_backward is not None:
                if index == self.num_microbatches - 1:
                    before_last_backward()
                with span(self._observers, "backward", 0, index):
                    value.backward()

    @torch.no_grad()
    def _pipelined_output(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The model's output for one input, on every rank of the pipeline; gathered if it is sharded.

        Raises:
            ConfigError: the arguments are not one tensor, or the batch does not divide into microbatches.
        """
        assert self.pipeline is not None
        if kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor) or args[0].ndim == 0:
            given = [type(value).__name__ for value in args] + [f"{name}=" for name in kwargs]
            raise ConfigError(
                f"engine(x): got {', '.join(given) or 'nothing'}, expected one tensor with the batch in dim 0: a "
                "pipeline's first stage takes one input only; compute the others in the model, or set "
                "parallel.pipeline.size to 1"
            )
        (x,) = args
        labels = torch.zeros(x.shape[0])
        self._first_batches.check(False, inputs={**dict(enumerate(args)), **kwargs})
        if (problem := self._problem_of(x, labels)) is not None:
            raise problem
        self._failure.begin_batch()
        with self._compute.enter():
            output, failure = None, None
            try:
                output = self.pipeline.run(x, labels, _no_loss, backward=False)
            except Exception as error:
                if not self.pipeline.in_step:
                    raise
                failure = error
        group, last_rank = self._context.stage_axis.group, self.pipeline.last_rank
        self._failure.agree(failure, group)
        output = full_tensor(output)
        description: list[Any] = [None if output is None else (output.shape, output.dtype)]
        dist.broadcast_object_list(description, group=group, group_src=last_rank)
        if output is None:
            shape, dtype = description[0]
            output = torch.empty(shape, dtype=dtype, device=self._context.device)
        broadcast_(output, group, last_rank)
        return output


def next_batch(data_iter: Iterator[Any], failure: SharedFailure) -> tuple[Any, Any]:
    """The next pair ``(data, label)`` of ``data_iter``. A collective of the world.

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
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(f"data_iter: yielded {type(batch).__name__}, expected a pair (data, label)")
    return batch[0], batch[1]


def joined(seen: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs and targets of all microbatches, concatenated; outputs are gathered if they are sharded."""
    outputs, targets = zip(*seen, strict=True)
    return torch.cat([full_tensor(output) for output in outputs]), torch.cat(targets)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """A context in which every module in ``module`` is in evaluation mode; on exit each returns to its own mode."""
    modes = {child: child.training for child in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for child, training in modes.items():  # some may have been in evaluation mode on purpose
            child.training = training


def _no_loss(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """The loss function if no loss is computed."""
    return output.new_zeros(())
