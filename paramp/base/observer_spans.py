"""Observers of a rank's operations: forward, backward, communication, step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol

import torch

from .torch_internals import expect

expect("torch._C._autograd")

STEP = "step"
"""The kind of an engine's step; all other kinds are the pipeline's."""


class Observer(Protocol):
    """Observes the operations of a rank as they run."""

    def begin_call(self) -> None:
        """A batch begins. Subclasses that do not count them leave this out."""
        return

    def span(self, kind: str, stage: int | None = None, microbatch: int | None = None) -> AbstractContextManager[None]:
        """A context around one operation; ``kind``: ``forward``, ``step``, ..."""


def span(
    observers: Sequence[Observer], kind: str, stage: int | None = None, microbatch: int | None = None
) -> AbstractContextManager[None]:
    """The ``span`` contexts of all ``observers``, nested; and a range of torch's profiler while that is active."""
    profiled = torch._C._autograd._profiler_enabled()
    if len(observers) > 1 or profiled:
        return _spans(observers, kind, stage, microbatch, profiled)
    return observers[0].span(kind, stage, microbatch) if observers else nullcontext()


@contextmanager
def _spans(
    observers: Sequence[Observer], kind: str, stage: int | None, microbatch: int | None, profiled: bool
) -> Iterator[None]:
    with ExitStack() as stack:
        if profiled:
            stack.enter_context(torch.profiler.record_function(_range_name(kind, stage, microbatch)))
        for observer in observers:
            stack.enter_context(observer.span(kind, stage, microbatch))
        yield


def _range_name(kind: str, stage: int | None, microbatch: int | None) -> str:
    """The name of an operation in torch's profiler: ``paramp forward (stage 1, microbatch 3)``."""
    place = [f"{what} {index}" for what, index in (("stage", stage), ("microbatch", microbatch)) if index is not None]
    return f"paramp {kind} ({', '.join(place)})" if place else f"paramp {kind}"


def begin_call(observers: Iterable[Observer]) -> None:
    """Call ``begin_call`` of each of ``observers``."""
    for observer in observers:
        observer.begin_call()
