"""Trees of values: tuples, lists, mappings and dataclasses, nested; tensors and all other values are leaves.

torch's own pytrees take dataclasses and mappings other than ``dict`` for leaves, unless they were registered.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch


def map_leaves(function: Callable[[str, Any], Any], tree: Any, path: str = "") -> Any:
    """``tree`` with ``function(path, leaf)`` in place of each leaf; paths are as in ``inputs['masks'][0]``.

    A part in which nothing changes is the same object; others are copies of their class.
    """
    parts = children(tree)
    if parts is None:
        return function(path, tree)
    changed = {key: map_leaves(function, child, path + step_to(tree, key)) for key, child in parts.items()}
    return tree if all(changed[key] is child for key, child in parts.items()) else rebuilt(tree, changed)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The path and value of each leaf of ``tree``, in order."""
    parts = children(tree)
    if parts is None:
        yield path, tree
        return
    for key, child in parts.items():
        yield from leaves(child, path + step_to(tree, key))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """``tree`` with ``function(tensor)`` in place of each tensor; as :func:`map_leaves`, at a fifth of its cost."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    parts = children(tree)
    if not parts:
        return tree
    changed = {key: map_tensors(function, child) for key, child in parts.items()}
    return tree if all(map(operator.is_, changed.values(), parts.values())) else rebuilt(tree, changed)


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in ``tree``, in order."""
    return (leaf for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor))


def children(tree: Any) -> dict[Any, Any] | None:
    """The direct parts of ``tree`` by index, key or field; None for a leaf."""
    if isinstance(tree, torch.Tensor) or (isinstance(tree, tuple) and isinstance(tree, torch.Size)):
        return None
    if isinstance(tree, (tuple, list)):
        return dict(enumerate(tree))
    if isinstance(tree, Mapping):
        return dict(tree.items())
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree)]
        return {name: getattr(tree, name) for name in names if hasattr(tree, name)}
    return None


def step_to(tree: Any, key: Any) -> str:
    """The part of a path that leads from ``tree`` to the child ``key`` of :func:`children`."""
    return f"[{key!r}]" if isinstance(tree, (tuple, list, Mapping)) else f".{key}"


def rebuilt(tree: Any, parts: dict[Any, Any]) -> Any:
    """A tree of the class of ``tree`` with other ``parts``."""
    if isinstance(tree, (tuple, list)):
        return type(tree)(*parts.values()) if hasattr(tree, "_fields") else type(tree)(list(parts.values()))
    if not isinstance(tree, Mapping):
        changed = copy.copy(tree)
        for name, value in parts.items():
            object.__setattr__(changed, name, value)  # the dataclass may be frozen
        return changed
    if hasattr(tree, "__dataclass_fields__"):  # transformers' ModelOutput, which is a mapping of its fields
        return type(tree)(**parts)
    result: Any = copy.copy(tree) if isinstance(tree, MutableMapping) else {}
    if not isinstance(result, dict) and not hasattr(type(result), "__copy__"):  # it shares what holds the values
        result = copy.deepcopy(tree, {id(value): value for value in tree.values()})
    for key, value in parts.items():
        result[key] = value
    return result
