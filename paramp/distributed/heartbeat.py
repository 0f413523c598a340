"""Heartbeat: every rank reports its phase, and every rank learns which rank is silent, and in which phase.

If a rank is stopped or lost, the others wait in a collective that nothing in their program can end. So each rank
has a thread that exchanges beats through the launch's store, over a separate connection:

    every rank            writes its beat; reads the leader's, and the failure report
    the leader            the lowest rank that has not left: reads every beat
    the failure report    the first rank that was silent or failed; every rank that reads it ends

A rank is silent when its beat has not changed for the time-out, measured on the reader's clock; clocks of two machines
are never compared. If the store stops answering, a second thread detects it and reports the machine that hosts it.

If all ranks are alive, but none moves, the leader writes where each of them is. It ends the job if they all wait for
each other in a training batch (:class:`LivenessMonitor`).
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # missing in torch's stubs only

from .first_failure import LOST, SECONDS_OF_GRACE, end_process, linger, mark_as_echo, write_stderr
from .phase_of_rank import SAVE, SETUP, PhaseTracker, ProgressRecord, paused
from .rendezvous import read_all

REPORT = "failure_report"
"""The key of the failure report, which is empty until a rank fails."""
LOOKED_AT = 8
"""Ranks that :meth:`Heartbeat.seen_in` looks at."""


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


class Heartbeat:
    """The beats of one rank. An observer of engines (:class:`paramp.base.observer_spans.Observer`)."""

    _clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: float,
        *,
        end_after: int | None = None,
        host: str = "",
    ) -> None:
        """Every rank makes one; the ranks then synchronise before any of them calls :meth:`start`.

        ``store`` is shared by this launch's ranks only; ``host`` names its host, empty: rank 0. A rank counts as lost
        after ``timeout`` seconds of silence. The job ends after ``end_after`` time-outs in which every rank waits for
        the others; None: never.
        """
        self.ending = False  # because another rank is silent
        self.is_running = False
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._timeout, self._interval = timeout, min(1.0, timeout / 5)
        self._longest_wait = float("inf") if end_after is None else end_after * timeout
        self._host = host
        self._name_of: Callable[[int], str] = "rank {}".format
        self._tracker = PhaseTracker()
        self._monitor = LivenessMonitor(timeout)
        self._number = 0  # of this rank's last beat; the second thread checks that it grows
        self._leader = 0
        self._beats: dict[int, Beat] = {}
        self._left: set[int] = set()
        self._failed_since: float | None = None
        self._failed = False
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        # Reading a missing key would block; once the ranks have synchronised, every key exists.
        if rank == 0:
            store.set(REPORT, "")
        self._send_beat()

    @property
    def record(self) -> ProgressRecord:
        """The phase of this rank."""
        return self._tracker.record

    @property
    def lost_host(self) -> bool:
        """Whether rank 0 has left, with the store that it hosted."""
        return 0 in self._left and not self._host

    def begin_call(self) -> None:
        """No action: the beginning of a batch is not recorded."""

    def span(self, kind: str, stage: int | None = None, microbatch: int | None = None) -> AbstractContextManager[None]:
        """A context in which this rank is in the phase ``kind``."""
        return self._tracker.span(kind, stage, microbatch)

    def seen_in(self, phases: Collection[str]) -> str:
        """Which rank waits in one of ``phases`` of this rank's step, by its last beat; empty if none is seen.

        It looks at a few other ranks, chosen anew each time: thousands that look at all would keep the store busy.
        """
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        some = random.SystemRandom().sample(others, min(LOOKED_AT, len(others)))
        for rank, text in zip(some, read_all(self._store, [*map(_beat_key, some)]), strict=True):
            record = Beat.decode(text).record
            if record.waiting and record.phase in phases and record.step == self.record.step:
                return f"{self._name_of(rank)} is {record}"
        return ""

    def start(self, name_of: Callable[[int], str]) -> None:
        """Start to send and read beats. ``name_of`` returns a rank's name with its coordinates on the mesh."""
        self._name_of = name_of
        self.is_running = True
        self._store = self._store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=10 * self._timeout))  # the second thread ends the process earlier
        self._threads = [
            threading.Thread(target=target, name=f"paramp-{target.__name__.strip('_')}", daemon=True)
            for target in (self._exchange_beats, self._watch_store)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self, *, failed: bool = False) -> None:
        """Report to the others that this rank leaves, and whether it ``failed``; end the threads."""
        self._failed = failed
        self.is_running = False
        self._stopped.set()
        while self._threads:
            self._threads.pop().join(2 * self._patience)  # a store that does not answer may block a thread

    def leave(self, error: BaseException | None) -> bool:
        """:meth:`stop`, because the program goes on without this or fails with an ``error``.

        Returns:
            Whether this rank was about to end because another one is silent.
        """
        self.stop(failed=error is not None and not (isinstance(error, SystemExit) and not error.code))
        return self.ending

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self.leave(error) and error is not None:
            mark_as_echo(error)

    @property
    def _patience(self) -> float:
        """Seconds after which every live rank has read a value written to the store."""
        return 2 * self._interval + 0.5

    def _exchange_beats(self) -> None:
        """The first thread: exchange beats until this rank stops."""
        with contextlib.suppress(*LOST):  # the second thread detects it
            while not self._stopped.wait(self._interval):
                self._exchange()
                if self.lost_host:
                    self._store.add("left", 1)
                    return
            self._leave()

    def _exchange(self) -> None:
        """One round: write this rank's beat, read the others', handle silent ranks and failure reports."""
        self._send_beat()
        report = self._read()
        now = self._clock()
        self._monitor.update(self._beats, now)
        if report:
            self._follow(json.loads(report), now)
        elif silent := self._monitor.silent(tolerance=2 * self._interval):
            text = "; ".join(
                f"{self._name_of(rank)} has been silent for {seconds:.0f} s; it was last seen {beat.record}"
                for rank, (seconds, beat) in silent.items()
            )
            self._end_all(text)
        elif self._leader == self._rank and (beats := self._monitor.stuck(2 * self._interval)):
            write_stderr(describe_stuck(beats, self._timeout, sorted(self._left)))
            if (seconds := self._monitor.seconds_waiting()) > self._longest_wait:
                self._end_all(describe_deadlock(beats, seconds, sorted(self._left)))

    def _send_beat(self, *, gone: bool = False) -> None:
        self._number += 1
        self._store.set(_beat_key(self._rank), self._beat(gone=gone).encode())

    def _beat(self, *, gone: bool = False) -> Beat:
        return Beat(self._number, paused(self._tracker.record), self._tracker.num_done, gone)

    def _read(self) -> str:
        """Read the leader's beat (as the leader: every rank's) into ``_beats``. Returns the failure report."""
        while True:
            leading = self._leader == self._rank
            wanted = set(range(self._world_size)) if leading else {self._leader}
            ranks = sorted(wanted - self._left - {self._rank})
            *texts, report = read_all(self._store, [*map(_beat_key, ranks), REPORT])
            beats = {rank: Beat.decode(text) for rank, text in zip(ranks, texts, strict=True)}
            self._left.update(rank for rank, beat in beats.items() if beat.gone)
            if leading or self._leader not in self._left:
                break
            self._leader += 1  # up to this rank itself
        self._beats = {rank: beat for rank, beat in beats.items() if rank not in self._left}
        if leading:
            self._beats[self._rank] = self._beat()
        return report

    def _leave(self) -> None:
        """Send the last beat, and a failure report if this rank failed."""
        if self._failed:
            self._store.compare_set(REPORT, "", json.dumps({"failed": self._rank}))
        self._send_beat(gone=True)
        self._store.add("left", 1)
        if self._rank == 0 and not self._host:  # the others must first read that it has left
            linger(lambda: self._store.add("left", 0) >= self._world_size, self._patience)

    def _watch_store(self) -> None:
        """The second thread: end the process if the first one has waited for the store for the time-out."""
        number, waited, before = 0, 0.0, self._clock()
        while not self._stopped.wait(self._interval):
            now = self._clock()
            self._end_after_failure(now)  # the first thread may have ended, with the store of rank 0
            gap, before = min(now - before, self._timeout / 2), now
            waited = waited + gap if number == self._number else 0.0
            number = self._number
            if waited > self._timeout and 0 not in self._left:  # a store on rank 0 may end after rank 0 has left
                self._end(self._describe_silent_store(waited))

    def _follow(self, report: Mapping[str, str | int], now: float) -> None:
        """End because of another rank's ``report``: with the reason in it; without a message, later, if it failed."""
        if "reason" in report:
            self._end(str(report["reason"]))
        self._failed_since = now if self._failed_since is None else self._failed_since
        self._end_after_failure(now)

    def _end_after_failure(self, now: float) -> None:
        """End if another rank has failed, and has had the time to print its error: a launcher then ends it too."""
        if self._failed_since is not None and now - self._failed_since > SECONDS_OF_GRACE + self._patience:
            end_process()

    def _describe_silent_store(self, seconds: float) -> str:
        if self._host:
            return f"the store has not answered for {seconds:.0f} s: {self._host}, which hosts it, is stopped or lost"
        last = f"; it was last seen {self._beats[0].record}" if 0 in self._beats else ""
        return f"{self._name_of(0)}, which hosts the store, has been silent for {seconds:.0f} s{last}"

    def _end_all(self, text: str) -> None:
        """Report the reason to every rank, and end."""
        self._store.compare_set(REPORT, "", json.dumps({"reason": text}))
        self._end(text)

    def _end(self, text: str) -> None:
        """Write the reason, and end this process after every rank has had the time to write it too."""
        self.ending = True
        write_stderr(f"paramp: {text}; ending {self._name_of(self._rank)}, which was {self._tracker.record}\n")
        # A launcher ends all ranks when the first one ends.
        time.sleep(self._patience)
        end_process(text)


def _beat_key(rank: int) -> str:
    """The key of a rank's beat in the store."""
    return f"beat/{rank}"


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
