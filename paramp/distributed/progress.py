"""The phase that a rank's program is in: forward, backward, step, with microbatch and stage."""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple

STEP = "step"
"""The phase that ends a step."""


class ProgressRecord(NamedTuple):
    """A phase of the program."""

    phase: str
    """``setup``, ``data``, ``forward``, ``loss``, ``backward``, ``step``, ``evaluation``, ``checkpoint``, ..."""
    inside: bool = True
    """False: that phase has ended, and no other has begun."""
    stage: int | None = None
    microbatch: int | None = None
    step: int = 1
    """Which call of the engine's ``step``."""

    def __str__(self) -> str:
        preposition = "in" if self.inside else "after"
        microbatch = "" if self.microbatch is None else f" of microbatch {self.microbatch}"
        stage = "" if self.stage is None else f", stage {self.stage}"
        return f"{preposition} {self.phase}{microbatch}{stage}, step {self.step}"


SETUP = ProgressRecord("setup")
"""Before the first phase that the program enters."""


class PhaseTracker:
    """Where this rank's main thread is. Other threads read it without a lock: each change is one assignment.

    Attributes:
        record: the phase now.
        step: which step of the engine is under way, from 1.
        num_done: how many phases have ended in this step.
    """

    def __init__(self) -> None:
        self.record = SETUP
        self.step = 1
        self.num_done = 0

    def span(self, kind: str, stage: int | None = None, microbatch: int | None = None) -> PhaseContext:
        """A context in which this rank is in the phase ``kind``."""
        return PhaseContext(self, ProgressRecord(kind, True, stage, microbatch, self.step))


class PhaseContext:
    """The context of :meth:`PhaseTracker.span`. Not a generator, which would take twice as long."""

    __slots__ = ("_before", "_record", "_tracker")

    def __init__(self, tracker: PhaseTracker, record: ProgressRecord) -> None:
        self._tracker = tracker
        self._record = record

    def __enter__(self) -> None:
        self._before = self._tracker.record
        self._tracker.record = self._record

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        tracker = self._tracker
        tracker.num_done += 1
        if self._record.phase == STEP:
            tracker.step += 1
            tracker.num_done = 0
        nested = self._before.inside and self._before is not SETUP
        tracker.record = self._before if nested else self._record._replace(inside=False)
