"""A heartbeat: every rank says what it is doing, and every rank learns which one has fallen silent, and where.

A rank that is stopped or lost leaves the others in a collective that nothing in their program can end. So each rank
has a thread that exchanges beats through the launch's store, over a connection of its own:

    every rank      writes its beat; reads the leader's, and the verdict
    the leader      the lowest rank that has not left: reads every beat
    the verdict     the first bad news, a rank that fell silent or that failed; who reads it ends

A beat is some tenths of a second old when it is read, which is long in a step. So each rank also keeps a slate
(:mod:`paramp.distributed.progress_record`), and tells what it reads on the slate of the next rank on its machine: the very place in
which that was stopped.

A rank is silent when its beat has not changed for the time-out on the reader's own clock; clocks of two machines are
never compared. Where the store itself falls silent, a second thread notices, and the machine that hosts it is meant.

The main thread says where it is by writing on its slate, which takes a microsecond or two and no lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType

from torch.distributed import DistError, Store  # type: ignore[attr-defined]  # missing in torch's stubs only

from .progress_record import SETUP, ProgressRecord, Where

__all__ = ["Beat", "Heartbeat", "LivenessMonitor", "ending_in_time"]

EXIT_CODE = 1
SECONDS_OF_GRACE = 5.0
"""What a rank gets to end by itself once another has failed."""
STEP = "step"
"""The phase that ends a step."""
LOST = (DistError, RuntimeError)
"""What the store raises when its host is gone."""


@dataclass(frozen=True)
class Beat:
    """What one rank says of itself."""

    number: int = 0
    """Of its beats; grows as long as it is alive."""
    where: Where = SETUP
    done: int = 0
    """Phases that have ended in this step."""
    gone: bool = False
    """It has left, and is no longer expected."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: bytes) -> Beat:
        fields = json.loads(text)
        return Beat(**fields | {"where": Where(*fields["where"])})


