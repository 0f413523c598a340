"""Compares the traces of two runs bit for bit.

Every tensor that the ranks of the sharded run have is brought to the shape that it has in the single process: copies
are compared one by one; shards of weights are compared where they belong in the whole one; shards of activations are
joined along the dim in which they differ, those of context ranks along that of the tokens. What cannot be joined is not
compared, which the report says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch

from ...checkpoint.chunks import ranges
from ...tools.verify.activation_recorder import RankRecord
from ...tools.verify.compare import check_same_start, has_all, joined
from .bits_report import ExactReport, TensorDifference, described
from .tensor_trace import KINDS, OF_MODULES, Entry, Key

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtype of the same bits, by the size of an element."""
Held = list[tuple[int, Entry]]
"""Ranks of the sharded run and what they have."""


def compare_exactly(
    single: RankRecord,
    sharded: Sequence[RankRecord],
    traces: Mapping[str, Sequence[Iterator[Entry]]],
    report: ExactReport,
) -> None:
    """Add to ``report`` what differs between the runs; ``traces``: by run, of each rank.

    Raises:
        ConfigError: the runs had different initial weights or batches.
    """
    check_same_start(single, sharded)
    held: dict[Key, Held] = defaultdict(list)
    for rank in sorted(range(len(sharded)), key=lambda rank: sharded[rank].tensor_rank):
        for entry in traces["sharded"][rank]:
            held[entry.key].append((rank, entry))
    packed = {*sharded[0].packed, sharded[0].microbatch_size} - {0, 1}
    context_ranks = [record.context_rank for record in sharded]
    holders: dict[str, set[int]] = {}
    wholes = [*traces["single"][0]]
    for whole in sorted(wholes, key=_order):  # stable: in the order in which the single process computed them
        key = whole.key
        found = held.pop(key, [])
        if key.kind in OF_MODULES:
            if key.name not in holders:
                ranks = range(len(sharded))
                holders[key.name] = {rank for rank in ranks if has_all(sharded[rank], key.name, single)}
            if not holders[key.name]:  # a module that spans stages has another output on each
                continue
            found = [(rank, entry) for rank, entry in found if rank in holders[key.name]]
        _compare(whole, found, context_ranks, packed, report)
    for key in held:
        if not (key.kind in OF_MODULES and not holders.get(key.name, {0})):
            report.leave_out(key, "only the sharded run has it")


def _order(entry: Entry) -> tuple[int, int]:
    return entry.key.step, KINDS.index(entry.key.kind)


def _compare(whole: Entry, found: Held, context_ranks: Sequence[int], packed: set[int], report: ExactReport) -> None:
    """Compare one tensor of the single process with what the ranks have of it."""
    key, values = whole.key, whole.values
    pairs: list[tuple[torch.Tensor, ...]] = []
    dtypes = {str(entry.values.dtype) for _, entry in found} | {str(values.dtype)}
    if found and len(dtypes) > 1:
        report.incomplete.append(f"{described(key)}: its dtypes are {', '.join(sorted(dtypes))}")
        return
    problem = _problem(whole, found)
    if problem is None:
        pairs = [*_pairs(values, found, packed)] or [*_of_sequences(values, found, context_ranks, packed)]
        shapes = ", ".join(str(tuple(entry.values.shape)) for _, entry in found)
        problem = None if pairs else f"its ranks have shapes {shapes}, which do not make up {tuple(values.shape)}"
    if problem is not None:
        report.leave_out(key, problem)
        return
    expected, actual, ranks = min(pairs, key=lambda pair: int(different(pair[0], pair[1]).sum()))
    report.num_compared[key.kind] += 1
    where = different(expected, actual)
    if bool(where.any()):
        report.num_different[key.kind] += 1
        report.first = report.first or _difference(key, expected, actual, ranks, where)


def _problem(whole: Entry, found: Held) -> str | None:
    """Why a tensor cannot be compared; None if its ranks' parts have to be looked at."""
    if not found:
        return "only the single run has it"
    is_partial = whole.partial or any(entry.partial for _, entry in found)
    return "its ranks have terms of a sum" if is_partial else None


