"""What ``events.jsonl`` in the folder of a run has, a JSON object a line, each with its ``event``.

``launch`` and ``end`` of each launch, and by ``step`` ``overflow``, ``histogram``, ``replicas`` and ``trace``. The page
"Watching a run" of the documentation lists their keys.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from ..base.errors import ConfigError, ReplicaDrift, TrainingDiverged, require, shown
from ..config.schema import flatten
from ..distributed.context import ParallelContext, current_context
from ..observe.grad_histogram import HIGHEST, LOWEST, GradientHistogram
from ..observe.replica_check import Difference
from ..observe.timeline import Timeline
from ..scaling.overflow_report import OverflowReport
from .doctor import examine

EVENTS, TRACES = "events.jsonl", "traces"
"""The file, and the folder of Chrome traces beside it."""
Finding: TypeAlias = OverflowReport | GradientHistogram | Timeline | Sequence[Difference]
"""What an observation of a step returns."""
LARGEST = 2.0**128
"""Numbers from it on count as not finite in the figures, which are in fp32."""
LAST_STEP = 10**15
"""The largest step, here and below zero; fp64 tells the middle between two steps from both."""


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
        "positions": [*origin.positions] if origin else [],
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


def check_step(step: object, name: str = "step") -> None:
    """Raise a ConfigError unless ``step`` is an int of at most :data:`LAST_STEP`."""
    require(_is_step(step), name, step, f"a whole number of at most {LAST_STEP:,}")


def check_event(event: Mapping[str, Any]) -> None:
    """Raise a ConfigError if a key of ``event`` that the page shows is not what :class:`paramp.Metrics` writes."""
    kind = event["event"]
    if kind not in ("launch", "end"):
        check_step(event.get("step"))
    for key, is_right in KEYS.get(kind, {}).items():
        value = event.get(key)
        missing = value is None and kind != "histogram"
        require(missing or is_right(value), f"{kind}: {key}", value, "what paramp.Metrics writes there")


def _is_step(value: object) -> bool:
    return type(value) is int and abs(value) <= LAST_STEP


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < LARGEST


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _table(of: Callable[[Any], bool] = lambda value: True) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(of, value.values()))


def _is_machine(value: Any) -> bool:
    return _table()(value) and _table()(value.get("versions") or {}) and _table(_table())(value.get("modes") or {})


def _is_counts(value: Any) -> bool:
    return _table(_is_number)(value) and value.keys() <= EXPONENTS


def _are_differences(value: Any) -> bool:
    ranks = ("ranks", "others")
    return isinstance(value, list) and all(
        isinstance(one, dict) and all(isinstance(one.get(key) or [], list) for key in ranks) for one in value
    )


EXPONENTS = {str(exponent) for exponent in range(LOWEST, HIGHEST + 1)}
KEYS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "launch": {"resumed_at": _is_step, "layout": _table(_is_number), "settings": _table(), "machine": _is_machine},
    "end": {"step": _is_step, "error": _is_text},
    "overflow": {"scale": _is_number, "parameter": _is_text, "module": _is_text, "axes": _table(), "message": _is_text},
    "histogram": {"counts": _is_counts, **dict.fromkeys(("zeros", "non_finite", "scale"), _is_number)},
    "replicas": {"differences": _are_differences},
    "trace": {"bubble": _is_number, "theoretical_bubble": _is_number},
}
"""Keys of an event that the page computes with. Those of a histogram are needed; others may be null or missing."""
