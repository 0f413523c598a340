"""Comparing the data of the ranks of one model group (tensor x pipeline x context), which are given the same samples.

Each of these ranks computes a part of the same forward: a shard of each layer, or one stage. If they are given
different batches, the parts do not belong together, and training goes wrong without an error. So the first batches of
an engine are compared, by a hash of their bits (:mod:`paramp.observe.bit_hash`), before they run.

Of a later batch only shapes, dtypes and values that are no tensors are compared. A rank with other ones would wait in
other collectives than the rest, so no collective can find it, and none should wait for it:

    each rank, before a batch    writes its number and kinds to the store; then reads its two neighbours' in the group
    of two that differ           the one that comes second finds what the first has written, and raises

In a group in which not all are equal, some two neighbours differ. Nobody waits: it takes two requests to the store.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # missing in torch's stubs only

from ..base.collectives import gather_objects
from ..base.dtensor import is_dtensor
from ..base.errors import ConfigError, shown
from ..distributed.context import ParallelContext
from ..distributed.rendezvous import read_all
from ..parallel.microbatches import Batch
from .bit_hash import hash_bits

NUM_COMPARED = 3
"""The batches that are compared at the start, of training and of evaluation each."""
NAMED = 4
"""The most ranks, and the most differences, that a message lists."""
SAME_BATCH = (
    "The ranks of a model group train on the same samples, and need the same batch: use the loader that initialize "
    "returns, or the trainer prepares, or a sampler with num_replicas=context.dp.size, rank=context.dp.rank"
)


class Leaf(NamedTuple):
    """A value of a batch, as ranks exchange it."""

    path: str
    """Such as ``inputs['mask']``."""
    kind: str
    """A tensor's dtype and shape, a number itself, or the class of anything else."""
    hash: int | None
    """Of a tensor's bits. None: they are not compared."""


class LaterBatches:
    """Compares the kinds of each batch of one rank with those of its neighbours in the model group."""

    def __init__(self, store: Store, key: str, rank: int, ranks: Sequence[int]) -> None:
        """Every rank of ``ranks`` makes one, before any compares; ``key`` is that of this engine in the ``store``."""
        self._store, self._key = store, key
        self._rank, self._ranks = rank, ranks
        index = ranks.index(rank)
        self._neighbours = sorted({ranks[index - 1], ranks[(index + 1) % len(ranks)]})
        store.set(f"{key}/{rank}", json.dumps([0, []]))  # so that no neighbour waits for the key

    def differ(self, number: int, leaves: Sequence[Leaf]) -> dict[int, list[Leaf]]:
        """The leaves of each rank that has come to the batch ``number``, if a neighbour's are not ``leaves``; else {}.

        Not a collective: of two neighbours that differ, the one that comes second finds it.
        """
        self._store.set(f"{self._key}/{self._rank}", json.dumps([number, leaves]))
        if all(theirs == leaves for theirs in self._at(number, self._neighbours).values()):
            return {}
        return self._at(number, self._ranks)

    def _at(self, number: int, ranks: Sequence[int]) -> dict[int, list[Leaf]]:
        states = map(json.loads, read_all(self._store, [f"{self._key}/{rank}" for rank in ranks]))
        return {
            rank: [Leaf(*leaf) for leaf in leaves]
            for rank, (theirs, leaves) in zip(ranks, states, strict=True)
            if theirs == number
        }


