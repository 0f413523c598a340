"""A batch in microchunks: the same number of samples in every layout."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from ..base.collectives import all_reduce_, largest_over_ranks
from ..base.errors import ConfigError
from ..distributed.context import ParallelContext
from ..engine.accumulation_window import AccumulationWindow, LossTotals
from ..parallel.microbatches import Batch
from .exact_layout import ExactLayout, Position
from .microchunk_gradients import MicrochunkGradients
from .tree_sum import tree_sum


class MicrochunkTotals(LossTotals):
    """The losses of a window, one by one until they are added up in a tree over the microchunks of the global batch."""

    def __init__(self, position: Callable[[], Position], layout: ExactLayout, context: ParallelContext) -> None:
        super().__init__(context)
        self._position, self._layout, self._context = position, layout, context
        self._terms: dict[tuple[int, int], torch.Tensor] = {}
        self.num_microchunks = 1
        """Microchunks of a call, over all data ranks."""

    def add_(self, parts: torch.Tensor) -> None:
        """Add what the loss of the microchunk that runs adds to the totals, 1-dim float64 of 4 elements."""
        at = self._position()
        self._terms[at.call, at.first_sample // self._layout.microchunk] = parts

    def of(self, call: int, microchunk: int) -> torch.Tensor | None:
        """What the loss of a microchunk added, of a backward of the window; None if this rank has none."""
        return self._terms.get((call, microchunk))

    def zero_(self) -> None:
        """Forget all losses."""
        self._terms.clear()

    def terms(self) -> torch.Tensor:
        """The totals on the first rank of the world, and zeros on the others. A collective of the world."""
        context, calls = self._context, self._position().call + 1
        counts = context.counts_loss and context.cp.rank == 0  # others have the same loss of whole sequences
        each = torch.zeros(calls, self.num_microchunks, 4, dtype=torch.float64, device=context.device)
        for (call, microchunk), parts in self._terms.items() if counts else ():
            each[call, microchunk] = parts
        if context.world_size > 1:
            all_reduce_(each)  # exact: one rank has each term, the others zeros
        total = tree_sum([tree_sum(list(one)) for one in each])
        return total if dist.get_rank() == 0 else torch.zeros_like(total)


class MicrochunkRun:
    """Runs batches microchunk by microchunk: where each is, and how its gradients are added up.

    Attributes:
        position: of the microchunk that runs.
    """

    def __init__(
        self,
        layout: ExactLayout,
        gradients: MicrochunkGradients,
        window: AccumulationWindow,
        step_counts: Callable[[], list[int]],
    ) -> None:
        losses, context = window.losses, window.losses.context
        self._layout, self._gradients = layout, gradients
        self._losses, self._window, self._step_counts = losses, window, step_counts
        self._axis, self._device = context.dp, context.device
        self._pipeline = context.config.parallel.pipeline
        self._accumulation = context.config.gradient_accumulation
        self._in_first_call = self._num_microchunks = 1
        self.position = Position()
        self._totals = losses.totals = MicrochunkTotals(lambda: self.position, layout, context)

    def count(self, num_samples: int) -> int:
        """The microchunks of a batch of ``num_samples`` on this data rank.

        Raises:
            ConfigError: it does not divide into microchunks, or not into as many as the pipeline's schedule needs.
        """
        size = self._layout.microchunk
        if num_samples == 0 or num_samples % size:
            raise ConfigError(
                f"batch: got {num_samples} samples on each data rank, expected a multiple of reproducible.chunk {size}"
            )
        num_microchunks = num_samples // size
        try:
            self._pipeline.check_microbatches(num_microchunks)
        except ConfigError as error:
            raise ConfigError(
                f"batch: got {num_samples} samples on each data rank, which are {num_microchunks} chunks of "
                f"reproducible.chunk {size} and run as microbatches; {error}"
            ) from None
        return num_microchunks

    def begin(self, microchunks: list[Batch]) -> list[Batch]:
        """Begin a backward of ``microchunks``, none after a failure; a collective of data ranks.

        Returns:
            ``microchunks``; none if data ranks or calls of a window have different numbers of them, or data ranks
            different shapes, which is recorded as a failure.
        """
        number, shapes, call = len(microchunks), _digest(microchunks), max(0, len(self._window.calls or ()) - 1)
        if torch.get_num_threads() != 1:  # changed since initialize
            torch.set_num_threads(1)
        self.position = Position(sum(self._step_counts()[:2]), call)
        self._num_microchunks = number
        bounds = [number, -number, shapes, -shapes]
        if self._axis.size > 1:  # the host waits: a rank without microchunks needs the others' numbers
            bounds = largest_over_ranks(bounds, self._device, self._axis.group)
        most, minus_least, largest, minus_smallest = bounds
        least = -minus_least
        self._gradients.begin_call(max(number, 1))
        if call == 0:  # the same on all ranks, which add up their losses even if one has failed
            self._in_first_call = max(most, 1)
        self._totals.num_microchunks = self._in_first_call * self._axis.size
        self._losses.size = self._totals.num_microchunks * self._accumulation
        problem, size = None, self._layout.microchunk
        if number and (most != least or number != self._in_first_call):
            others = f"from {least} to {most}" if most != least else f"{self._in_first_call} in the call before"
            problem = (
                f"batch: got {number} chunks of {size} samples on this data rank, but {others}; reproducible needs the "
                "same number on all data ranks and in all calls of a window: drop the last batch"
            )
        elif least and largest != -minus_smallest:
            problem = (
                f"batch: got chunks of {microchunks[0]} on this data rank, and others on other data ranks; "
                "reproducible needs chunks of the same shapes: pad all samples to one length"
            )
        if problem is not None:
            self._losses.failure.record(ConfigError(problem))
        return [] if problem else microchunks

    def move_to(self, index: int) -> None:
        """An operation of the microchunk ``index`` of this rank follows."""
        first_sample = (self._axis.rank * self._num_microchunks + index) * self._layout.microchunk
        self.position = replace(self.position, first_sample=first_sample)

    def begin_again(self, call: int) -> None:
        """That call of the window is computed again, for a diagnosis."""
        self.position = replace(self.position, call=call)

    def add_gradients(self, stage: int, index: int) -> None:
        """The backward of a microchunk through ``stage`` has ended.

        A failed one leaves gradients behind, which are dropped with its window.
        """
        try:
            self._gradients.end_microchunk(stage, index)
        except RuntimeError as error:  # on this rank alone: others wait for it in the schedule
            self._losses.failure.record(error)


def _digest(microchunks: Sequence[Batch]) -> int:
    """A number for the shapes and dtypes of the tensors in a microchunk."""
    leaves = microchunks[0].leaves() if microchunks else ()
    shapes = [(path, tuple(leaf.shape), str(leaf.dtype)) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
    return zlib.crc32(repr(shapes).encode())
