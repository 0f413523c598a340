"""A layer in slices: each slice is one call of one shape, and what is added up is added in one tree.

These functions carry what slices exchange, within this rank and with the other tensor ranks; the products stay torch's.
Sums are in fp32 (fp64 for fp64), rounded once. They take and return plain tensors::

    function     forward                              backward
    fan_out      one alias for each slice             sum over slices and ranks
    sum_slices   sum over slices and ranks            -
    join         slices one after the other           slices
    add_bias     plus the bias                        of the bias: sum over slices of the sequence, and over ranks
    sum_rows     rows of which one rank has each      -

``sequence``: between sharded layers each rank has a slice of the sequence (dim 1), which ``fan_out`` gathers, and
of which ``sum_slices`` returns this rank's slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from .tree_sum import gathered, own_slice_of_sum, sum_over, tree_sum

Group = dist.ProcessGroup | None


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which a product with ``x`` is computed here: autocast's, if it is on and ``x`` is not fp64."""
    kind = x.device.type
    casts = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype is not torch.float64
    return torch.get_autocast_dtype(kind) if casts else x.dtype


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in contiguous memory that begins on a multiple of 64 bytes, as kernels may depend on both."""
    dense = tensor.contiguous()
    return dense if dense.data_ptr() % 64 == 0 else dense.clone()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def fan_out(
    x: torch.Tensor, count: int, group: Group, *, sequence: bool = False, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, ...]:
    """``count`` aliases of ``x``, one for each slice of this rank that uses all of ``x``.

    ``dtype``: of the aliases. None: the compute dtype.
    """
    return cast(tuple[torch.Tensor, ...], _FanOut.apply(x, count, dtype or compute_dtype(x), group, sequence))


class _FanOut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, count: int, dtype: torch.dtype, group: Group, sequence: bool
    ) -> tuple[torch.Tensor, ...]:
        ctx.others = x.dtype, group, sequence
        whole = torch.cat(gathered(x, group), 1) if sequence else x
        dense = aligned(whole.to(dtype))
        return tuple(dense.view_as(dense) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dtype, group, sequence = ctx.others
        own = tree_sum([gradient.to(_wide(gradient.dtype)) for gradient in gradients])
        total = own_slice_of_sum(own, group, 1) if sequence else sum_over(own, group)
        return total.to(dtype), None, None, None, None


def sum_slices(terms: Sequence[torch.Tensor], group: Group, *, sequence: bool = False) -> torch.Tensor:
    """The sum of ``terms``, one for each slice of this rank, over all slices of all ranks; in fp32 or fp64."""
    return cast(torch.Tensor, _SumSlices.apply(group, sequence, *terms))


class _SumSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, sequence: bool, *terms: torch.Tensor) -> torch.Tensor:
        ctx.others = group, sequence, len(terms), terms[0].dtype
        own = tree_sum([term.to(_wide(term.dtype)) for term in terms])
        total = own_slice_of_sum(own, group, 1) if sequence else sum_over(own, group)
        return total.view_as(total) if any(total is term for term in terms) else total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group, sequence, count, dtype = ctx.others
        whole = torch.cat(gathered(gradient, group), 1) if sequence else gradient
        one = aligned(whole.to(dtype))
        return None, None, *(one for _ in range(count))


def join(slices: Sequence[torch.Tensor], dim: int, parts: int = 1) -> torch.Tensor:
    """``slices`` one after the other along ``dim``; of ``parts`` fused outputs each slice has a slice of each."""
    return cast(torch.Tensor, _Join.apply(dim, parts, *slices))


class _Join(torch.autograd.Function):
    """Not ``torch.cat``, because its gradients are views, whose strides depend on the number of slices."""

    @staticmethod
    def forward(ctx: Any, dim: int, parts: int, *slices: torch.Tensor) -> torch.Tensor:
        dim %= slices[0].ndim
        ctx.others = dim, parts, len(slices)
        return torch.stack([one.unflatten(dim, (parts, -1)) for one in slices], dim + 1).flatten(dim, dim + 2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dim, parts, count = ctx.others
        several = gradient.unflatten(dim, (parts, count, -1)).unbind(dim + 1)
        return None, None, *(aligned(one.flatten(dim, dim + 1)) for one in several)


def split(x: torch.Tensor, count: int, dim: int, parts: int = 1) -> list[torch.Tensor]:
    """The ``count`` slices of ``x`` along ``dim``, each contiguous; of ``parts`` fused ones a slice of each."""
    if count == 1:
        return [aligned(x)]
    dim %= x.ndim
    several = x.unflatten(dim, (parts, count, -1)).unbind(dim + 1)
    return [aligned(one.flatten(dim, dim + 1)) for one in several]


def add_bias(total: torch.Tensor, bias: torch.Tensor, count: int, group: Group) -> torch.Tensor:
    """``total`` (batch, ..., features) plus ``bias`` (features), in the dtype of ``total``.

    Args:
        count: the slices of this rank's part of the sequence (dim 1) over which the gradient of the bias is added up.
        group: the ranks that have the other parts of the sequence.
    """
    return cast(torch.Tensor, _AddBias.apply(total, bias, count, group))


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, bias: torch.Tensor, count: int, group: Group) -> torch.Tensor:
        ctx.others = bias.dtype, count, group
        return total + bias.to(total.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dtype, count, group = ctx.others
        features = gradient.shape[-1]
        several = split(gradient, count, 1) if gradient.ndim > 2 else [aligned(gradient)]
        sums = [one.reshape(-1, features).sum(0) for one in several]
        return gradient, sum_over(tree_sum(sums), group).to(dtype), None, None


def sum_rows(rows: torch.Tensor, group: dist.ProcessGroup, *, sequence: bool) -> torch.Tensor:
    """The sum over ``group`` of ``rows``, each of which is 0 on all ranks but one; bit for bit that rank's."""
    return cast(torch.Tensor, _SumRows.apply(rows, group, sequence))


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup, sequence: bool) -> torch.Tensor:
        ctx.others = group, sequence
        first, *others = gathered(rows.contiguous().view(torch.uint8), group)
        for other in others:
            first.bitwise_or_(other)  # -0 + 0 would be 0
        whole = first.view(rows.dtype)
        return whole.chunk(group.size(), 1)[group.rank()].contiguous() if sequence else whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group, sequence = ctx.others
        return torch.cat(gathered(gradient, group), 1) if sequence else gradient, None, None
