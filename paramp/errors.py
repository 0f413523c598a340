"""The errors that users see, and the hint in them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["CheckpointError", "ConfigError", "TrainingDiverged", "nearest"]


class ConfigError(ValueError):
    """The user asked for something impossible. The message names the value, what is allowed, and the fix."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message names the file or the tensor, and what to do."""


class TrainingDiverged(RuntimeError):
    """So many steps were skipped that training would not recover. The message is the diagnosis; every rank has it.

    Attributes:
        report: the diagnosis, a :class:`~paramp.diagnosis.OverflowReport`.
    """

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report


def nearest(word: object, known: Iterable[str]) -> str:
    """``" (did you mean 'tensor'?)"`` for the closest of ``known``, or an empty string when nothing is close."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
