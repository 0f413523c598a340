"""A batch in chunks of the same number of samples in every layout."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ..base.errors import ConfigError
from ..distributed.context import ParallelContext
from ..engine.losses import WindowLosses
from ..engine.shared_failure import SharedFailure
from ..observe.overflow_record import WindowRecord
from ..parallel.batches import Batch
from .chunk_gradients import ChunkGradients
from .functions import ExactFunctions
from .totals import ChunkTotals


class ChunkRun:
    """Runs a batch chunk by chunk: it tells where each is, and adds up its gradients."""

    def __init__(
        self,
        functions: ExactFunctions,
        gradients: ChunkGradients,
        losses: WindowLosses,
        batches: WindowRecord,
        failure: SharedFailure,
        step_counts: Callable[[], list[int]],
        context: ParallelContext,
    ) -> None:
        self.functions = functions
        self.place = functions.place
        self._losses, self._batches, self._failure = losses, batches, failure
        self._gradients = gradients
        self._step_counts = step_counts
        self._axis = context.batch_axis
        self._device = context.device
        self._pipeline = context.config.parallel.pipeline
        self._accumulation = context.config.gradient_accumulation
        self._window_chunks = 1
        self._num_chunks = 0

    def count(self, num_samples: int) -> int:
        """The chunks of a batch of ``num_samples`` on this data rank.

        Raises:
            ConfigError: it does not divide into chunks, or not into as many as the pipeline's schedule needs.
        """
        chunk = self.place.chunk
        if num_samples == 0 or num_samples % chunk:
            raise ConfigError(
                f"batch: got {num_samples} samples on each data rank, expected a multiple of reproducible.chunk {chunk}"
            )
        num_chunks = num_samples // chunk
        try:
            self._pipeline.check_microbatches(num_chunks)
        except ConfigError as error:
            raise ConfigError(
                f"batch: got {num_samples} samples on each data rank, which are {num_chunks} chunks of "
                f"reproducible.chunk {chunk} and run as microbatches; {error}"
            ) from None
        return num_chunks

    def begin(self, chunks: list[Batch]) -> list[Batch]:
        """Begin a backward of ``chunks``, none after a failure; a collective of data ranks.

        Returns:
            ``chunks``; none if data ranks or calls of a window have different numbers of them, or data ranks different
            shapes, which is recorded as a failure.
        """
        problem = self._begin(chunks)
        if problem is None:
            return chunks
        self._failure.record(problem)
        return []

    def _begin(self, chunks: Sequence[Batch]) -> ConfigError | None:
        num_chunks, shapes = len(chunks), _digest(chunks)
        losses, call = self._losses, self._batches.last_index
        if torch.get_num_threads() != 1:  # changed since initialize
            torch.set_num_threads(1)
        self.place.step, self.place.call = sum(self._step_counts()[:2]), call
        self._num_chunks = num_chunks
        bounds = [num_chunks, -num_chunks, shapes, -shapes]
        most, minus_least, largest, minus_smallest = self._largest(bounds) if self._axis.size > 1 else bounds
        least = -minus_least
        self._gradients.begin_call(max(num_chunks, 1))
        if call == 0:  # the same on all ranks, which add up their losses even if one has failed
            self._window_chunks = max(most, 1)
        of_call = self._window_chunks * self._axis.size
        losses.size = of_call * self._accumulation
        if isinstance(losses.totals, ChunkTotals):
            losses.totals.num_chunks = of_call
        if num_chunks and (most != least or num_chunks != self._window_chunks):
            others = f"from {least} to {most}" if most != least else f"{self._window_chunks} in the call before"
            return ConfigError(
                f"batch: got {num_chunks} chunks of {self.place.chunk} samples on this data rank, but {others}; "
                "reproducible needs the same number on all data ranks and in all calls of a window: drop the last batch"
            )
        if least and largest != -minus_smallest:
            return ConfigError(
                f"batch: got chunks of {chunks[0]} on this data rank, and others on other data ranks; reproducible "
                "needs chunks of the same shapes: pad all samples to one length"
            )
        return None

    def _largest(self, numbers: Sequence[int]) -> list[int]:
        """The largest of each of ``numbers`` over data ranks. The host waits: one without chunks needs the others'."""
        found = torch.tensor(numbers, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._axis.group)
        largest: list[int] = found.tolist()
        return largest

    def move_to(self, index: int) -> None:
        """An operation of the chunk ``index`` of this rank follows."""
        self.place.first_sample = (self._axis.rank * self._num_chunks + index) * self.place.chunk

    def add_gradients(self, stage: int, index: int) -> None:
        """The backward of a chunk through ``stage`` has ended.

        A failed one leaves gradients behind, which are dropped with its window.
        """
        try:
            self._gradients.end_chunk(stage, index)
        except RuntimeError as error:  # on this rank alone: others wait for it in the schedule
            self._failure.record(error)


def _digest(chunks: Sequence[Batch]) -> int:
    """A number for the shapes and dtypes of the tensors in a chunk."""
    leaves = chunks[0].leaves() if chunks else ()
    shapes = [(path, tuple(leaf.shape), str(leaf.dtype)) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
    return zlib.crc32(repr(shapes).encode())
