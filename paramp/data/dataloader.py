"""The user's own ``DataLoader``, dealt over the data axis.

A loader is made as for one process. What :func:`deal` returns gives each data rank every dp-th sample of the same
order, and the ranks of one model group, which share a batch, the same samples. ``batch_size`` stays that of one data
rank: over all of them a step sees dp times as many.

All ranks get the same number of batches, or some would wait for ever in a collective that the others never reach. So
what is left over at the end is dropped with ``drop_last``, and else filled up from the beginning, as torch's
``DistributedSampler`` does.

The order is drawn from the run's seed and the epoch, whatever state a rank's random numbers are in. Every
``iter(loader)`` begins the next epoch, on every rank alike, as long as all of them iterate equally often;
``set_epoch(n)`` says which one comes next.

A loader knows its :class:`LoaderPosition`, which checkpoints hold: after a resume the next ``iter(loader)`` goes on with the
batch after the last one that was given out, also over another number of data ranks.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ..base.errors import ConfigError
from ..distributed.collectives import gather_objects
from ..distributed.context import ParallelContext
from ..distributed.rng import RandomStream, derive_seed

__all__ = ["LoaderPosition", "ShardedBatches", "ShardedSampler", "shard_loader", "shard_loaders"]

DRAWS_FROM_A_GENERATOR = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class ShardedSampler(Sampler[Any]):
    """Every ``size``-th item of ``inner``, from item ``rank`` on: indices of samples, or whole batches of them.

    ``inner`` draws its random numbers, as long as they are torch's, from a stream of this sampler's own, which is equal
    on all ranks and another in each epoch.

    Args:
        inner: what is dealt; iterating it again begins it anew.
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
        """The one that the next iteration is of."""
        self.skip = 0
        """Items of this rank that the next iteration leaves out."""

    @property
    def num_replicas(self) -> int:
        """As torch's ``DistributedSampler`` calls ``size``: a loader with this sampler is not dealt again."""
        return self.size

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is of; ``inner`` too, if it wants to know."""
        self.epoch = epoch
        tell = getattr(self.inner, "set_epoch", None)
        if tell is not None:
            tell(epoch)

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
            return self._deal(inner, nullcontext())
        if type(self.inner) is SequentialSampler:
            return self._deal(self.inner, nullcontext())
        return self._deal(self.inner, RandomStream(seed, torch.device("cpu")))

    def _deal(self, inner: Iterable[Any], random: AbstractContextManager[None]) -> Iterator[Any]:
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


class LoaderPosition:
    """Where the user of a dealt loader is: in which epoch, and how many of its batches were given out.

    Args:
        generator: of the loader, from which its workers get their seeds: another one in each epoch.
        seed: of that generator.
        unit: what one batch of a rank stands for over all ranks: in samples, or in batches where these are dealt.
        dealer: the loader's sampler, which can leave out what was given before; else batches are read and dropped.
        dealt_at_once: items that ``dealer`` yields for one batch.
    """

    def __init__(
        self, generator: torch.Generator, seed: int, unit: int, dealer: ShardedSampler | None, dealt_at_once: int = 1
    ) -> None:
        self._generator = generator
        self._seed = seed
        self._unit = unit
        self._dealer = dealer
        self._dealt_at_once = dealt_at_once
        self._next = 0
        self._skip = 0
        self._current: _Given | None = None

    @property
    def _next_epoch(self) -> int:
        return self._next if self._dealer is None else self._dealer.epoch

    def begin(self, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The batches of the next epoch, or the rest of one, from the iterator that ``iterate`` makes."""
        skip, self._skip = self._skip, 0
        epoch = self._next_epoch
        self._next = epoch + 1
        self._generator.manual_seed(derive_seed(self._seed, epoch))
        if self._dealer is not None:
            self._dealer.skip = skip * self._dealt_at_once
        batches = iterate()
        if self._dealer is None and skip:
            with torch.random.fork_rng(devices=[]):  # what was drawn for these was drawn before
                for _ in itertools.islice(batches, skip):
                    pass
        self._current = _Given(batches, epoch, skip)
        return self._current

    def state_dict(self) -> dict[str, int]:
        """``epoch`` and, in all ranks' samples (or batches), how much of it was given out."""
        current = self._current
        if current is None:
            return {"epoch": self._next_epoch, "given": self._skip * self._unit}
        return {"epoch": current.epoch, "given": current.given * self._unit}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next iteration go on from ``state``, of this number of data ranks or another."""
        if self._current is not None:
            self._current.stale = True
        self._current, self._next = None, state["epoch"]
        if self._dealer is not None:
            self._dealer.set_epoch(state["epoch"])
        self._skip, rest = divmod(state["given"], self._unit)
        if rest:
            warnings.warn(
                f"loader: the run had read {state['given']} samples of its epoch, no multiple of the {self._unit} that "
                f"all ranks read at once now; the last {rest} come again",
                stacklevel=2,
            )


class _Given:
    """An iteration's batches, counted as they are given out."""

    def __init__(self, batches: Iterator[Any], epoch: int, given: int) -> None:
        self._batches = batches
        self.epoch = epoch
        self.given = given
        self.stale = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.stale:
            raise RuntimeError("loader: this iteration was begun before a checkpoint was loaded; begin another one")
        try:
            batch = next(self._batches)
        except StopIteration:
            if self.given:
                self.epoch, self.given = self.epoch + 1, 0
            raise
        self.given += 1
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


