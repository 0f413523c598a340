"""The errors that users see, and the hint in them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST = 200
"""Characters of a value in a message."""


class ConfigError(ValueError):
    """The user asked for something impossible. The message names the value, what is allowed, and the fix."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message names the file or the tensor, and what to do."""


class TrainingDiverged(RuntimeError):
    """So many steps were skipped that training would not recover. The message is the diagnosis; every rank has it.

    ``report`` is the same as a :class:`~paramp.optim.overflow_report.OverflowReport`.
    """

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report


class DataError(RuntimeError):
    """Data that was right when it was opened cannot be read any more. The message names the file and the offset."""


class ReplicaDrift(RuntimeError):
    """Ranks that should hold the same weights, masters or loss scale do not. The message names what, and the ranks."""


def one_line(text: str, longest: int = LONGEST) -> str:
    """``text`` for a message: its lines one after the other, odd characters escaped, cut after ``longest``."""
    text = " ".join(line.strip() for line in text.splitlines())
    if not text.isprintable():
        text = text.encode("unicode_escape").decode()
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"


def shown(value: object) -> str:
    """What a user gave, for a message: its ``repr``, in :func:`one_line`."""
    try:
        return one_line(repr(value))
    except Exception as error:  # Python does not write out integers of thousands of digits, nor do all objects
        return f"a value of the type {type(value).__name__} ({one_line(str(error))})"


def key_name(key: object) -> str:
    """A key for a message: as it is, or quoted where it would not be recognised as one."""
    plain = isinstance(key, str) and key.isprintable() and key and " " not in key and len(key) <= LONGEST
    return str(key) if plain else shown(key)


def nearest(word: object, known: Iterable[str]) -> str:
    """``" (did you mean 'tensor'?)"`` for the closest of ``known``, or an empty string when nothing is close."""
    text = word if isinstance(word, str) else shown(word)
    close = difflib.get_close_matches(text, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


class LaunchError(RuntimeError):
    """The processes cannot find each other. The message names what is missing and how to set it."""


def require(condition: bool, name: str, value: object, allowed: str) -> None:
    """Unless ``condition``, raise a ConfigError with a setting's ``name``, its ``value`` and what is ``allowed``."""
    if not condition:
        raise ConfigError(f"{name}: got {shown(value)}, expected {allowed}")
