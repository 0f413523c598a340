"""Values as users write them: paths; dataclasses from plain mappings, each value checked against its field's type."""

import dataclasses
import math
import os
import types
import typing
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar

from .errors import ConfigError, key_name, nearest, shown

T = TypeVar("T")
UNLISTED = {"unlisted": True}
"""The metadata of a field that is no key."""


def user_path(path: str | os.PathLike[str]) -> Path:
    """``path``, with the home folder in place of a leading ``~`` or ``~name``, as a shell would have it.

    A home folder that is not known leaves the path as it is.
    """
    return Path(os.path.expanduser(path))


def keys(cls: type, *, unlisted: bool = True) -> list[str]:
    """The names of the fields of a dataclass; with ``unlisted`` also of those that are no keys."""
    return [item.name for item in dataclasses.fields(cls) if unlisted or item.metadata != UNLISTED]


def build(cls: type[T], tree: Mapping[str, Any], path: str, *, also: Sequence[str] = ()) -> T:
    """Build ``cls`` from ``tree``; every value is checked against the type of its field.

    Messages begin with ``path``, the key of ``tree`` in the configuration. They list the keys ``also`` as allowed too.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type, or ``cls`` itself raises.
    """
    hints, known = typing.get_type_hints(cls), keys(cls)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        where = f"{path}.{key_name(key)}" if path else key_name(key)
        if key not in known:
            allowed = [*keys(cls, unlisted=False), *also]
            raise ConfigError(f"{where}: no such key, expected one of {', '.join(allowed)}{nearest(key, allowed)}")
        values[key] = convert(value, hints[key], where)
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}.{error}" if path else str(error)) from None


def convert(value: Any, hint: Any, path: str) -> Any:
    """Convert ``value`` to the type ``hint`` without loss, such as an int to a float or a list to a tuple.

    A class with a ``parse`` method is converted by that method.

    Raises:
        ConfigError: ``value`` has another type. The message begins with ``path``, its key in the configuration.
    """
    if isinstance(hint, type) and hasattr(hint, "parse"):
        try:
            return hint.parse(value)
        except ConfigError as error:
            raise ConfigError(f"{path}.{error}" if isinstance(value, Mapping) else str(error)) from None
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _convert_to_dataclass(value, hint, path)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        choices = typing.get_args(hint)
        if value is None and type(None) in choices:
            return None
        tables = [choice for choice in choices if dataclasses.is_dataclass(choice)]
        if isinstance(value, Mapping) and tables:
            return convert(value, tables[0], path)  # the error names the key in it
        for choice in choices:
            try:
                return convert(value, choice, path)
            except ConfigError:
                continue
    elif _matches(value, hint):
        converter = {int: int, float: float, tuple: tuple}.get(typing.get_origin(hint) or hint)
        return value if converter is None else converter(value)
    elif hint is int and is_integer(value):
        raise ConfigError(f"{path}: got {shown(value)}, expected a signed 64-bit integer")
    raise ConfigError(f"{path}: got {shown(value)}, expected {_describe(hint)}")


def _convert_to_dataclass(value: Any, cls: type, path: str) -> Any:
    if isinstance(value, cls):
        return value
    if value is None:
        value = {}  # a table that is left out, as in Colossal-AI's pipeline=None
    if is_integer(value) and "size" in keys(cls):
        value = {"size": value}  # tensor=2 is short for tensor=dict(size=2)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: got {shown(value)}, expected {_describe(cls)}")
    return build(cls, value, path)


def _matches(value: Any, hint: Any) -> bool:
    """Whether ``value`` has the type ``hint`` (not a union), or converts to it without loss."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in typing.get_args(hint))
    if origin is tuple:
        return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
    if origin is not None:
        return isinstance(value, Mapping)
    if hint is float:
        return not isinstance(value, bool) and isinstance(value, Real) and _fits(value)
    if hint is int:
        return is_integer(value) and -(2**63) <= value < 2**63
    return isinstance(value, hint)


def is_integer(value: Any) -> bool:
    """Whether ``value`` is an integer, which one of numpy's is too; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _fits(number: Real) -> bool:
    """Whether ``number`` is in the range of float64 and not NaN."""
    try:
        return not math.isnan(number)
    except OverflowError:
        return False


def _describe(hint: Any) -> str:
    """A type for a message: ``an integer or None``."""
    words = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "None"}
    if hint in words:
        return words[hint]
    if typing.get_origin(hint) is tuple:
        return "a list of strings"
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return f"a table with {', '.join(keys(hint))}"
    if isinstance(hint, type):
        return f"a {hint.__module__}.{hint.__name__}"
    if typing.get_origin(hint) is Mapping:
        return "a table"
    if typing.get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(hint))
    return " or ".join(_describe(choice) for choice in typing.get_args(hint))
