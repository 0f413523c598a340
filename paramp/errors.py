"""The errors that users see: for a mistake of theirs, with the hint in it, and for replicas that have parted."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["ConfigError", "ReplicaDrift", "nearest"]


class ConfigError(ValueError):
    """The user asked for something impossible. The message names the value, what is allowed, and the fix."""


class ReplicaDrift(RuntimeError):
    """Ranks that should hold the same weights, masters or loss scale do not. The message names what, and the ranks."""


def nearest(word: object, known: Iterable[str]) -> str:
    """``" (did you mean 'tensor'?)"`` for the closest of ``known``, or an empty string when nothing is close."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