class LivenessMonitor:
    """When each rank was last heard, and when any of them last got on, on this rank's clock.

    The clock stands still while this rank itself does: a job that was stopped and goes on would otherwise find that
    all others have been silent.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._looked: float | None = None
        self._now = 0.0
        self._heard: dict[int, tuple[float, Beat]] = {}
        self._moved = 0.0

    def hear(self, beats: Mapping[int, Beat], now: float) -> None:
        """Take in the ``beats`` that were read at the time ``now``, in seconds."""
        if self._looked is not None:
            self._now += min(now - self._looked, self._timeout / 2)
        self._looked = now
        for rank, beat in beats.items():
            before = self._heard.get(rank)
            if before is None or (before[1].where, before[1].done) != (beat.where, beat.done):
                self._moved = self._now
            if before is None or before[1].number != beat.number:
                self._heard[rank] = self._now, beat
        self._heard = {rank: heard for rank, heard in self._heard.items() if rank in beats}

    def silent(self, tolerance: float = 0.0) -> dict[int, tuple[float, Beat]]:
        """The ranks that have been silent for the time-out; how long, and their last beat.

        Args:
            tolerance: once there is one, those that fell silent by so many seconds later count too.
        """
        silence = {rank: (self._now - heard, beat) for rank, (heard, beat) in self._heard.items()}
        if not any(seconds > self._timeout for seconds, _ in silence.values()):
            return {}
        return {rank: found for rank, found in silence.items() if found[0] > self._timeout - tolerance}

    def stuck(self) -> dict[int, Beat]:
        """The last beat of every rank, if none has got on for the time-out; then nothing until that has passed again.

        Ranks that never began are not stuck: their program does not tell where it is.
        """
        beats = {rank: beat for rank, (_, beat) in self._heard.items()}
        begun = any(beat.where != SETUP for beat in beats.values())
        if not begun or self._now - self._moved <= self._timeout:
            return {}
        self._moved = self._now
        return beats


class Heartbeat:
    """The beats of one rank. An observer of engines (:class:`paramp.base.spans.Observer`).

    Attributes:
        ending: another rank has fallen silent, and this one is about to end.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: float,
        *,
        host: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Every rank makes one, and the ranks then meet, before any calls :meth:`start`.

        Args:
            store: shared by this launch's ranks alone.
            timeout: seconds of silence after which a rank is missing.
            host: who hosts the store, in words; empty: rank 0.
        """
        self.ending = False
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._interval = min(1.0, timeout / 5)
        self._host = host
        self._clock = clock
        self._name_of: Callable[[int], str] = "rank {}".format
        # Reading what is not there would wait; after the ranks have met, everything is.
        if rank == 0:
            store.set("verdict", "")
            store.set("launch", secrets.token_hex(8))
        self._launch = store.get("launch").decode()
        self._slate = ProgressRecord.create(ProgressRecord.path(self._launch, rank))
        self._records: dict[int, ProgressRecord] = {}
        self._neighbour: int | None = None
        self._shown = True
        self._at = SETUP
        self._step = 1
        self._done = 0
        self._number = 0
        self._leader = 0
        self._beats: dict[int, Beat] = {}
        self._left: set[int] = set()
        self._monitor = LivenessMonitor(timeout)
        self._answers = 0
        self._failed_since: float | None = None
        self._failed = False
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        store.set(_beat(rank), self._next_beat().encode())
        store.set(_sight(rank), "")

    # ------------------------------------------------------------------------------- what the main thread says

    def begin_call(self) -> None:
        """A batch begins; nothing is noted."""

    def span(self, kind: str, stage: int | None = None, microbatch: int | None = None) -> AbstractContextManager[None]:
        """A context in which this rank is in the phase ``kind``."""
        return _Phase(self, kind, stage, microbatch)

    def _go_to(self, where: Where) -> None:
        self._at = where
        self._slate.write(where, self._done)

    # ---------------------------------------------------------------------------------------------- beginning, ending

    def start(self, name_of: Callable[[int], str]) -> None:
        """Begin to beat and to listen. ``name_of`` says a rank's name and place."""
        self._name_of = name_of
        self._store = self._store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=10 * self._timeout))  # it is the other thread that loses patience
        self._look_around()
        self._threads = [
            threading.Thread(target=target, name=f"paramp-{target.__name__.strip('_')}", daemon=True)
            for target in (self._talk, self._guard)
        ]
        for thread in self._threads:
            thread.start()

    def _look_around(self) -> None:
        """Find the slates of the next rank on this machine, and of rank 0, which may host the store."""
        for rank in [*range(self._rank + 1, self._world_size), *range(self._rank)]:
            record = ProgressRecord.find(ProgressRecord.path(self._launch, rank))
            if record is not None:
                self._neighbour = rank
                self._records[rank] = record
                break
        host = ProgressRecord.find(ProgressRecord.path(self._launch, 0))
        if host is not None:
            self._records[0] = host
        self._store.add("looked", 1)

    def stop(self, *, failed: bool = False) -> None:
        """Tell the others that this rank leaves, and whether it ``failed``, and end the threads."""
        self._failed = failed
        self._stopped.set()
        for thread in self._threads:
            thread.join(2 * self._patience)  # a store that does not answer holds up a thread for good
        self._threads = []
        self.hide()

    def hide(self, *others: int) -> None:
        """Remove the name of this rank's slate, and of others. Who has found it can go on reading."""
        for rank in (self._rank, *others):
            ProgressRecord.path(self._launch, rank).unlink(missing_ok=True)

    @property
    def _patience(self) -> float:
        """Seconds after which every rank that is alive has read what was written."""
        return 2 * self._interval + 0.5

    # ----------------------------------------------------------------------------------------------------- the threads

    def _talk(self) -> None:
        """The thread that exchanges beats."""
        with contextlib.suppress(*LOST):  # which the other thread notices
            while not self._stopped.wait(self._interval):
                self._exchange()
                if 0 in self._left and not self._host:  # the store that rank 0 hosted ends with it
                    self._store.add("left", 1)
                    return
            self._say_goodbye()

    def _exchange(self) -> None:
        """One round: write, read, judge."""
        self._store.set(_beat(self._rank), self._next_beat().encode())
        if self._neighbour is not None:
            self._store.set(_sight(self._neighbour), Beat(0, *self._records[self._neighbour].read()).encode())
        if self._shown and self._store.add("looked", 0) == self._world_size:
            self.hide()
            self._shown = False
        verdict = self._read()
        self._answers += 1
        now = self._clock()
        self._monitor.hear(self._beats, now)
        if verdict:
            self._obey(json.loads(verdict), now)
        elif silent := self._monitor.silent(tolerance=2 * self._interval):
            text = "; ".join(self._obituary(rank, *found) for rank, found in silent.items())
            self._store.compare_set("verdict", "", json.dumps({"silent": text}))
            self._end(text)
        elif self._leader == self._rank and (beats := self._monitor.stuck()):
            _write(_describe_stuck(beats, self._timeout))

    def _next_beat(self) -> Beat:
        self._number += 1
        return Beat(self._number, self._at, self._done)

    def _read(self) -> bytes:
        """Look at the leader's beat, or as the leader at every one; the verdict."""
        while True:
            leading = self._leader == self._rank
            ranks = [
                rank
                for rank in (range(self._world_size) if leading else [self._leader])
                if rank not in self._left and rank != self._rank
            ]
            *texts, verdict = self._store.multi_get([*map(_beat, ranks), "verdict"])
            beats = {rank: Beat.decode(text) for rank, text in zip(ranks, texts, strict=True)}
            self._left.update(rank for rank, beat in beats.items() if beat.gone)
            if leading or self._leader not in self._left:
                break
            self._leader += 1  # up to this rank itself
        self._beats = {rank: beat for rank, beat in beats.items() if rank not in self._left}
        if leading:
            self._beats[self._rank] = Beat(self._number, self._at, self._done)
        return bytes(verdict)

    def _say_goodbye(self) -> None:
        if self._failed:
            self._store.compare_set("verdict", "", json.dumps({"failed": self._rank}))
        self._store.set(_beat(self._rank), Beat(self._number + 1, self._at, self._done, gone=True).encode())
        num_left = self._store.add("left", 1)
        # Rank 0 may host the store, which ends with it: those who stay have to read first that it has left.
        deadline = time.monotonic() + self._patience
        while self._rank == 0 and num_left < self._world_size and time.monotonic() < deadline:
            time.sleep(0.02)
            num_left = self._store.add("left", 0)

    def _guard(self) -> None:
        """The thread that notices when the other one waits for the store."""
        answers, waited, before = -1, 0.0, self._clock()
        while not self._stopped.wait(self._interval):
            now = self._clock()
            gap, before = min(now - before, self._timeout / 2), now
            waited = waited + gap if answers == self._answers else 0.0
            answers = self._answers
            if waited > self._timeout and 0 not in self._left:  # what rank 0 hosted may end after it
                self._end(self._obituary_of_store(waited))

    # -------------------------------------------------------------------------------------------------- bad news

    def _obey(self, verdict: Mapping[str, str | int], now: float) -> None:
        """End as another rank's ``verdict`` says: at once, or quietly, a while after that rank has failed."""
        if "silent" in verdict:
            self._end(str(verdict["silent"]))
        if self._failed_since is None:
            self._failed_since = now
        elif now - self._failed_since > SECONDS_OF_GRACE:
            self.ending = True
            self.hide()
            _exit()

    def _obituary(self, rank: int, seconds: float, beat: Beat) -> str:
        sight = self._store.get(_sight(rank))
        seen = max(Beat.decode(sight), beat, key=lambda seen: (seen.where.step, seen.done)) if sight else beat
        return f"{self._name_of(rank)} has been silent for {seconds:.0f} s; it was last seen {seen.where}"

    def _obituary_of_store(self, seconds: float) -> str:
        if self._host:
            return f"the store has not answered for {seconds:.0f} s: {self._host}, which hosts it, is stopped or lost"
        where = self._records[0].read()[0] if 0 in self._records else self._beats[0].where if 0 in self._beats else None
        last = "" if where is None else f"; it was last seen {where}"
        return f"{self._name_of(0)}, which hosts the store, has been silent for {seconds:.0f} s{last}"

    def _end(self, text: str) -> None:
        """Say why, and end this process, when every rank has had the time to say so too."""
        self.ending = True
        _write(f"paramp: {text}; ending {self._name_of(self._rank)}, which was {self._at}\n")
        self.hide(0, *self._records)  # a rank that is stopped cannot
        # A launcher ends all ranks when the first one ends.
        time.sleep(self._patience)
        _exit()


