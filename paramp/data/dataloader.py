"""The user's own ``DataLoader``, sharded over the data axis.

The user makes a loader as for one process. :func:`shard_loader` gives each data rank every dp-th sample of one common
order. The ranks of a model group get the same samples. ``batch_size`` is that of one data rank: a step over all data
ranks has dp times as many samples.

With ``consecutive`` a data rank gets consecutive samples instead, the rank-th part of each global batch.

All ranks get the same number of batches; otherwise some would wait forever in a collective. With ``drop_last`` an
incomplete last round is dropped. Without it, the first samples are repeated, as in torch's ``DistributedSampler``.

The order depends only on the run's seed and the epoch, not on a rank's random state. Every ``iter(loader)`` begins the
next epoch, so all ranks have to iterate equally often. ``set_epoch(n)`` sets the next epoch. An evaluation by the
engine counts as an epoch of the test loader alone.

Checkpoints hold a loader's :class:`~paramp.data.loader_position.LoaderPosition`: after a resume the next
``iter(loader)`` continues after the last batch that was yielded, also with another number of data ranks. That of
the test loader begins the next epoch, as without the stop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    SequentialSampler,
)

from ..base.collectives import gather_different
from ..base.errors import ConfigError
from ..distributed.context import ParallelContext
from ..distributed.rng import derive_seed
from .loader_position import EVALUATION, LoaderPosition, ShardedLoader, WithPosition, known_length
from .sharded_sampler import ShardedSampler
from .worker_signals import start_workers


@dataclass(eq=False)
class _Batches:
    """Every ``size``-th batch of a loader over an iterable dataset; other attributes are the loader's.

    Every rank reads the whole dataset, which has to yield the same on every rank, and keeps its own batches. Ranks
    without a batch in the last round repeat their first one.
    """

    loader: DataLoader[Any]
    rank: int
    size: int
    repeats: bool = True

    def __iter__(self) -> Iterator[Any]:
        local, first, count = None, None, 0
        for count, batch in enumerate(start_workers(self.loader, self.loader.__iter__), start=1):
            turn = (count - 1) % self.size
            if turn == self.rank:
                local = batch
            if count == 1 or count == self.rank + 1:  # the very first batch serves ranks that have none at all
                first = batch
            if turn == self.size - 1:
                yield local
        rest = count % self.size
        if rest and not self.loader.drop_last and (self.repeats or self.rank < rest):
            yield local if self.rank < rest else first

    def __len__(self) -> int:
        whole, rest = divmod(len(self.loader), self.size)
        return whole + (rest > 0 and not self.loader.drop_last)

    @property
    def num_repeated(self) -> int:
        """1 if this rank's last batch fills the last round."""
        rest = len(self.loader) % self.size
        return int(0 < rest <= self.rank and not self.loader.drop_last)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # during unpickling, before __init__
            raise AttributeError(name)
        return getattr(self.loader, name)


class ShardedBatches(WithPosition, _Batches):
    """:class:`_Batches` with a position for checkpoints."""


def shard_loader(
    loader: Any, rank: int, size: int, seed: int, *, consecutive: bool = False, run_seed: int | None = None
) -> Any:
    """The part of ``loader`` for data rank ``rank`` of ``size``.

    A ``DataLoader``, of any subclass, is copied, and the copy gets another sampler. A custom sampler is sharded by
    index, a custom batch sampler by batch. Both must yield the same on every rank and may draw random numbers from
    torch's default generator. A sampler that already shards over this axis, such as a ``DistributedSampler``, is kept.
    A loader over an iterable dataset becomes :class:`ShardedBatches`. Anything else is returned unchanged, and so is a
    loader with a true attribute ``is_whole``: every rank reads all of it.

    With ``consecutive`` each batch has consecutive samples of the common order, and all ranks' together too.

    The copy has its own generator, which seeds its worker processes: equally in a model group and differently over the
    data axis. For an iterable dataset the seeds are equal on all ranks, because all ranks read the same items.

    ``run_seed``: the seed that the user gave, from which ``seed`` was derived; None: ``seed`` itself.

    Raises:
        ConfigError: the loader shards over another axis, its order differs between ranks, or a rank has no batch.
    """
    if not isinstance(loader, DataLoader) or getattr(loader, "is_whole", False):
        return loader
    _check_sharding_is_possible(loader, rank, size)
    if isinstance(loader, WithPosition):
        return loader
    iterable = isinstance(loader.dataset, IterableDataset)
    generator = torch.Generator()
    worker_seed = derive_seed(seed, "workers", 0 if iterable else rank)
    changes: dict[str, Any] = {"generator": generator, "_iterator": None}
    if not iterable and not _samplers_that_shard(loader):
        options: dict[str, Any] = {"block": _batch_size(loader) if consecutive else 1}
        changes |= _sharded_samplers(
            loader, lambda inner, drop: ShardedSampler(inner, rank, size, derive_seed(seed), drop_last=drop, **options)
        )
    kind: Any = type(loader) if iterable else _with_position(type(loader))
    sharded = kind.__new__(kind)
    sharded.__dict__.update(loader.__dict__ | changes)  # DataLoader.__setattr__ refuses these
    result: Any = ShardedBatches(sharded, rank, size) if iterable else sharded
    samplers = _samplers_that_shard(sharded)
    sampler = next((one for one in samplers if isinstance(one, ShardedSampler)), None)
    own = [one for one in samplers if not isinstance(one, ShardedSampler) and hasattr(one, "set_epoch")]
    batch_size = _batch_size(sharded)
    result.position = LoaderPosition(generator, worker_seed, size * batch_size, sampler, batch_size, own)
    result.position.order = partial(_order, sharded, sampler, seed if run_seed is None else run_seed)
    _check_not_empty(result, size)
    return result


