"""Observers of a rank's operations: forward, backward, communication, step."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from .torch_internals import expect

expect("torch._C._autograd")

STEP = "step"
"""The kind of an engine's step; all other kinds are the pipeline's."""


@dataclass(frozen=True)
class Span:
    """One operation on one rank."""

    kind: str
    """``forward``, ``loss``, ``backward``; where the schedule splits it, ``backward input`` (gradients of activations)
    and ``backward weight``; ``step``: gradients reduced and checked, and the optimizer's step."""
    begin: float
    end: float
    """Seconds since recording began."""
    stage: int | None = None
    microbatch: int | None = None
    call: int = 0
    """The index of the call of ``forward_backward``; with gradient accumulation a step has several."""


class Recorder:
    """Records the spans of one rank, by the clock of its process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recorded: list[tuple[str, Any, Any, int | None, int | None, int]] = []
        self._call = -1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._base = self._now()
        self.origin = time.perf_counter()

    def begin_call(self) -> None:
        """A batch begins."""
        self._call += 1

    @contextmanager
    def span(self, kind: str, stage: int | None = None, microbatch: int | None = None) -> Iterator[None]:
        """Record what runs inside."""
        begin = self._now()
        yield
        self._recorded.append((kind, begin, self._now(), stage, microbatch, max(self._call, 0)))

    def spans(self) -> list[Span]:
        """All recorded spans, in seconds of this process's clock; on CUDA it synchronises."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [
            Span(kind, self._seconds(begin), self._seconds(end), stage, microbatch, call)
            for kind, begin, end, stage, microbatch, call in self._recorded
        ]

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, moment: Any) -> float:
        if self._device.type != "cuda":
            return float(moment)
        return self.origin + float(self._base.elapsed_time(moment)) / 1000


class Observer(Protocol):
    """Observes the operations of a rank as they run."""

    def begin_call(self) -> None:
        """A batch begins. Subclasses that do not count them leave this out."""
        return

    def span(self, kind: str, stage: int | None = None, microbatch: int | None = None) -> AbstractContextManager[None]:
        """A context around one operation; ``kind`` as in :class:`Span`."""


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


class _Observed(Protocol):
    observers: list[Observer]


Owner = TypeVar("Owner", bound=_Observed)
Result = TypeVar("Result")


def observed(kind: str) -> Callable[[Callable[[Owner], Result]], Callable[[Owner], Result]]:
    """A decorator: each call of the method is a span for its object's ``observers``."""

    def decorate(method: Callable[[Owner], Result]) -> Callable[[Owner], Result]:
        @functools.wraps(method)
        def wrapper(self: Owner) -> Result:
            with span(self.observers, kind):
                return method(self)

        return wrapper

    return decorate
