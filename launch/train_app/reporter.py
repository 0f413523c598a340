"""What a run writes on the main rank: to the terminal, to a text log, to ``metrics.jsonl`` and for TensorBoard."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shlex
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any, TextIO

import torch

from paramp import Metrics, ParallelContext
from paramp.base.installed_packages import check_installed
from paramp.base.values_checked_by_type import user_path
from paramp.config.files import load
from paramp.tools.metrics import Hook, set_aside, writing_to
from paramp.tools.run_events import Finding

from .corpus import Corpus
from .settings import DEFAULTS, Job, TrainConfig, all_settings

TAGS = {
    **{key: f"train/{key}" for key in ("loss", "grad_norm", "loss_scale", "skipped", "lr")},
    **{key: f"speed/{key}" for key in ("tokens_per_second", "step_seconds", "data_seconds", "mfu")},
    "memory_bytes": "memory/peak_bytes",
    "val_loss": "val/loss",
    "val_seconds": "val/seconds",
}
"""A key of ``metrics.jsonl`` -> the name of its scalar in TensorBoard."""
PRINT_EVERY = 10
"""A plain terminal shows every step whose number is a multiple of this."""


def memory_bytes(device: torch.device) -> int:
    """The peak memory of this process in bytes: of the GPU's allocator, or the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def check_tensorboard() -> None:
    """Raise a ConfigError if TensorBoard is not installed. Every rank calls it, so that all raise."""
    check_installed("tensorboard", "tensorboard", "train.tensorboard", ", or remove --tensorboard")


