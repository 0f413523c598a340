"""Attention over sequences of which each rank of the context axis has a part.

Three methods give the same result, up to the order of sums:

- ``"all-gather"``: each rank gets all keys and values, and attends with its queries;
- ``"ring"``: they go round, so that a rank has those of two ranks at a time, and transfers overlap with computation;
- ``"ulysses"``: each rank gets whole sequences of some heads (Jacobs et al. 2023), and sends their outputs back.

Keys and values are sent in their own dtype, sums of their gradients in fp32 or wider.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from ...base.errors import ConfigError, nearest, require
from . import merged_attention
from .attention_kernels import Scores
from .head_exchange import HeadExchange
from .key_exchange import EXCHANGES, Alone, key_exchange
from .merged_attention import KeyExchange
from .tokens_of_ranks import SequenceLayout
from .visible_keys import Documents, VisibleKeys

METHODS = (*EXCHANGES, "ulysses")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def default_method(num_heads: int, num_key_heads: int, layout: SequenceLayout) -> str:
    """The method that is likely fastest for attention of so many heads over ``layout``.

    All-gather where the keys and values of all ranks are no more than this rank's queries and outputs, as where many
    query heads share a key head: so they cost little memory, and one collective. Else Ulysses, which sends less, where
    the heads divide; else the ring.
    """
    if num_key_heads * layout.size <= num_heads:
        return "all-gather"
    return "ring" if num_heads % layout.size or num_key_heads % layout.size else "ulysses"


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: SequenceLayout,
    method: str,
    causal: bool,
    documents: torch.Tensor | Documents | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
    dropout_seed: int | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys of all ranks, (B, Hq, T, Dv). Every rank of ``layout`` calls it.

    Under autocast the inputs are cast as ``F.scaled_dot_product_attention`` does. Gradients exist once.

    Args:
        q: queries, (B, Hq, T, D); T is the layout's local length. fp16, bf16, fp32 or fp64.
        k: keys, (B, Hk, T, D). Query head h attends to key head h // (Hq / Hk).
        v: values, (B, Hk, T, Dv).
        method: how ranks exchange, one of :data:`METHODS`. It does not matter for a single rank.
        causal: queries see no later keys.
        documents: (B, T) int, the number of each token's document, or :class:`Documents` of it, which spares each
            layer a collective and a copy to the host. Queries see keys of their document only. -n is padding of
            document n: nobody sees it, and its queries see the document. 0 sees nobody either: its outputs and
            gradients are 0.
        window: how many keys a causal query sees, itself included; without ``causal``, it sees those at a smaller
            distance, on both sides (what transformers' models pass as ``sliding_window``).
        scale: of the products of queries and keys. None: 1 / sqrt(D).
        softcap: c for scores c · tanh(score / c).
        sinks: (Hq,), a further score for each head, which has no value (GPT-OSS). Its gradient is a sum over the
            queries of this rank; with Ulysses over all queries, of this rank's heads: sum it over the ranks.
        dropout: of probabilities. Whether one is dropped depends on the seed, its row of the batch, head, and the
            positions of its query and key in the sequence.
        dropout_seed: the same on all ranks of ``layout``, another one for other rows, heads, layers and steps.

    Raises:
        ConfigError: shapes, dtypes or values that do not fit.
    """
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype is torch.float64 else x.to(dtype) for x in (q, k, v))
    _check(q, k, v, layout, sinks)
    _check_options(method, window, softcap, dropout, dropout_seed)
    if isinstance(documents, torch.Tensor):
        _check_documents(documents, q, layout)
        documents = Documents(documents, layout)
    scores = Scores(
        visible=VisibleKeys(causal, window, documents),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        softcap=softcap,
        dropout=dropout,
        seed=dropout_seed or 0,
    )
    if method == "ulysses" and layout.size > 1:
        exchange = HeadExchange(layout, q.shape[1], k.shape[1])
        return cast(torch.Tensor, _OfHeads.apply(q, k, v, sinks, scores, exchange, layout.length))
    return cast(torch.Tensor, _OfQueries.apply(q, k, v, sinks, scores, key_exchange(method, layout), layout))