def _batch_size(loader: DataLoader[Any]) -> int:
    """The samples of a batch; 1 if the loader does not batch, or is sharded by batch."""
    batches = loader.batch_sampler  # given as such, it leaves the loader's batch_size None
    return batches.batch_size if type(batches) is BatchSampler else 1


def _order(loader: DataLoader[Any], sampler: ShardedSampler | None, seed: int) -> dict[str, int]:
    """:attr:`.LoaderPosition.order` of a sharded ``loader`` with ``sampler``; equal on every number of data ranks."""
    samples = known_length(loader.dataset)
    facts: dict[str, int | None]
    if isinstance(loader.dataset, IterableDataset):
        workers = max(loader.num_workers, 1)  # they take turns, one batch each
        facts = {"workers": workers, "batch size": _batch_size(loader) if workers > 1 else None}
    elif sampler is None:  # it shards by itself
        facts = {"samples": samples}
    elif type(sampler.inner) is SequentialSampler:
        facts = {}
    else:
        facts = {"seed": seed, "samples": samples, "length of its sampler": known_length(sampler.inner)}
    return {name: value for name, value in facts.items() if value is not None}


@contextmanager
def evaluation_pass(*, repeats: bool = False) -> Iterator[None]:
    """A context in which an iteration of a loader of :func:`shard_loader` is over a whole epoch.

    Also one that begins inside of a wrapper, such as tqdm's. On exit the loader's position is what it was, except for a
    test loader. Unless it ``repeats``, no sample is there twice to fill the last round: some ranks have a smaller last
    batch, or a batch less.
    """
    with ExitStack() as passes:
        token = EVALUATION.set(lambda loader: passes.enter_context(_evaluated(loader, repeats)))
        try:
            yield
        finally:
            EVALUATION.reset(token)


@contextmanager
def _evaluated(loader: Any, repeats: bool) -> Iterator[None]:
    position = loader.position
    changes: list[tuple[Any, dict[str, Any]]] = []
    if not repeats:
        changes += [(one, _without_repeats(one)) for one in position.own_samplers]
        filled = loader if isinstance(loader, ShardedBatches) else position.sampler
        changes += [] if filled is None else [(filled, {"repeats": False})]
    if position.is_running and not position.begins_anew:
        # persistent workers serve one iteration at a time; these get others
        changes.append((loader.loader if isinstance(loader, ShardedBatches) else loader, {"_iterator": None}))
    before = [(owner, {name: getattr(owner, name) for name in new}) for owner, new in changes]
    try:
        for owner, new in changes:
            vars(owner).update(new)
        with nullcontext() if position.begins_anew else position.aside():
            yield
    finally:
        for owner, old in before:
            vars(owner).update(old)


def num_repeated(loader: Any) -> float:
    """How many samples at the end of its last batch a loader of :func:`shard_loader` repeats; infinity: all of them."""
    if isinstance(loader, ShardedBatches):
        return math.inf if loader.num_repeated else 0
    if not isinstance(loader, ShardedLoader):
        return 0
    sampler, own = loader.position.sampler, loader.position.own_samplers
    count = sampler.num_repeated if sampler is not None else max((_repeated_by(one, loader) for one in own), default=0)
    return count if isinstance(loader.batch_sampler, BatchSampler) or not count else math.inf


def _repeated_by(sampler: Any, loader: DataLoader[Any]) -> int:
    """How many samples that a ``DistributedSampler`` repeats ``loader`` yields; it may drop its last batch."""
    changed, batches = _without_repeats(sampler), loader.batch_sampler  # given as such, it has the options
    drops = getattr(batches, "drop_last", False)
    dropped = sampler.num_samples % (getattr(batches, "batch_size", None) or 1) if changed and drops else 0
    return max(sampler.num_samples - changed["num_samples"] - dropped, 0) if changed else 0


def _without_repeats(sampler: Any) -> dict[str, int]:
    """What attributes a ``DistributedSampler`` has that repeats no sample; none of other classes, or if it drops."""
    if type(sampler) is not DistributedSampler or sampler.drop_last:
        return {}
    count = len(sampler.dataset)  # type: ignore[arg-type]
    return {"total_size": count, "num_samples": len(range(sampler.rank, count, sampler.num_replicas))}


