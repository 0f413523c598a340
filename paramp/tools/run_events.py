"""What ``events.jsonl`` in the folder of a run has, a JSON object a line, each with its ``event``.

``launch`` and ``end`` of each launch, and by ``step`` ``overflow``, ``histogram``, ``replicas`` and ``trace``. The page
"Watching a run" of the documentation lists their keys.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from ..base.errors import ConfigError, ReplicaDrift, TrainingDiverged, shown
from ..config.schema import flatten
from ..distributed.context import ParallelContext, current_context
from ..observe.grad_histogram import GradientHistogram
from ..observe.replica_check import Difference
from ..observe.timeline import Timeline
from ..scaling.overflow_report import OverflowReport
from .doctor import examine

EVENTS, TRACES = "events.jsonl", "traces"
"""The file, and the folder of Chrome traces beside it."""
Finding: TypeAlias = OverflowReport | GradientHistogram | Timeline | Sequence[Difference]
"""What an observation of a step returns."""


def launch_event(resumed_at: int | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The start of a launch after the step ``resumed_at``: layout and settings of the current context, the machine."""
    context = current_context()
    config = {} if context is None else flatten(context.config)
    return {
        "event": "launch",
        "time": _now(),
        "resumed_at": resumed_at,
        "world_size": None if context is None else context.world_size,
        "layout": None if context is None else _layout(context),
        "mode": None if context is None else context.config.precision.name,
        "settings": config | dict(settings),
        "machine": examine(),
    }


def end_event(step: int | None, error: BaseException | None) -> dict[str, Any]:
    """The end of a launch after ``step``, with the ``error`` that ended it."""
    text = None if error is None else f"{type(error).__name__}: {error}".rstrip(": ")
    return {"event": "end", "time": _now(), "step": step, "error": text}


def event_of(step: int, finding: Finding) -> dict[str, Any]:
    """The event of what an observation of ``step`` found; of a timeline with its Chrome trace as ``trace``."""
    if isinstance(finding, OverflowReport):
        return {"event": "overflow", "step": step, **_overflow(finding)}
    if isinstance(finding, GradientHistogram):
        return {"event": "histogram", "step": step, **finding.as_json()}
    if isinstance(finding, Timeline):
        trace = finding.chrome_trace()
        return {"event": "trace", "step": step, **trace["otherData"], "trace": trace}
    if isinstance(finding, (list, tuple)) and all(isinstance(one, Difference) for one in finding):
        return {"event": "replicas", "step": step, "differences": [_difference(one) for one in finding]}
    raise ConfigError(
        f"finding: got {shown(finding)}, expected an OverflowReport, a GradientHistogram, a Timeline, or what "
        "check_replicas returned"
    )


def found_by(error: BaseException | None) -> Iterator[Finding]:
    """The findings that ``error`` carries."""
    if isinstance(error, TrainingDiverged) and isinstance(error.report, OverflowReport):
        yield error.report
    if isinstance(error, ReplicaDrift) and error.differences:
        yield list(error.differences)


def _layout(context: ParallelContext) -> dict[str, int]:
    """The size of each axis of the mesh by its name, and what else shards values over them."""
    parallel = context.config.parallel
    more = {"zero": parallel.zero, "sequence_parallel": int(parallel.sequence_parallel)}
    sizes = dict(zip(context.roles, context.mesh.shape, strict=True))
    return sizes | {name: value for name, value in more.items() if value}


def _overflow(report: OverflowReport) -> dict[str, Any]:
    """``report`` as plain values: where it began, the gradients that are closest to there, and the message."""
    origin, closest = report.origin, report.closest
    place = origin.place if origin else closest[0].place if closest else None
    return {
        "scale": report.scale,
        "kind": report.kind,
        "module": origin.module if origin else None,
        "parameter": (origin and origin.parameter) or (closest[0].name if closest else None),
        "rank": place.rank if place else None,
        "axes": dict(place.axes) if place else {},
        "stage": place.stage if place else None,
        "microbatch": origin.microbatch if origin else None,
        "gradients": [asdict(gradient) for gradient in closest],
        "num_gradients": len(report.gradients),
        "message": str(report),
    }


def _difference(found: Difference) -> dict[str, Any]:
    return {
        "kind": found.kind,
        "parameter": found.parameter,
        "ranks": found.ranks,
        "others": found.others,
        "message": found.message,
    }


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
