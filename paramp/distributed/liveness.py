"""The phase of each rank, which ranks are alive and which make progress, from the beats that they send."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import NamedTuple

from ..base.spans import STEP

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


@dataclass(frozen=True)
class Beat:
    """The status that one rank reports."""

    number: int = 0
    """The number of the beat; it grows as long as the rank is alive."""
    record: ProgressRecord = SETUP
    num_done: int = 0
    """Phases that have ended in this step."""
    gone: bool = False
    """True: the rank has left, and no more beats are expected."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str | bytes) -> Beat:
        fields = json.loads(text)
        return Beat(**fields | {"record": ProgressRecord(*fields["record"])})


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


class LivenessMonitor:
    """The times, on this rank's clock, of each rank's last new beat and of the last progress of any rank.

    A job does not end while any rank may do something long that this does not see: it loads data, saves, evaluates,
    compiles or is in a debugger. Only if every rank is in a training batch, or waits to save, is none to be waited for.

    The clock stops while this rank is stopped: after a job was stopped and continued, each rank would otherwise find
    all others silent.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._updated: float | None = None
        self._now = 0.0
        self._last: dict[int, tuple[float, Beat]] = {}
        self._progressed = 0.0
        self._waiting_since = 0.0

    def update(self, beats: Mapping[int, Beat], now: float) -> None:
        """Record the ``beats`` of all expected ranks, read at the time ``now`` (seconds)."""
        if self._updated is not None:
            self._now += min(now - self._updated, self._timeout / 2)
        self._updated = now
        waiting = all(beat.record.waiting for beat in beats.values())
        for rank, beat in beats.items():
            _, before = self._last.get(rank, (0.0, None))
            if before is None or (before.record, before.num_done) != (beat.record, beat.num_done):
                self._progressed, waiting = self._now, False
            if before is None or before.number != beat.number:
                self._last[rank] = self._now, beat
        self._last = {rank: last for rank, last in self._last.items() if rank in beats}
        if not waiting:
            self._waiting_since = self._now

    def silent(self, tolerance: float = 0.0) -> dict[int, tuple[float, Beat]]:
        """The ranks that have been silent for the time-out, each with the seconds of silence and its last beat.

        If there is one, ranks that became silent at most ``tolerance`` seconds later count too.
        """
        silence = {rank: (self._now - since, beat) for rank, (since, beat) in self._last.items()}
        if not any(seconds > self._timeout for seconds, _ in silence.values()):
            return {}
        return {rank: found for rank, found in silence.items() if found[0] > self._timeout - tolerance}

    def stuck(self, patience: float = float("inf")) -> dict[int, Beat]:
        """Every rank's last beat if no rank made progress for the time-out; after that, empty until it passes again.

        A job that never began a phase is not stuck: its program does not report phases. Empty also while a beat is
        more than ``patience`` seconds old: that rank may be silent, which is then the cause.
        """
        beats = {rank: beat for rank, (_, beat) in self._last.items()}
        begun = any(beat.record != SETUP for beat in beats.values())
        overdue = any(self._now - since > patience for since, _ in self._last.values())
        if overdue or not begun or self._now - self._progressed <= self._timeout:
            return {}
        self._progressed = self._now
        return beats

    def seconds_waiting(self) -> float:
        """How long every rank has been in a waiting phase, without progress of any."""
        return self._now - self._waiting_since


def describe_stuck(beats: Mapping[int, Beat], seconds: float, left: Sequence[int] = ()) -> str:
    """A table of the phase of each rank, for a job without progress; ``left``: the ranks that have left it."""
    least = min((beat.record.step, beat.num_done) for beat in beats.values())
    behind = [rank for rank, beat in beats.items() if (beat.record.step, beat.num_done) == least]
    last = f"; furthest behind: {_list_ranks(behind)}" if len(behind) < len(beats) else ""
    lines = [f"paramp: no rank has made progress for {seconds:.0f} s{last}"]
    lines += [f"paramp:   {place}" for place in _places(beats)]
    lines += [f"paramp:   has left: {_list_ranks(left)}"] * bool(left)
    return "\n".join(lines) + "\n"


def describe_deadlock(beats: Mapping[int, Beat], seconds: float, left: Sequence[int] = ()) -> str:
    """Why a job ends in which every rank has waited for the others for so many ``seconds``, on one line.

    ``left``: the ranks that have left it.
    """
    saving = [rank for rank, beat in beats.items() if beat.record.phase == SAVE]
    only = f"; engine.save has to be called on every rank, but was on {_list_ranks(saving)} only" if saving else ""
    places = [*_places(beats), *[f"has left: {_list_ranks(left)}"] * bool(left)]
    return f"every rank has waited for the others for {seconds:.0f} s: {'; '.join(places)}{only}"


def _places(beats: Mapping[int, Beat]) -> list[str]:
    """``in step, step 3: ranks 0-1`` for each phase in which ranks are."""
    ranks_at: dict[str, list[int]] = defaultdict(list)
    for rank, beat in sorted(beats.items()):
        ranks_at[str(beat.record)].append(rank)
    return [f"{where}: {_list_ranks(ranks)}" for where, ranks in ranks_at.items()]


def _list_ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
