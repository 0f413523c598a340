"""The error that ends a program of several ranks: printed by one of them, in one line if the user can correct it.

Under torchrun the report of the launcher follows, with ``Root Cause`` at its end. It shows there what this rank writes
to ``TORCHELASTIC_ERROR_FILE``.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from ..base.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LaunchError,
    ReplicaDrift,
    TrainingDiverged,
    users_line,
)
from .first_failure import give_launcher, is_echo, left_a_context
from .launcher_variables import rank_by_any_variable
from .local_launcher import reported_by_rank_0

CORRECTABLE = CheckpointError, ConfigError, DataError, LaunchError
"""Errors of paramp's that the user can correct."""
USER_ERRORS = (*CORRECTABLE, FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError)
"""The errors of paramp's own programs that the user can correct: exit code 2."""
EXPLAINED = (*CORRECTABLE, ReplicaDrift, TrainingDiverged)
"""Errors of paramp's that their message explains: a script ends with it alone, without a traceback."""
TRACEBACK = "PARAMP_TRACEBACK"
"""The environment variable that asks for tracebacks all the same."""

_previous: list[Callable[..., object]] = []
"""The excepthook before the first :func:`report_uncaught`."""


def report_uncaught(explain: Callable[[BaseException], None]) -> None:
    """From now on, report an error that ends this program on one rank.

    One of :data:`EXPLAINED` is printed as the line of the script and ``error: message``. Another one that is not marked
    as a consequence of another rank's failure is printed as before, after a call of ``explain`` with it. An error that
    ends a process forked from this one is none of this rank's.
    """
    inner, process = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != process:
            inner(kind, error, trace)
            return
        if isinstance(error, EXPLAINED):
            if _previous[0] is not sys.__excepthook__:
                _previous[0](kind, error, trace)  # of a logger, say, which has to learn that the program fails
            _report(error, f"error: {error}", _line_of(error))
            return
        give_launcher(f"{kind.__name__}: {error}")
        if not is_echo(error):
            explain(error)
            inner(kind, error, trace)

    if not getattr(inner, "reports_uncaught", False):  # torch wraps it when the process group is made
        _previous.append(inner)
        hook.reports_uncaught = True  # type: ignore[attr-defined]
        sys.excepthook = hook


def report_failure(error: Exception) -> int:
    """Print ``error``, which ends a program of paramp's, to stderr on one rank. Returns the exit code: 2 or 1."""
    if isinstance(error, (*USER_ERRORS, TrainingDiverged)):
        _report(error, f"error: {error}")
        return 2 if isinstance(error, USER_ERRORS) else 1
    give_launcher(f"{type(error).__name__}: {error}")
    if not is_echo(error):
        details = "".join(traceback.format_exception(error))
        print(f"error: rank {rank_by_any_variable()} failed\n{details}", file=sys.stderr, flush=True)
    return 1


def _report(error: BaseException, text: str, before: str = "") -> None:
    """Give the launcher ``text``, and print it after the lines ``before`` it unless another rank prints the same."""
    give_launcher(text)
    if is_echo(error) or (not left_a_context(error) and reported_by_rank_0(str(error), rank_by_any_variable())):
        return
    if os.environ.get(TRACEBACK, "") not in ("", "0"):
        before = "".join(traceback.format_exception(error))
    print(f"{before}{text}", file=sys.stderr, flush=True)


def _line_of(error: BaseException) -> str:
    """The line of the user's script that an ``error`` comes from, as a traceback shows it."""
    line = users_line(error)
    hidden = f"({TRACEBACK}=1 shows the whole traceback)\n" if error.__cause__ is not None else ""
    if line is None:
        return hidden
    return f'{hidden}  File "{line.filename}", line {line.lineno}, in {line.name}\n    {line.line}\n'
