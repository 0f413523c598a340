"""Plain leaves of autograd's graph that stand for DTensor parameters while a batch runs.

The gradient of a DTensor parameter is a DTensor, which costs autograd some 0.1 ms of Python each time it is added to
``.grad``. A leaf is a plain tensor with the memory of the parameter's local tensor, whose ``.grad`` is that of the
parameter's ``.grad``: so a layer that computes on it accumulates the same gradient as one that computes on the
parameter's local tensor, in C++.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TypeAlias, cast

import torch

Leaves: TypeAlias = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
"""By the id of a parameter: its leaf, and the ``.grad`` of the parameter that has the memory of the leaf's."""
NONE: Leaves = MappingProxyType({})
_IN_USE = ContextVar("local_leaves", default=NONE)


def make_leaf(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The leaf of ``parameter``, a DTensor, for its ``gradient``, a DTensor with the same placements."""
    leaf = parameter._local_tensor.detach().requires_grad_()  # type: ignore[attr-defined]
    local_gradient = gradient._local_tensor  # type: ignore[attr-defined]
    if local_gradient.dtype is not leaf.dtype:
        leaf.grad_dtype = local_gradient.dtype
    leaf.grad = local_gradient
    return cast(torch.Tensor, leaf)


@contextmanager
def using(leaves: Leaves) -> Iterator[None]:
    """A context in which :func:`leaf_of` finds ``leaves``."""
    token = _IN_USE.set(leaves)
    try:
        yield
    finally:
        _IN_USE.reset(token)


def leaf_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The leaf that stands for ``parameter`` here; None if there is none, or if the parameter's own node has to run.

    That is where it has hooks, is frozen, or has another ``.grad``.
    """
    leaf, gradient = _IN_USE.get().get(id(parameter), (None, None))
    if leaf is None or parameter.grad is not gradient or not parameter.requires_grad:
        return None
    hooked = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    return None if hooked else leaf
