"""The tables of the page, as plain values: what stands in its head, launches, overflows, replica checks, settings."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..read_run import LoggedRun, Record
from .step_panels import place_of, scale_text

STILL_RUNS = 600.0
"""A launch without an end runs if it has written in the last of these seconds."""
MOST_ROWS = 500
"""The most rows of a table; the newest are shown."""


class Table(NamedTuple):
    """A table of the page."""

    columns: Sequence[str]
    rows: Sequence[tuple[Sequence[Any], str]]
    """The cells of each row, and a text of several lines that it opens; mostly empty."""
    left_out: int = 0
    """How many older rows are not shown."""


def head(run: LoggedRun) -> list[tuple[str, str]]:
    """Labels and values of the most important facts."""
    launch = (run.of_kind("launch") or [{}])[-1]
    first, last = run.records[0]["step"], max(record["step"] for record in run.records)
    facts = [("state", state(run)), ("layout", layout_text(launch)), ("mode", launch.get("mode") or "")]
    facts += [("steps", f"{last:,}" if first <= 1 else f"{first:,} to {last:,}")]
    facts += [("loss", _last(run, "loss")), ("validation loss", _last(run, "val_loss"))]
    if num_steps := len(run.series("skipped")[0]):  # other lines may be those of evaluations
        skipped = len(run.skipped())
        share = f" ({100 * skipped / num_steps:.2g} %)" if skipped else ""
        facts.append(("overflows", f"{skipped:,}{share}"))
    facts += [("time", duration(run))]
    return [(label, value) for label, value in facts if value]


def _last(run: LoggedRun, key: str) -> str:
    """The last value of ``key``; empty if there is none."""
    value = next((record[key] for record in reversed(run.records) if key in record), "")
    return "not finite" if value is None else f"{value:.4f}" if value != "" else ""


def state(run: LoggedRun) -> str:
    """Whether the last launch runs, or how it ended; empty if that is not known."""
    ends = [one for one in run.events if one["event"] in ("launch", "end")]
    if not ends:
        return ""
    if ends[-1]["event"] == "launch":
        path = run.folder / "metrics.jsonl"
        return "running" if path.is_file() and time.time() - path.stat().st_mtime < STILL_RUNS else "no end recorded"
    return "ended by an error" if ends[-1].get("error") else "finished"


def layout_text(launch: Record) -> str:
    """``tp 2 · pp 2`` of a launch; the axes of size 1 are left out."""
    layout = launch.get("layout")
    if not layout:
        return ""
    sizes = {name: size for name, size in layout.items() if size > 1 or name in ("zero", "sequence_parallel")}
    sizes = {name.replace("_", " "): size for name, size in sizes.items()}
    return " · ".join(f"{name}\N{NO-BREAK SPACE}{size}" for name, size in sizes.items()) or "one process"


def duration(run: LoggedRun) -> str:
    """The time in steps and evaluations; without their times, that between a launch and its end, of all launches."""
    keys = ("step_seconds", "val_seconds")
    seconds = sum(float(record.get(key) or 0.0) for record in run.records for key in keys)
    if not seconds:
        begin = None
        for one in run.events:
            if one["event"] == "launch":
                begin = _time(one)
            elif one["event"] == "end" and begin is not None and (end := _time(one)) is not None:
                seconds += (end - begin).total_seconds()
    return _seconds(seconds) if seconds else ""


def _seconds(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"


def _time(event: Record) -> datetime.datetime | None:
    """The event's time; one without a zone is in that of this machine."""
    try:
        time = datetime.datetime.fromisoformat(str(event.get("time")))
        return time if time.tzinfo else time.astimezone()
    except (ValueError, OverflowError):
        return None