class Reporter:
    """Writes messages and steps to the terminal and, with ``job.log_dir``, to files in it. A context manager.

    On a terminal, with rich installed, a bar, the time left and the current step are redrawn. A plain one shows every
    :data:`PRINT_EVERY`-th step, the first, the last, and skipped ones, each with the time left. Files of an earlier run
    in the folder are renamed, not overwritten.

    Args:
        enabled: False on all ranks but the main one: write nothing.
        resumed_at: the last step of the resumed run, whose files are continued. None: a new run.
        settings: those of the run, for its page.
    """

    def __init__(
        self,
        job: TrainConfig,
        enabled: bool,
        resumed_at: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._total, self._enabled, self._num_skipped = job.steps, enabled, 0
        self._begun, self._first = monotonic(), (resumed_at or 0) + 1
        self._files = ExitStack()
        self._log: TextIO | None = None
        self._metrics: Metrics | None = None
        self._live: Any = None
        if enabled and job.log_dir is not None:
            folder = user_path(job.log_dir)
            hooks = [self._tensorboard(folder / "tensorboard", resumed_at)] if job.tensorboard else []
            metrics = Metrics(folder, resumed_at=resumed_at, settings=settings, hooks=hooks)
            self._metrics = self._files.enter_context(metrics)
            log = _continued(folder / "train.log", resumed_at)
            self._log = log.open("a", encoding="utf-8", buffering=1)
            self._files.callback(self._close_log)
        if enabled and _is_terminal(sys.stdout) and importlib.util.find_spec("rich") is not None:
            from rich.live import Live

            self._live = self._files.enter_context(Live(refresh_per_second=8))

    def _tensorboard(self, folder: Path, resumed_at: int | None) -> Hook:
        """A hook that writes scalars to ``folder``."""
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resumed_at is None else resumed_at + 1
        board: Any = SummaryWriter(str(_continued(folder, resumed_at)), purge_step=purge)
        self._files.enter_context(board)

        def write(values: dict[str, float], step: int) -> None:
            for key in values.keys() & TAGS.keys():
                # by default torch stores fp32, which rounds large byte counts
                board.add_scalar(TAGS[key], values[key], step, new_style=True, double_precision=True)

        return write

    def say(self, text: str) -> None:
        """Write a message to the terminal and the log."""
        if self._live is not None:
            self._live.console.print(text, highlight=False, markup=False, soft_wrap=True)
        elif self._enabled:
            print(text, flush=True)
        self._write_log(text)

    def step(self, record: dict[str, Any]) -> None:
        """Write a step's numbers, which may be None or not finite; keys as in :data:`TAGS`, and ``step``.

        Without a ``loss`` they are those of an evaluation alone, which the terminal does not show.
        """
        if self._metrics is not None:
            self._metrics.write(**record)
        if not self._enabled or "loss" not in record:
            return
        step, skipped = record["step"], record["skipped"]
        self._num_skipped += skipped
        line = (
            f"step {step:>{len(str(self._total))}}/{self._total}  loss {record['loss']:.4f}  "
            f"scale {record['loss_scale']:g}  grad norm {record['grad_norm']:.3f}  skipped {self._num_skipped}  "
            f"{record['tokens_per_second']:,.0f} tokens/s  {record['memory_bytes'] / 2**20:,.0f} MiB"
        )
        if self._live is not None:
            self._draw(step, line)
        elif step % PRINT_EVERY == 0 or step in (1, self._total) or skipped:
            print(f"{line}  {self._left(step)}", flush=True)
        self._write_log(line)

    def _write_log(self, line: str) -> None:
        if self._log is not None:
            with writing_to(self._log.name):
                self._log.write(line + "\n")

    def _close_log(self) -> None:
        if self._log is not None:
            with writing_to(self._log.name):  # what it could not write before
                self._log.close()

    def _draw(self, step: int, line: str) -> None:
        """Redraw the bar and the line below it."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        bar = ProgressBar(total=self._total, completed=step)
        self._live.update(Group(bar, Text(f"\n{self._left(step)}  {line}")))  # a bar ends without a newline

    def _left(self, step: int) -> str:
        """The time until the last step, at the mean speed of this run so far: ``0:42 left``."""
        speed = (monotonic() - self._begun) / (step - self._first + 1)
        minutes, seconds = divmod(round(speed * (self._total - step)), 60)
        return f"{minutes}:{seconds:02} left"

    def record(self, step: int, finding: Finding) -> Path | None:
        """Write what an observation of ``step`` found, as :meth:`paramp.Metrics.record`."""
        return None if self._metrics is None else self._metrics.record(step, finding)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.__exit__(*error)


def _continued(path: Path, resumed_at: int | None) -> Path:
    """``path``, which a resumed run goes on with; a new run's is new."""
    return path if resumed_at is not None else set_aside(path)


def _is_terminal(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal with a width; mpirun gives each rank a pseudo-terminal without one."""
    try:
        return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):
        return False


def facts_of(context: ParallelContext, corpus: Corpus, num_parameters: int) -> dict[str, Any]:
    """What a run is made of beside its settings, with plain values."""
    return {
        "world_size": context.world_size,
        "data_size": context.dp.size,
        "device": str(context.device),
        "torch": torch.__version__,
        "data_sha256": corpus.sha256,
        "data_files": corpus.num_files,
        "data_vocab_size": corpus.vocab_size,
        f"data_{corpus.unit}s": len(corpus.training) + len(corpus.held_out),
        "parameters": num_parameters,
    }


def announce(
    reporter: Reporter, context: ParallelContext, job: Job, facts: Mapping[str, Any], notes: Iterable[str]
) -> None:
    """Log the settings that differ from the default on the main rank, and save all of them as JSON."""
    if not context.is_main:
        return
    settings = all_settings(context.config, job)
    usual = all_settings(load(DEFAULTS | {"precision": context.config.precision.name}), Job())
    usual["precision"] = DEFAULTS["precision"]
    changed = [f"{name} = {value}" for name, value in settings.items() if name not in usual or usual[name] != value]
    reporter.say(f"settings other than the default: {', '.join(changed) or 'none'}")
    reporter.say(", ".join(f"{name} = {value}" for name, value in facts.items() if name != "data_sha256"))
    for line in notes:
        reporter.say(line)
    if job.train.log_dir is not None:
        path = set_aside(user_path(job.train.log_dir) / "config.json")
        path.write_text(json.dumps({"config": settings, "run": facts}, indent=2) + "\n", encoding="utf-8")


def announce_resume(reporter: Reporter, job: TrainConfig, found: Path, position: dict[str, Any]) -> None:
    """Log the checkpoint ``found`` that the run resumes from, the settings it overrides, and whether it is finished.

    ``position`` is the state of a :class:`~train_app.batch_reader.DataPosition`.
    """
    step = position.get("step", 0)
    reporter.say(f"resumed from {found}, after step {step}")
    for name in ("lr", "weight_decay"):
        asked = getattr(job, name)
        before = position.get(name, asked)
        if before != asked:
            reporter.say(f"train.{name} = {before} from the checkpoint's optimizer is kept; {asked} is not used")
    if step >= job.steps:
        reporter.say(f"all {job.steps} steps are done, and {found} has them; for more, raise --steps")


def announce_end(reporter: Reporter, job: TrainConfig) -> None:
    """Say how to make the page of the run, which is finished."""
    if job.log_dir is not None:
        python = Path(sys.executable)
        python = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
        script = python.with_name("paramp")
        paramp = [str(script)] if script.exists() else [str(python), "-m", "paramp"]
        command = shlex.join([*paramp, "report", job.log_dir])
        reporter.say(f"for the page of this run: {command}")