class _Phase:
    """The context of :meth:`Heartbeat.span`. Not a generator, which would take twice as long."""

    __slots__ = ("_before", "_heartbeat", "_where")

    def __init__(self, heartbeat: Heartbeat, kind: str, stage: int | None, microbatch: int | None) -> None:
        self._heartbeat = heartbeat
        self._where = Where(kind, True, stage, microbatch, heartbeat._step)

    def __enter__(self) -> None:
        self._before = self._heartbeat._at
        self._heartbeat._go_to(self._where)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        heartbeat = self._heartbeat
        heartbeat._done += 1
        if self._where.phase == STEP:
            heartbeat._step += 1
            heartbeat._done = 0
        outside = self._before.inside and self._before is not SETUP
        heartbeat._go_to(self._before if outside else self._where._replace(inside=False))


@contextmanager
def ending_in_time(error: BaseException | None, *, quiet: bool) -> Iterator[None]:
    """End the process with ``error``, if there is one and what runs inside takes too long.

    Closing a group whose other ranks wait in a collective may never return, and then nobody would hear of the error.

    Args:
        quiet: another rank tells it.
    """

    def give_up() -> None:
        if not quiet:
            _write("".join(traceback.format_exception(error)))
        _exit()

    if error is None:
        yield
        return
    timer = threading.Timer(SECONDS_OF_GRACE, give_up)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # a thread that still runs when the interpreter ends may abort the process


