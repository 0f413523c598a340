"""Attention of some queries to some keys, with what is needed to merge it with attention to other keys.

A kernel has two functions. ``forward`` returns the output and the log-sum-exp of the scores. ``backward`` takes those
of *all* keys that the queries see, as the flash attention of Dao et al. (2022) allows::

    P = exp(S - logsumexp)     dV = Pᵀ dO     dS = P ∘ (dO Vᵀ - rowsum(dO ∘ O))     dQ = dS K     dK = dSᵀ Q

Shapes: queries (B, Hq, Tq, D), keys (B, Hk, Tk, D), values (B, Hk, Tk, Dv), masks (B or 1, 1, Tq, Tk) bool, outputs
(B, Hq, Tq, Dv), log-sum-exps (B, Hq, Tq). Query head h attends to key head h // (Hq / Hk). A query without a visible
key has the output 0 and the log-sum-exp -inf; :meth:`backward` gets +inf for it, with which P is 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ...base.torch_internals import expect
from ...precision.stochastic_rounding import signed
from .visible_keys import Sees, Tile, VisibleKeys

_aten = torch.ops.aten
_FUSED = ("flash_attention_for_cpu", "flash_attention", "efficient_attention")
expect(*(f"torch.ops.aten._scaled_dot_product_{name}{end}" for name in _FUSED for end in ("", "_backward")))

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
LSE_ALIGNMENT, BIAS_ALIGNMENT, HEAD_ALIGNMENT = 32, 16, 8
"""Elements of which CUDA's kernels want multiples: queries of a log-sum-exp, keys of a bias, features of a head."""
_FIRST, _SECOND = 0x85EBCA6B, 0xC2B2AE35
"""The factors of MurmurHash3's finalizer."""
_START = 0x9E3779B9


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How probabilities come from queries and keys, whatever the kernel."""

    visible: VisibleKeys
    scale: float
    softcap: float | None = None
    dropout: float = 0.0
    seed: int = 0
    first_head: int = 0
    """The number among all ranks of the first head of the queries."""


class AttentionKernel(ABC):
    """Computes the attention of tiles of queries and keys."""

    joins = True
    """Whether tiles without a mask may be large."""

    def dtype(self, given: torch.dtype) -> torch.dtype:
        """What it computes in."""
        return wide(given)

    def features(self, given: int) -> int | None:
        """How many features heads have to have; None: any, keys and values different ones."""
        return given

    @abstractmethod
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scores: Scores) -> Any:
        """The output and the log-sum-exp."""

    @abstractmethod
    def backward(
        self, gradient: torch.Tensor, qkv: Three, out: torch.Tensor, lse: torch.Tensor, tile: Tile, scores: Scores
    ) -> Three:
        """The gradients of ``qkv``; ``out`` and ``lse`` are of all keys."""


class PlainKernel(AttentionKernel):
    """Products and a softmax of torch, in fp32 or wider: with soft caps and dropout, on any device, of small tiles."""

    joins = False

    def features(self, given: int) -> None:
        return None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scores: Scores) -> Any:
        weights, _ = self._scores(q, k, tile, scores)
        highest = weights.amax(-1, keepdim=True)
        highest.masked_fill_(highest == -math.inf, 0)
        weights = weights.sub_(highest).exp_()
        total = weights.sum(-1, keepdim=True)
        noise = self._noise(weights, tile, scores)
        out = _by_key_head(weights if noise is None else weights * noise, k) @ v
        out = out.reshape(*q.shape[:3], v.shape[-1]) / total.masked_fill(total == 0, 1)
        return out, (total.log() + highest).squeeze(-1)

    def backward(
        self, gradient: torch.Tensor, qkv: Three, out: torch.Tensor, lse: torch.Tensor, tile: Tile, scores: Scores
    ) -> Three:
        q, k, v = qkv
        weights, cap_slope = self._scores(q, k, tile, scores)
        weights = weights.sub_(lse.unsqueeze(-1)).exp_()
        noise = self._noise(weights, tile, scores)
        folded = _by_key_head(gradient, k)
        grad_v = _by_key_head(weights if noise is None else weights * noise, k).mT @ folded
        slope = (folded @ v.mT).view_as(weights)
        slope = slope if noise is None else slope * noise
        slope = (slope - (gradient * out).sum(-1, keepdim=True)).mul_(weights).mul_(scores.scale)
        slope = _by_key_head(slope if cap_slope is None else slope.mul_(cap_slope), k)
        return (slope @ k).view_as(q), slope.mT @ _by_key_head(q, k), grad_v

    def _scores(
        self, q: torch.Tensor, k: torch.Tensor, tile: Tile, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scores of a tile, and the derivative of the soft cap there."""
        found = (_by_key_head(q, k) @ k.mT).view(*q.shape[:3], k.shape[2]).mul_(scores.scale)
        cap_slope = None
        if scores.softcap is not None:
            found = found.div_(scores.softcap).tanh_()
            cap_slope = 1 - found.square()
            found = found.mul_(scores.softcap)
        if tile.sees is not Sees.ALL:
            found.masked_fill_(~scores.visible.mask(tile, q.device), -math.inf)
        return found, cap_slope

    def _noise(self, like: torch.Tensor, tile: Tile, scores: Scores) -> torch.Tensor | None:
        """What probabilities are multiplied with; None without dropout."""
        if not scores.dropout:
            return None
        starts = (0, scores.first_head, tile.first_query, tile.first_key)
        pairs = zip(starts, like.shape, strict=True)
        places = [torch.arange(start, start + count, device=like.device) for start, count in pairs]
        keeps = kept(scores.seed, scores.dropout, places[0], places[1], places[2], places[3])
        return keeps.to(like.dtype).div_(1 - scores.dropout)


