"""Which keys a query sees, and the rectangles of queries and keys in which anything has to be computed.

A rectangle, a tile, is *whole* where every query sees every key, *causal* where query i sees the keys 0 to i, and
*masked* where a mask tensor has to say it. Tiles without a visible pair do not exist. Under a causal mask a rank thus
computes half of its pairs, with a sliding window or packed documents fewer still, and few of them need a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import torch

from ...base.collectives import all_gather_single
from .tokens_of_ranks import Segments, SequenceLayout


class Sees(Enum):
    """What the queries of a tile see of its keys."""

    NOTHING = 0
    MASKED = 1
    CAUSAL = 2
    ALL = 3


class Tile(NamedTuple):
    """A rectangle of queries and keys."""

    queries: slice
    keys: slice
    """In the tensors of a rank."""
    first_query: int
    first_key: int
    """In the sequence. Those that follow do so there too, but for joined tiles that are :attr:`Sees.ALL`."""
    sees: Sees


class Documents:
    """The documents that are packed into the sequences of a batch. One batch needs one such object, for all layers.

    Every rank of the group makes it: one all-gather, then one copy to the host where that decides what is computed.
    """

    def __init__(self, local: torch.Tensor, layout: SequenceLayout) -> None:
        """``local``: (B, local length) int, each token's document.

        -n is a token that nobody sees, and that sees document n; 0 one that sees nobody either.
        """
        shards = [local.to(torch.int32).contiguous()]
        if layout.size > 1:
            gathered = shards[0].new_empty(layout.size * local.numel())
            all_gather_single(gathered, shards[0].view(-1), group=layout.group)
            shards = list(gathered.view(layout.size, *local.shape))
        self.whole = layout.whole(shards, 1)
        """(B, length) int32, on the device of ``local``."""
        self.tiles: dict[tuple[VisibleKeys, Segments, Segments, int, bool], tuple[Tile, ...]] = {}
        """What was asked for before (:meth:`VisibleKeys.tiles`)."""
        self._bounds: dict[tuple[int, int, bool], tuple[torch.Tensor, torch.Tensor]] = {}

    @functools.cached_property
    def _on_host(self) -> torch.Tensor:
        return self.whole.cpu()

    def of(self, segments: Segments) -> torch.Tensor:
        """The documents of those tokens, (B, tokens)."""
        return torch.cat([self.whole[:, start:end] for start, end in segments], 1)

    def sees(self, queries: tuple[int, int], keys: tuple[int, int]) -> Sees:
        """What these queries see of these keys, as far as it depends on documents. Those of 0 may see anything."""
        low, high = self._bounds_of(queries, hidden=True)
        least, most = self._bounds_of(keys, hidden=False)
        has_hidden = (self._on_host[:, slice(*keys)] <= 0).any(1)
        none_asks = low > high  # all queries are of 0
        if bool((none_asks | (high < least) | (most < low)).all()):
            return Sees.NOTHING
        alike = (low == least) & (high == most) & (low == high) & ~has_hidden
        return Sees.ALL if bool((none_asks | alike).all()) else Sees.MASKED

    def _bounds_of(self, positions: tuple[int, int], *, hidden: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The lowest and the highest document of each sequence there, swapped if there is none.

        ``hidden``: tokens that nobody sees count.
        """
        if (*positions, hidden) not in self._bounds:
            part = self._on_host[:, slice(*positions)]
            part = part.abs() if hidden else part.clamp(min=0)
            limit = torch.iinfo(part.dtype).max
            lowest = part.masked_fill(part == 0, limit).amin(1)
            self._bounds[*positions, hidden] = lowest, part.amax(1).masked_fill(lowest == limit, 0)
        return self._bounds[*positions, hidden]


