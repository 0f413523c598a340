"""Colossal-AI's logger: Python's, with a selection of the ranks that write."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection
from functools import partialmethod
from pathlib import Path
from typing import Any, TextIO

from ...base.errors import ConfigError, nearest
from ...base.values_checked_by_type import user_path
from ...distributed.context import current_context
from .context import ParallelMode
from .core import global_context

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
FORMAT = "[%(asctime)s] %(name)s %(levelname)s: %(message)s"


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the current value of ``sys.stderr``."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class DistributedLogger:
    """``info``, ``warning``, ``error`` and ``debug`` with ``ranks=[0]``, to stderr and optionally to files.

    Attributes:
        logger: the ``logging.Logger`` that it writes to.
    """

    def __init__(self, name: str) -> None:
        self.logger = logging.getLogger(name)
        self.logger.setLevel(logging.INFO)
        self.logger.propagate = False
        if not any(isinstance(handler, _Stderr) for handler in self.logger.handlers):
            self._add(_Stderr())

    def _add(self, handler: logging.Handler) -> None:
        handler.setFormatter(logging.Formatter(FORMAT))
        self.logger.addHandler(handler)

    def log(
        self,
        level: str,
        message: object,
        parallel_mode: ParallelMode = ParallelMode.GLOBAL,
        ranks: Collection[int] | None = None,
    ) -> None:
        """Write ``message`` on ``ranks`` (None: all) of the groups of ``parallel_mode``.

        Without an open context, this process counts as rank 0.
        """
        if ranks is None or (global_context.get_local_rank(parallel_mode) if current_context() else 0) in ranks:
            self.logger.log(logging.getLevelNamesMapping()[_checked_level(level)], "%s", message)

    debug = partialmethod(log, "DEBUG")
    info = partialmethod(log, "INFO")
    warning = partialmethod(log, "WARNING")
    error = partialmethod(log, "ERROR")

    def set_level(self, level: str) -> None:
        """Ignore messages below ``level``: DEBUG, INFO (the default), WARNING or ERROR."""
        self.logger.setLevel(_checked_level(level))

    def log_to_file(self, path: str | Path, mode: str = "a", level: str = "INFO", suffix: str | None = None) -> None:
        """Write also to ``rank_R.log``, or ``rank_R_SUFFIX.log``, in the folder ``path``, which is made if missing."""
        context = current_context()
        rank = context.rank if context else 0
        folder = user_path(path)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank_{rank}.log" if suffix is None else f"rank_{rank}_{suffix}.log"
        handler = logging.FileHandler(folder / name, mode, encoding="utf-8")
        handler.setLevel(_checked_level(level))
        self._add(handler)


def _checked_level(level: Any) -> str:
    if level not in LEVELS:
        raise ConfigError(f"level: got {level!r}, expected one of {', '.join(LEVELS)}{nearest(level, LEVELS)}")
    return str(level)


_loggers: dict[str, DistributedLogger] = {}


def get_dist_logger(name: str = "paramp") -> DistributedLogger:
    """The logger called ``name``; the same one each time."""
    return _loggers.setdefault(name, DistributedLogger(name))


def disable_existing_loggers(include: Collection[str] | None = None, exclude: Collection[str] = ("paramp",)) -> None:
    """Ignore messages below WARNING of the loggers that exist now.

    Args:
        include: the names of these loggers. None: all but ``exclude``.
        exclude: names of loggers that are not changed; no effect with ``include``.
    """
    for name in list(logging.root.manager.loggerDict):
        if name not in exclude if include is None else name in include:
            logging.getLogger(name).setLevel(logging.WARNING)