class FlashKernel(AttentionKernel):
    """torch's flash attention for CPUs.

    Halves are computed in fp32, which needs no hardware for halves and rounds each result once.
    """

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scores: Scores) -> Any:
        mask = scores.visible.mask(tile, q.device) if tile.sees is Sees.MASKED else None
        out, lse = self._forward(q, k, v, mask, tile.sees is Sees.CAUSAL, scores.scale)
        if mask is not None:  # the kernel's log-sum-exp of a query without a key is 0
            sees_none = ~mask.any(-1)
            out, lse = out.masked_fill(sees_none.unsqueeze(-1), 0), lse.masked_fill(sees_none, -math.inf)
        return out, lse

    def backward(
        self, gradient: torch.Tensor, qkv: Three, out: torch.Tensor, lse: torch.Tensor, tile: Tile, scores: Scores
    ) -> Three:
        mask = scores.visible.mask(tile, out.device) if tile.sees is Sees.MASKED else None
        return self._backward(gradient, qkv, out, lse, mask, tile.sees is Sees.CAUSAL, scores.scale)

    def _forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
    ) -> Any:
        bias = None if mask is None else _bias(mask, q.dtype)
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)

    def _backward(
        self,
        gradient: torch.Tensor,
        qkv: Three,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float,
    ) -> Three:
        bias = None if mask is None else _bias(mask, out.dtype)
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        found: Three = backward(gradient, *qkv, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
        return found


class CudaKernel(FlashKernel):
    """Flash attention on CUDA, or, with a mask or in fp32, efficient attention. No GPU has run it yet.

    Outputs of halves are halves, so that each part that is merged has been rounded.
    """

    def dtype(self, given: torch.dtype) -> torch.dtype:
        return given

    def features(self, given: int) -> int | None:
        return _up(given, HEAD_ALIGNMENT)

    def _forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
    ) -> Any:
        if mask is None and q.dtype.itemsize == 2:
            return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
        k, v, bias = _repeated(k, q), _repeated(v, q), _cuda_bias(mask, q)
        found = _aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
        return found[0], found[1][:, :, : q.shape[2]]  # it has more queries

    def _backward(
        self,
        gradient: torch.Tensor,
        qkv: Three,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float,
    ) -> Three:
        q, k, v = qkv
        none = torch.empty((), dtype=torch.int64, device=q.device)  # the state of a random generator
        lengths = q.shape[2], k.shape[2]
        if mask is None and q.dtype.itemsize == 2:
            of_batch = (None, None, *lengths, 0.0, causal, none, none)
            backward = _aten._scaled_dot_product_flash_attention_backward
            found: Three = backward(gradient, q, k, v, out, lse.contiguous(), *of_batch, scale=scale)
            return found
        lse = F.pad(lse, (0, _up(lengths[0], LSE_ALIGNMENT) - lengths[0]), value=math.inf)
        wide_k, wide_v, bias = _repeated(k, q), _repeated(v, q), _cuda_bias(mask, q)
        rest = (none, none, 0.0, [True, True, True, False], causal)
        backward = _aten._scaled_dot_product_efficient_attention_backward
        grad_q, grad_k, grad_v, _ = backward(gradient, q, wide_k, wide_v, bias, out, lse, *rest, scale=scale)
        return grad_q, _summed(grad_k, k), _summed(grad_v, v)


