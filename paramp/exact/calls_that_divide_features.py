"""Calls of torch that divide, join or reorder features, of which each tensor rank may have some only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..base.errors import ConfigError

DIVIDES = {
    **dict.fromkeys(("chunk", "tensor_split", "split", "split_with_sizes"), (2, "dim", 0)),
    "roll": (2, "dims", None),
    "flip": (1, "dims", None),
    **dict.fromkeys(("narrow", "select", "index_select", "sort", "argsort", "gather"), (1, "dim", -1)),
    "glu": (1, "dim", -1),
}
"""Functions that divide or reorder a dim, and which argument it is: its place, its name and its default."""
JOINS = "cat", "concat", "concatenate", "dstack"


def divided_features(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Into how many equal parts a call divides the last dim of 3 of its first argument; 0 if it reorders or cuts it.

    0 too if it joins several; None if it does none of these.
    """
    if name in JOINS:
        return 0 if _joins_features(name, args, kwargs) else None
    x = args[0] if args else None
    if not isinstance(x, torch.Tensor) or x.ndim != 3:
        return None
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        reaches = len(index) == 3 or (Ellipsis in map(_plain, index) and index[-1] is not Ellipsis)
        return 0 if reaches and index[-1] != slice(None) else None
    if name in ("view", "reshape", "unflatten"):
        return _parts_before_rest(name, x, args[1:], kwargs)
    if name not in DIVIDES:
        return None
    place, key, default = DIVIDES[name]
    dims = kwargs.get(key, args[place] if len(args) > place else default)
    if not {-1, 2} & {*(dims if isinstance(dims, (tuple, list)) else [dims])}:
        return None
    if name == "glu":
        return 2
    size: Any = args[1] if len(args) > 1 else kwargs.get("chunks", kwargs.get("split_size"))
    if name in ("chunk", "tensor_split") and isinstance(size, int):
        return size
    if name == "split" and isinstance(size, int):
        return x.shape[2] // size if x.shape[2] % size == 0 else 0
    return len(size) if name == "split" and len({*size}) == 1 else 0


def _joins_features(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call joins features of several tensors; not of those without gradients, such as tables of angles."""
    parts = args[0] if args else kwargs["tensors"]
    dim = -1 if name == "dstack" else kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    return len(parts) > 1 and dim in (-1, 2) and any(part.ndim == 3 and part.requires_grad for part in parts)


def _parts_before_rest(name: str, x: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Into how many parts a call divides the last dim of ``x`` before the one of size -1; None if not, or into one.

    Each rank would take its features for some of all parts, or its part of all heads for whole ones.
    """
    given = (*args, *kwargs.values())
    if name == "unflatten":
        sizes = given[-1] if given[0] in (-1, 2) else ()
    else:
        shape = given[0] if isinstance(given[0], (tuple, list)) else given
        sizes = shape[2:] if (*shape[:2],) == x.shape[:2] else ()
    before = math.prod(sizes[: sizes.index(-1)]) if -1 in sizes else 1
    return None if before == 1 or not x.requires_grad else before


def _plain(index: Any) -> Any:
    return index if index is Ellipsis else None


def check_broadcast(where: str, operands: Sequence[torch.Tensor]) -> None:
    """Raise a ConfigError for one that is trained, and broadcast over the features or heads that ranks have."""
    shape = torch.broadcast_shapes(*(operand.shape for operand in operands))
    dims = {3: [2], 4: [1]}.get(len(shape), [])  # heads are in dim 1, as for attention
    for operand in operands:
        sizes = (*[1] * (len(shape) - operand.ndim), *operand.shape)
        if operand.requires_grad and any(sizes[dim] == 1 < shape[dim] for dim in dims):
            raise ConfigError(
                f"reproducible: {where} broadcasts a tensor of the shape "
                f"{(*operand.shape,)} that requires gradients over {(*shape,)}, between a colwise and a rowwise "
                "layer, where each tensor rank has its own features or heads, so that its gradient would be a "
                "part; do this behind the rowwise layer, or leave these layers out of the plan"
            )