def launches(run: LoggedRun) -> Table | None:
    """A row for each launch, which opens its error."""
    rows: list[list[Any]] = []
    errors: list[str] = []
    for one in run.events:
        if one["event"] == "launch":
            versions = (one.get("machine") or {}).get("versions") or {}
            begun = _time(one)
            when = begun.strftime("%Y-%m-%d %H:%M:%S") if begun else ""
            after = f"step {one['resumed_at']:,}" if one.get("resumed_at") is not None else "start"
            row = [len(rows) + 1, when, after, "", layout_text(one), one.get("world_size") or "", one.get("mode") or ""]
            rows.append([*row, versions.get("torch", ""), "no end recorded"])
            errors.append("")
        elif one["event"] == "end" and rows:
            error = one.get("error") or ""
            rows[-1][3] = f"step {one['step']:,}" if one.get("step") is not None else ""
            rows[-1][-1], errors[-1] = error.partition(":")[0] or "finished", error
    columns = ("launch", "begun", "from", "to", "layout", "ranks", "mode", "torch", "end")
    return _table(columns, rows, errors)


def overflows(run: LoggedRun) -> Table | None:
    """A row for each report of an overflow, which opens the report."""
    rows, reports = [], []
    for one in run.of_kind("overflow"):
        name, module = one.get("parameter") or "", one.get("module") or ""
        microbatch = one.get("microbatch")
        place = (place_of(one), "" if microbatch is None else microbatch)
        rows.append([f"{one['step']:,}", name, *place, scale_text(one.get("scale") or 0.0), module])
        reports.append(one.get("message") or "")
    return _table(("step", "parameter", "where", "microbatch", "scale", "module"), rows, reports)


def differences(run: LoggedRun) -> Table | None:
    """A row for each difference between replicas."""
    rows = []
    for one in run.of_kind("replicas"):
        for found in one.get("differences") or ():
            ranks = (", ".join(map(str, found.get(key) or ())) for key in ("ranks", "others"))
            rows.append([f"{one['step']:,}", found.get("kind"), found.get("parameter") or "", *ranks])
    return _table(("step", "what differs", "parameter", "on ranks", "from ranks"), rows)


def replicas_text(run: LoggedRun) -> str:
    """A sentence on all comparisons; empty without any."""
    checks = run.of_kind("replicas")
    if not checks:
        return ""
    bad = sum(1 for one in checks if one.get("differences"))
    first, last = checks[0]["step"], checks[-1]["step"]
    when = f"after step {first:,}" if len(checks) == 1 else f"{len(checks):,} times, after steps {first:,} to {last:,}"
    result = "were equal, bit for bit" if not bad else "differed once" if bad == 1 else f"differed {bad:,} times"
    return f"Replicas were compared {when}: they {result}."


def _newest(run: LoggedRun, key: str) -> Mapping[str, Any]:
    """What the last launch that has ``key`` has there."""
    return next((one[key] for one in reversed(run.of_kind("launch")) if one.get(key)), {})


def settings(run: LoggedRun) -> Table | None:
    """The settings of the last launch that has any."""
    found = sorted(_newest(run, "settings").items())
    return _table(("setting", "value"), [[key, _text(value)] for key, value in found])


def machine(run: LoggedRun) -> Table | None:
    """What ``paramp doctor`` found for the last launch."""
    rows = []
    for key, value in _newest(run, "machine").items():
        if key == "modes" or value in (None, [], {}):
            continue
        if isinstance(value, Mapping):
            there = (f"{name} {_text(item)}" for name, item in value.items() if item is not None and item != "")
            rows.append([key, ", ".join(there)])
        elif isinstance(value, list):
            rows.append(
                [key, "; ".join(str(one.get("name", one)) if isinstance(one, dict) else str(one) for one in value)]
            )
        else:
            rows.append([key, _text(value)])
    return _table(("", "found"), rows)


def modes(run: LoggedRun) -> Table | None:
    """How each precision mode runs on the machine of the last launch."""
    found = _newest(run, "machine").get("modes") or {}
    rows = [[name, mode.get("runs"), mode.get("why")] for name, mode in found.items()]
    return _table(("mode", "runs", "why"), rows)


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]], opened: Sequence[str] = ()) -> Table | None:
    pairs = list(zip(rows, opened or [""] * len(rows), strict=True))
    return Table(columns, pairs[-MOST_ROWS:], max(0, len(pairs) - MOST_ROWS)) if pairs else None