def _beat(rank: int) -> str:
    """The key of what a rank says of itself."""
    return f"beat/{rank}"


def _sight(rank: int) -> str:
    """The key of what its neighbour has read on its slate."""
    return f"sight/{rank}"


def _describe_stuck(beats: Mapping[int, Beat], seconds: float) -> str:
    """The table of where each rank is, when none gets on."""
    ranks_at: dict[str, list[int]] = defaultdict(list)
    for rank, beat in beats.items():
        ranks_at[str(beat.where)].append(rank)
    least = min((beat.where.step, beat.done) for beat in beats.values())
    behind = [rank for rank, beat in beats.items() if (beat.where.step, beat.done) == least]
    last = f"; furthest behind: {_listed(behind)}" if len(behind) < len(beats) else ""
    lines = [f"paramp: no rank has got on for {seconds:.0f} s{last}"]
    lines += [f"paramp:   {where}: {_listed(ranks)}" for where, ranks in ranks_at.items()]
    return "\n".join(lines) + "\n"


def _listed(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    told = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
    return f"rank{'s' if len(ranks) > 1 else ''} {told}"


def _write(text: str) -> None:
    """To stderr, in one piece, whatever the main thread does with it."""
    os.write(2, text.encode())


def _exit() -> None:
    """End the process: its main thread may be where no exception reaches it."""

    def flush() -> None:
        sys.stdout.flush()
        sys.stderr.flush()

    # In a thread, because the main thread may hold their locks.
    flushing = threading.Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(1.0)
    os._exit(EXIT_CODE)
