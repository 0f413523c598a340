"""What to write in place of another library's configuration key: the advice in an error of :mod:`paramp.config.files`.

That module, and the train script for its flags, import this one when they raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ..base.errors import ConfigError, one_line, shown
from ..base.values_checked_by_type import keys
from ..config.files import merge
from ..config.schema import Config
from .foreign_key_advice import NAMES, OFF, OUT, TOP, ByValue, Given

LONGEST = 900
"""The most characters of a message."""
Load = Callable[[Mapping[str, Any]], object]
"""Raises a ConfigError for a configuration that is not accepted."""


class Row(NamedTuple):
    """What the table has for a key."""

    key: str
    library: str
    value: Any
    """The user's."""
    example: Mapping[str, Any]
    note: str


def advised(message: str, tree: Mapping[str, Any], load: Load) -> str:
    """``message``, of the error that ``load`` raised for ``tree``; or advice, if another library's key caused it.

    The message begins with the path of its key. Keys of the tables around it may be the cause, too.
    """
    path, colon, _ = message.partition(": ")
    parts = path.split(".") if colon else []
    table = tree.get("fp16")
    if parts[:1] == ["fp16"] and isinstance(table, Mapping) and "mode" in table:  # Colossal-AI's, which is accepted
        return message
    while parts:
        key = ".".join(parts)
        whole_path = parts[0] in keys(Config) and (key != path or parts[0] != "parallel")  # reduce_dtype has dp, too
        if found := advice(key, _at(tree, parts), load, whole_path=whole_path):
            return one_line(f"{key}: {found}", LONGEST)
        parts.pop()
    return message


def _at(tree: Any, parts: list[str]) -> Any:
    """The value at a path; None if there is none."""
    for part in parts:
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def advice(
    path: str, value: Any, load: Load, *, whole_path: bool = False, show: Callable[[Mapping[str, Any]], str] = repr
) -> str | None:
    """What to write in place of ``value`` at the dotted ``path``; None if the table does not have it.

    Args:
        whole_path: do not look for the last part of the path alone.
        show: writes a configuration.
    """
    found = list(_rows(path, value, whole_path))
    if not found:
        return None
    configuration: dict[str, Any] = {}
    for row in found:
        configuration = _with(configuration, row, load)
    written = [f"write {show(configuration)}"] if configuration else []
    notes = [row for row in found if row.note and not (written and row.note.startswith(OUT))]
    what = written + [row.note if len(found) == 1 else f"{row.key}: {row.note}" for row in notes]
    library = next((f", as in {row.library}" for row in found if row.library), "")
    return f"got {shown(value)}{library}; here, {'; '.join(what)}"


def _rows(path: str, value: Any, whole_path: bool) -> Iterator[Row]:
    """The rows for the keys of a table, else for the table itself."""
    path = path.replace("-", "_").lower()
    library, found = ("", TOP[path]) if path in TOP else ("", None)
    if found is None and not whole_path:
        library, found = NAMES.get(path.rpartition(".")[2], ("", None))
    if isinstance(value, Mapping) and not isinstance(found, str):
        inside = [row for key, item in value.items() for row in _rows(f"{path}.{key}", item, whole_path)]
        if inside:
            yield from inside
        if inside or path in keys(Config):  # of a table of ours, its own error is the advice
            return
    found = _of_value(found, value)
    if found is not None:
        example, note = found if isinstance(found, tuple) else ({}, found) if isinstance(found, str) else (found, "")
        yield Row(path, library, value, example, note)


def _of_value(found: Any, value: Any) -> Any:
    """The row for ``value`` alone."""
    if found is None or isinstance(found, str):
        return found
    if isinstance(found, ByValue):
        for known, row in found.items():
            if type(known) is type(value) and _folded(known) == _folded(value):
                return row
        if ... not in found:
            return None
    if value is None or value is False or (type(value) in (int, float) and value == 0):
        return OFF
    return found[...] if isinstance(found, ByValue) else found


def _folded(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _with(configuration: dict[str, Any], row: Row, load: Load) -> dict[str, Any]:
    """``configuration`` and the row's example, with the user's value if it is accepted there."""
    for value in (row.value, ...):
        try:
            merged = merge(configuration, _filled(row.example, value))
            load(merged)
        except (ConfigError, OverflowError):  # the latter of a power of two, for one
            continue
        return merged
    return configuration


def _filled(example: Any, value: Any) -> Any:
    """``example`` with ``value`` for each :class:`Given` that has its type, with the given example for others."""
    if isinstance(example, Mapping):
        return {key: _filled(item, value) for key, item in example.items()}
    if not isinstance(example, Given):
        return example
    is_number = type(value) is int and type(example.example) is float
    return example.of(value) if is_number or type(value) is type(example.example) else example.example
