"""Attention and products of batches of matrices, in calls whose shapes do not depend on how many heads a rank has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from ..base.errors import ConfigError
from ..base.torch_internals import expect
from .elementwise import expanded, with_contiguous_gradient
from .sums_over_slices import compute_dtype

expect("torch._safe_softmax")

Noise = Callable[[torch.Size, float, torch.Tensor], torch.Tensor]
"""From the shape of attention weights, (samples, heads, queries, keys), the probability of 0, and a tensor that has
their dtype and device, to what they are multiplied with."""


def attention(
    noise: Noise,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
) -> torch.Tensor:
    """``F.scaled_dot_product_attention``, one call for each key/value head, with the query heads that attend to it.

    Args:
        query: (samples, heads, queries, features); without the dim of heads there is one.
        softcap: the bound ``c`` of scores, which become ``c * tanh(score / c)``, as in Gemma 2 (arXiv 2408.00118).

    Raises:
        ConfigError: another number of dims.
    """
    if query.ndim == 3:
        query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.ndim == 3 else attn_mask
        return attention(noise, query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, softcap).squeeze(1)
    if query.ndim != 4:
        raise ConfigError(
            f"reproducible: scaled_dot_product_attention got a query of the shape {(*query.shape,)}, expected 4 dims, "
            "(samples, heads, queries, features); reshape it"
        )
    heads = query.shape[1]
    if not enable_gqa:
        key, value = (expanded(one, (one.shape[0], heads, *one.shape[2:])) for one in (key, value))
    groups = key.shape[1]
    masks = _split_mask(attn_mask, heads, groups)
    each: list[Sequence[torch.Tensor | None]] = [*(_split(one, groups) for one in (query, key, value)), masks]
    if dropout_p or softcap is not None:
        call: Callable[..., torch.Tensor] = partial(_by_steps, is_causal=is_causal, scale=scale, softcap=softcap)
        shape = torch.Size([*query.shape[:3], key.shape[2]])
        each.append(_split(noise(shape, dropout_p, computing(query)), groups) if dropout_p else [None] * groups)
    else:
        call = partial(F.scaled_dot_product_attention, is_causal=is_causal, scale=scale, enable_gqa=heads > groups)
    parts = zip(*each, strict=True)
    return torch.cat([with_contiguous_gradient(call(*part)) for part in parts], 1)


def _split(heads: torch.Tensor, groups: int) -> list[torch.Tensor]:
    """Contiguous copies of ``heads``, split along dim 1; torch's allocations begin at multiples of 64 bytes."""
    return [part.clone(memory_format=torch.contiguous_format) for part in heads.chunk(groups, 1)]


def _split_mask(mask: torch.Tensor | None, heads: int, groups: int) -> Sequence[torch.Tensor | None]:
    if mask is None or mask.ndim < 3 or mask.shape[-3] != heads or heads == 1:
        return [mask] * groups
    return [part.clone(memory_format=torch.contiguous_format) for part in mask.chunk(groups, -3)]


def _by_steps(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    noise: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention whose scores have a soft cap, and whose weights are multiplied with ``noise``, in fp32 or wider."""
    query, key, value = computing(query), computing(key), computing(value)
    mask = computing(mask) if mask is not None and mask.is_floating_point() else mask
    dtype = query.dtype
    with torch.autocast(query.device.type, enabled=False):
        query, key, value = _wide(query), _wide(key), _wide(value)
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        if is_causal:
            if mask is not None:
                raise ValueError("scaled_dot_product_attention: got both attn_mask and is_causal=True, expected one")
            mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + _wide(mask)
        weights = torch._safe_softmax(scores, -1)  # rows without a key: 0
        weights = weights if noise is None else weights * _wide(noise)
        return (weights @ value).to(dtype)


def computing(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as autocast, if it is active, casts what is multiplied."""
    return tensor.to(compute_dtype(tensor))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right``, tensors of at least 3 dims, one product of contiguous matrices for each entry of the others."""
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    pairs = zip(_matrices(left, batch), _matrices(right, batch), strict=True)
    products = [with_contiguous_gradient(torch.mm(one, other)) for one, other in pairs]
    if not products:
        return torch.matmul(left, right)
    return torch.stack(products).view(*batch, left.shape[-2], right.shape[-1])


def baddbmm(
    input: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """``torch.baddbmm``, one call for each entry of dim 0, (batch, rows, columns)."""
    shape = (batch1.shape[0], batch1.shape[1], batch2.shape[2])
    terms = _matrices(expanded(input, shape), shape[:1])
    triples = zip(terms, _matrices(batch1, shape[:1]), _matrices(batch2, shape[:1]), strict=True)
    sums = [with_contiguous_gradient(torch.addmm(*triple, beta=beta, alpha=alpha)) for triple in triples]
    return torch.stack(sums) if sums else torch.baddbmm(input, batch1, batch2, beta=beta, alpha=alpha)


def _matrices(tensor: torch.Tensor, batch: tuple[int, ...]) -> list[torch.Tensor]:
    """Contiguous copies of the matrices of ``tensor``, broadcast to the dims ``batch`` before the last two."""
    tensor = expanded(tensor, (*batch, *tensor.shape[-2:]))
    parts = tensor.reshape(-1, *tensor.shape[-2:]).unbind(0)
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]
