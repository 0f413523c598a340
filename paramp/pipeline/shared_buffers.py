"""Buffers that several pipeline stages have: a forward that changes one would change the copy of its stage only."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

import torch
from torch import nn

from ..base.dtensor import version
from ..base.errors import ConfigError

States: TypeAlias = list[tuple[torch.Tensor | None, int]]
"""Buffers with their counters of changes in place."""


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

    def states(self) -> States:
        """Those of now, for :meth:`check_unchanged`."""
        buffers = [getattr(child, name, None) for _, child, name in self._places]
        return [(one, 0 if one is None or one.is_inference() else version(one)) for one in buffers]

    def values(self) -> list[torch.Tensor | None]:
        """Copies of those that are in state dicts."""
        return [
            None if buffer is None or name in child._non_persistent_buffers_set else buffer.clone()
            for (_, child, name), (buffer, _) in zip(self._places, self.states(), strict=True)
        ]

    def check_unchanged(self, before: States, values: list[torch.Tensor | None] | None = None) -> None:
        """Check what forwards since ``before`` have done.

        Args:
            before: of :meth:`states`.
            values: of :meth:`values`, to find changes through ``.data`` too, which move no counter.

        Raises:
            ConfigError: a buffer has changed.
        """
        copies = values or [None] * len(before)
        pairs = zip(self._places, before, self.states(), copies, strict=True)
        for (full, child, name), (old, count), (new, later), value in pairs:
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
