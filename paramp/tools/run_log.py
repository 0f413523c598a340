"""Reading the ``metrics.jsonl`` of a run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import ConfigError


@dataclass(frozen=True)
class LoggedRun:
    """The steps of one run, oldest first."""

    name: str
    records: list[dict[str, Any]]

    def series(self, key: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The steps that have ``key``, and its values there, 1-dim each; NaN for null."""
        found = [(record["step"], record[key]) for record in self.records if key in record]
        table = np.array([(step, math.nan if value is None else value) for step, value in found], dtype=np.float64)
        return (table[:, 0], table[:, 1]) if found else (np.empty(0), np.empty(0))

    def waiting(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Steps, and the percentage of each that was spent waiting for data, 1-dim each."""
        records = [record for record in self.records if record.get("step_seconds") and "data_seconds" in record]
        percentages = [100 * (record["data_seconds"] or 0) / record["step_seconds"] for record in records]
        return np.array([record["step"] for record in records], np.float64), np.array(percentages, np.float64)


def read_run(log_dir: str | Path) -> LoggedRun:
    """Read the run in ``log_dir``, without an incomplete last line, as a running or a killed process leaves it.

    Raises:
        ConfigError: no such folder, no ``metrics.jsonl`` in it, no step in that, or a line that is no step's record.
    """
    folder, path = Path(log_dir), Path(log_dir) / "metrics.jsonl"
    if not path.is_file():
        missing = "metrics.jsonl in" if folder.is_dir() else "folder"
        raise ConfigError(f"plot: no {missing} {str(log_dir)!r}; expected the --log-dir of a run")
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(_record(line))
        except ValueError as error:
            if number < len(lines):  # the last one, with no newline after it, may still be being written
                raise ConfigError(f"plot: {str(path)!r}, line {number}: {error}") from None
    if not records:
        raise ConfigError(f"plot: {str(path)!r} holds no step yet")
    return LoggedRun(folder.name or str(folder), records)


def _record(line: bytes) -> dict[str, Any]:
    """Parse a step's record, whose values are numbers or None; a ValueError where it is something else."""
    try:
        record = json.loads(line)
    except ValueError:
        raise ValueError(f"not JSON: {line[:40].decode(errors='replace')!r}") from None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError('expected an object with a whole number as its "step"')
    for key, value in record.items():
        if not isinstance(value, (int, float, type(None))):
            raise ValueError(f"{key}: got {value!r}, expected a number or null")
    return record
