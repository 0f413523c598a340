"""Frozen dataclasses from plain mappings, every value checked against the type of its field."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from .errors import ConfigError, key_name, nearest, shown

__all__ = ["build", "convert", "keys"]

T = TypeVar("T")


def keys(cls: type) -> list[str]:
    """The names of the fields of a dataclass."""
    return [item.name for item in dataclasses.fields(cls)]


def build(cls: type[T], tree: Mapping[str, Any], path: str, *, also: Sequence[str] = ()) -> T:
    """``cls`` from a mapping, every value checked against its field's type.

    Args:
        path: of the mapping, for messages.
        also: further keys that the user may write, for messages.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or what ``cls`` itself complains of.
    """
    hints, known = typing.get_type_hints(cls), keys(cls)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        where = f"{path}.{key_name(key)}" if path else key_name(key)
        if key not in known:
            allowed = [*known, *also]
            raise ConfigError(f"{where}: no such key, expected one of {', '.join(allowed)}{nearest(key, allowed)}")
        values[key] = convert(value, hints[key], where)
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}.{error}" if path else str(error)) from None


def convert(value: Any, hint: Any, path: str) -> Any:
    """``value`` as the type ``hint``. Only conversions that lose nothing: an int to a float, a list to a tuple.

    A class with a ``parse`` of its own is asked for it.

    Raises:
        ConfigError: it is of another type.
    """
    parse = getattr(hint, "parse", None) if isinstance(hint, type) else None
    if parse is not None:
        try:
            return parse(value)
        except ConfigError as error:
            raise ConfigError(f"{path}.{error}" if isinstance(value, Mapping) else str(error)) from None
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if isinstance(value, hint):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and "size" in keys(hint):
            value = {"size": value}  # tensor=2 is short for tensor=dict(size=2)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: got {shown(value)}, expected a table with {', '.join(keys(hint))}")
        return build(hint, value, path)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for choice in arguments:
            try:
                return convert(value, choice, path)
            except ConfigError:
                continue
    elif origin is Literal:
        if any(type(value) is type(choice) and value == choice for choice in arguments):
            return value
    elif origin is tuple:
        if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            return tuple(value)
    elif origin is not None:
        if isinstance(value, Mapping):
            return value
    elif hint is type(None):
        if value is None:
            return None
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and _fits(value):
            return float(value)
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            if not -(2**63) <= value < 2**63:
                raise ConfigError(f"{path}: got {shown(value)}, expected an integer that 64 bits hold")
            return value
    elif isinstance(value, hint):
        return value
    raise ConfigError(f"{path}: got {shown(value)}, expected {_describe(hint)}")


def _fits(number: float) -> bool:
    """Whether a float can be ``number``."""
    return abs(number) < 10**308 if isinstance(number, int) else not math.isnan(number)


def _describe(hint: Any) -> str:
    """A type in words: ``an integer or None``."""
    words = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "None"}
    if hint in words:
        return words[hint]
    if typing.get_origin(hint) is tuple:
        return "a list of strings"
    if isinstance(hint, type):
        return f"a {hint.__module__}.{hint.__name__}"
    if typing.get_origin(hint) is Mapping:
        return "a table"
    if typing.get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(hint))
    return " or ".join(_describe(choice) for choice in typing.get_args(hint))
