"""Who did what when in a step: spans on every rank, a Chrome trace of them, and the bubble that was measured.

::

    with engine.recording() as timeline:
        engine.forward_backward(x, y)
        engine.step()
    timeline.save("trace.json")              # for chrome://tracing or ui.perfetto.dev
    print(timeline.bubble, timeline.theoretical_bubble)

Times on a CPU are those of the process's clock after an operation, on CUDA those of events on the stream. Ranks of one
machine share a clock; the clocks of several machines are put together at a barrier, so they agree to its latency only.
"""

from __future__ import annotations

import json
import platform
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..base.spans import STEP, Observer, Recorder, Span
from ..distributed.collectives import gather_objects
from ..distributed.context import ParallelContext

__all__ = ["RankSpans", "Timeline", "recording"]


@dataclass(frozen=True)
class RankSpans:
    """What one rank did."""

    name: str
    spans: list[Span]


class Timeline:
    """The spans of all ranks. :meth:`paramp.Engine.recording` makes one, complete when it is left, on every rank.

    Attributes:
        title: the schedule and its sizes, in words.
        ranks: by rank of the world.
        pipelines: the ranks of each pipeline, in the order of its axis.
        theoretical_bubble: that of the schedule (:mod:`paramp.config.schedules`); None with too few microbatches to say.
    """

    def __init__(
        self,
        title: str = "",
        ranks: Sequence[RankSpans] = (),
        pipelines: Sequence[Sequence[int]] = (),
        theoretical_bubble: float | None = None,
    ) -> None:
        self.title = title
        self.ranks = list(ranks)
        self.pipelines = [list(pipeline) for pipeline in pipelines]
        self.theoretical_bubble = theoretical_bubble

    @property
    def bubble(self) -> float:
        """The measured bubble: the share of their time that ranks of a pipeline wait or send, over all pipelines.

        For each batch a pipeline's time begins with its first operation on any rank and ends with its last. The step of
        the optimizer is no part of it. NaN if no batch ran.
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
        for rank, own in enumerate(self.ranks):
            events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": own.name}})
            threads = {-1 if item.stage is None else item.stage for item in own.spans}
            for thread in sorted(threads):
                name = "step" if thread < 0 else f"stage {thread}"
                events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}})
            for item in own.spans:
                number = "" if item.microbatch is None else f" {item.microbatch}"
                events.append(
                    {
                        "ph": "X",
                        "name": f"{item.kind}{number}",
                        "cat": item.kind,
                        "pid": rank,
                        "tid": -1 if item.stage is None else item.stage,
                        "ts": item.begin * 1e6,
                        "dur": (item.end - item.begin) * 1e6,
                        "args": {"stage": item.stage, "microbatch": item.microbatch, "call": item.call},
                    }
                )
        other = {"title": self.title, "bubble": self.bubble, "theoretical_bubble": self.theoretical_bubble}
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}

    def save(self, path: str | Path) -> None:
        """Write the Chrome trace, as JSON."""
        Path(path).write_text(json.dumps(self.chrome_trace()) + "\n", encoding="utf-8")

    def gather(self, recorder: Recorder, context: ParallelContext) -> None:
        """Fill in what every rank's ``recorder`` noted; a collective of the whole world."""
        places = f"pp {context.pp.rank}, dp {context.dp.rank}, tp {context.tp.rank}"
        mine = (_machine(), recorder.origin, RankSpans(f"rank {context.rank} ({places})", recorder.spans()))
        everyone = gather_objects(mine)
        starts: dict[str, float] = {}
        for machine, origin, _ in everyone:
            starts[machine] = min(origin, starts.get(machine, origin))
        self.ranks = [
            RankSpans(own.name, [_shifted(item, starts[machine]) for item in own.spans]) for machine, _, own in everyone
        ]
        self.pipelines = context.mesh.mesh.flatten(1).T.tolist()


@contextmanager
def recording(context: ParallelContext, observers: list[Observer]) -> Iterator[Timeline]:
    """Record what runs inside; every rank enters it and leaves it.

    Args:
        observers: told what runs; a recorder is among them inside.
    """
    pipeline = context.config.parallel.pipeline
    stages = f"{pipeline.num_local_stages} stage{'s' if pipeline.num_local_stages > 1 else ''} a rank"
    title = f"{pipeline.schedule}, {pipeline.size} ranks, {stages}" if pipeline.size > 1 else "no pipeline"
    timeline = Timeline(
        f"{title}, {pipeline.num_microbatches} microbatches", theoretical_bubble=pipeline.theoretical_bubble
    )
    dist.barrier()
    recorder = Recorder(context.device)
    observers.append(recorder)
    try:
        yield timeline
    finally:
        observers.remove(recorder)
    timeline.gather(recorder, context)


def _machine() -> str:
    """What ranks with one clock have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.is_file() else ''}"


def _shifted(item: Span, start: float) -> Span:
    return Span(item.kind, item.begin - start, item.end - start, item.stage, item.microbatch, item.call)
