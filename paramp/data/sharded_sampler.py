"""A sampler that gives each data rank its part of another sampler's items."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from ..distributed.rng import RandomStream, derive_seed

DRAWS_FROM_A_GENERATOR = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass(eq=False)
class ShardedSampler(Sampler[Any]):
    """One item of each ``size`` of ``inner``, that of ``rank``: indices of samples, or whole batches of them.

    With a ``block``, the ``rank``-th ``block`` items of each ``size`` x ``block``.

    ``inner`` draws torch's random numbers from this sampler's own stream, which is equal on all ranks and new in each
    epoch. If it has ``set_epoch``, each iteration calls it with the epoch.
    """

    inner: Iterable[Any]
    """A sampler or batch sampler that can be iterated repeatedly."""
    rank: int
    size: int
    """The data rank, and the number of data ranks."""
    seed: int
    """The seed of the random numbers, equal on all ranks."""
    drop_last: bool
    """True: a last round without an item for every rank is dropped. False: it is filled with the first items."""
    block: int = 1
    """Consecutive items of a rank."""
    epoch: int = field(init=False, default=0)
    """The epoch of the next iteration."""
    skip: int = field(init=False, default=0)
    """Items of this rank that the next iteration skips."""
    repeats: bool = field(init=False, default=True)
    """False: without ``drop_last`` a last round is not filled, so that some ranks have less."""

    @property
    def num_replicas(self) -> int:
        """``size`` under the name in torch's ``DistributedSampler``: marks a loader that is already sharded."""
        return self.size

    @property
    def num_repeated(self) -> int:
        """How many of this rank's items, its last ones, fill the last round."""
        rest = len(self.inner) % (self.size * self.block)  # type: ignore[arg-type]
        given = min(max(rest - self.rank * self.block, 0), self.block)
        return self.block - given if rest and not self.drop_last else 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, also of ``inner`` if it has ``set_epoch``."""
        self.epoch = epoch
        if hasattr(self.inner, "set_epoch"):
            self.inner.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        # a generator: torch's loader with workers makes two iterators in each pass, and reads the second alone
        self.set_epoch(self.epoch)  # inner's too, in every pass, as a load sets it
        seed = derive_seed(self.seed, "samples", self.epoch)
        self.epoch += 1
        skip, self.skip = self.skip, 0
        inner: Any = self.inner
        random: AbstractContextManager[None] = nullcontext()
        if type(inner) in DRAWS_FROM_A_GENERATOR:
            inner = copy.copy(inner)
            # the state of the user's generator, and of torch's default one, may differ between ranks
            inner.generator = torch.Generator().manual_seed(seed)
        elif type(inner) is not SequentialSampler:
            random = RandomStream(seed, torch.device("cpu"))
        yield from itertools.islice(self._local_items(inner, random), skip, None)

    def _local_items(self, inner: Iterable[Any], random: AbstractContextManager[None]) -> Iterator[Any]:
        with random:
            items = iter(inner)
        first: list[Any] = []
        local = slice(self.rank * self.block, (self.rank + 1) * self.block)
        while True:
            with random:
                round_ = list(itertools.islice(items, self.size * self.block))
            first = first or round_
            missing = self.size * self.block - len(round_)
            if not round_ or (missing and self.drop_last):
                return
            if missing and not self.repeats:
                yield from round_[local]
                return
            yield from [*round_, *itertools.islice(itertools.cycle(first), missing)][local]

    def __len__(self) -> int:
        whole, rest = divmod(len(self.inner), self.size * self.block)  # type: ignore[arg-type]
        return self.block * (whole + (rest > 0 and not self.drop_last))
