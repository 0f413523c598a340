"""The reader of a run's folder, which :class:`paramp.Metrics` wrote: for the page and for the plots."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import ConfigError, one_line, shown
from ..base.values_checked_by_type import user_path
from .run_events import EVENTS, LARGEST, check_event, check_step

NUMBERS = {
    *("loss", "val_loss", "grad_norm", "loss_scale", "skipped", "lr"),
    *("tokens_per_second", "step_seconds", "data_seconds", "val_seconds", "memory_bytes", "mfu"),
}
"""Keys of a step whose values are numbers or null. Others may be strings."""
Record = dict[str, Any]


@dataclass(frozen=True)
class LoggedRun:
    """The steps of one run, and what happened in it, oldest first."""

    name: str
    records: list[Record]
    events: list[Record] = field(default_factory=list)
    folder: Path = Path()
    left_out: list[str] = field(default_factory=list)
    """What is wrong with each line and value that was not read."""

    def series(self, key: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The steps with ``key``, and its values, 1-dim each; NaN for null."""
        found = [(record["step"], record[key]) for record in self.records if key in record]
        table = np.array([(step, math.nan if value is None else value) for step, value in found], dtype=np.float64)
        return (table[:, 0], table[:, 1]) if found else (np.empty(0), np.empty(0))

    def skipped(self) -> NDArray[np.float64]:
        """The steps that were skipped, 1-dim."""
        steps, values = self.series("skipped")
        return steps[values > 0]

    def waiting(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Steps, and the percentage of each that was spent waiting for data, 1-dim each."""
        records = [record for record in self.records if record.get("step_seconds") and "data_seconds" in record]
        percentages = [100 * (record["data_seconds"] or 0) / record["step_seconds"] for record in records]
        return np.array([record["step"] for record in records], np.float64), np.array(percentages, np.float64)

    def of_kind(self, event: str) -> list[Record]:
        """The events of a kind of :mod:`paramp.tools.run_events`."""
        return [one for one in self.events if one["event"] == event]


def read_run(log_dir: str | Path) -> LoggedRun:
    """Read the run in ``log_dir``. An incomplete last line, of a running or killed process, is ignored.

    Lines and values that cannot be read are left out, and named in :attr:`LoggedRun.left_out`.

    Raises:
        ConfigError: the folder or its ``metrics.jsonl`` does not exist, or has no step.
    """
    folder = user_path(log_dir)
    path = folder / "metrics.jsonl"
    if folder.is_file():
        raise ConfigError(f"{str(log_dir)!r} is a file; expected the folder of a run, such as {str(folder.parent)!r}")
    if not path.is_file():
        missing = "metrics.jsonl in" if folder.is_dir() else "folder"
        raise ConfigError(f"no {missing} {str(log_dir)!r}; expected the folder of a run, that of paramp.Metrics")
    left_out: list[str] = []
    records = _lines(path, _step, left_out)
    if not records:
        raise ConfigError(f"{str(path)!r} has no step yet" + "".join(f"; {text}" for text in left_out[:1]))
    _keep_numbers(records, left_out)
    events = _lines(folder / EVENTS, _event, left_out) if (folder / EVENTS).is_file() else []
    return LoggedRun(folder.resolve().name or str(folder), records, events, folder, left_out)


def _lines(path: Path, check: Callable[[Any], Record], left_out: list[str]) -> list[Record]:
    """The objects in the lines of ``path``, each as ``check`` returns it; it raises a ValueError for a wrong line."""
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(check(_parsed(line)))
        except ValueError as error:
            if number < len(lines):  # a last line without a newline may be incomplete
                left_out.append(f"{path.name}, line {number}: {error}")
    return records


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"not JSON: {one_line(repr(line[:40].decode(errors='replace')))}") from None


def _step(record: Any) -> Record:
    """``record`` if it is that of a step."""
    if not isinstance(record, dict):
        raise ValueError(f"got {shown(record)}, expected an object")
    check_step(record.get("step"))
    return record


def _keep_numbers(records: Iterable[Record], left_out: list[str]) -> None:
    """Keep numbers and None alone under the keys that are numbers in any step; None for what is not finite."""
    numbers = NUMBERS | {key for record in records for key, value in record.items() if isinstance(value, int | float)}
    for record in records:
        for key in numbers & record.keys() - {"step"}:
            value = record[key]
            if not isinstance(value, int | float | None):
                left_out.append(f"step {record['step']}, {key}: got {shown(value)}, expected a number or null")
                del record[key]
            elif value is not None and not abs(value) < LARGEST:
                record[key] = None


def _event(event: Any) -> Record:
    """``event`` if it is an event."""
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise ValueError('expected an object with a string as its "event"')
    check_event(event)
    return event
