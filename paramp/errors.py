"""The errors that users see, for a mistake of theirs and for data that fails under way, and the hint in them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["ConfigError", "DataError", "nearest"]


class ConfigError(ValueError):
    """The user asked for something impossible. The message names the value, what is allowed, and the fix."""


class DataError(RuntimeError):
    """Data that was right when it was opened cannot be read any more. The message names the file and the offset."""


def nearest(word: object, known: Iterable[str]) -> str:
    """``" (did you mean 'tensor'?)"`` for the closest of ``known``, or an empty string when nothing is close."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
