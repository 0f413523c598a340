"""Runs batches of a data rank in microbatches, with a pipeline or without, through the checked criterion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..base.dtensor import full_tensor
from ..base.errors import ConfigError
from ..base.observer_spans import Observer, begin_call, span
from ..base.trees import map_tensors
from ..distributed.context import ParallelContext
from ..distributed.exact_mode_protocol import Numerics
from ..observe.same_data import SameBatches
from ..optim.flat_weights import FlatWeights
from ..parallel.loss_and_outputs_of_batch import loss_in, summed
from ..parallel.microbatches import Batch
from ..pipeline.stage import Stages
from ..precision.compute_context import ComputeContext, default_dtype_of, moved
from .accumulation_window import AccumulationWindow, LossTotals, WindowLosses
from .criterion_checks import gathered, required, training_nothing_of
from .model_plan import sequence_axis
from .power_of_two_loss_divisor import Criterion, Loss, as_count

if TYPE_CHECKING:
    from ..parallel.context_axis.cut_sequences import SequenceAxis
    from ..pipeline.pipeline import Pipeline

OwnLoss = Callable[[Any, Batch], Loss | None]
"""The loss in a model's output for a microbatch; None if it has none."""
LossFunction = Callable[[Any, Batch], torch.Tensor]
"""Maps the model's output for a microbatch to the 0-dim tensor that its backward starts from."""
Seen = list[tuple[Any, Any]]
"""The detached output and the target of each microbatch."""


@dataclass(frozen=True, kw_only=True)
class EngineContext(ComputeContext):
    """The compute context of an engine, whose functions, sequences and vocabularies follow its layout."""

    numerics: Numerics
    sequences: SequenceAxis | None
    """The context axis, over which attention goes and outputs are joined; None: sequences are whole."""
    sharded: Sequence[str]
    """The mesh's axes over which the vocabulary of the logits may be sharded, as DTensors; none in one tensor rank."""

    @staticmethod
    def of(context: ParallelContext, numerics: Numerics) -> EngineContext:
        """The context of an engine in ``context``."""
        config = context.config
        return EngineContext(
            config.precision,
            context.device,
            config.emulate_fp16,
            numerics=numerics,
            sequences=sequence_axis(context, numerics),
            sharded=context.axes_of("tensor") if context.tensor_axis.size > 1 else (),
        )

    @contextmanager
    def enter(self, *, autocast: bool = False) -> Iterator[None]:
        inside = self.numerics if self.sequences is None else self.sequences
        with super().enter(autocast=autocast), inside.computing():
            yield

    def whole_sequences(self) -> AbstractContextManager[None]:
        """The context for a criterion, which may run a model of its own, such as a teacher."""
        return nullcontext() if self.sequences is None else self.sequences.paused()

    def sharded_loss(self, given: Any = None, *, in_model: bool = False) -> AbstractContextManager[None]:
        """The context for a criterion of ``given``, or ``in_model``: cross-entropy over a sharded vocabulary."""
        if not self.sharded:
            return nullcontext()
        # This imports DTensor, which other layouts do not need.
        from ..parallel.tensor.sharded_loss import vocab_parallel_loss

        computes = not self.numerics.computes_cross_entropy
        return vocab_parallel_loss(given, others=not in_model, computes=computes, gathered=self.gathered)

    def gathered(self, value: Any) -> Any:
        """What a criterion has computed, as a plain tensor; a ConfigError if it is of a shard of a weight."""
        return gathered(value, self.sharded)


