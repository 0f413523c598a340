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

import inspect
import json
import math
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np
import torch

from ..base.errors import ConfigError, require, shown
from ..base.values_checked_by_type import user_path
from .read_run import NUMBERS
from .run_events import EVENTS, TRACES, Finding, check_step, end_event, event_of, found_by, launch_event

Hook = Callable[[dict[str, float], int], object]
"""Is given the numbers of a step by their names, and the step: ``run.log`` of wandb, ``mlflow.log_metrics``, ..."""


class Metrics:
    """Writes the metrics of a run to ``metrics.jsonl`` in a folder, line by line. A context manager.

    The files of an earlier run are renamed to ``metrics.1.jsonl``, ``metrics.2.jsonl``, ...; its traces, which the
    renamed ``events.1.jsonl`` names, stay where they are.
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
            ConfigError: ``folder`` is no path, ``resumed_at`` no step, ``settings`` no dict, or ``hooks`` no list of
                functions that are not async; on every rank. Or ``folder`` cannot be written to, where it is enabled.
        """
        require(isinstance(folder, str | os.PathLike) and bool(str(folder)), "folder", folder, "a path, as 'runs/a'")
        require(isinstance(settings or {}, Mapping), "settings", settings, "a dict, such as vars(arguments)")
        self._hooks = _functions(hooks)
        self._files: list[TextIO] = []
        self._last_step = None if resumed_at is None else _as_step(resumed_at, "resumed_at")
        self._closed = False
        self._numbers = dict.fromkeys(NUMBERS, True)
        if enabled:
            self._folder = user_path(folder).absolute()  # that of now, also after os.chdir
            names = ("metrics.jsonl", EVENTS)
            with ExitStack() as stack:
                with writing_to(folder, "folder", "choose another folder"):
                    self._folder.mkdir(parents=True, exist_ok=True)
                    self._files = [stack.enter_context(_continued(self._folder / name, resumed_at)) for name in names]
                self._write_event(launch_event(resumed_at, settings or {}))
                self._open = stack.pop_all()

    def write(self, step: int, **values: Any) -> None:
        """Write the metrics of ``step``: numbers, arrays or tensors of one element; under other keys strings or lists.

        A number that is not finite becomes null. ``paramp report`` draws every number, ``paramp plot`` ``loss``,
        ``val_loss``, ``grad_norm``, ``loss_scale``, ``skipped`` (0 or 1), ``tokens_per_second``, and ``data_seconds``
        of ``step_seconds``.

        Raises:
            ConfigError: ``step`` is no whole number, or a value is none of these, or no number under a key of the
                list or one that was a number before (or the other way round); or the log is closed, or its disk full.
        """
        self._check_open()
        if self._files:
            step = _as_step(step)
            plain = {name: self._checked(f"step {step}, {name}", name, value) for name, value in values.items()}
            self._write_line(0, json.dumps({"step": step} | plain, allow_nan=False))
            self._last_step = step
            for hook in self._hooks:
                hook({name: value for name, value in plain.items() if isinstance(value, int | float)}, step)

    def record(self, step: int, finding: Finding) -> Path | None:
        """Write what an observation of ``step`` found.

        Args:
            finding: the report of ``diagnose_overflow``, ``trace_overflow`` or ``scaler.diagnose``; a
                ``gradient_histogram``; the timeline of ``engine.recording()``, whose Chrome trace is written too; or
                the list of ``check_replicas``, where an empty one says that replicas are equal.

        Returns:
            The file of the Chrome trace, if one was written.

        Raises:
            ConfigError: it is something else, ``step`` is no whole number, or the log is closed; on every rank. Or the
                disk of the log is full.
        """
        self._check_open()
        step = _as_step(step)
        event = event_of(step, finding)
        path = None
        if self._files:
            if "trace" in event:
                path = free_path(self._folder / TRACES / f"step-{step}.json")
                with writing_to(path):
                    path.parent.mkdir(exist_ok=True)
                    path.write_text(json.dumps(event.pop("trace")) + "\n", encoding="utf-8")
                event["file"] = f"{TRACES}/{path.name}"
            self._write_event(event)
        return path

    def _checked(self, where: str, name: str, value: Any) -> Any:
        """``value`` as JSON has it; a ConfigError, which begins with ``where``, if a reader could not use it."""
        plain = _plain(value)
        is_number = isinstance(plain, int | float)
        try:
            json.dumps(plain, allow_nan=False)
            fits = not is_number or abs(plain) <= sys.float_info.max
        except (TypeError, ValueError, RecursionError):
            fits = False
        require(fits, where, value, "a number of fp64, an array or a tensor of one element, a string or a list of them")
        if plain is not None and self._numbers.setdefault(name, is_number) != is_number:
            expected = "no number, as before" if is_number else "a number"
            raise ConfigError(f"{where}: got {shown(value)}, expected {expected}; write it under another key")
        return plain

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("Metrics: closed; write inside the with block, or open it again with resumed_at=STEP")

    def _write_event(self, event: Mapping[str, Any]) -> None:
        self._write_line(1, json.dumps(_plain(event), allow_nan=False, default=str))

    def _write_line(self, index: int, line: str) -> None:
        with writing_to(self._files[index].name):
            self._files[index].write(line + "\n")

    def close(self, error: BaseException | None = None) -> None:
        """Record the end of the launch, and ``error`` if that ended it; close the files.

        Where ``error`` is given, it is no further error if they cannot be written.
        """
        if self._files:
            failing = nullcontext() if error is None else suppress(ConfigError)
            with failing, writing_to(self._folder), self._open:
                for finding in found_by(error):
                    self.record(self._last_step or 0, finding)
                self._write_event(end_event(self._last_step, error))
            self._files = []
        self._closed = True

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)