def kernel_for(device: torch.device, dtype: torch.dtype, scores: Scores) -> AttentionKernel:
    """The kernel that can compute these scores of tensors of that dtype on that device."""
    if scores.softcap is not None or scores.dropout:  # flash attention has neither soft caps nor a dropout by position
        return PlainKernel()
    if device.type == "cpu":
        return FlashKernel()
    if device.type == "cuda" and dtype is not torch.float64:
        return CudaKernel()
    return PlainKernel()


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of ``dtype`` are accumulated in: fp32, or fp64 for fp64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _by_key_head(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """``x``, (B, Hq, Tq, ...), with the query heads of each key head after one another: (B, Hk, Hq / Hk x Tq, ...)."""
    return x.reshape(x.shape[0], k.shape[1], -1, x.shape[-1])


def _bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _cuda_bias(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """As the efficient kernel wants it: of each head, with aligned rows."""
    if mask is None:
        return None
    keys = mask.shape[-1]
    padded = F.pad(_bias(mask, q.dtype), (0, _up(keys, BIAS_ALIGNMENT) - keys))
    return padded[..., :keys].expand(q.shape[0], q.shape[1], -1, -1)


def _repeated(keys: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """A key head for each query head."""
    return keys if keys.shape[1] == q.shape[1] else keys.repeat_interleave(q.shape[1] // keys.shape[1], 1)


def _summed(gradient: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The gradient of ``keys`` from that of :func:`_repeated`."""
    if gradient.shape[1] == keys.shape[1]:
        return gradient
    return gradient.unflatten(1, (keys.shape[1], -1)).sum(2, dtype=wide(gradient.dtype))


def _up(count: int, multiple: int) -> int:
    """The next multiple, or ``count`` itself."""
    return -(-count // multiple) * multiple


def kept(
    seed: int, probability: float, batch: torch.Tensor, heads: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Which probabilities dropout keeps: (B, H, queries, keys) bool, the same however the sequence is sharded.

    An element's random number is a hash of the seed, its row of the batch, its head and its two positions, each
    absorbed by MurmurHash3's finalizer for 32 bits (Appleby, public domain), whose every output bit depends on every
    input bit.

    Args:
        seed: at most 64 bits of it count.
        probability: of an element to be dropped, to 32 bits.
        batch: (B,), as the others int on one device: rows of the batch.
        heads: (H,), numbered over all ranks.
        queries: positions in the sequence.
        keys: positions in the sequence.
    """
    state = torch.full((1, 1, 1, 1), signed(_START), dtype=torch.int32, device=keys.device)
    for word in (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF):
        state = _mixed(state ^ signed(word))
    for dim, words in enumerate((batch, heads, queries)):
        state = _mixed(state ^ words.to(torch.int32).view([-1 if axis == dim else 1 for axis in range(4)]))
    # The second time, because two rows of which the states differ in few bits have the same numbers in another order.
    drawn = _mixed(_mixed(state ^ keys.to(torch.int32)) ^ _mixed(state + signed(_START)))
    return drawn >= int(probability * 2**32) - 2**31


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finalizer, in place; the shifts of torch are of signed numbers."""
    x ^= (x >> 16) & 0xFFFF
    x *= signed(_FIRST)
    x ^= (x >> 13) & 0x7FFFF
    x *= signed(_SECOND)
    x ^= (x >> 16) & 0xFFFF
    return x
