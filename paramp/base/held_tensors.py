"""The tensors that a value holds, in its parts or in its attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .trees import children

NUMBERS_AND_TEXT = (int, float, complex, str, bytes, type(None))
"""Hold no tensors."""


def held_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tree and in the attributes of its leaves, except modules, and of their attributes."""
    seen: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, torch.Tensor):
            yield one
        elif id(one) not in seen and not isinstance(one, NUMBERS_AND_TEXT) and not callable(one):
            seen[id(one)] = one
            parts = children(one)
            waiting += (attributes(one) if parts is None else parts).values()


def attributes(value: Any) -> dict[str, Any]:
    """The attributes that ``value`` itself has, in its ``__dict__`` or in slots."""
    slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
    names = {name for own in slots for name in ([own] if isinstance(own, str) else own)}
    found = {name: getattr(value, name) for name in sorted(names) if hasattr(value, name)}
    return found | getattr(value, "__dict__", {})
