"""The end of a program of several ranks: one error message for all ranks, and the exit code."""

import sys
import traceback

from ..base.errors import CheckpointError, ConfigError, DataError, LaunchError, TrainingDiverged
from ..distributed.first_failure import is_echo
from ..distributed.launcher_env import rank_by_any_variable
from ..distributed.local_launcher import reported_by_rank_0

USER_ERRORS = (
    *(CheckpointError, ConfigError, DataError, LaunchError),
    *(FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError),
)
"""Errors that the user can correct: only the message is printed, without a traceback."""


def report_failure(error: Exception, launched: bool) -> int:
    """Print ``error`` to stderr, on one rank only if several ranks raise the same.

    Returns the exit code: 2 for one of :data:`USER_ERRORS`, else 1. ``launched``: whether process groups were made.
    """
    exit_code = 2 if isinstance(error, USER_ERRORS) else 1
    rank = rank_by_any_variable()
    if is_echo(error) or (not launched and reported_by_rank_0(str(error), rank)):
        return exit_code
    details = str(error)
    if not isinstance(error, (*USER_ERRORS, TrainingDiverged)):
        details = f"rank {rank} failed\n{''.join(traceback.format_exception(error))}"
    print(f"error: {details}", file=sys.stderr, flush=True)
    return exit_code
