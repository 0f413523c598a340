"""The timeline of a step: the spans of every rank, their Chrome trace, and the measured pipeline bubble.

::

    with engine.recording() as timeline:
        engine.forward_backward(x, y)
        engine.step()
    timeline.save("trace.json")              # for chrome://tracing or ui.perfetto.dev
    print(timeline.bubble, timeline.theoretical_bubble)

Times are those of the process's clock on a CPU, and of CUDA events on a GPU. Ranks of one machine share a clock. Clocks
of several machines are aligned at a barrier, to the accuracy of its latency.
"""

from __future__ import annotations

import json
import platform
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..base.collectives import gather_objects
from ..base.observer_spans import STEP, Observer
from ..base.values_checked_by_type import user_path
from ..distributed.context import ParallelContext


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


class RankSpans(NamedTuple):
    """The spans of one rank, by its name with coordinates."""

    name: str
    spans: list[Span]


@dataclass
class Timeline:
    """The spans of all ranks. :meth:`paramp.Engine.recording` yields one and fills it on exit, on every rank."""

    title: str = ""
    """The schedule and its sizes."""
    ranks: Sequence[RankSpans] = ()
    """The spans of each rank of the world."""
    pipelines: Sequence[Sequence[int]] = ()
    """The ranks of each pipeline, in stage order."""
    theoretical_bubble: float | None = None
    """As a fraction of the step (:mod:`paramp.config.pipeline_schedules`); None with too few microbatches."""

    @property
    def bubble(self) -> float:
        """The measured bubble: the fraction of time in which pipeline ranks wait or send, over all pipelines.

        The time of a batch is from the first operation on any rank to the last one. The optimizer's step is not
        included. NaN if no batch ran.
        """
        busy = held = 0.0
        for pipeline in self.pipelines:
            of_call: dict[int, list[Span]] = defaultdict(list)
            for item in (item for rank in pipeline for item in self.ranks[rank].spans if item.kind != STEP):
                of_call[item.call].append(item)
            for items in of_call.values():
                busy += sum(item.end - item.begin for item in items)
                held += len(pipeline) * (max(item.end for item in items) - min(item.begin for item in items))
        return 1 - busy / held if held else float("nan")

    def describe(self) -> str:
        """One line: the schedule, the measured bubble, and the theoretical one."""
        theory = "too few microbatches for one" if self.theoretical_bubble is None else f"{self.theoretical_bubble:.1%}"
        return f"{self.title}: bubble {self.bubble:.1%} measured, {theory} in theory"

    def chrome_trace(self) -> dict[str, Any]:
        """The trace in Chrome's format: a process for each rank, a thread for each stage, times in microseconds."""
        events: list[dict[str, Any]] = []

        def name_of(kind: str, rank: int, thread: int, name: str) -> None:
            events.append({"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}})

        for rank, (rank_name, spans) in enumerate(self.ranks):
            name_of("process_name", rank, 0, rank_name)
            for thread in sorted({-1 if item.stage is None else item.stage for item in spans}):
                name_of("thread_name", rank, thread, "step" if thread < 0 else f"stage {thread}")
            for item in spans:
                event = {
                    "ph": "X",
                    "name": item.kind if item.microbatch is None else f"{item.kind} {item.microbatch}",
                    "cat": item.kind,
                    "pid": rank,
                    "tid": -1 if item.stage is None else item.stage,
                    "ts": item.begin * 1e6,
                    "dur": (item.end - item.begin) * 1e6,
                    "args": {"stage": item.stage, "microbatch": item.microbatch, "call": item.call},
                }
                events.append(event)
        other = {"title": self.title, "bubble": self.bubble, "theoretical_bubble": self.theoretical_bubble}
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}

    def save(self, path: str | Path) -> None:
        """Write the Chrome trace, as JSON."""
        user_path(path).write_text(json.dumps(self.chrome_trace()) + "\n", encoding="utf-8")

    def gather(self, recorder: Recorder, context: ParallelContext) -> None:
        """Gather the spans of every rank's ``recorder``. A collective of the world."""
        mine = (_machine(), recorder.origin, RankSpans(context.name_of(context.rank), recorder.spans()))
        everyone = gather_objects(mine)
        starts: dict[str, float] = {}
        for machine, origin, _ in everyone:
            # The barrier aligns the ranks; time zero of a machine is the earliest origin of its ranks.
            starts[machine] = min(origin, starts.get(machine, origin))
        self.ranks = [
            RankSpans(name, [replace(item, begin=item.begin - start, end=item.end - start) for item in spans])
            for (name, spans), start in ((of_rank, starts[machine]) for machine, _, of_rank in everyone)
        ]
        self.pipelines = context.ranks_along(context.axes_of("stage")).tolist()


@contextmanager
def recording(context: ParallelContext, observers: list[Observer]) -> Iterator[Timeline]:
    """Record the operations inside, by a recorder added to the engine's ``observers``. All ranks enter and exit it."""
    pipeline = context.config.parallel.pipeline
    stages = f"{pipeline.num_local_stages} stage{'s' if pipeline.num_local_stages > 1 else ''} a rank"
    title = f"{pipeline.schedule}, {pipeline.size} ranks, {stages}" if pipeline.size > 1 else "no pipeline"
    title += f", {pipeline.num_microbatches} microbatches"
    timeline = Timeline(title, theoretical_bubble=pipeline.theoretical_bubble)
    dist.barrier(device_ids=[context.device.index] if context.device.type == "cuda" else None)  # else NCCL guesses one
    recorder = Recorder(context.device)
    observers.append(recorder)
    try:
        yield timeline
    finally:
        observers.remove(recorder)
    timeline.gather(recorder, context)


def _machine() -> str:
    """An identifier of the machine, equal for ranks that share a clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.is_file() else ''}"
