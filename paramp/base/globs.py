"""Globs over dotted module names."""

import fnmatch
from collections.abc import Sequence


def matches(name: str, pattern: str) -> bool:
    """Whether ``name`` matches ``pattern``.

    ``*`` matches any characters of one part between dots, ``**`` any number of parts.
    """
    return _match(name.split("."), pattern.split("."))


def _match(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_match(parts[skipped:], patterns[1:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], patterns[0]) and _match(parts[1:], patterns[1:])
