"""The loss over a whole loader, without gradients: a mean over samples, or over the criterion's counts.

Data ranks may have different numbers of batches, and batches of different sizes. A batch that does not divide into a
pipeline's microbatches is run in two parts: as much of it as divides, and the rest one sample a microbatch, with
copies of its samples in the microbatches that are left over. These count for nothing. Where parameters are sharded
over data ranks, all of them gather each block together; so a rank with fewer batches repeats its last one, which counts
for nothing either.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..base.errors import ConfigError
from ..data.dataloader import evaluation_pass
from ..distributed.context import ParallelContext
from ..parallel.microbatches import Batch
from .accumulation_window import LossTotals
from .shared_failure import SharedFailure


class _SampleTotals:
    """Adds losses up in ``totals``; means by samples."""

    def __init__(self, totals: LossTotals) -> None:
        self._totals = totals
        self._samples = self._num_left = 0

    def expect(self, samples: int, microbatches: int) -> None:
        """Add the next ``microbatches`` losses, each of ``samples`` samples, and none after them."""
        self._samples, self._num_left = samples, microbatches

    def add_(self, added: torch.Tensor) -> None:
        """Add what the loss of a microbatch adds to the totals; a mean, which has no count, once for each sample."""
        self._num_left -= 1
        if self._num_left >= 0:
            self._totals.add_(torch.where(added[1] == added[2], added, added * self._samples))


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


def is_loader(inputs: Any) -> bool:
    """Whether ``inputs`` is to be iterated over for batches, rather than being the inputs of one batch."""
    return isinstance(inputs, Iterable) and not isinstance(inputs, (torch.Tensor, tuple, Mapping, str))


def run_loader(
    loader: Iterable[Any],
    run: Callable[..., None],
    totals: LossTotals,
    num_microbatches: int,
    failure: SharedFailure,
    context: ParallelContext,
) -> None:
    """Run every batch of ``loader`` on this rank, and add up its losses. A collective of the world.

    Args:
        run: called with a batch, None and ``totals=`` an object whose ``add_`` takes what a microbatch's loss adds.
        totals: what they are added to.

    Raises:
        ConfigError: on every rank: there is no batch, the ranks of a model group have different numbers of batches, or
            a batch is not ``(inputs, target)`` or a mapping; or a data rank has none, and others wait for it.
        Exception: on every rank: whatever ``loader`` or a batch raises on one.
    """
    counted, last = _SampleTotals(totals), Batch()
    with evaluation_pass():
        batches: Iterator[Any] | None = None
        for index in itertools.count():
            parts: list[tuple[Batch, int, int]] = []
            problem = failure.take()
            try:
                batches = iter(loader) if batches is None else batches
                batch = next(map(batch_of, batches), None)
                parts = [] if batch is None else [*_parts(batch, num_microbatches)]
            except Exception as error:
                problem = problem or error
            most = _agree(len(parts), problem, index, failure, context)
            if not most:
                return
            for last, samples, microbatches in parts:
                counted.expect(samples, microbatches)
                run(last, None, totals=counted)
            for _ in range(most - len(parts) if context.config.parallel.data_ranks_wait else 0):
                counted.expect(0, 0)
                run(last, None, totals=counted)


def _agree(
    num_parts: int, problem: Exception | None, index: int, failure: SharedFailure, context: ParallelContext
) -> int:
    """The largest number of parts of the next batch of a data rank, 0 if none has one; one all-reduce of the world."""
    failure.check_not_alone()
    axis = context.dp
    counts = torch.zeros(2 * axis.size + 1, device=context.device)
    counts[axis.rank] = float(num_parts > 0)
    counts[axis.size + axis.rank] = float(num_parts)
    counts[-1] = float(problem is not None)
    dist.all_reduce(counts)
    *both, failed = counts.tolist()
    have, num_runs = both[: axis.size], both[axis.size :]
    if failed:
        failure.agree(problem)
    num_ranks = context.world_size // axis.size
    for rank, number in enumerate(have):
        if number not in (0, num_ranks):
            raise ConfigError(
                f"loader: {number:g} of the {num_ranks} ranks of data rank {rank}'s model group have a batch {index}, "
                "the others have not; give all ranks of a model group the same batches"
            )
    if index == 0 and not any(have):
        raise ConfigError("loader: yielded no batch, expected at least one; an iterator can be used up only once")
    if index == 0 and not all(have) and context.config.parallel.data_ranks_wait:
        raise ConfigError(
            f"loader: yielded no batch on data rank {have.index(0)}, expected at least one on each, because "
            "with parallel.data.shard, parallel.expert or parallel.context data ranks wait for each other in the model"
        )
    return int(max(num_runs)) // num_ranks


def batch_of(batch: Any, given_by: str = "loader: yielded") -> Batch:
    """The batch of a pair ``(inputs, target)``, or of a mapping of inputs; a ConfigError for anything else."""
    if isinstance(batch, Mapping):
        return Batch.of(batch)
    is_sequence = isinstance(batch, (tuple, list))
    if is_sequence and len(batch) == 2:
        return Batch.of(*batch)
    raise ConfigError(
        f"{given_by} {type(batch).__name__}{f' of {len(batch)}' if is_sequence else ''}, expected a pair (inputs, "
        "target), or a mapping of the model's keyword inputs"
    )


def _parts(batch: Batch, num_microbatches: int) -> Iterator[tuple[Batch, int, int]]:
    """``batch`` in parts that divide into microbatches: the part, samples of a microbatch, microbatches to count."""
    size = batch.size
    each, rest = divmod(size, num_microbatches)
    whole = size - rest
    if whole or not rest:
        yield (batch.rows(slice(0, whole)) if rest else batch), each, num_microbatches
    if rest:
        copies = itertools.islice(itertools.cycle(range(whole, size)), num_microbatches)
        yield batch.rows([*copies]), 1, rest
