"""The reader of a run's folder, which :class:`paramp.Metrics` wrote: for the page and for the plots."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import ConfigError
from ..base.user_values import user_path
from .run_events import EVENTS

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

    Raises:
        ConfigError: the folder or its ``metrics.jsonl`` does not exist, has no step, or a file has an invalid line.
    """
    folder = user_path(log_dir)
    path = folder / "metrics.jsonl"
    if not path.is_file():
        missing = "metrics.jsonl in" if folder.is_dir() else "folder"
        raise ConfigError(f"no {missing} {str(log_dir)!r}; expected the folder of a run, that of paramp.Metrics")
    records = _lines(path, _step)
    if not records:
        raise ConfigError(f"{str(path)!r} has no step yet")
    events = _lines(folder / EVENTS, _event) if (folder / EVENTS).is_file() else []
    return LoggedRun(folder.resolve().name or str(folder), records, events, folder)


def _lines(path: Path, check: Callable[[Any], Record]) -> list[Record]:
    """The objects in the lines of ``path``, each as ``check`` returns it; a ValueError of it is for a wrong line."""
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(check(_parsed(line)))
        except ValueError as error:
            if number < len(lines):  # a last line without a newline may be incomplete
                raise ConfigError(f"{str(path)!r}, line {number}: {error}") from None
    return records


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        raise ValueError(f"not JSON: {line[:40].decode(errors='replace')!r}") from None


def _step(record: Any) -> Record:
    """``record`` if it is that of a step, whose :data:`NUMBERS` are numbers or None."""
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise ValueError('expected an object with a whole number as its "step"')
    for key in NUMBERS & record.keys():
        if not isinstance(record[key], (int, float, type(None))):
            raise ValueError(f"{key}: got {record[key]!r}, expected a number or null")
    return record


def _event(event: Any) -> Record:
    """``event`` if it is an event."""
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise ValueError('expected an object with a string as its "event"')
    if event["event"] not in ("launch", "end") and type(event.get("step")) is not int:
        raise ValueError('expected a whole number as its "step"')
    return event
