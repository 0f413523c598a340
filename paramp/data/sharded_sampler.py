"""A sampler that gives each data rank its part of another sampler's items."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from ..distributed.rng import RandomStream, derive_seed

DRAWS_FROM_A_GENERATOR = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class ShardedSampler(Sampler[Any]):
    """Every ``size``-th item of ``inner``, from item ``rank`` on: indices of samples, or whole batches of them.

    ``inner`` draws its random numbers, as long as they are torch's, from a stream of this sampler's own, which is equal
    on all ranks and another in each epoch.

    Args:
        inner: what is sharded; iterating it again begins it anew.
        rank, size: the data rank and the number of them.
        seed: of the random numbers, equal on all ranks.
        drop_last: whether the last round is dropped if there is not an item for every rank; else it is filled up with
            the first ones.
    """

    def __init__(self, inner: Iterable[Any], rank: int, size: int, seed: int, *, drop_last: bool) -> None:
        self.inner = inner
        self.rank = rank
        self.size = size
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        """Of the next iteration."""
        self.skip = 0
        """Items of this rank that the next iteration skips."""

    @property
    def num_replicas(self) -> int:
        """As torch's ``DistributedSampler`` calls ``size``: a loader with this sampler is not sharded again."""
        return self.size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; that of ``inner`` too, if it has such a method."""
        self.epoch = epoch
        set_inner = getattr(self.inner, "set_epoch", None)
        if set_inner is not None:
            set_inner(epoch)

    def __iter__(self) -> Iterator[Any]:
        seed = derive_seed(self.seed, "samples", self.epoch)
        self.epoch += 1
        skip, self.skip = self.skip, 0
        return itertools.islice(self._items(seed), skip, None)

    def _items(self, seed: int) -> Iterator[Any]:
        if type(self.inner) in DRAWS_FROM_A_GENERATOR:
            inner: Any = copy.copy(self.inner)
            # the user's, like torch's default one, may be in another state on each rank
            inner.generator = torch.Generator()
            inner.generator.manual_seed(seed)
            return self._own_items(inner, nullcontext())
        if type(self.inner) is SequentialSampler:
            return self._own_items(self.inner, nullcontext())
        return self._own_items(self.inner, RandomStream(seed, torch.device("cpu")))

    def _own_items(self, inner: Iterable[Any], random: AbstractContextManager[None]) -> Iterator[Any]:
        with random:
            items = iter(inner)
        first: list[Any] = []
        while True:
            with random:
                round_ = list(itertools.islice(items, self.size))
            first = first or round_
            missing = self.size - len(round_)
            if not round_ or (missing and self.drop_last):
                return
            yield [*round_, *itertools.islice(itertools.cycle(first), missing)][self.rank]

    def __len__(self) -> int:
        whole, rest = divmod(len(self.inner), self.size)  # type: ignore[arg-type]
        return whole + (rest > 0 and not self.drop_last)
