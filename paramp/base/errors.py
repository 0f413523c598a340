"""The exceptions that users see, and helpers for their messages."""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

LONGEST = 200
"""The most characters of a value that a message shows."""
CLOSE = 0.65
"""The least similarity of a name that a message suggests, from 0 to 1 (:class:`difflib.SequenceMatcher`)."""


class ConfigError(ValueError):
    """A configuration or argument is invalid. The message names the value, what is allowed, and the fix."""


class AfterBatchError(ConfigError):
    """A :class:`ConfigError` of this rank at the end of a batch, in which no other rank waits for it any more."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message names the file or the tensor, and the fix."""


class TrainingDiverged(RuntimeError):
    """Too many steps in a row were skipped. The message is the diagnosis, the same on every rank.

    ``report`` is the diagnosis as a :class:`~paramp.scaling.overflow_report.OverflowReport`.
    """

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report


class DataError(RuntimeError):
    """Data cannot be read any more, though it was valid when opened. The message names the file and the offset."""


class ReplicaDrift(RuntimeError):
    """Replicas of a weight, master or loss scale differ. The message names the value and the ranks.

    ``differences`` are those found, as :func:`paramp.check_replicas` returns them.
    """

    def __init__(self, message: str, differences: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.differences = differences


def one_line(text: str, longest: int = LONGEST) -> str:
    """``text`` for a message: on one line, unprintable characters escaped, truncated to ``longest`` characters."""
    text = " ".join(line.strip() for line in text.splitlines())
    if not text.isprintable():
        text = text.encode("unicode_escape").decode()
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"


def first_line(value: BaseException | str) -> str:
    """The first line of a text or of an error for a message; of an error without a text the name of its class."""
    lines = str(value).strip().splitlines()
    return lines[0] if lines else "" if isinstance(value, str) else type(value).__name__


def shown(value: object) -> str:
    """A user's value for a message: its ``repr`` through :func:`one_line`."""
    try:
        return one_line(repr(value))
    except Exception as error:  # repr fails for integers of thousands of digits, and for some users' classes
        return f"a value of the type {type(value).__name__} ({one_line(str(error))})"


def key_name(key: object) -> str:
    """A key for a message; quoted if empty, long, not a string, or with spaces, colons or unprintable characters."""
    plain = isinstance(key, str) and key.isprintable() and key and not set(" :") & set(key) and len(key) <= LONGEST
    return str(key) if plain else shown(key)


def nearest(word: object, known: Iterable[str]) -> str:
    """``" (did you mean 'tensor'?)"`` for the closest of ``known``; empty when none is close, or for another type."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=CLOSE) if isinstance(word, str) else []
    return f" (did you mean {close[0]!r}?)" if close else ""


class LaunchError(RuntimeError):
    """The processes cannot find each other. The message names what is missing and how to set it."""


def require(condition: bool, name: str, value: object, allowed: str) -> None:
    """Raise a ConfigError unless ``condition``; ``allowed`` describes the values that setting ``name`` accepts."""
    if not condition:
        raise ConfigError(f"{name}: got {shown(value)}, expected {allowed}")


def users_line(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost line in the traceback of ``error`` that is not paramp's, Python's or an installed package's.

    None if there is none.
    """
    files = (__file__, sys.modules["torch"].__file__) if "torch" in sys.modules else (__file__,)
    folders = (*(os.path.dirname(os.path.dirname(str(file))) for file in files), os.path.dirname(os.__file__))
    apart = (*(folder + os.sep for folder in folders), "<")
    lines = [line for line in traceback.extract_tb(error.__traceback__) if not line.filename.startswith(apart)]
    return lines[-1] if lines else None


def shown_line(file: str, number: int | None, source: str | None) -> str:
    """A line of code for a message: ``at net.py:12, 'return self.head(x)'``."""
    return f"at {os.path.basename(file)}:{number}" + (f", {one_line(source)!r}" if source and source.strip() else "")


def at_users_line(error: BaseException) -> str:
    """:func:`users_line` for a message, after a space; an empty string without one."""
    line = users_line(error)
    return "" if line is None else f" {shown_line(line.filename, line.lineno, line.line)}"
