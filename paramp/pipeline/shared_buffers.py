"""Buffers that several pipeline stages have: a forward that changes one would change the copy of its stage only."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

import torch
from torch import nn

from ..base.dtensor import version
from ..base.errors import ConfigError

States: TypeAlias = list[tuple[torch.Tensor | None, int, torch.Tensor | None]]
"""Buffers with their counters of changes in place, and copies."""


class SharedBuffers:
    """The buffers of ``module``, a stage, that other stages have too.

    One that is not in state dicts may be replaced, as caches of what follows from shapes are, but not changed in place.
    """

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        """``names``: those of all buffers that several stages have."""
        self._places = [
            (f"{path}.{name}".removeprefix("."), child, name)
            for path, child in module.named_modules(remove_duplicate=False)
            for name, _ in child._buffers.items()  # of TorchScript a table without an iterator
            if f"{path}.{name}".removeprefix(".") in names
        ]

    def states(self, *, copied: bool = False) -> States:
        """Those of now, for :meth:`check_unchanged`.

        ``copied``: with copies of those in state dicts, to find changes through ``.data`` too, which move no counter.
        """
        states: States = []
        for _, child, name in self._places:
            buffer: torch.Tensor | None = getattr(child, name, None)
            copies = copied and name not in child._non_persistent_buffers_set
            copy = buffer.clone() if copies and buffer is not None else None
            states.append((buffer, 0 if buffer is None else version(buffer), copy))
        return states

    def check_unchanged(self, before: States) -> None:
        """Raise a ConfigError if forwards since ``before``, of :meth:`states`, have changed a buffer."""
        pairs = zip(self._places, before, self.states(), strict=True)
        for (full, child, name), (old, count, value), (new, later, _) in pairs:
            may_be_replaced = name in child._non_persistent_buffers_set
            changed = count != later if new is old else not may_be_replaced
            if not changed and new is not None and value is not None:
                changed = not torch.isclose(new, value, rtol=0, atol=0, equal_nan=True).all()
            if changed:
                raise ConfigError(
                    f"parallel.pipeline.split: the forward changes the buffer {full!r}, of which several stages would "
                    "each have a value of their own; split so that one stage makes all calls of its module, use one "
                    "module per call, or, for a cache of what follows from shapes, register it with persistent=False "
                    "and put another tensor in its place"
                )
