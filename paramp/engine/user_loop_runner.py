"""What an engine runs beside :meth:`Engine.forward_backward`: the user's own loop, evaluations, a batch once more.

:meth:`Engine.count_tokens` runs the batches of a step forward before they are trained on, for modules whose gradients
need a sum over all of them (:mod:`paramp.parallel.expert_balance`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from ..base.collectives import largest_over_ranks
from ..base.dtensor import full_tensor
from ..base.errors import AfterBatchError, ConfigError
from ..base.trees import map_tensors, tensors
from ..distributed.phase_of_rank import BATCH
from ..observe.nonfinite_hooks import Tracer
from ..observe.recorded_window import RecordedBatch
from ..parallel.expert_balance import EACH_ONCE, announcing, uncounted_if_failed
from ..parallel.loss_and_outputs_of_batch import broadcast_tree, join
from ..parallel.microbatches import Batch
from ..precision.compute_context import default_dtype_of
from .accumulation_window import LossTotals
from .batch_runner import BatchRunner, Seen, no_loss
from .evaluation import batch_of, evaluation_mode, is_loader, run_loader
from .power_of_two_loss_divisor import Loss, as_count
from .shared_failure import SharedFailure

IN_A_STEP = (
    "count_tokens: got a call after a batch of this step, expected one before the first; if that batch failed, call "
    "zero_grad() before"
)
NO_COUNTS = (
    "count_tokens: the model counts no tokens, expected a mixture that is balanced: a MoEGPT, a model of transformers "
    "with output_router_logits=True or a bias_rate in its configuration, or one with a TokenCounts for each router"
)


class LoopRunner(BatchRunner):
    """A :class:`BatchRunner`, whose ``run`` is that of ``forward_backward``, and what users' own loops call besides."""

    _counted: Sequence[Batch] | None = None
    """The batches of the next step, whose tokens were counted."""
    _num_forwards = 0
    """Of the user's loop in training."""

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
            self._num_forwards += training
            failed_alike = partial(self._failure.failed_alike, number=self._num_forwards)
            undone = uncounted_if_failed(self._window.counts, failed_alike)
            phase = self._context.phase("forward" if training else "evaluation")
            output = None
            try:
                with failing, undone, phase, self._computing(), running:
                    output = self.criterion.joined(self._stages(*batch.args, **batch.kwargs), batch)
            except AfterBatchError as error:
                if not training:
                    raise
                self._failure.record(error)  # the others wait for this rank in the backward, whose sum tells them
            if not training:
                output = map_tensors(full_tensor, output)
            if training or torch.is_grad_enabled():  # so that a backward may follow
                self.criterion.find_count(output, batch, training)
            for tensor in tensors(output) if training else ():
                self._window.foreign.watch(tensor)
            return output
        if training:
            raise RuntimeError(
                "engine(x) cannot train under pipeline > 1, where forward and backward of several microbatches "
                "interleave; call engine.forward_backward(x, y), or engine.eval() first to look at outputs"
            )
        return self._pipelined_output(*args, **kwargs)

    def run_backward(self, loss: Loss) -> None:
        """Run the backward of ``loss``, as the criterion or the model returned it, in the accumulation window.

        It is of a whole batch: a mean counts as those of all its microbatches would.
        """
        window, loss = self._window, self._of_rank(self.criterion.counted(loss))
        self._numerics.check_own_forward()
        self._failure.begin_batch()
        window.begin_batch(is_known=False)
        window.begin_backward(None)
        taking_part, trained = self._taking_part(window.in_last_call), self.criterion.training_nothing()
        phase, computing = self._context.phase("backward"), self._compute.enter()
        with phase, window.failing(), taking_part as begin_reductions, trained, computing:
            times = 1 if isinstance(loss, tuple) else self.num_microbatches
            value = self._losses.scaled(map_tensors(full_tensor, loss), times)
            begin_reductions()
            with window.foreign.ours(), self._stages.resetting(), default_dtype_of(self._compute.precision):
                value.backward()
        window.end_backward()

    def _of_rank(self, loss: Any) -> Any:
        """A ``loss`` of a joined output, as (sum, count), with what this rank adds to the sum and the count.

        Each rank of the context axis has the loss of whole sequences. Without a criterion, ``forward_backward`` adds
        losses and counts of the ranks' own tokens to the same window.
        """
        sequences = self._compute.sequences
        if sequences is None or self.criterion.is_given or not isinstance(loss, (tuple, list)):
            return loss
        total, count = loss[0], as_count(loss[1])
        return total / sequences.size, count / sequences.size if isinstance(count, torch.Tensor) else count

    @torch.no_grad()
    def evaluate(self, inputs: Any, target: Any) -> torch.Tensor:
        """The loss of a batch, or of a loader, as :meth:`Engine.evaluate` returns it."""
        self._check_window()
        totals = LossTotals(self._context)
        with self._context.phase("evaluation"), evaluation_mode(self._stages):
            if target is None and is_loader(inputs):
                run_loader(inputs, self.run, totals, self.num_microbatches, self._failure, self._context)
            else:
                self.run(inputs, target, totals=totals)
        return self._losses.mean(totals)

    def _check_window(self) -> None:
        """Before other batches than the window's: raise on every rank, as its failure, what no call has raised yet."""
        if self._window.is_open and self._context.world_size > 1:
            with self._window.failing():
                self._failure.agree(self._failure.take())

    @torch.no_grad()
    def count_tokens(self, batches: Iterable[Any]) -> None:
        """Run all batches of the next step forward, for its counts, as :meth:`Engine.count_tokens` does."""
        window, given, problem = self._window, list[Batch](), None
        if window.is_open:
            raise RuntimeError(IN_A_STEP)
        try:
            given = [batch_of(batch, "count_tokens: got") for batch in batches]
        except Exception as error:
            problem = error
        self._failure.agree(problem)
        self._check_counts(len(given), len(window.counts))
        self._counted = None
        with self._context.phase("evaluation"), announcing(window.counts), window.record().again():
            for batch in given:
                self.run(batch, None)
            self._failure.agree(self._failure.take())
        self._counted = given

    def _check_counts(self, num_batches: int, num_counts: int) -> None:
        """Check that ranks have as many batches, and that some count; a collective of the world."""
        most, least, counts = largest_over_ranks([num_batches, -num_batches, num_counts], self._context.device)
        if not counts:
            raise ConfigError(NO_COUNTS)
        if most != -least:
            raise ValueError(f"count_tokens: got {-least} batches on one rank, and {most} on another, expected as many")

    def check_counted(self) -> None:
        """Before a step: raise a ValueError on every rank if its batches are not those whose tokens were counted."""
        counts, given, self._counted = self._window.counts, self._counted, None
        if given is None:
            return
        problem = self._failure.take()
        try:
            if all(one.announced is not None for one in counts):
                _check_same(given, self._window.calls)
            for one in counts:
                one.check_announced()
        except ValueError as error:
            problem = problem or error
        self._failure.agree(problem)

    def run_next(
        self, data_iter: Iterator[Any], forward_only: bool, return_loss: bool, return_output_label: bool
    ) -> tuple[Any, Any, torch.Tensor | None]:
        """Run the next batch of ``data_iter``, as :meth:`Engine.execute_schedule` does."""
        if not forward_only and not return_loss:
            raise ValueError("return_loss: got False, but a backward needs the loss; pass forward_only=True too")
        if forward_only:
            self._check_window()
        inputs, target = next_batch(data_iter, self._failure)
        totals = LossTotals(self._context) if forward_only and return_loss else None
        seen: Seen | None = [] if return_output_label else None
        with self._context.phase("evaluation" if forward_only else BATCH), torch.set_grad_enabled(not forward_only):
            self.run(inputs, target, backward=not forward_only, totals=totals, seen=seen)
        shown: tuple[Any, Any] = (None, None)
        with nullcontext() if forward_only else self._window.failing():
            try:
                shown = joined(seen) if seen else shown
            except Exception as error:  # outputs that do not join; on the last stage only
                self._failure.record(error)
        if not return_loss:
            self._failure.agree(self._failure.take())
            return *shown, None
        return *shown, self._window.mean_loss() if totals is None else self._losses.mean(totals)

    def rerun(self, call: RecordedBatch, scale: torch.Tensor, tracer: Tracer) -> None:
        """Run a batch of the window again, forward and backward, at the loss scale ``scale`` (0-dim), with ``tracer``.

        It adds gradients to the buffers and nothing to the window.
        """

        def loss(output: Any, microbatch: Batch) -> torch.Tensor:
            value, _ = self._losses.split(self.criterion.of(output, microbatch))
            tracer.see_loss(output, microbatch.target, value)
            scaled = value * scale / self._losses.size
            tracer.see_scaled(scaled)
            return scaled

        self._failure.begin_batch()
        microbatches = call.batch.split(self._num_parts(call.batch))
        if self._compute.sequences is not None:
            tracer.seen.places = self._compute.sequences.places(self._context.tensor_axis, microbatches[0])
        self._numerics.begin_rerun(call.number)
        self._observers.append(tracer)
        try:
            self._run(microbatches, loss, backward=True)
        finally:
            self._observers.remove(tracer)
        if (failure := self._failure.take()) is not None:
            tracer.failure = str(failure)

    @torch.no_grad()
    def _pipelined_output(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for one batch, on every rank of the pipeline; gathered if it is sharded.

        Raises:
            ConfigError: the batch does not divide into microbatches.
        """
        assert self.pipeline is not None
        self._failure.begin_batch()
        batch = Batch.called_with(args, kwargs)
        self._check_same(False, batch)
        microbatches = batch.split(self.num_microbatches)
        outputs: list[Any] = []

        def see(output: Any, microbatch: Batch) -> torch.Tensor:
            outputs.append(map_tensors(full_tensor, self.criterion.joined(output, microbatch)))
            return no_loss(output, microbatch)

        output, failure = None, None
        try:
            with self._context.phase("evaluation"), self._computing(), self._stages.running(backward=False):
                try:
                    self.pipeline.run(microbatches, see, backward=False)
                    output = join(outputs) if outputs else None
                except Exception as error:
                    if not self.pipeline.in_step:
                        raise
                    failure = error
        except AfterBatchError as error:
            failure = failure or error
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


def _check_same(counted: Sequence[Batch], calls: Sequence[RecordedBatch] | None) -> None:
    """Raise a ValueError if the batches of a window, None if they are not known, are not those ``counted``."""
    if calls is None:
        return
    if len(calls) != len(counted):
        raise ValueError(f"count_tokens: got {len(counted)} batches, but the step has {len(calls)}; {EACH_ONCE}")
    for number, (batch, call) in enumerate(zip(counted, calls, strict=True), start=1):
        pairs = itertools.zip_longest(_tensors(batch), _tensors(call.batch))
        if not all(one is other or _are_equal(one, other) for one, other in pairs):
            raise ValueError(f"count_tokens: its batch {number} has other inputs than that of the step; {EACH_ONCE}")


def _tensors(batch: Batch) -> list[torch.Tensor]:
    return [leaf for _, leaf in batch.unwrapped().inputs() if isinstance(leaf, torch.Tensor)]


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one, other.to(one.device))


def joined(seen: Seen) -> tuple[Any, Any]:
    """The outputs and targets of all microbatches, concatenated; outputs are gathered if they are sharded."""
    outputs, targets = zip(*seen, strict=True)
    return join([map_tensors(full_tensor, output) for output in outputs]), join(list(targets))
