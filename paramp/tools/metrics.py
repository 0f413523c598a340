"""The log of a run: a folder that ``paramp report`` and ``paramp plot`` draw. For any loop::

with paramp.Metrics("runs/a", enabled=context.is_main) as metrics:
    for step in range(1, steps + 1):
        ...
        result = engine.step()
        metrics.write(step, loss=result.loss, grad_norm=result.grad_norm, loss_scale=result.loss_scale,
                      skipped=int(result.overflow), lr=lr_scheduler.get_last_lr()[0])
        if result.overflow:
            metrics.record(step, engine.diagnose_overflow())  # every rank calls it

``metrics.jsonl`` has one JSON object a step, ``events.jsonl`` (:mod:`paramp.tools.run_events`) one for each launch and
its end, and each thing recorded; the folder ``traces`` has a Chrome trace of each step that was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch

from ..base.errors import require
from ..base.user_values import user_path
from .run_events import EVENTS, TRACES, Finding, end_event, event_of, found_by, launch_event

Hook = Callable[[dict[str, float], int], object]
"""Is given the numbers of a step by their names, and the step: ``run.log`` of wandb, ``mlflow.log_metrics``, ..."""


class Metrics:
    """Writes the metrics of a run to ``metrics.jsonl`` in a folder, line by line. A context manager.

    The file of an earlier run is renamed to ``metrics.1.jsonl``, ``metrics.2.jsonl``, ..., and so are the others.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        resumed_at: int | None = None,
        enabled: bool = True,
        settings: Mapping[str, Any] | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        """Create ``folder`` if it does not exist, and open the files. The launch is recorded: layout, mode, machine.

        Args:
            resumed_at: the last step of the run that is resumed, whose lines up to there are kept. None: a new run.
            enabled: False on all ranks but one: write nothing, and call no hook.
            settings: of the loop, by name, for the page; those of the current context's configuration are added.
            hooks: called as ``hook(values, step)`` at each :meth:`write`: functions of other loggers, such as
                ``wandb_run.log`` or ``mlflow.log_metrics``. ``values`` has the numbers that are finite.

        Raises:
            ConfigError: ``hooks`` is not a list of functions.
        """
        functions = not callable(hooks) and all(map(callable, hooks))
        require(functions, "hooks", hooks, "a list of functions of the values and the step, such as [wandb_run.log]")
        self._hooks = tuple(hooks)
        self._files: list[TextIO] = []
        self._last_step = resumed_at
        if enabled:
            self._folder = user_path(folder)
            self._folder.mkdir(parents=True, exist_ok=True)
            if resumed_at is None:
                set_aside(self._folder / TRACES)
            names = ("metrics.jsonl", EVENTS)
            with ExitStack() as stack:
                self._files = [stack.enter_context(_continued(self._folder / name, resumed_at)) for name in names]
                self._write_event(launch_event(resumed_at, settings or {}))
                self._open = stack.pop_all()

    def write(self, step: int, **values: Any) -> None:
        """Write the metrics of ``step``: numbers, strings, or tensors of one element.

        A number that is not finite becomes null. ``paramp report`` draws every number, ``paramp plot`` ``loss``,
        ``val_loss``, ``grad_norm``, ``loss_scale``, ``skipped`` (0 or 1), ``tokens_per_second``, and ``data_seconds``
        of ``step_seconds``.
        """
        if self._files:
            plain = {name: _plain(value) for name, value in values.items()}
            self._files[0].write(json.dumps({"step": step} | plain, allow_nan=False) + "\n")
            self._last_step = step
            for hook in self._hooks:
                hook({name: value for name, value in plain.items() if isinstance(value, int | float)}, step)

    def record(self, step: int, finding: Finding) -> None:
        """Write what an observation of ``step`` found.

        Args:
            finding: the report of ``diagnose_overflow``, ``trace_overflow`` or ``scaler.diagnose``; a
                ``gradient_histogram``; the timeline of ``engine.recording()``, whose Chrome trace is written too; or
                the list of ``check_replicas``, where an empty one says that replicas are equal.

        Raises:
            ConfigError: it is something else; on every rank.
        """
        event = event_of(step, finding)
        if self._files:
            if "trace" in event:
                path = self._folder / TRACES / f"step-{step}.json"
                path.parent.mkdir(exist_ok=True)
                path.write_text(json.dumps(event.pop("trace")) + "\n", encoding="utf-8")
                event["file"] = f"{TRACES}/{path.name}"
            self._write_event(event)

    def _write_event(self, event: Mapping[str, Any]) -> None:
        self._files[1].write(json.dumps(_finite(event), allow_nan=False, default=str) + "\n")

    def close(self, error: BaseException | None = None) -> None:
        """Record the end of the launch, and ``error`` if that ended it; close the files."""
        if self._files:
            for finding in found_by(error):
                self.record(self._last_step or 0, finding)
            self._write_event(end_event(self._last_step, error))
            self._open.close()
            self._files = []

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, torch.Tensor) else value
    return value if is_finite(value) else None


def _finite(value: Any) -> Any:
    """``value`` with None for each number in it that is not finite."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value if is_finite(value) else None


def is_finite(value: object) -> bool:
    """False for a float that is infinite or not a number; True for everything else."""
    return not isinstance(value, float) or math.isfinite(value)


def _continued(path: Path, resumed_at: int | None) -> TextIO:
    """``path`` opened, an earlier file set aside; of a resumed run with its lines up to the step ``resumed_at``."""
    kept = [] if resumed_at is None else _lines_up_to(path, resumed_at)
    file = set_aside(path).open("w", encoding="utf-8", buffering=1)
    file.writelines(kept)
    return file


def _lines_up_to(path: Path, step: int) -> list[str]:
    """The lines of the steps up to ``step``, and those of launches; an incomplete last line is dropped."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else ():
        try:
            record = json.loads(line)
            if record.get("event") in ("launch", "end") or record["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return kept


def set_aside(path: Path) -> Path:
    """Return ``path``, after renaming an existing file to ``metrics.1.jsonl``, ``metrics.2.jsonl``, ..."""
    if path.exists():
        number = 1
        while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
            number += 1
        path.rename(aside)
    return path