class CheckedCriterion:
    """The user's criterion, else the model's own loss, with checks of the losses, in the context ``compute``."""

    def __init__(self, criterion: Criterion | None, own_loss: OwnLoss, compute: EngineContext) -> None:
        self._criterion = criterion
        self._own_loss = own_loss
        self.compute = compute
        self._counts = WeakTensorKeyDictionary()  # of losses that are means
        self.training_nothing = training_nothing_of(criterion)

    @property
    def is_given(self) -> bool:
        """Whether ``initialize`` got a criterion."""
        return self._criterion is not None

    def of(self, output: Any, microbatch: Batch) -> Loss:
        """The loss of a microbatch, from the model's output and, if there is one, the target; as :meth:`__call__`."""
        if self._criterion is not None:
            output = self.joined(output, microbatch)
            with self.compute.whole_sequences():
                return self(*((output,) if microbatch.target is None else (output, microbatch.target)))
        return _checked(required(self._own_loss(output, microbatch)))

    def joined(self, output: Any, batch: Batch) -> Any:
        """The ``output`` for ``batch``, with the tokens of all ranks of the context axis, and the loss of them."""
        sequences = self.compute.sequences
        if sequences is None:
            return output
        return sequences.joined(output, batch, lambda: _checked(self._own_loss(output, batch)))

    def find_count(self, output: Any, batch: Batch, training: bool) -> None:
        """Remember the count of the model's own loss in a joined ``output``, for :meth:`counted`; not the loss."""
        loss = loss_in(output)
        if self._criterion is None and isinstance(loss, torch.Tensor):
            found, sequences = self._own_loss(output, batch), self.compute.sequences
            if isinstance(found, tuple):
                self._counts[loss] = found[1] if sequences is None else sequences.summed(found[1]), training

    def counted(self, loss: Any, in_training: bool = False) -> Any:
        """``loss``; as ``(sum, count)`` if it is the mean in an output that :meth:`find_count` had, or in training."""
        count, training = self._counts.get(loss, (None, False)) if isinstance(loss, torch.Tensor) else (None, False)
        return loss if count is None or in_training > training else (summed(loss, count), count)

    def __call__(self, *args: Any, **kwargs: Any) -> Loss:
        """The loss of this rank's output and target, as plain 0-dim tensors; not reduced over ranks.

        Tensors in ``args`` and ``kwargs`` are moved to the device.

        Raises:
            ValueError: there is no criterion, or it returned neither one element nor ``(sum, count)``.
            ConfigError: it used a weight that FSDP2 has sharded.
        """
        if self._criterion is None:
            return _checked(required(self.counted(loss_in(args[0] if args else None), in_training=True)))
        args, kwargs = map_tensors(lambda tensor: moved(tensor, self.compute.device), (args, kwargs))
        with self.compute.sharded_loss((args, kwargs)):
            return _checked(self._criterion(*args, **kwargs), self.compute.gathered)


def _checked(loss: Any, gathered: Callable[[Any], Any] = full_tensor) -> Loss:
    """``loss`` as plain 0-dim tensors, or a ValueError unless it is one element, or ``(sum, count)``.

    A count that is no number stays as it is, for :class:`CountUnit` to raise.
    """
    parts, expected = ([*loss], 2) if isinstance(loss, (tuple, list)) else ([loss], 1)
    if len(parts) != expected or not isinstance(parts[0], torch.Tensor) or parts[0].numel() != 1:
        raise ValueError(
            "criterion: expected a tensor of one element, or (sum, count) of two, got "
            + ", ".join(str(tuple(part.shape)) if isinstance(part, torch.Tensor) else repr(part) for part in parts)
        )
    is_plain = type(parts[0]) is torch.Tensor and not parts[0].ndim
    value = parts[0] if is_plain else gathered(parts[0]).reshape(())
    return (value, as_count(full_tensor(parts[1]))) if expected == 2 else value


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
        self.pipeline: Pipeline | None = None
        if config.size > 1:
            from ..pipeline.pipeline import Pipeline  # imports torch's schedules, which takes seconds

            self.pipeline = Pipeline(stages, context, observers, failure.raise_if_alone, numerics)
        self.criterion = criterion
        self._compute = criterion.compute
        self._numerics, self._observers = numerics, observers
        self._stages = stages
        self._weights = weights
        self._gradients = weights.gradients
        self._losses, self._window = losses, window
        self._failure = failure
        self._context = context
        is_split = context.stage_axis.size * context.cp.size * context.tensor_axis.size > 1
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
        """Run a batch (:mod:`paramp.parallel.microbatches`); append outputs and targets to ``seen``; record failures.

        Args:
            backward: add losses and gradients to the accumulation window.
            totals: without a backward, add the losses to it; None: compute no losses.
        """
        if self._failure.is_shared:
            self._failure.begin_batch()
        if backward:
            self._window.begin_batch(is_known=True)
        batch, microbatches = self._split(inputs, target, training=backward)

        def loss(output: Any, microbatch: Batch) -> torch.Tensor:
            if seen is not None:
                whole = self.criterion.joined(output, microbatch)
                seen.append((map_tensors(torch.Tensor.detach, whole), microbatch.target))
            if backward:
                return self._losses.scaled(self.criterion.of(output, microbatch))
            if totals is None:
                return no_loss(output, microbatch)
            value, added = self._losses.split(self.criterion.of(output, microbatch))
            totals.add_(added)
            return value

        if not backward:
            self._run(microbatches, loss)
            return
        self._window.begin_backward(batch)
        microbatches = self._numerics.begin_batch(microbatches)  # now that the gradients of a past step are dropped
        with self._window.failing():
            self._run(microbatches, loss, backward=True, overlap=self._window.in_last_call)
        self._window.end_backward()

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
        running, trained = self._stages.running(backward=backward), self.criterion.training_nothing()
        with self._taking_part(overlap, backward) as before_last_backward, trained, self._computing(), running:
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
                with span(self._observers, "backward", 0, index), default_dtype_of(self._compute.precision):
                    value.backward()
                self._numerics.end_backward(0, index)


def no_loss(output: Any, _: Batch) -> torch.Tensor:
    """The loss function if no loss is computed."""
    return torch.zeros(())