def _with_position(kind: type) -> type:
    return type(kind.__name__, (ShardedLoader, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _sharded_samplers(loader: DataLoader[Any], make: Callable[[Iterable[Any], bool], ShardedSampler]) -> dict[str, Any]:
    """The attributes ``sampler`` and ``batch_sampler`` of the sharded loader."""
    batches: Any = loader.batch_sampler
    if batches is None:  # batch_size=None: no automatic batching
        return {"sampler": make(loader.sampler, loader.drop_last)}
    if type(batches) is BatchSampler:
        sampler = make(batches.sampler, batches.drop_last)
        return {"sampler": sampler, "batch_sampler": BatchSampler(sampler, batches.batch_size, batches.drop_last)}
    sampler = make(batches, bool(getattr(batches, "drop_last", False)))
    return {"sampler": sampler, "batch_sampler": sampler}


def _samplers_that_shard(loader: DataLoader[Any]) -> list[Any]:
    """The samplers of ``loader`` that shard over ranks themselves, such as ``DistributedSampler``."""
    candidates = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    shard = [sampler for sampler in candidates if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")]
    return [*{id(sampler): sampler for sampler in shard}.values()]  # torch's batch sampler has that of its loader


def _check_sharding_is_possible(loader: DataLoader[Any], rank: int, size: int) -> None:
    for sampler in _samplers_that_shard(loader):
        if (sampler.num_replicas, sampler.rank) != (size, rank):
            raise ConfigError(
                f"its {type(sampler).__name__} gives samples to rank {sampler.rank} of {sampler.num_replicas}, but "
                f"this is data rank {rank} of {size}; remove the sampler and pass shuffle, or give it "
                "num_replicas=context.dp.size, rank=context.dp.rank"
            )
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        raise ConfigError(
            "its dataset is a DataPipe, which torch shards over all ranks, also within a model group; "
            "pass an IterableDataset or a Dataset"
        )
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise ConfigError(
            "in_order=False yields batches in the order in which workers finish, which differs between ranks; "
            "remove in_order"
        )


def _check_not_empty(sharded: Any, size: int) -> None:
    """Raise a ConfigError if the loader has no batch: a loop that repeats it until N steps are made would hang."""
    if known_length(sharded) != 0:
        return
    samples = known_length(sharded.dataset)
    if not samples:
        raise ConfigError("its dataset is empty; expected at least one sample")
    # given as such, torch's batch sampler has the options, and the loader has its defaults
    options = sharded.batch_sampler if type(sharded.batch_sampler) is BatchSampler else sharded
    if not options.drop_last:
        raise ConfigError(f"its sampler yields none of its dataset's {samples} samples; expected at least one")
    local = 0 if isinstance(sharded, ShardedBatches) else known_length(getattr(sharded.batch_sampler, "sampler", None))
    if not local:
        raise ConfigError(
            f"its {samples} samples do not fill a batch of {options.batch_size} for each of {size} data ranks, so "
            "drop_last leaves none; expected more samples, smaller batches or drop_last=False"
        )
    raise ConfigError(
        f"batch_size {options.batch_size}, but a data rank has {local} samples, so drop_last leaves no batch; expected "
        f"at most {local}"
    )


def shard_loaders(context: ParallelContext, *, consecutive: bool = False, **loaders: Any) -> list[Any]:
    """Shard each of ``loaders`` over the data axis of ``context``; what is not a ``DataLoader`` is unchanged.

    Every rank has to call this. Ranks may pass None where others pass a loader. ``consecutive``: a data rank gets
    consecutive samples of each global batch.

    Raises:
        ConfigError: on every rank, if any rank's loader cannot be sharded, or the ranks' loaders differ.
    """
    sharded, problems, facts = [], [], []
    axis = context.dp
    for name, loader in loaders.items():
        try:
            seed = derive_seed(context.config.seed, name)
            one = shard_loader(
                loader, axis.rank, axis.size, seed, consecutive=consecutive, run_seed=context.config.seed
            )
            sharded.append(one)
        except ConfigError as error:
            sharded.append(None)
            problems.append(f"{name}: {error}")
        facts.append(_describe(loader))
    everyone = gather_different((problems, facts), context.device)
    for others, _ in everyone:
        if others:
            raise ConfigError(others[0])
    for index, name in enumerate(loaders):
        known = [(rank, each[index]) for rank, (_, each) in enumerate(everyone) if each[index] is not None]
        for rank, fact in known:
            if fact != known[0][1]:
                raise ConfigError(
                    f"{name}: rank {known[0][0]} has {known[0][1]}, but rank {rank} has {fact}; make the same loader "
                    "over all of the data on every rank: initialize shards it"
                )
    return sharded


def _describe(loader: Any) -> str | None:
    """The properties that have to be equal on all ranks, as text; None if it is not a ``DataLoader``."""
    if not isinstance(loader, DataLoader):
        return None
    length = known_length(loader.dataset)
    samples = "an unknown number of samples" if length is None else f"{length} samples"
    return f"{samples} in batches of {loader.batch_size}, drop_last {loader.drop_last}"