class SameBatches:
    """Compares the batches that this rank's engine is given with those of its model group.

    The first ones by their bits, later ones by their shapes and dtypes.
    """

    def __init__(self, context: ParallelContext, raise_alone: Callable[[Exception], None]) -> None:
        """``raise_alone`` raises the error of a later batch, for which other ranks may wait already."""
        self._context = context
        self._raise_alone = raise_alone
        self._ranks = dist.get_process_group_ranks(context.model_group)
        in_group = len(self._ranks) > 1
        self._left = dict.fromkeys((False, True), NUM_COMPARED if in_group else 0)
        self._number = 0
        store = dist.distributed_c10d._get_default_store()
        is_file = not store.has_extended_api()  # type: ignore[attr-defined]  # as above
        # A file would grow with each batch; with a fake process group only this rank runs.
        usable = in_group and not is_file and dist.get_backend() != "fake"
        key = f"paramp/batch/{context.serial}/{context.num_engines}"
        self._later = LaterBatches(store, key, context.rank, self._ranks) if usable else None

    def check(self, training: bool, batch: Batch) -> None:
        """Compare ``batch``; a collective of the model group for one of the first.

        Raises:
            ConfigError: they differ: on every rank of the model group for one of the first; else on this rank, and
                perhaps on no other.
        """
        self._number += 1
        if self._left[training]:
            self._left[training] -= 1
            self._compare_bits(batch)
        elif self._later is not None:
            call = Leaf("the call", "a training batch" if training else "an evaluation", None)
            if by_rank := self._later.differ(self._number, [call, *_leaves(batch, hashed=False)]):
                difference = _difference([*by_rank.values()], [*by_rank], self._context)
                where = f"{difference}, in batch {self._number} of this engine"
                self._raise_alone(ConfigError(f"{where}. {SAME_BATCH}"))

    def _compare_bits(self, batch: Batch) -> None:
        """The host waits for them."""
        everyone = gather_objects(_leaves(batch), self._context.model_group)
        if (difference := _difference(everyone, self._ranks, self._context)) is not None:
            raise ConfigError(f"{difference}. {SAME_BATCH}")


def different_data(batches: Sequence[Batch], context: ParallelContext) -> str | None:
    """Where ranks of a model group have different ``batches`` of a window; None if nowhere, or if none are known.

    Returns:
        The same on every rank; a collective of the world.
    """
    local_leaves = [
        leaf._replace(path=f"{leaf.path} of batch {number} of the last window")
        for number, batch in enumerate(batches, start=1)
        for leaf in _leaves(batch)
    ]
    everyone = gather_objects(local_leaves)
    for ranks in gather_objects(dist.get_process_group_ranks(context.model_group)):
        known = [rank for rank in ranks if everyone[rank]]
        if (found := _difference([everyone[rank] for rank in known], known, context)) is not None:
            return found
    return None


def _leaves(batch: Batch, *, hashed: bool = True) -> list[Leaf]:
    return [_leaf(path, value, hashed) for path, value in batch.unwrapped().leaves()]


def _leaf(path: str, value: Any, hashed: bool) -> Leaf:
    if not isinstance(value, torch.Tensor):
        is_scalar = getattr(value, "shape", None) == ()  # of NumPy
        plain = is_scalar or value is None or isinstance(value, (bool, int, float, str))
        return Leaf(path, shown(value) if plain else type(value).__name__, None)
    kind = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    readable = hashed and not (value.is_meta or is_dtensor(value)) and value.layout is torch.strided
    return Leaf(path, kind, int(hash_bits(value)) if readable else None)


def _difference(everyone: Sequence[Sequence[Leaf]], ranks: Sequence[int], context: ParallelContext) -> str | None:
    """The first leaf in which ``everyone``, the leaves of each of ``ranks``, differs; None if there is none."""
    for leaves in itertools.zip_longest(*everyone):
        usual = leaves[0]
        other = next((leaf for leaf in leaves if leaf != usual), usual)
        if other == usual:
            continue
        differ = [rank for rank, leaf in zip(ranks, leaves, strict=True) if leaf == other]
        if other is None or usual is None or other.path != usual.path:
            path, has, other_has = "the batch", *(leaf.path if leaf else "nothing more" for leaf in (usual, other))
        else:
            path, has, other_has = usual.path, usual.kind, other.kind
        if has == other_has:
            other_has = "other values"
        return f"{path}: {context.name_of(ranks[0])} has {has}, but {listed(differ, context)} has {other_has}"
    return None


def listed(ranks: Sequence[int], context: ParallelContext) -> str:
    """The first few of ``ranks`` with their coordinates, and how many more there are."""
    more = [f"{len(ranks) - NAMED} more"] if len(ranks) > NAMED else []
    return ", ".join([context.name_of(rank) for rank in ranks[:NAMED]] + more)
