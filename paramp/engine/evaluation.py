"""The loss over a whole loader, without gradients: a mean over samples, or over the criterion's counts.

Data ranks may have different numbers of batches, and batches of different sizes. A batch that does not divide into a
pipeline's microbatches is run in two parts: as much of it as divides, and the rest one sample a microbatch, with
copies of its samples in the microbatches that are left over. These count for nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from ..base.errors import ConfigError
from ..data.dataloader import each_sample_once
from ..distributed.context import ParallelContext
from .shared_failure import SharedFailure


class _SampleTotals:
    """Adds losses up in ``totals``, as a :class:`~paramp.engine.loss_window.LossWindow` has them; means by samples."""

    def __init__(self, totals: torch.Tensor) -> None:
        self._totals = totals
        self._samples = self._num_left = 0

    def expect(self, samples: int, microbatches: int) -> None:
        """Add the next ``microbatches`` losses, each of ``samples`` samples, and none after them."""
        self._samples, self._num_left = samples, microbatches

    def add_(self, added: torch.Tensor) -> None:
        """Add what the loss of a microbatch adds to the totals; a mean, which has no count, once for each sample."""
        self._num_left -= 1
        if self._num_left >= 0:
            self._totals += torch.where(added[2] > 0, added, added * self._samples)


def is_loader(inputs: Any) -> bool:
    """Whether ``inputs`` is to be iterated over for batches, rather than being the inputs of one batch."""
    return isinstance(inputs, Iterable) and not isinstance(inputs, (torch.Tensor, tuple, Mapping, str))


def run_loader(
    loader: Iterable[Any],
    run: Callable[..., None],
    totals: torch.Tensor,
    num_microbatches: int,
    failure: SharedFailure,
    context: ParallelContext,
) -> None:
    """Run every batch of ``loader`` on this rank, and add up its losses. A collective of the world.

    Args:
        run: called with inputs, target and ``totals=`` an object whose ``add_`` takes what a microbatch's loss adds.
        totals: 1-dim float64 of 4 elements, as :attr:`paramp.engine.loss_window.LossWindow.totals`.

    Raises:
        ConfigError: on every rank: there is no batch, the ranks of a model group have different numbers of batches, or
            a batch is not ``(inputs, target)`` or a mapping.
        Exception: on every rank: whatever ``loader`` or a batch raises on one.
    """
    counted = _SampleTotals(totals)
    with each_sample_once(loader):
        batches: Iterator[Any] | None = None
        for index in itertools.count():
            batch, problem = None, failure.take()
            try:
                batches = iter(loader) if batches is None else batches
                batch = next((_inputs_and_target(batch) for batch in batches), None)
            except Exception as error:
                problem = problem or error
            if not _agree(batch is not None, problem, index, failure, context):
                return
            if batch is not None:
                for inputs, target, samples, microbatches in _parts(*batch, num_microbatches):
                    counted.expect(samples, microbatches)
                    run(inputs, target, totals=counted)


def _agree(
    has_batch: bool, problem: Exception | None, index: int, failure: SharedFailure, context: ParallelContext
) -> bool:
    """Whether a data rank has a further batch; one all-reduce of the world."""
    axis = context.batch_axis
    counts = torch.zeros(axis.size + 1, device=context.device)
    counts[axis.rank] = float(has_batch)
    counts[-1] = float(problem is not None)
    dist.all_reduce(counts)
    *have, failed = counts.tolist()
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
    return any(have)


def _inputs_and_target(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Mapping):
        return batch, None
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise ConfigError(
        f"loader: yielded {type(batch).__name__}{f' of {len(batch)}' if isinstance(batch, (tuple, list)) else ''}, "
        "expected a pair (inputs, target), or a mapping of the model's keyword inputs"
    )


def _parts(inputs: Any, target: Any, num_microbatches: int) -> Iterator[tuple[Any, Any, int, int]]:
    """The batch in parts that divide into microbatches: inputs, target, samples of a microbatch, microbatches to count.

    Tensors with as many elements in dim 0 as the batch has samples are split.
    """
    size = _num_samples(inputs, target)
    each, rest = divmod(size, num_microbatches)
    if not rest:
        yield inputs, target, each, num_microbatches
        return

    def rows(indices: list[int]) -> tuple[Any, Any]:
        index = torch.tensor(indices)

        def take(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[index.to(tensor.device)] if tensor.ndim and tensor.shape[0] == size else tensor

        return tree_map_only(torch.Tensor, take, (inputs, target))

    whole = size - rest
    if whole:
        yield *rows([*range(whole)]), each, num_microbatches
    copies = itertools.islice(itertools.cycle(range(whole, size)), num_microbatches)
    yield *rows([*copies]), 1, rest


def _num_samples(inputs: Any, target: Any) -> int:
    """The number of samples: dim 0 of the first positional tensor, else of the target's first, else of a keyword's."""
    positional, keywords = (None, inputs) if isinstance(inputs, Mapping) else (inputs, None)
    for tree in (positional, target):
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.ndim:
                return leaf.shape[0]
    sizes = [leaf.shape[0] for leaf in tree_leaves(keywords) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    return next((size for size in sizes if size != 1), 1)
