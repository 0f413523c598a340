"""Output of a run on the main rank: the terminal, a text log, ``metrics.jsonl`` and TensorBoard.

:class:`Reporter` passes every message and every step to a list of writers, one small class for each destination.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
from pathlib import Path
from typing import Any, TextIO

import torch

from ..base.coerce import user_path
from ..base.errors import ConfigError
from .metrics import Metrics, is_finite, set_aside

TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "loss_scale": "train/loss_scale",
    "skipped": "train/skipped",
    "lr": "train/lr",
    "tokens_per_second": "speed/tokens_per_second",
    "step_seconds": "speed/step_seconds",
    "data_seconds": "speed/data_seconds",
    "mfu": "speed/mfu",
    "memory_bytes": "memory/peak_bytes",
    "val_loss": "val/loss",
    "val_seconds": "val/seconds",
}
"""A key of ``metrics.jsonl`` -> the name of its scalar in TensorBoard."""


def memory_bytes(device: torch.device) -> int:
    """The peak memory of this process in bytes: of the GPU's allocator, or the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def check_tensorboard() -> None:
    """Check that TensorBoard is installed. Every rank calls it, so that all raise, although only one writes.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            'train.tensorboard: tensorboard is not installed; run pip install "paramp[tensorboard]", or '
            "remove --tensorboard"
        )


PRINT_EVERY = 10
"""A plain terminal shows every step whose number is a multiple of this."""


class Writer:
    """One destination. The methods of this base class do nothing."""

    def say(self, text: str) -> None:
        """Write a message."""

    def step(self, record: dict[str, Any], line: str) -> None:
        """Write a step: ``record``, whose values may be None or not finite, and ``line``, the same as text."""

    def close(self) -> None:
        """Close the destination."""


class Terminal(Writer):
    """Plain lines: every message, every :data:`PRINT_EVERY`-th step, the first, the last, and skipped ones."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps

    def say(self, text: str) -> None:
        print(text, flush=True)

    def step(self, record: dict[str, Any], line: str) -> None:
        if record["step"] % PRINT_EVERY == 0 or record["step"] in (1, self._total) or record["skipped"]:
            print(line, flush=True)


class LiveTerminal(Writer):
    """The current step as one line that is redrawn, with messages above it; needs rich."""

    def __init__(self) -> None:
        from rich.live import Live

        self._live = Live(refresh_per_second=8)
        self._live.start()

    def say(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, record: dict[str, Any], line: str) -> None:
        self._live.update(line)

    def close(self) -> None:
        self._live.stop()


class TextLog(Writer):
    """``train.log``: every message and every step's line."""

    def __init__(self, folder: Path, resumed_at: int | None) -> None:
        path = folder / "train.log" if resumed_at is not None else set_aside(folder / "train.log")
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def say(self, text: str) -> None:
        self._file.write(text + "\n")

    def step(self, record: dict[str, Any], line: str) -> None:
        self._file.write(line + "\n")

    def close(self) -> None:
        self._file.close()


class JsonLines(Writer):
    """``metrics.jsonl``, of the metrics as :class:`~paramp.observe.metrics.Metrics` writes them."""

    def __init__(self, folder: Path, resumed_at: int | None) -> None:
        self._metrics = Metrics(folder, resumed_at=resumed_at)

    def step(self, record: dict[str, Any], line: str) -> None:
        self._metrics.write(**record)

    def close(self) -> None:
        self._metrics.close()


class TensorBoard(Writer):
    """The folder ``tensorboard``: a scalar for each row of :data:`TAGS`; a value that is not finite is omitted."""

    def __init__(self, folder: Path, resumed_at: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = folder / "tensorboard" if resumed_at is not None else set_aside(folder / "tensorboard")
        purge_step = None if resumed_at is None else resumed_at + 1
        self._writer: Any = SummaryWriter(str(path), purge_step=purge_step)

    def step(self, record: dict[str, Any], line: str) -> None:
        for key, tag in TAGS.items():
            value = record.get(key)
            if value is not None and is_finite(value):
                # by default torch stores fp32, which rounds large byte counts
                self._writer.add_scalar(tag, value, record["step"], new_style=True, double_precision=True)

    def close(self) -> None:
        self._writer.close()


class Reporter:
    """Writes messages and steps to the terminal and, with a log directory, to files in it.

    On a terminal, with rich installed, the current step is one line that is redrawn. Files of an earlier run in the
    directory are renamed, not overwritten.

    Args:
        log_dir: the directory of the files, created if it does not exist. None: no files.
        enabled: False on all ranks but the main one: write nothing.
        tensorboard: write for TensorBoard too (:func:`check_tensorboard`), into the log directory.
        resumed_at: the last step of the resumed run, whose files are continued. None: a new run.
    """

    def __init__(
        self,
        total_steps: int,
        log_dir: str | None,
        enabled: bool,
        tensorboard: bool = False,
        resumed_at: int | None = None,
    ) -> None:
        self._total = total_steps
        self._num_skipped = 0
        self._writers: list[Writer] = []
        if not enabled:
            return
        if log_dir is not None:
            folder = user_path(log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self._writers += [TextLog(folder, resumed_at), JsonLines(folder, resumed_at)]
            if tensorboard:
                self._writers.append(TensorBoard(folder, resumed_at))
        live = _is_terminal(sys.stdout) and importlib.util.find_spec("rich") is not None
        self._writers.append(LiveTerminal() if live else Terminal(total_steps))

    def say(self, text: str) -> None:
        """Write a message to the terminal and the log."""
        for writer in self._writers:
            writer.say(text)

    def step(self, record: dict[str, Any]) -> None:
        """Write a step's numbers to every writer; keys as in :func:`step_line` and :data:`TAGS`."""
        self._num_skipped += record["skipped"]
        line = step_line(record, self._total, self._num_skipped)
        for writer in self._writers:
            writer.step(record, line)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.close()


def _is_terminal(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal with a width; mpirun gives each rank a pseudo-terminal without one."""
    try:
        return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):
        return False


def step_line(record: dict[str, Any], total: int, num_skipped: int) -> str:
    """A step's record as one line of text."""
    return (
        f"step {record['step']:>{len(str(total))}}/{total}  loss {record['loss']:.4f}  "
        f"scale {record['loss_scale']:g}  grad norm {record['grad_norm']:.3f}  skipped {num_skipped}  "
        f"{record['tokens_per_second']:,.0f} tokens/s  {record['memory_bytes'] / 2**20:,.0f} MiB"
    )