@dataclass(frozen=True)
class VisibleKeys:
    """The rule by which a query sees a key, by the positions of both in the sequence."""

    causal: bool
    """Query i sees no key after i."""
    window: int | None
    """As what transformers passes to attention: a query i sees keys after i - window, so that a causal one sees
    ``window`` of them, itself included; one that is not causal sees those before i + window. None: no limit."""
    documents: Documents | None = field(compare=False)

    def tiles(self, queries: Segments, keys: Segments, size: int, join: bool) -> tuple[Tile, ...]:
        """The tiles in which ``queries`` see some of the ``keys``, for tensors that hold these segments in their order.

        Args:
            size: at most so many queries and keys of a tile.
            join: that is for masked tiles only; others are as large as can be.
        """
        if self.documents is None:
            return _tiles(self, queries, keys, size, join)
        known, asked = self.documents.tiles, (self, queries, keys, size, join)
        if asked not in known:
            known[asked] = tuple(self._find(queries, keys, size, join))
        return known[asked]

    def mask(self, tile: Tile, device: torch.device) -> torch.Tensor:
        """Which pairs of a tile see each other: (B, 1, queries, keys) bool; B is 1 without documents."""
        first, last = tile.first_query, tile.first_query + tile.queries.stop - tile.queries.start
        begin, end = tile.first_key, tile.first_key + tile.keys.stop - tile.keys.start
        distance = torch.arange(first, last, device=device).unsqueeze(1) - torch.arange(begin, end, device=device)
        visible = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            visible &= distance.abs() < self.window
        visible = visible.view(1, 1, *visible.shape)
        if self.documents is not None:
            theirs, others = self.documents.whole[:, first:last], self.documents.whole[:, begin:end]
            same = (theirs.abs().unsqueeze(2) == others.unsqueeze(1)) & (others > 0).unsqueeze(1)
            visible = visible & same.unsqueeze(1)
        return visible

    def _sees(self, queries: tuple[int, int], keys: tuple[int, int]) -> Sees:
        (first, end), (begin, stop) = queries, keys
        nearest, farthest = first - (stop - 1), (end - 1) - begin  # the least and the greatest query - key
        highest = self.length_limit - 1
        lowest = 0 if self.causal else -highest
        if farthest < lowest or nearest > highest:
            return Sees.NOTHING
        by_document = Sees.ALL if self.documents is None else self.documents.sees(queries, keys)
        if by_document is not Sees.ALL:
            return by_document
        if nearest >= lowest and farthest <= highest:
            return Sees.ALL
        return Sees.CAUSAL if self.causal and queries == keys and farthest <= highest else Sees.MASKED

    @property
    def length_limit(self) -> int:
        """The window, or more than any sequence has."""
        return 2**62 if self.window is None else self.window

    def _find(self, queries: Segments, keys: Segments, size: int, join: bool) -> Iterable[Tile]:
        if join and queries == keys and self._is_triangle(queries):
            local = slice(0, sum(end - start for start, end in queries))
            return [Tile(local, local, queries[0][0], keys[0][0], Sees.CAUSAL)]
        tiles: list[Tile] = []
        for query, query_at in _local(queries):
            for whole_key, key_at in _local(keys):
                for key in _cut(whole_key, query if self.causal else ()):
                    at = key_at + key[0] - whole_key[0]
                    tiles += self._divided((query, query_at), (key, at), size, join)
        return _joined(tiles) if join else tiles

    def _is_triangle(self, segments: Segments) -> bool:
        """Whether a local causal mask is right for queries and keys of the same segments."""
        is_short = segments[-1][1] - segments[0][0] <= self.length_limit
        return self.causal and is_short and self.documents is None

    def _divided(
        self, query: tuple[tuple[int, int], int], key: tuple[tuple[int, int], int], size: int, join: bool
    ) -> Iterator[Tile]:
        """The tiles of a segment of queries and one of keys, each with where it begins in the tensor."""
        (queries, query_at), (keys, key_at) = query, key
        sees = self._sees(queries, keys)
        is_small = max(queries[1] - queries[0], keys[1] - keys[0]) <= size
        if sees is not Sees.NOTHING and (is_small or (join and sees is not Sees.MASKED)):
            yield _tile(queries, query_at, keys, key_at, sees)
        elif sees is not Sees.NOTHING:
            for rows in _grid(queries, size):
                for columns in _grid(keys, size):
                    if (sees := self._sees(rows, columns)) is not Sees.NOTHING:
                        row_at, column_at = query_at + rows[0] - queries[0], key_at + columns[0] - keys[0]
                        yield _tile(rows, row_at, columns, column_at, sees)


@functools.lru_cache(maxsize=1024)
def _tiles(rule: VisibleKeys, queries: Segments, keys: Segments, size: int, join: bool) -> tuple[Tile, ...]:
    return tuple(rule._find(queries, keys, size, join))


def _tile(queries: tuple[int, int], query_at: int, keys: tuple[int, int], key_at: int, sees: Sees) -> Tile:
    rows = slice(query_at, query_at + queries[1] - queries[0])
    columns = slice(key_at, key_at + keys[1] - keys[0])
    return Tile(rows, columns, queries[0], keys[0], sees)


def _local(segments: Segments) -> Iterator[tuple[tuple[int, int], int]]:
    """Each segment, and where it begins in the tensor that holds all of them."""
    at = 0
    for start, end in segments:
        yield (start, end), at
        at += end - start


def _cut(segment: tuple[int, int], at: Iterable[int]) -> Iterable[tuple[int, int]]:
    """``segment`` in parts that begin or end at the positions ``at``."""
    start, end = segment
    return pairwise([start, *sorted({one for one in at if start < one < end}), end])


def _grid(segment: tuple[int, int], size: int) -> Iterable[tuple[int, int]]:
    """``segment`` in parts that begin or end at multiples of ``size``."""
    start, end = segment
    return _cut(segment, range(start - start % size + size, end, size))


def _joined(tiles: Iterable[Tile]) -> list[Tile]:
    """``tiles`` with neighbours joined that are :attr:`Sees.ALL`: along the keys, then along the queries."""
    rows: list[Tile] = []
    for tile in sorted(tiles, key=lambda tile: (tile.queries.start, tile.keys.start)):
        last = rows[-1] if rows else tile
        is_next = tile.queries == last.queries and tile.keys.start == last.keys.stop
        if is_next and tile.sees is last.sees is Sees.ALL:
            rows[-1] = last._replace(keys=slice(last.keys.start, tile.keys.stop))
        else:
            rows.append(tile)
    joined: dict[tuple[int, int, int], Tile] = {}
    others = []
    for tile in rows:
        if tile.sees is not Sees.ALL:
            others.append(tile)
            continue
        above = joined.pop((tile.keys.start, tile.keys.stop, tile.queries.start), None)
        if above is not None:
            tile = tile._replace(queries=slice(above.queries.start, tile.queries.stop), first_query=above.first_query)
        joined[tile.keys.start, tile.keys.stop, tile.queries.stop] = tile
    return [*joined.values(), *others]
