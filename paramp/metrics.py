"""What a run tells: one progress line, a plain log, and ``metrics.jsonl``. Only the main rank writes."""

from __future__ import annotations

import json
import math
import resource
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch

__all__ = ["Reporter", "memory_bytes"]


def memory_bytes(device: torch.device) -> int:
    """The most memory this process has held so far: of the GPU's allocator, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Reporter:
    """Writes progress to the terminal and, with a log directory, ``train.log`` and ``metrics.jsonl``.

    On a terminal with rich installed the current step is one line that renews itself; elsewhere every
    ``every``-th step is a plain line. Files of an earlier run in the directory are set aside, not overwritten.
    """

    def __init__(self, total_steps: int, log_dir: str | None, enabled: bool, every: int = 10) -> None:
        self._enabled = enabled
        self._total = total_steps
        self._every = every
        self._num_skipped = 0
        self._live: Any = None
        self._log: TextIO | None = None
        self._metrics: TextIO | None = None
        if not enabled:
            return
        if log_dir is not None:
            folder = Path(log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self._log, self._metrics = (
                set_aside(folder / name).open("w", encoding="utf-8", buffering=1)
                for name in ("train.log", "metrics.jsonl")
            )
        if sys.stdout.isatty():
            try:
                from rich.live import Live
            except ImportError:
                return
            self._live = Live(refresh_per_second=8)
            self._live.start()

    def say(self, text: str) -> None:
        """One message, to the terminal and the log."""
        if not self._enabled:
            return
        if self._live is not None:
            self._live.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)
        self._write(text)

    def step(self, record: dict[str, Any]) -> None:
        """One step: a JSON object in ``metrics.jsonl``, where what is not finite is null, and a line of progress."""
        if not self._enabled:
            return
        self._num_skipped += record["skipped"]
        self._record(record)
        line = step_line(record, self._total, self._num_skipped)
        self._write(line)
        if self._live is not None:
            self._live.update(line)
        elif record["step"] % self._every == 0 or record["step"] in (1, self._total) or record["skipped"]:
            print(line, flush=True)

    def _record(self, values: dict[str, Any]) -> None:
        if self._metrics is not None:
            clean = {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in values.items()
            }
            self._metrics.write(json.dumps(clean, allow_nan=False) + "\n")

    def _write(self, line: str) -> None:
        if self._log is not None:
            self._log.write(line + "\n")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
        for file in (self._log, self._metrics):
            if file is not None:
                file.close()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def set_aside(path: Path) -> Path:
    """``path``, with a file that is there already renamed to ``metrics.1.jsonl``, ``metrics.2.jsonl``, ..."""
    if path.exists():
        number = 1
        while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
            number += 1
        path.rename(aside)
    return path


def step_line(record: dict[str, Any], total: int, num_skipped: int) -> str:
    """A step's record as one line of text."""
    return (
        f"step {record['step']:>{len(str(total))}}/{total}  loss {record['loss']:.4f}  "
        f"scale {record['loss_scale']:g}  grad norm {record['grad_norm']:.3f}  skipped {num_skipped}  "
        f"{record['tokens_per_second']:,.0f} tokens/s  {record['memory_bytes'] / 2**20:,.0f} MiB"
    )