def _functions(hooks: Sequence[Hook]) -> tuple[Hook, ...]:
    """``hooks`` as a tuple, which a generator fills once."""
    functions = tuple(hooks) if isinstance(hooks, Iterable) else (hooks,)
    right = not callable(hooks) and all(map(callable, functions))
    require(right, "hooks", hooks, "a list of functions of the values and the step, such as [wandb_run.log]")
    for hook in functions:
        require(not inspect.iscoroutinefunction(hook), "hooks", hook, "a function that is not async: none awaits it")
    return functions


def _as_step(step: Any, name: str = "step") -> int:
    """``step`` as an int: one of numpy's and a tensor of one have ``__index__``."""
    try:
        whole = step if isinstance(step, bool) else operator.index(step)
    except TypeError:
        whole = step
    check_step(whole, name)
    return int(whole)


def _plain(value: Any) -> Any:
    """``value`` with a number for each array or tensor of one element, and None for each number that is not finite."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and math.prod(value.shape) == 1:
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def writing_to(
    path: str | Path, name: str = "log", fix: str = "make room, and resume from the last checkpoint"
) -> Iterator[None]:
    """A context in which an error of the disk is a ConfigError that names ``path``."""
    try:
        yield
    except OSError as error:
        why = f"cannot be written to: {error.strerror or error}; {fix}"
        raise ConfigError(f"{name}: {str(path)!r} {why}") from None


def _continued(path: Path, resumed_at: int | None) -> TextIO:
    """``path`` opened, an earlier file set aside; of a resumed run with its lines up to the step ``resumed_at``.

    Those are written whole before: on a full disk the earlier file stays.
    """
    kept = [] if resumed_at is None else _lines_up_to(path, resumed_at)
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(kept)
        set_aside(path)
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return path.open("a", encoding="utf-8", buffering=1)


def _lines_up_to(path: Path, step: int) -> list[str]:
    """The lines of the steps up to ``step``, and those of launches; incomplete and damaged ones are dropped."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
            if record.get("event") in ("launch", "end") or record["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return kept


def set_aside(path: Path) -> Path:
    """Return ``path``, after renaming an existing file to ``metrics.1.jsonl``, ``metrics.2.jsonl``, ..."""
    if path.exists():
        path.rename(free_path(path))
    return path


def free_path(path: Path) -> Path:
    """``path``, or if it exists the first of ``metrics.1.jsonl``, ``metrics.2.jsonl``, ... that does not."""
    free, number = path, 0
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}.{number}{path.suffix}")
    return free
