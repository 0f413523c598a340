"""Configurations by name, and what all of them check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from numbers import Integral
from typing import Any, TypeVar

from ..base.errors import ConfigError, nearest

Config = TypeVar("Config")


def is_count(value: object) -> bool:
    """Whether ``value`` is an integer of 1 or more."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1


def check_counts(config: Any) -> None:
    """Check the fields of a configuration that are declared as ``int``, all of which count something.

    Raises:
        ConfigError: one is not an integer of 1 or more.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type in ("int", int) and not is_count(value):
            raise ConfigError(f"{field.name}: got {value!r}, expected an integer of 1 or more")


def choose(presets: Mapping[str, Config], name: str, **changes: object) -> Config:
    """The one of ``presets`` that is called ``name``, with ``changes`` in place of its fields.

    Raises:
        ConfigError: there is none, or it has no such field, or not with such a value.
    """
    if name not in presets:
        raise ConfigError(f"model: got {name!r}, expected one of {', '.join(presets)}{nearest(name, presets)}")
    preset: Any = presets[name]
    known = [field.name for field in fields(preset)]
    for change, value in changes.items():
        if change not in known:
            raise ConfigError(
                f"{change}: got {value!r}, but {type(preset).__name__} has no such field; expected one of "
                f"{', '.join(known)}{nearest(change, known)}"
            )
    changed: Config = replace(preset, **changes)
    return changed
