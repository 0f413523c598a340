"""Which tokens of a sequence each rank of the context axis has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist

from ...base.errors import ConfigError

Segments: TypeAlias = tuple[tuple[int, int], ...]
"""Parts of a sequence, each by its first position and the one after its last; ascending, not adjacent."""

CUTS = ("head-to-tail", "contiguous")


@dataclass(frozen=True)
class SequenceLayout:
    """A sequence over the ranks of a process group, the same number of tokens on each.

    ``"head-to-tail"`` cuts it into 2 x size equal parts. Rank r has part r and part 2 x size - 1 - r, so that under a
    causal mask every rank has the same number of pairs of a query and a key to compute::

        size 4:   0 1 2 3 3 2 1 0

    ``"contiguous"`` gives rank r the r-th of ``size`` equal parts.

    Raises:
        ConfigError: a cut that is not known, a rank out of range, or a length that does not divide.
    """

    group: dist.ProcessGroup | None
    """None: this process alone."""
    rank: int
    size: int
    length: int
    """Tokens of the whole sequence, padding included."""
    cut: str = "head-to-tail"

    def __post_init__(self) -> None:
        if self.cut not in CUTS:
            raise ConfigError(f"cut of the sequence: got {self.cut!r}, expected one of {', '.join(CUTS)}")
        if not 0 <= self.rank < self.size or (self.group is None and self.size > 1):
            raise ConfigError(f"rank of the context axis: got {self.rank} of {self.size} in {self.group}, expected one")
        parts = self.size * (2 if self.cut == "head-to-tail" and self.size > 1 else 1)
        if self.length < 1 or self.length % parts:
            raise ConfigError(
                f"length of the sequence: got {self.length} tokens over {self.size} ranks, expected a multiple of "
                f"{parts}; pad it"
            )

    @classmethod
    def over(cls, group: dist.ProcessGroup, length: int, cut: str = "head-to-tail") -> SequenceLayout:
        """This rank's place in the layout of ``length`` tokens over ``group``."""
        return cls(group, group.rank(), group.size(), length, cut)

    @property
    def local_length(self) -> int:
        """Tokens of one rank."""
        return self.length // self.size

    def segments(self, rank: int) -> Segments:
        """What ``rank`` has, in the order in which it has it."""
        if self.cut == "contiguous" or self.size == 1:
            return ((rank * self.local_length, (rank + 1) * self.local_length),)
        return head_and_tail(rank, self.size, self.length)

    def positions(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Where in the sequence the tokens of ``rank`` are: (local length,) int64, ascending."""
        return torch.cat([torch.arange(*segment, device=device) for segment in self.segments(rank)])

    def whole(self, shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """The sequence along ``dim``, a copy, of the ``shards`` that the ranks have, by rank."""
        parts = []
        for rank, shard in enumerate(shards):
            at = 0
            for start, end in self.segments(rank):
                parts.append((start, shard.narrow(dim, at, end - start)))
                at += end - start
        return torch.cat([part for _, part in sorted(parts, key=lambda pair: pair[0])], dim)

    def shard(self, whole: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """The tokens of ``rank``, a copy, of a sequence along ``dim``."""
        return taken(whole, dim, self.segments(rank))


def head_and_tail(rank: int, size: int, length: int) -> Segments:
    """What ``rank`` of ``size`` has of ``length`` tokens that are cut ``"head-to-tail"``."""
    part, last = length // (2 * size), 2 * size - 1
    head, tail = (rank * part, (rank + 1) * part), ((last - rank) * part, (last - rank + 1) * part)
    return ((head[0], tail[1]),) if head[1] == tail[0] else (head, tail)


def taken(whole: torch.Tensor, dim: int, segments: Segments) -> torch.Tensor:
    """The tokens of ``segments``, a copy, of a sequence along ``dim``."""
    return torch.cat([whole.narrow(dim, start, end - start) for start, end in segments], dim)
