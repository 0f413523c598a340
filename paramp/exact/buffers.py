"""Buffers that a forward changes: each data rank would change its own, by its own samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from ..base.errors import ConfigError
from ..base.module_surgery import run_within


def check_buffers(stages: Mapping[int, nn.Module]) -> None:
    """Let each training forward of ``stages`` raise a ConfigError if it changes a buffer, or puts another in its place.

    What the first forward changes may be a cache that it fills, so that it is not looked at.
    """
    for stage in stages.values():
        run_within(stage, _Check(stage))


class _Check:
    """Makes the context of each forward of ``stage``."""

    def __init__(self, stage: nn.Module) -> None:
        self._buffers = [(prefix, child, name) for prefix, child in stage.named_modules() for name in child._buffers]
        self._has_run = False

    def __call__(self, stage: nn.Module) -> AbstractContextManager[None] | None:
        is_first, self._has_run = not self._has_run, True
        return None if is_first or not stage.training or not self._buffers else self._checked()

    @contextmanager
    def _checked(self) -> Iterator[None]:
        before = self._state()
        yield
        after = self._state()
        for (prefix, child, name), old, new in zip(self._buffers, before, after, strict=True):
            if old != new:
                raise ConfigError(
                    f"reproducible: the forward of {prefix!r}, a {type(child).__name__}, changes its buffer {name!r}, "
                    "which each data rank would change by its own samples; expected a forward that leaves buffers as "
                    "they are: keep the value outside of the model, or change it between the steps"
                )

    def _state(self) -> list[tuple[int, int] | None]:
        buffers: list[torch.Tensor | None] = [child._buffers[name] for _, child, name in self._buffers]
        return [None if buffer is None else (id(buffer), buffer._version) for buffer in buffers]