def _pairs(values: torch.Tensor, found: Held, packed: set[int]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Each way to compare: the expected tensor, the ranks' of its shape, and the rank that has each element.

    Copies, and shards whose place is known, are put into one tensor: one of the ranks that differ, if any does.
    """
    if any(entry.offsets is not None for _, entry in found):
        yield from _placed(values, found)
        return
    if all(entry.values.shape == values.shape for _, entry in found):
        rank, entry = next(
            ((rank, entry) for rank, entry in found if bool(different(values, entry.values).any())), found[0]
        )
        yield values, entry.values, torch.full(values.shape, rank)
        return
    parts = [entry.values for _, entry in found]
    numbers = [torch.full(entry.values.shape, rank) for rank, entry in found]
    for actual, ranks in zip(joined(parts, values, packed), joined(numbers, values, packed), strict=True):
        yield values, actual, ranks


def _of_sequences(
    values: torch.Tensor, found: Held, context_ranks: Sequence[int], packed: set[int]
) -> Iterator[tuple[torch.Tensor, ...]]:
    """As :func:`_pairs`, for context ranks that each have consecutive tokens: in dim 1, 2 or 0, or in rows of samples.

    ``packed`` has the number of samples.
    """
    of_ranks: dict[int, Held] = {index: [] for index in sorted({context_ranks[rank] for rank, _ in found})}
    for rank, entry in found:
        of_ranks[context_ranks[rank]].append((rank, entry))
    size = len(of_ranks)
    for dim, count in ((1, 1), (2, 1), *((0, count) for count in (1, *packed))):
        if size == 1 or values.ndim <= dim or values.shape[dim] % (count * size):
            continue
        cut = (one.flatten(dim, dim + 1) for one in values.unflatten(dim, (count, size, -1)).unbind(dim + 1))
        ways = (_pairs(part, of_rank, packed) for part, of_rank in zip(cut, of_ranks.values(), strict=True))
        for several in zip(*ways, strict=True):
            yield tuple(
                torch.stack([one.unflatten(dim, (count, -1)) for one in tensors], dim + 1).flatten(dim, dim + 2)
                for tensors in zip(*several, strict=True)
            )


def _placed(values: torch.Tensor, found: Held) -> Iterator[tuple[torch.Tensor, ...]]:
    """As :func:`_pairs`, for parts whose place in the whole is known; nothing if they do not cover it."""
    actual, ranks = values.clone(), torch.full(values.shape, -1)
    is_wrong = torch.zeros(values.shape, dtype=torch.bool)
    for rank, entry in found:
        assert entry.offsets is not None
        place = ranges(entry.offsets, entry.values.shape)
        if values[place].shape != entry.values.shape:
            return
        free = ~is_wrong[place]  # keep what differs on another rank, which has a copy
        is_wrong[place] |= different(values[place], entry.values)
        actual[place] = torch.where(free, entry.values, actual[place])
        ranks[place] = torch.where(free, rank, ranks[place])
    if not bool((ranks < 0).any()):
        yield values, actual, ranks


def different(first: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where the bits of two tensors of one shape and dtype differ: -0 is not 0, and a NaN is itself."""
    bits = BITS[first.element_size()]
    return first.contiguous().view(bits) != other.contiguous().view(bits)


def _difference(
    key: Key, expected: torch.Tensor, actual: torch.Tensor, ranks: torch.Tensor, where: torch.Tensor
) -> TensorDifference:
    index = tuple(where.nonzero()[0].tolist())
    return TensorDifference(
        key=key,
        ranks=sorted(set(ranks[where].tolist())),
        num_different=int(where.sum()),
        num_elements=where.numel(),
        index=index,
        single=_shown(expected[index]),
        sharded=_shown(actual[index]),
    )


def _shown(value: torch.Tensor) -> str:
    """A 0-dim tensor, with enough digits to tell its neighbours apart, and its bits."""
    digits = 17 if value.element_size() == 8 else 9
    number = f"{value.item():.{digits}g}" if value.is_floating_point() else str(value.item())
    size = value.element_size()
    bits = int(value.view(BITS[size]).item()) & (1 << 8 * size) - 1
    return f"{number} (0x{bits:0{2 * size}x})"