class _OfQueries(torch.autograd.Function):
    """Each rank attends with its own queries, to keys of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        scores: Scores,
        exchange: KeyExchange,
        layout: SequenceLayout,
    ) -> torch.Tensor:
        ctx.rest = layout.segments(layout.rank), scores, exchange
        with torch.autocast(q.device.type, enabled=False):
            out, lse = merged_attention.forward((q, k, v), sinks, *ctx.rest)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            found = merged_attention.backward(gradient, (q, k, v), sinks, (out, lse), *ctx.rest)
        return *_rounded(found, (q, k, v, sinks)), None, None, None


class _OfHeads(torch.autograd.Function):
    """Each rank attends with all queries of its heads."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        scores: Scores,
        exchange: HeadExchange,
        length: int,
    ) -> torch.Tensor:
        whole = SequenceLayout(None, 0, 1, length)
        ctx.exchange, ctx.rest = exchange, (whole.segments(0), exchange.scores(scores), Alone(whole))
        local_sinks = exchange.local_sinks(sinks)
        with torch.autocast(q.device.type, enabled=False):
            q, k, v = exchange.to_heads([q, exchange.repeated(k), exchange.repeated(v)])
            out, lse = merged_attention.forward((q, k, v), local_sinks, *ctx.rest)
        ctx.save_for_backward(q, k, v, local_sinks, out, lse)
        return exchange.to_sequences([out])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        exchange: HeadExchange = ctx.exchange
        with torch.autocast(q.device.type, enabled=False):
            (gradient,) = exchange.to_heads([gradient])
            found = merged_attention.backward(gradient, (q, k, v), sinks, (out, lse), *ctx.rest)
            grad_q, grad_k, grad_v, grad_sinks = found
            if exchange.repeats == 1:  # nothing is left to be summed
                grad_k, grad_v = grad_k.to(k.dtype), grad_v.to(v.dtype)
            (grad_q,) = exchange.to_sequences([grad_q.to(q.dtype)])
            grad_k, grad_v = map(exchange.summed, exchange.to_sequences([grad_k, grad_v]))
        found = grad_q, grad_k, grad_v, exchange.gradient_of_sinks(grad_sinks)
        return *_rounded(found, (q, k, v, sinks)), None, None, None


def _rounded(
    gradients: tuple[torch.Tensor | None, ...], like: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    """``gradients`` in the dtypes of ``like``."""
    pairs = zip(gradients, like, strict=True)
    return tuple(None if one is None or other is None else one.to(other.dtype) for one, other in pairs)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: SequenceLayout, sinks: torch.Tensor | None
) -> None:
    shapes = f"queries {(*q.shape,)}, keys {(*k.shape,)}, values {(*v.shape,)}"
    if not q.ndim == k.ndim == v.ndim == 4 or k.shape[:3] != v.shape[:3] or q.shape[-1] != k.shape[-1]:
        raise ConfigError(f"attention: got {shapes}, expected (B, Hq, T, D), (B, Hk, T, D) and (B, Hk, T, Dv)")
    if q.shape[0] != k.shape[0] or q.shape[1] % k.shape[1]:
        raise ConfigError(f"attention: got {shapes}, expected one batch, and for each key head as many query heads")
    if q.shape[2] != layout.local_length or k.shape[2] != layout.local_length:
        raise ConfigError(
            f"attention: got {shapes}, expected {layout.local_length} tokens, the part of a rank of {layout.size} of "
            f"{layout.length} tokens"
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise ConfigError(
            f"attention: got queries, keys and values of {q.dtype}, {k.dtype}, {v.dtype}, expected one of "
            f"{', '.join(map(str, DTYPES))}"
        )
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ConfigError(f"sinks: got the shape {(*sinks.shape,)}, expected one for each of {q.shape[1]} heads")


def _check_options(
    method: str, window: int | None, softcap: float | None, dropout: float, dropout_seed: int | None
) -> None:
    if method not in METHODS:
        known = f"{', '.join(METHODS)}{nearest(method, METHODS)}"
        raise ConfigError(f"method of the context axis: got {method!r}, expected one of {known}")
    require(window is None or window > 0, "window", window, "a number of keys of at least 1, or None")
    require(softcap is None or softcap > 0, "softcap", softcap, "a number over 0, or None")
    require(0 <= dropout < 1, "dropout", dropout, "a probability of at least 0 and less than 1")
    require(not dropout or dropout_seed is not None, "dropout_seed", dropout_seed, "an int, as dropout is not 0")


def _check_documents(documents: torch.Tensor, q: torch.Tensor, layout: SequenceLayout) -> None:
    expected = (q.shape[0], layout.local_length)
    if documents.is_floating_point() or documents.dtype is torch.bool or documents.shape != expected:
        raise ConfigError(
            f"documents: got {documents.dtype} of the shape {(*documents.shape,)}, expected ints of {expected}"
        )
