"""Configurations from files and dicts."""

import dataclasses
import difflib
import importlib
import runpy
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch

from ..base.errors import ConfigError, one_line, shown
from ..base.values_checked_by_type import build, is_integer, keys, user_path
from ..precision.modes import FOREIGN_NAMES, Precision
from .schema import Config

ADVICE = "paramp.compat.key_advice"
"""The module of what to write in place of other libraries' keys, imported for an error."""
SCRIPT_TABLES = ("train", "model")
"""Tables in files of ``launch/train.py``, which takes them out before it makes a :class:`Config`."""


def load(source: Config | Mapping[str, Any] | str | Path | None, overrides: Mapping[str, Any] | None = None) -> Config:
    """A :class:`Config` from a dict or a ``.toml`` or ``.py`` file; a Config is returned unchanged.

    ``overrides`` replace the values of ``source``, table by table.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or is not allowed.
        FileNotFoundError: the file does not exist.
    """
    if isinstance(source, Config):
        if overrides:
            raise ConfigError("overrides: a finished Config cannot be overridden; pass the dict it was made from")
        return source
    source = read_file(source) if isinstance(source, (str, Path)) else {} if source is None else source
    if not isinstance(source, Mapping):
        raise ConfigError(
            f"config: got {type(source).__name__}, expected a dict, a Config, or a path to a .toml or .py file"
        )
    tree = merge(source, overrides or {})
    for name in SCRIPT_TABLES:
        if name in tree:
            raise ConfigError(
                f"{name}: no key of the library, but a table of launch/train.py, which takes it out of its file; "
                "remove it here, or give the file to that script with --config"
            )
    if "user" in tree:
        raise ConfigError("user: no such key; write your own keys in capitals, at the top level")
    try:
        return _built(tree)
    except ConfigError as error:
        text = importlib.import_module(ADVICE).advised(str(error), tree, _built)
        raise ConfigError(text) from None


def _built(tree: Mapping[str, Any]) -> Config:
    if set(tree) <= {*keys(Config)}:
        return build(Config, tree, "")
    foreign = importlib.import_module(FOREIGN_NAMES)
    tree = foreign.translated(tree)
    user = {key: value for key, value in tree.items() if isinstance(key, str) and key.isupper()}
    settings = {key: value for key, value in tree.items() if key not in user} | ({"user": user} if user else {})
    return cast(Config, foreign.with_user_keys(build(Config, settings, "", also=foreign.KEYS)))


def read_file(path: str | Path) -> dict[str, Any]:
    """Read a ``.toml`` file, or a ``.py`` file: its dict ``CONFIG`` or ``config``, else its global names.

    Names in capitals beside such a dict are keys too; others are not, which a warning says of the names of keys.

    Raises:
        ConfigError: the file is not valid, or has another suffix.
        FileNotFoundError: the file does not exist.
    """
    path = user_path(path)
    if not path.is_file():
        raise FileNotFoundError(f"config: no file {shown(str(path))}")
    if path.suffix == ".toml":
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # also for very long numbers and deeply nested brackets
            raise ConfigError(f"config: {str(path)!r} is not valid TOML: {one_line(str(error))}") from None
    if path.suffix == ".py":
        try:
            names = runpy.run_path(str(path))
        except Exception as error:
            what = f"{type(error).__name__}: {one_line(str(error))}"
            raise ConfigError(f"config: {str(path)!r} does not run: {what}") from None
        for name in ("CONFIG", "config"):
            if isinstance(names.get(name), Config):
                raise ConfigError(f"config: {name} in {str(path)!r} is a Config, expected the dict it is made from")
        known = [*keys(Config), *importlib.import_module(FOREIGN_NAMES).KEYS]
        names = {
            key: value for key, value in names.items() if not key.startswith("_") and _is_setting(key, value, known)
        }
        for name in ("CONFIG", "config"):
            if isinstance(names.get(name), Mapping):
                tree = names.pop(name)
                for key in names:
                    if key in known and key not in tree:
                        meant = f"if it is meant as one, write it into {name}"
                        warnings.warn(f"{key}: is no key beside {name} in {str(path)!r}; {meant}", stacklevel=2)
                return {key: value for key, value in names.items() if key.isupper()} | tree
        return names
    raise ConfigError(f"config: {str(path)!r} ends in {path.suffix!r}, expected .toml or .py")


PLAIN = (Mapping, str, int, float, list, tuple, Precision)
"""Types of values of keys that a file has for nothing else."""
OF_SOME = (type(None), torch.dtype, torch.Tensor, np.generic)
"""Types of values that a key may be given, and that a file has for other things too."""
NEAR = 0.85
"""How much of a name is that of a key if it is one misspelt: a file may have a ``dtype`` beside ``grad_dtype``."""


def _is_setting(name: str, value: Any, known: Sequence[str]) -> bool:
    """Whether a global name of a ``.py`` file is meant as a key, and was not made or imported for something else.

    One with a value that only some keys have is if it is one of the ``known`` keys, or is close to one.
    """
    if isinstance(value, PLAIN):
        return True
    if name in known:
        is_helper = isinstance(value, ModuleType) or (callable(value) and not isinstance(value, type))  # torch.compile
        return not is_helper and getattr(value, "__name__", "") != name
    is_class = isinstance(value, type) and name.islower() and value.__name__ != name  # numpy.float16, not a helper
    is_table = dataclasses.is_dataclass(value) and not isinstance(value, type)  # EmaConfig(...)
    is_of_some = isinstance(value, OF_SOME) or is_table or is_class
    return is_of_some and bool(difflib.get_close_matches(name, known, n=1, cutoff=NEAR))


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``overrides``, table by table.

    The number of an axis that meets its table, or a table that meets its number, becomes a key in it: for ``data`` the
    number to ``replicate``, else the ``size``. So ``tensor=2`` and ``tensor.mode="1d"`` give both, in either order. A
    name for ``precision`` is the ``mode`` for a table that follows, and replaces one that it follows, whose other keys
    are of another mode.
    """
    result = _merged(base, overrides)
    if set(result) <= {*keys(Config)}:
        return result
    return cast(dict[str, Any], importlib.import_module(FOREIGN_NAMES).without_replaced(result, overrides))


SHORT = {"precision": "mode", "data": "replicate"}
"""The key that a value in place of a table is short for."""
AXES = ("tensor", "pipeline", "context", "data")
"""The tables of ``parallel``."""


def _merged(base: Mapping[str, Any], overrides: Mapping[str, Any], table: str = "") -> dict[str, Any]:
    """``table``: the key that has ``base``."""
    result = dict(base)
    for key, value in overrides.items():
        old = result.get(key)
        if (
            table == "parallel"
            and key in AXES
            and isinstance(old, Mapping)
            and (is_integer(value) or isinstance(value, str))
        ):
            value = {SHORT.get(key, "size"): value}
        if isinstance(value, Mapping):
            if is_integer(old) or (key == "precision" and isinstance(old, str)):
                old = {SHORT.get(key, "size"): old}
            value = _merged(old if isinstance(old, Mapping) else {}, value, key)
        result[key] = value
    return result
