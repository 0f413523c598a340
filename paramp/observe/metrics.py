"""A log of metrics, ``metrics.jsonl``: one JSON object a step, which ``paramp plot`` draws. For any loop::

with paramp.Metrics("runs/a", enabled=context.is_main) as metrics:
    for step in range(1, steps + 1):
        ...
        result = engine.step()
        metrics.write(step, loss=result.loss, grad_norm=result.grad_norm, loss_scale=result.loss_scale,
                      skipped=int(result.overflow), lr=lr_scheduler.get_last_lr()[0])
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from ..base.errors import require
from ..base.user_values import user_path

Hook = Callable[[dict[str, float], int], object]
"""Is given the numbers of a step by their names, and the step: ``run.log`` of wandb, ``mlflow.log_metrics``, ..."""


class Metrics:
    """Writes the metrics of a run to ``metrics.jsonl`` in a folder, line by line. A context manager.

    The file of an earlier run is renamed to ``metrics.1.jsonl``, ``metrics.2.jsonl``, ...
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        resumed_at: int | None = None,
        enabled: bool = True,
        hooks: Sequence[Hook] = (),
    ) -> None:
        """Create ``folder`` if it does not exist, and open the file.

        Args:
            resumed_at: the last step of the run that is resumed, whose lines up to there are kept. None: a new run.
            enabled: False on all ranks but one: write nothing, and call no hook.
            hooks: called as ``hook(values, step)`` after each write: a logger's function, such as ``wandb_run.log`` or
                ``mlflow.log_metrics``. ``values`` has the numbers that are finite, as int or float.

        Raises:
            ConfigError: ``hooks`` is no list of functions.
        """
        functions = not callable(hooks) and all(map(callable, hooks))
        require(functions, "hooks", hooks, "a list of functions of the values and the step, such as [wandb_run.log]")
        self._file: TextIO | None = None
        self._hooks = tuple(hooks) if enabled else ()
        if enabled:
            path = user_path(folder) / "metrics.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = [] if resumed_at is None else _lines_up_to(path, resumed_at)
            self._file = set_aside(path).open("w", encoding="utf-8", buffering=1)
            self._file.writelines(kept)

    def write(self, step: int, **values: Any) -> None:
        """Write the metrics of ``step``: numbers, strings, or tensors of one element.

        A number that is not finite becomes null. ``paramp plot`` draws ``loss``, ``val_loss``, ``grad_norm``,
        ``loss_scale``, ``skipped`` (0 or 1), ``tokens_per_second``, and ``data_seconds`` of ``step_seconds``.
        """
        if self._file is not None:
            plain = {name: _plain(value) for name, value in values.items()}
            self._file.write(json.dumps({"step": step} | plain, allow_nan=False) + "\n")
            numbers = {name: value for name, value in plain.items() if isinstance(value, int | float)}
            for hook in self._hooks:
                hook(dict(numbers), step)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, torch.Tensor) else value
    return value if is_finite(value) else None


def is_finite(value: object) -> bool:
    """False for a float that is infinite or not a number; True for everything else."""
    return not isinstance(value, float) or math.isfinite(value)


def _lines_up_to(path: Path, step: int) -> list[str]:
    """The lines of the steps up to ``step``; an incomplete last line is dropped."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else ():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
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
