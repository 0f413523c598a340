"""The phase of the program that this rank is in, such as forward or checkpoint, and whether it can only wait there."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import NamedTuple

from ..base.observer_spans import STEP

BATCH = "batch"
"""The kind of the phase around all of a training batch."""
SAVE = "save"
"""The kind of the phase in which a rank waits until all ranks have begun to save."""
WAITING = {BATCH, STEP, SAVE, "forward", "loss", "backward", "backward input", "backward weight"}
"""The kinds of phases in which a rank computes for seconds, or waits for others: nothing else takes long there."""
PAUSED_IN = {
    "compilation": ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py"),
    "debugger": ("/bdb.py", "/pydevd.py"),
}
"""What a rank may do for long in such a phase, and the files whose functions then run."""


class ProgressRecord(NamedTuple):
    """A phase of the program."""

    phase: str
    """``setup``, ``data``, ``forward``, ``loss``, ``backward``, ``step``, ``evaluation``, ``checkpoint``, ..."""
    inside: bool = True
    """False: the phase has ended, and no other has begun."""
    stage: int | None = None
    microbatch: int | None = None
    step: int = 1
    """The number of the engine's ``step`` call."""
    waiting: bool = False
    """Whether this lies in a training batch, or in another phase in which the rank can only wait for others."""

    def __str__(self) -> str:
        preposition = "in" if self.inside else "after"
        microbatch = "" if self.microbatch is None else f" of microbatch {self.microbatch}"
        stage = "" if self.stage is None else f", stage {self.stage}"
        return f"{preposition} {self.phase}{microbatch}{stage}, step {self.step}"


SETUP = ProgressRecord("setup")
"""The record before the program enters its first phase."""


class PhaseTracker:
    """The phase of this rank's main thread. Other threads read it without a lock: each change is one assignment."""

    def __init__(self) -> None:
        self.record = SETUP
        self.step = 1  # the engine's current step
        self.num_done = 0  # phases that have ended in this step

    def span(self, kind: str, stage: int | None = None, microbatch: int | None = None) -> PhaseContext:
        """A context in which this rank is in the phase ``kind``."""
        outer = self.record
        waiting = kind in WAITING and (outer.waiting or not outer.inside or outer is SETUP)
        return PhaseContext(self, ProgressRecord(kind, True, stage, microbatch, self.step, waiting))


class PhaseContext:
    """The context of :meth:`PhaseTracker.span`. A class, because a generator would take twice as long."""

    __slots__ = ("_before", "_record", "_tracker")

    def __init__(self, tracker: PhaseTracker, record: ProgressRecord) -> None:
        self._tracker = tracker
        self._record = record

    def __enter__(self) -> None:
        self._before = self._tracker.record
        self._tracker.record = self._record

    def __exit__(self, *_: object) -> None:
        tracker = self._tracker
        tracker.num_done += 1
        if self._record.phase == STEP:
            tracker.step += 1
            tracker.num_done = 0
        before = self._before
        nested = before.inside and before is not SETUP and before.phase != BATCH  # after a part of it tells more
        tracker.record = before if nested else self._record._replace(inside=False, waiting=before.waiting)


def paused(record: ProgressRecord) -> ProgressRecord:
    """``record``; or another if a thread of this process compiles, or a debugger holds one, in a waiting phase."""
    if not record.waiting:
        return record
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            for phase, files in PAUSED_IN.items():
                if at.f_code.co_filename.replace(os.sep, "/").endswith(files):
                    return record._replace(phase=phase, waiting=False)
            at = at.f_back
    return record
