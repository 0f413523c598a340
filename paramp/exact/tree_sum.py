"""Sums in one fixed binary tree, so that they have the same bits however their terms are split over ranks.

A sum of floating-point numbers depends on the order of its additions. Here the terms 0 to n - 1 are added as

    T(n) = T(first ceil(n / 2) terms) + T(the other terms)

If n terms are split evenly over a power of two of ranks, each of which has consecutive ones, then the sum of a rank's
terms is a node of this tree, and the sum over the ranks is the rest of it. Additions of two numbers commute, so the
order of arrival does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..base import loop_block_sizes
from ..base.collectives import all_gather_single, all_reduce_
from ..base.torch_internals import expect

expect("torch._foreach_add_")

Terms = list[torch.Tensor | None]
"""Tensors that are added one by one to those of the same index; None counts as nothing, not as zero."""


def tree_sum(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of ``terms``, tensors of one shape and dtype; one of a single term is that term."""
    if len(terms) == 1:
        return terms[0]
    half = (len(terms) + 1) // 2
    return tree_sum(terms[:half]) + tree_sum(terms[half:])


class SumTree:
    """The sum of ``size`` lists of tensors that arrive one after the other, in any order.

    It holds at most one list for each level of the tree if they arrive in their order.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._nodes: dict[tuple[int, int], Terms] = {}

    def add(self, index: int, terms: Terms) -> None:
        """Add the term ``index``. The tensors are changed in place from now on."""
        path = [(0, self._size)]
        while path[-1][1] - path[-1][0] > 1:
            left, right = _children(*path[-1])
            path.append(left if index < left[1] else right)
        node = path.pop()
        while path:
            left, right = _children(*path[-1])
            other = self._nodes.pop(right if node == left else left, None)
            if other is None:
                break
            terms = _added(terms, other)
            node = path.pop()
        self._nodes[node] = terms

    def total(self) -> Terms | None:
        """The sum of all terms; None until the last one has arrived."""
        return self._nodes.get((0, self._size))


def _children(start: int, stop: int) -> tuple[tuple[int, int], tuple[int, int]]:
    middle = start + (stop - start + 1) // 2
    return (start, middle), (middle, stop)


def _added(first: Terms, second: Terms) -> Terms:
    pairs = [(one, other) for one, other in zip(first, second, strict=True) if one is not None and other is not None]
    if pairs:
        ones, others = zip(*pairs, strict=True)
        torch._foreach_add_(list[torch.Tensor](ones), list[torch.Tensor](others))
    return [other if one is None else one for one, other in zip(first, second, strict=True)]


@torch.no_grad()
def gathered(own: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """The tensor ``own`` of each rank of ``group``, by rank; of this rank alone without a group."""
    if group is None or group.size() == 1:
        return [own]
    size = group.size()
    whole = own.new_empty(size * own.numel())
    all_gather_single(whole, own.contiguous().view(-1), group=group)
    return list(whole.view(size, *own.shape))


@torch.no_grad()
def sum_over(own: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The sum of ``own`` over the ranks of ``group``, on each of them; without a group ``own`` itself."""
    return tree_sum(gathered(own, group))


@torch.no_grad()
def sum_over_(own: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """:func:`sum_over` in place, of a contiguous 1-dim fp32 tensor, without holding all ranks' terms at once.

    Of more than two ranks each adds up its slice and sends the sum to the others, which is less to send than all terms.
    """
    if group is None or group.size() == 1:
        return
    if group.size() == 2:
        all_reduce_(own, group)  # one addition an element, in any algorithm, and it commutes
        return
    count = loop_block_sizes.SUM_PIECE
    assert count % group.size() == 0, f"got {group.size()} ranks, expected a power of two"
    rest = own.numel() % group.size()
    for part in own[: own.numel() - rest].split(count):
        all_gather_single(part, own_slice_of_sum(part, group, 0), group=group)
    if rest:
        own[-rest:].copy_(sum_over(own[-rest:], group))


@torch.no_grad()
def own_slice_of_sum(own: torch.Tensor, group: dist.ProcessGroup | None, dim: int) -> torch.Tensor:
    """This rank's slice along ``dim`` of :func:`sum_over`; its size is a multiple of that of ``group``."""
    if group is None or group.size() == 1:
        return own
    slices = torch.stack(own.chunk(group.size(), dim))
    received = torch.empty_like(slices)
    dist.all_to_all_single(received, slices, group=group)
    return tree_sum(list(received))
