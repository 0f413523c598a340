"""The layout on the command line of ``paramp run``, which its ranks read when they launch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, shown
from ..base.values_checked_by_type import build
from .files import load, merge, read_file
from .layout import DataConfig, ParallelConfig
from .schema import Config

VARIABLE = "PARAMP_LAYOUT"
"""A JSON object of keys and values, such as ``{"parallel.tensor.size": 2, "parallel.pipeline.size": 2}``."""


def load_in_layout(source: Config | Mapping[str, Any] | str | Path | None) -> Config:
    """:func:`~paramp.config.files.load`, with the settings in :data:`VARIABLE` where ``source`` leaves the default.

    Raises:
        ConfigError: also if ``source`` sets one of them to another value.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return load(source)
    asked = _asked(text)
    if isinstance(source, Config):
        tree = _with({"parallel": asdict(source.parallel)}, asked)
        return replace(source, parallel=build(ParallelConfig, tree["parallel"], "parallel"))
    given = read_file(source) if isinstance(source, (str, Path)) else {} if source is None else source
    return load(_with(given, asked) if isinstance(given, Mapping) else given)


def _asked(text: str) -> dict[str, Any]:
    try:
        asked = json.loads(text)
    except ValueError:
        asked = None
    if not isinstance(asked, dict) or not all(key.startswith("parallel.") for key in asked):
        example = '{"parallel.tensor.size": 2}'
        raise ConfigError(f"{VARIABLE}: got {shown(text)}, expected a JSON object such as {example}; unset it")
    return asked


def _with(tree: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """``tree`` with the settings ``asked`` for; a ConfigError if it says otherwise."""
    result, defaults = dict(tree), {"parallel": asdict(ParallelConfig(data=DataConfig()))}
    for key, value in asked.items():
        before = _value(result, key)
        if before not in (None, _value(defaults, key), value):
            raise ConfigError(
                f"{key}: got {shown(before)} in the configuration, and {shown(value)} on the command line of paramp "
                f"run ({VARIABLE}); leave one of them out"
            )
        for name in reversed(key.split(".")):
            value = {name: value}
        result = merge(result, value)
    return result


def _value(tree: Any, key: str) -> Any:
    """The value of ``key`` in a configuration; None if it is not set. A number stands for the size of its table."""
    for name in key.split("."):
        if isinstance(tree, Mapping):
            tree = tree.get(name)
        elif name not in ("size", "replicate"):
            return None
    return tree
