"""Comparing the data of the ranks of one model group, which together hold one replica of the model.

Each of these ranks computes a part of the same forward: a shard of each layer, or one stage. If they are given
different batches, the parts do not belong together, and training goes wrong without an error. So the first batches of
an engine are compared, by a hash of their bits (:mod:`paramp.observe.bit_hash`), before they run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import keystr, tree_flatten_with_path

from ..base.dtensor import is_dtensor
from ..base.errors import ConfigError, shown
from ..distributed.collectives import gather_objects
from ..distributed.context import ParallelContext
from .bit_hash import hash_bits

NUM_COMPARED = 3
"""The batches that are compared at the start, of training and of evaluation each."""
NAMED = 4
"""The most ranks that a message lists."""


class Leaf(NamedTuple):
    """A value of a batch, as ranks exchange it."""

    path: str
    """Such as ``inputs['mask']``."""
    kind: str
    """A tensor's dtype and shape, a number itself, or the class of anything else."""
    hash: int | None
    """Of a tensor's bits. None: they are not compared."""


class FirstBatches:
    """Compares the first batches that this rank's engine is given with those of its model group."""

    def __init__(self, context: ParallelContext) -> None:
        self._context = context
        in_group = dist.get_world_size(context.model_group) > 1
        self._left = dict.fromkeys((False, True), NUM_COMPARED if in_group else 0)

    def check(self, training: bool, **parts: Any) -> None:
        """Compare ``parts`` of a batch, trees of tensors by name; a collective of the model group for first batches.

        Raises:
            ConfigError: on every rank of the model group: they differ.
        """
        if not self._left[training]:
            return
        self._left[training] -= 1
        group = self._context.model_group
        ranks = dist.get_process_group_ranks(group)
        found = _difference(gather_objects(list(_leaves(parts)), group), ranks, self._context)
        if found is not None:
            raise ConfigError(
                f"{found}. The ranks of a model group hold one replica of the model, and need the same batch: use the "
                "loader that initialize returns, or a sampler with num_replicas=context.batch_axis.size, "
                "rank=context.batch_axis.rank"
            )


def different_data(batches: Sequence[Mapping[str, Any]], context: ParallelContext) -> str | None:
    """Where ranks of a model group have different ``batches`` of a window; None if nowhere, or if none are known.

    Args:
        batches: the parts of each batch, trees of tensors, by name.

    Returns:
        The same on every rank; a collective of the world.
    """
    own = [
        leaf
        for number, parts in enumerate(batches, start=1)
        for leaf in _leaves({f"{name} of batch {number} of the last window": part for name, part in parts.items()})
    ]
    everyone = gather_objects(own)
    for ranks in gather_objects(dist.get_process_group_ranks(context.model_group)):
        known = [rank for rank in ranks if everyone[rank]]
        if (found := _difference([everyone[rank] for rank in known], known, context)) is not None:
            return found
    return None


def _leaves(parts: Mapping[str, Any]) -> Iterator[Leaf]:
    for name, part in parts.items():
        for path, value in tree_flatten_with_path(part)[0]:
            yield _leaf(f"{name}{keystr(path)}", value)


def _leaf(path: str, value: Any) -> Leaf:
    if not isinstance(value, torch.Tensor):
        plain = value is None or isinstance(value, (bool, int, float, str))
        return Leaf(path, shown(value) if plain else type(value).__name__, None)
    kind = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    readable = not (value.is_meta or is_dtensor(value)) and value.layout is torch.strided
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
            has, other_has = (leaf.path if leaf else "nothing more" for leaf in (usual, other))
            path = "the batch"
        else:
            path, has, other_has = usual.path, usual.kind, other.kind
        if has == other_has:
            other_has = "other values"
        return f"{path}: {context.name_of(ranks[0])} has {has}, but {_listed(differ, context)} has {other_has}"
    return None


def _listed(ranks: Sequence[int], context: ParallelContext) -> str:
    more = [f"{len(ranks) - NAMED} more"] if len(ranks) > NAMED else []
    return ", ".join([context.name_of(rank) for rank in ranks[:NAMED]] + more)
