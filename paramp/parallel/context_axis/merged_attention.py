"""Attention of a rank's queries to keys that come in several parts, each part attended to alone and then merged.

With the output o and the log-sum-exp l of each of two parts (Milakov and Gimelshein 2018), in fp32 or wider::

    l = log(exp l1 + exp l2)     o = exp(l1 - l) o1 + exp(l2 - l) o2

An attention sink is a further score with a value of zeros. Gradients of keys and values are sums over the parts of the
queries, of which this rank has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from ...base import loop_block_sizes
from .attention_kernels import Scores, Three, kernel_for, wide
from .tokens_of_ranks import Segments
from .visible_keys import Tile

Visit = Callable[[Segments, torch.Tensor, torch.Tensor], None]
VisitBack = Callable[[Segments, torch.Tensor, torch.Tensor], torch.Tensor]
"""Called with keys, values and where in the sequence they are; the second one returns both gradients, flat and wide."""


class KeyExchange(Protocol):
    """Brings the keys and values of all ranks to this one."""

    def forward(self, k: torch.Tensor, v: torch.Tensor, visit: Visit) -> None:
        """Call ``visit`` for parts that make up the sequence; ``k`` and ``v`` are this rank's."""

    def backward(self, k: torch.Tensor, v: torch.Tensor, visit: VisitBack) -> torch.Tensor:
        """The same, with the sum over the ranks of the gradients of ``k`` and ``v`` in return, flat."""


def forward(
    qkv: Three, sinks: torch.Tensor | None, segments: Segments, scores: Scores, exchange: KeyExchange
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, in the dtype of the queries, and the log-sum-exp of the queries at ``segments``."""
    q, k, v = qkv
    fit = _Fit(qkv, scores)
    queries, merged = fit(q), _Merged(q, v.shape[-1])

    def visit(key_segments: Segments, k: torch.Tensor, v: torch.Tensor) -> None:
        keys, values = fit(k), fit(v)
        for tile in fit.tiles(segments, key_segments):
            parts = (queries[:, :, tile.queries], keys[:, :, tile.keys], values[:, :, tile.keys])
            merged.add(tile, *fit.kernel.forward(*parts, tile, scores))

    exchange.forward(k, v, visit)
    out, lse = merged.out, merged.lse
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
        out, lse = out.mul_((lse - total).exp_().unsqueeze(-1)), total
    if (padding := _padding(segments, scores)) is not None:
        out.masked_fill_(padding, 0)  # those whose tile needs no mask for the others
    return out.to(q.dtype), lse.masked_fill_(lse == -math.inf, math.inf)


def backward(
    gradient: torch.Tensor,
    qkv: Three,
    sinks: torch.Tensor | None,
    results: tuple[torch.Tensor, torch.Tensor],
    segments: Segments,
    scores: Scores,
    exchange: KeyExchange,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradients of queries, keys, values and sinks, wide. ``results``: those of :func:`forward`."""
    (q, k, v), (out, lse) = qkv, results
    if (padding := _padding(segments, scores)) is not None:
        gradient = gradient.masked_fill(padding, 0)
    fit = _Fit(qkv, scores)
    queries, outs, gradients = fit(q), fit(out), fit(gradient)
    grad_q = torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device)

    def visit(key_segments: Segments, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = fit(k), fit(v)
        flat = torch.zeros(k.numel() + v.numel(), dtype=grad_q.dtype, device=k.device)
        grad_k, grad_v = unpacked(flat, k, v)
        for tile in fit.tiles(segments, key_segments):
            rows, columns = (slice(None), slice(None), tile.queries), (slice(None), slice(None), tile.keys)
            parts = queries[rows], keys[columns], values[columns]
            found = fit.kernel.backward(gradients[rows], parts, outs[rows], lse[rows], tile, scores)
            for total, part in zip((grad_q[rows], grad_k[columns], grad_v[columns]), found, strict=True):
                total += part[..., : total.shape[-1]]
        return flat

    grad_k, grad_v = unpacked(exchange.backward(k, v, visit), k, v)
    grad_sinks = None
    if sinks is not None:
        share = (sinks.to(lse.dtype).view(1, -1, 1) - lse).exp_()  # the probability of the sink
        grad_sinks = -(share * (gradient.to(lse.dtype) * out).sum(-1)).sum((0, 2))
    return grad_q, grad_k, grad_v, grad_sinks


def packed(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Both in one flat tensor, to be sent at once."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def unpacked(flat: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of ``flat`` in the shapes of ``k`` and ``v``."""
    keys, values = flat.split([k.numel(), v.numel()])
    return keys.view(k.shape), values.view(v.shape)


class _Merged:
    """The attention of queries to the keys so far."""

    def __init__(self, q: torch.Tensor, features: int) -> None:
        self.out = torch.zeros(*q.shape[:3], features, dtype=wide(q.dtype), device=q.device)
        self.lse = torch.full(q.shape[:3], -math.inf, dtype=self.out.dtype, device=q.device)

    def add(self, tile: Tile, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge the attention of a tile's queries to its keys; ``out`` may have more features, all of them 0."""
        merged, before = self.out[:, :, tile.queries], self.lse[:, :, tile.queries]
        total = torch.logaddexp(before, lse)
        finite = total.masked_fill(total == -math.inf, 0)  # -inf - -inf would be NaN
        merged.mul_((before - finite).exp_().unsqueeze(-1))
        merged.addcmul_(out[..., : merged.shape[-1]].to(merged.dtype), (lse - finite).exp_().unsqueeze(-1))
        before.copy_(total)


class _Fit:
    """Tensors as the kernel of some attention wants them: its dtype, and heads of one size, padded with zeros."""

    def __init__(self, qkv: Three, scores: Scores) -> None:
        q, _, v = qkv
        self.kernel, self._visible = kernel_for(q.device, q.dtype, scores), scores.visible
        self._dtype = self.kernel.dtype(q.dtype)
        self._features = self.kernel.features(max(q.shape[-1], v.shape[-1]))
        self._tile_size = loop_block_sizes.ATTENTION_TILE.get(q.device.type, loop_block_sizes.ATTENTION_TILE["cuda"])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        missing = 0 if self._features is None else self._features - x.shape[-1]
        return (F.pad(x, (0, missing)) if missing else x).to(self._dtype)

    def tiles(self, queries: Segments, keys: Segments) -> tuple[Tile, ...]:
        return self._visible.tiles(queries, keys, self._tile_size, self.kernel.joins)


def _padding(segments: Segments, scores: Scores) -> torch.Tensor | None:
    """Which of the queries are padding, (B, 1, Tq, 1) bool; None without documents."""
    documents = scores.visible.documents
    return None if documents is None else (documents.of(segments) == 0)[:, None, :, None]
