"""Runs one batch of a data rank in microbatches, with a pipeline or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..base.dtensor import full_tensor
from ..base.errors import ConfigError
from ..base.spans import Observer, begin_call, span
from ..distributed.collectives import broadcast_
from ..distributed.context import ParallelContext
from ..optim.flat_gradients import FlatGradients
from ..parallel.pipeline import Pipeline
from ..parallel.stage import Stages
from .compute_context import ComputeContext
from .shared_failure import SharedFailure

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From a microbatch's output and target to the 0-dim tensor at which its backward begins."""


class BatchRunner:
    """Runs batches through this rank's stages.

    Attributes:
        pipeline: None where there is one stage only.
        num_microbatches: how many parts each batch is split into.
        failure: what fails in a batch on this rank.
    """

    def __init__(
        self,
        stages: Stages,
        gradients: FlatGradients,
        compute: ComputeContext,
        context: ParallelContext,
        observers: list[Observer],
    ) -> None:
        config = context.config.parallel.pipeline
        self.num_microbatches = config.num_microbatches
        self._observers = observers
        self._stages = stages
        self._gradients = gradients
        self._compute = compute
        self.failure = failure = SharedFailure(context)
        self.pipeline = (
            Pipeline(stages, context, config, observers, failure.raise_if_alone) if config.size > 1 else None
        )
        self._context = context

    def begin(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Before a batch: check it, and record what is wrong; how many elements a microbatch's target has."""
        try:
            self.check(x, y)
        except ValueError as error:
            self.failure.record(error)
        return y.numel() / self.num_microbatches if isinstance(y, torch.Tensor) else 1.0

    def check(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Check that a batch can be split into microbatches along dim 0.

        Raises:
            ValueError: an argument is not a tensor with a batch dim.
            ConfigError: the sizes differ, or do not divide into the microbatches.
        """
        for name, value in (("x", x), ("y", y)):
            if not isinstance(value, torch.Tensor) or value.ndim == 0:
                raise ValueError(f"{name}: got {type(value).__name__}, expected a tensor with the batch in dim 0")
        if x.shape[0] != y.shape[0]:
            raise ConfigError(f"batch: got {x.shape[0]} samples in x and {y.shape[0]} in y, expected as many")
        self._check_divides(x.shape[0])

    def _check_divides(self, size: int) -> None:
        if size % self.num_microbatches or size == 0:
            raise ConfigError(
                f"batch: got {size} samples on each data rank, expected a multiple of the {self.num_microbatches} "
                "microbatches (parallel.pipeline.microbatches)"
            )

    def run(
        self, x: torch.Tensor, y: torch.Tensor, loss: LossFunction, *, backward: bool, overlap: bool = False
    ) -> None:
        """Run each microbatch forward, through ``loss`` on the last stage and, if asked, backward.

        What fails is recorded in :attr:`failure`.

        Args:
            overlap: begin the reductions over data ranks beside the last backward.
        """
        overlap = overlap and (self.pipeline is None or self.pipeline.overlaps)
        with self._taking_part(overlap) as before_last_backward, self._compute.enter():
            self.check(x, y)
            try:
                self._gradients.before_batch()
            except RuntimeError as error:  # of this stage; the others wait for it
                self.failure.record(error)
            if self.pipeline is None:
                self._run_plain(x, y, loss, before_last_backward if backward else None)
            else:
                self.pipeline.run(x, y, loss, backward=backward, before_last_backward=before_last_backward)

    def run_backward(self, begin: Callable[[], torch.Tensor], *, overlap: bool) -> None:
        """Run the backward of the 0-dim tensor that ``begin`` returns; otherwise as :meth:`run`."""
        with self._taking_part(overlap) as before_last_backward, self._compute.enter():
            value = begin()
            before_last_backward()
            value.backward()

    @contextmanager
    def _taking_part(self, overlap: bool) -> Iterator[Callable[[], None]]:
        """Record what fails inside, and take part in the reductions over data ranks whatever happens.

        Yields what is to be called before the last backward; with ``overlap`` it begins them.
        """
        self.failure.begin_batch()
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
            self.failure.record(error)
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
    def pipelined_output(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The model's output for its one input on every rank of the pipeline; gathered if it is sharded.

        Raises:
            ConfigError: anything but one tensor is given.
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
        self._check_divides(x.shape[0])
        self.failure.begin_batch()
        with self._compute.enter():
            output, failure = None, None
            try:
                output = self.pipeline.run(x, torch.zeros(x.shape[0]), no_loss, backward=False)
            except Exception as error:
                if not self.pipeline.in_step:
                    raise
                failure = error
        group, last_rank = self._context.stage_axis.group, self.pipeline.last_rank
        self.failure.agree(failure, group)
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
        ValueError: on every rank: one has no further batch, or its ``data_iter`` is no iterator or yields no pairs.
        Exception: on every rank: what ``data_iter`` raised on one.
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
        raise ValueError(f"data_iter: it yielded {type(batch).__name__}, expected a pair (data, label)")
    return batch[0], batch[1]


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Inside, every module in ``module`` is in evaluation mode; afterwards each has its own mode again."""
    modes = {child: child.training for child in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for child, training in modes.items():  # some may have been in evaluation mode on purpose
            child.training = training


def no_loss(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """The loss function of a batch without one."""
    return output.new_zeros(())
