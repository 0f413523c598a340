"""Whole sequences of some heads on each rank, in place of a part of the sequences of all heads (Jacobs et al. 2023).

Bytes that a rank sends for one layer, of N ranks, where Q, K, V and O are what it has of each::

    forward     (N - 1) / N · (Q + K + V + O)      backward    the same, of gradients

Where the key heads do not divide over the ranks, each is repeated first, and gradients of K and V are sent in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from ...base.errors import ConfigError
from .attention_kernels import Scores
from .tokens_of_ranks import SequenceLayout


class HeadExchange:
    """Exchanges the heads of queries, keys, values and outputs over the ranks of a layout."""

    def __init__(self, layout: SequenceLayout, num_heads: int, num_key_heads: int) -> None:
        """Raise a ConfigError if the heads do not divide."""
        size = layout.size
        self.repeats = size // math.gcd(num_key_heads, size)
        """How often each key head is repeated."""
        if num_heads % size or num_heads % (num_key_heads * self.repeats):
            raise ConfigError(
                f"ulysses: got {num_heads} heads and {num_key_heads} key heads over {size} ranks, expected a multiple "
                f"of {size} and of {num_key_heads * self.repeats} heads; use 'ring' or 'all-gather'"
            )
        self._layout, self._num_heads = layout, num_heads
        self._heads = slice(layout.rank * num_heads // size, (layout.rank + 1) * num_heads // size)

    def scores(self, scores: Scores) -> Scores:
        """``scores`` of this rank's heads."""
        return replace(scores, first_head=scores.first_head + self._heads.start)

    def local_sinks(self, sinks: torch.Tensor | None) -> torch.Tensor | None:
        """A copy of this rank's part of (Hq,) ``sinks``."""
        return None if sinks is None else sinks[self._heads].clone()

    def gradient_of_sinks(self, local: torch.Tensor | None) -> torch.Tensor | None:
        """(Hq,), with zeros for the other ranks' heads."""
        if local is None:
            return None
        gradient = local.new_zeros(self._num_heads)
        gradient[self._heads] = local
        return gradient

    def repeated(self, keys: torch.Tensor) -> torch.Tensor:
        """``keys``, (B, Hk, T, D), with so many heads that they divide."""
        return keys if self.repeats == 1 else keys.repeat_interleave(self.repeats, 1)

    def summed(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of keys from that of :meth:`repeated`."""
        return gradient if self.repeats == 1 else gradient.unflatten(1, (-1, self.repeats)).sum(2)

    def to_heads(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of each (B, H, local length, D) this rank's heads, (B, H / N, length, D); one all-to-all."""
        layout = self._layout
        parts = [one.unflatten(1, (layout.size, -1)).movedim(1, 0) for one in tensors]
        received = self._exchange(parts)
        return [layout.whole(list(one), 2) for one in received]

    def to_sequences(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of each (B, H / N, length, D) all heads of this rank's tokens, (B, H, local length, D); one all-to-all."""
        layout = self._layout
        parts = [torch.stack([layout.shard(one, 2, rank) for rank in range(layout.size)]) for one in tensors]
        return [one.movedim(0, 1).flatten(1, 2) for one in self._exchange(parts)]

    def _exchange(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send entry i of dim 0 of each to rank i; the entries that this rank gets, by the rank that has sent them."""
        size = self._layout.size
        sent = torch.cat([one.reshape(size, -1) for one in parts], 1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._layout.group)
        columns = received.split([one.numel() // size for one in parts], 1)
        return [column.reshape(one.shape) for column, one in zip(columns, parts, strict=True)]