class _WithPosition:
    """Added to the class of a loader that is dealt: it counts what it gives out."""

    position: LoaderPosition

    def __iter__(self) -> Iterator[Any]:
        return self.position.begin(super().__iter__)  # type: ignore[misc]

    def state_dict(self) -> dict[str, int]:
        """The loader's position, for checkpoints."""
        return self.position.state_dict()

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from there."""
        self.position.load_state_dict(state_dict)


class _Batches:
    """Every ``size``-th batch of a loader over an iterable dataset; everything else is the loader's.

    Every rank reads all of the dataset, which has to yield the same on every rank, and keeps its batches. In a last
    round without a batch for every rank, those that have none repeat their first.
    """

    def __init__(self, loader: DataLoader[Any], rank: int, size: int) -> None:
        self.loader = loader
        self.rank = rank
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        own: Any = None
        first: Any = None
        count = 0
        for count, batch in enumerate(self.loader, start=1):
            place = (count - 1) % self.size
            if place == self.rank:
                own = batch
            if count == 1 or count == self.rank + 1:  # with less than one round, another rank's is all there is
                first = batch
            if place == self.size - 1:
                yield own
        rest = count % self.size
        if rest and not self.loader.drop_last:
            yield own if self.rank < rest else first

    def __len__(self) -> int:
        whole, rest = divmod(len(self.loader), self.size)
        return whole + (rest > 0 and not self.loader.drop_last)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)


class ShardedBatches(_WithPosition, _Batches):
    """:class:`_Batches` that know their position."""


def shard_loader(loader: Any, rank: int, size: int, seed: int) -> Any:
    """``loader`` with the part of its samples that belongs to data rank ``rank`` of ``size``.

    A ``DataLoader`` is copied, whatever subclass it is of, and the copy given another sampler. A custom sampler is
    dealt index by index, a custom batch sampler batch by batch; they must yield the same on every rank, and may draw
    random numbers from torch's default generator. One that deals over this very axis already, such as a
    ``DistributedSampler``, is left alone. Loaders over iterable datasets become :class:`ShardedBatches`. Anything else
    is returned as it is.

    The copy has a generator of its own, of which its worker processes get their seeds: equal in a model group, and
    different over the data axis, unless all data ranks have to read the same of an iterable dataset.

    Raises:
        ConfigError: the loader deals over something else, its order is not the same on every rank, or no batch is left
            for a rank.
    """
    if not isinstance(loader, DataLoader):
        return loader
    _check(loader, rank, size)
    if isinstance(loader, _WithPosition):
        return loader
    iterable = isinstance(loader.dataset, IterableDataset)
    generator = torch.Generator()
    worker_seed = derive_seed(seed, "workers", 0 if iterable else rank)
    changes: dict[str, Any] = {"generator": generator, "_iterator": None}
    if not iterable and not _samplers_that_shard(loader):
        changes |= _sharded_samplers(
            loader, lambda inner, drop: ShardedSampler(inner, rank, size, derive_seed(seed), drop_last=drop)
        )
    kind: Any = type(loader) if iterable else _with_position(type(loader))
    sharded = kind.__new__(kind)
    sharded.__dict__.update(
        loader.__dict__ | changes
    )  # DataLoader forbids to set these: its own constructor checks them
    result: Any = ShardedBatches(sharded, rank, size) if iterable else sharded
    dealer = next((sampler for sampler in _samplers_that_shard(sharded) if isinstance(sampler, ShardedSampler)), None)
    at_once = sharded.batch_size or 1
    result.position = LoaderPosition(generator, worker_seed, size * at_once, dealer, at_once)
    _check_not_empty(result, size)
    return result


def _with_position(kind: type) -> type:
    return type(kind.__name__, (_WithPosition, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _sharded_samplers(loader: DataLoader[Any], make: Callable[[Iterable[Any], bool], ShardedSampler]) -> dict[str, Any]:
    """The attributes ``sampler`` and ``batch_sampler`` of the dealt loader."""
    batches: Any = loader.batch_sampler
    if batches is None:  # the dataset yields whole batches, or none are wanted
        return {"sampler": make(loader.sampler, loader.drop_last)}
    if type(batches) is BatchSampler:
        sampler = make(batches.sampler, batches.drop_last)
        return {"sampler": sampler, "batch_sampler": BatchSampler(sampler, batches.batch_size, batches.drop_last)}
    sampler = make(batches, bool(getattr(batches, "drop_last", False)))
    return {"sampler": sampler, "batch_sampler": sampler}


def _samplers_that_shard(loader: DataLoader[Any]) -> list[Any]:
    """The samplers of ``loader`` that deal over ranks by themselves."""
    candidates = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return [sampler for sampler in candidates if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")]


def _check(loader: DataLoader[Any], rank: int, size: int) -> None:
    for sampler in _samplers_that_shard(loader):
        if (sampler.num_replicas, sampler.rank) != (size, rank):
            raise ConfigError(
                f"its {type(sampler).__name__} deals to rank {sampler.rank} of {sampler.num_replicas}, but this is "
                f"data rank {rank} of {size}; leave the sampler out and pass shuffle, or give it "
                "num_replicas=context.dp.size, rank=context.dp.rank"
            )
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        raise ConfigError(
            "its dataset is a DataPipe, which torch deals over all ranks, those of a model group too; "
            "pass an IterableDataset or a Dataset"
        )
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise ConfigError(
            "in_order=False gives batches in the order in which its workers are done, another on each rank; "
            "leave in_order out"
        )


def _check_not_empty(sharded: Any, size: int) -> None:
    """Complain about a loader without a batch: a loop that asks it for one would never end, or train nothing."""
    try:
        if len(sharded):
            return
    except (TypeError, NotImplementedError):  # nobody knows before it is read
        return
    samples = _length(sharded.dataset)
    if not samples:
        raise ConfigError("its dataset is empty; expected at least one sample")
    if not sharded.drop_last:
        raise ConfigError(f"its sampler yields none of its dataset's {samples} samples; expected at least one")
    own = 0 if isinstance(sharded, ShardedBatches) else _length(getattr(sharded.batch_sampler, "sampler", None))
    if not own:
        raise ConfigError(
            f"its {samples} samples do not fill a batch of {sharded.batch_size} for each of {size} data ranks, so "
            "drop_last leaves none; expected more samples, smaller batches or drop_last=False"
        )
    raise ConfigError(
        f"batch_size {sharded.batch_size}, but a data rank has {own} samples, so drop_last leaves no batch; expected at "
        f"most {own}"
    )


def _length(items: Any) -> int:
    """0 where there is no telling."""
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return 0


def shard_loaders(context: ParallelContext, **loaders: Any) -> list[Any]:
    """Each of ``loaders`` dealt over the data axis of ``context``, or as it is if it is no ``DataLoader``.

    Every rank has to call this. Ranks may pass None where others pass a loader.

    Raises:
        ConfigError: on every rank, if a loader of any rank cannot be dealt, or ranks have different ones.
    """
    sharded, problems, facts = [], [], []
    for name, loader in loaders.items():
        try:
            sharded.append(
                shard_loader(loader, context.dp.rank, context.dp.size, derive_seed(context.config.seed, name))
            )
        except ConfigError as error:
            sharded.append(None)
            problems.append(f"{name}: {error}")
        facts.append(_describe(loader))
    everyone = gather_objects((problems, facts))
    for others, _ in everyone:
        if others:
            raise ConfigError(others[0])
    for index, name in enumerate(loaders):
        known = [(rank, each[index]) for rank, (_, each) in enumerate(everyone) if each[index] is not None]
        for rank, fact in known:
            if fact != known[0][1]:
                raise ConfigError(
                    f"{name}: rank {known[0][0]} has {known[0][1]}, where rank {rank} has {fact}; make the same loader "
                    "over all of the data on every rank, initialize deals it"
                )
    return sharded


def _describe(loader: Any) -> str | None:
    """What has to be equal on all ranks, in words; None for what is no ``DataLoader``."""
    if not isinstance(loader, DataLoader):
        return None
    try:
        length = f"{len(loader.dataset)} samples"  # type: ignore[arg-type]
    except TypeError:
        length = "samples without a number"
    return f"{length} in batches of {loader.batch_size}, drop_last {loader.drop_last}"
