"""Other libraries' names of modes, options and configuration keys, as values of ours.

:mod:`paramp.precision.policy` and :mod:`paramp.config.files` know none of these names: they import this module
when they meet a value that is not theirs. Options of Colossal-AI's ``fp16`` dict and of Apex's levels become changes to
a row of the table of modes (:class:`ParsedOptions`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..base.coerce import convert
from ..base.errors import ConfigError, key_name, nearest, shown
from ..config.schema import Config
from ..precision.policy import PRESETS, Precision, as_dtype
from ..scaling.loss_scaling import LossScaling


class AMP_TYPE(enum.Enum):
    """The three modes of Colossal-AI's ``fp16=dict(mode=...)``."""

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"


@dataclass(frozen=True, kw_only=True)
class ParsedOptions:
    """A row of the table of modes, and the changes to it."""

    row: str
    precision: Mapping[str, Any] = field(default_factory=dict)
    """Fields of :class:`~paramp.precision.policy.Precision`."""
    scaling: Mapping[str, Any] | None = field(default_factory=dict)
    """Fields of its :class:`~paramp.precision.policy.LossScaling`; None: losses are not scaled."""


@dataclass(frozen=True)
class Properties:
    """The properties of an Apex level. None: the level does not set it."""

    cast_model_type: torch.dtype | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | str
    """A number, or ``"dynamic"``."""


OPT_LEVELS = {
    # model's dtype, functions patched, batch norms in fp32, masters, loss scale
    "O0": Properties(torch.float32, False, None, False, 1.0),
    "O1": Properties(None, True, None, None, "dynamic"),
    "O2": Properties(torch.float16, False, True, True, "dynamic"),
    "O3": Properties(torch.float16, False, False, False, 1.0),
}
"""Apex's table (its ``amp/frontend.py`` and documentation)."""

_ROWS = {"O0": "32-true", "O1": "16-mixed", "O2": "O2", "O3": "O3"}


def apex_properties(
    opt_level: str = "O1",
    *,
    cast_model_type: torch.dtype | str | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
) -> Properties:
    """The properties of ``opt_level``, overridden by the given ones.

    Strings are accepted where Apex accepts them: ``"128.0"`` and ``"dynamic"``, ``"True"`` and ``"False"``.

    Raises:
        ConfigError: an unknown level, a value of the wrong type, or one that contradicts the level.
    """
    if not isinstance(opt_level, str) or opt_level not in OPT_LEVELS:
        raise ConfigError(
            f"opt_level: got {shown(opt_level)}, expected one of {', '.join(OPT_LEVELS)} (the letter O, not a zero)"
        )
    options: dict[str, tuple[Any, Callable[[str, Any], Any]]] = {
        "cast_model_type": (None if cast_model_type is False else cast_model_type, as_dtype),
        "patch_torch_functions": (patch_torch_functions, _as_bool),
        "keep_batchnorm_fp32": (keep_batchnorm_fp32, _as_bool),
        "master_weights": (master_weights, _as_bool),
        "loss_scale": (loss_scale, _as_scale),
    }
    given = {name: parse(name, value) for name, (value, parse) in options.items() if value is not None}
    _refuse_contradictions(opt_level, given)
    return replace(OPT_LEVELS[opt_level], **given)


def _refuse_contradictions(opt_level: str, given: Mapping[str, Any]) -> None:
    def refuse(name: str, reason: str) -> None:
        raise ConfigError(f"{name}: got {shown(given[name])} with opt_level {opt_level!r}; {reason}")

    if opt_level == "O1":
        if given.get("cast_model_type", torch.float32) is not torch.float32:
            refuse("cast_model_type", "O1 casts the inputs of functions and keeps the weights in fp32; use O2 or O3")
        if "keep_batchnorm_fp32" in given:
            refuse("keep_batchnorm_fp32", "under O1 batch norms always run in fp32; leave it out")
        if "master_weights" in given:
            refuse("master_weights", "under O1 the weights themselves are in fp32; leave it out")
    elif given.get("patch_torch_functions"):
        refuse("patch_torch_functions", "only O1 has it, with weights in fp32; use O1")


def apex_options(
    opt_level: str = "O1",
    *,
    enabled: bool = True,
    cast_model_outputs: torch.dtype | str | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
    **overrides: Any,
) -> ParsedOptions:
    """Parse Apex's arguments; ``overrides`` are those of :func:`apex_properties`, which raises ConfigError.

    ``num_losses`` and ``verbosity`` are only checked: an engine has one loss.
    """
    properties = apex_properties(opt_level, **overrides)
    if not _as_bool("enabled", enabled):
        return ParsedOptions(row="32-true", scaling=None)
    for name, value, least in (("num_losses", num_losses, 1), ("verbosity", verbosity, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name}: got {shown(value)}, expected an integer of {least} or more")
    weights = properties.cast_model_type or torch.float32
    changes: dict[str, Any] = {
        "weights": weights,
        "compute": torch.float16 if properties.patch_torch_functions else weights,
        "autocast": properties.patch_torch_functions,
        "keep_batchnorm_fp32": bool(properties.keep_batchnorm_fp32),
        "masters": bool(properties.master_weights) and weights.itemsize < 4,
        "norms": torch.float32 if properties.patch_torch_functions else weights,
    }
    if cast_model_outputs is not None:
        changes["outputs"] = as_dtype("cast_model_outputs", cast_model_outputs)
    scaling = _apex_scaling(properties, min_loss_scale, max_loss_scale)
    return ParsedOptions(row=_ROWS[opt_level], precision=changes, scaling=scaling)


def _apex_scaling(properties: Properties, smallest: float | None, largest: float | None) -> dict[str, Any] | None:
    """The fields of the loss scaling; a dynamic scale is limited to ``smallest`` to ``largest``."""
    scale = properties.loss_scale
    if isinstance(scale, str):
        first = 2.0**16 if largest is None else min(2.0**16, convert(largest, float, "max_loss_scale"))
        least = convert(smallest, float | None, "min_loss_scale")
        return {"init_scale": first, "min_scale": least, "max_scale": largest}
    if scale == 1.0 and properties.cast_model_type in (None, torch.float32):
        return None
    return {"init_scale": scale, "min_scale": scale, "max_scale": scale}


def _as_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool) and value not in ("True", "False"):
        raise ConfigError(f"{name}: got {shown(value)}, expected True or False")
    return value in (True, "True")


def _as_scale(name: str, value: object) -> float | str:
    if value == "dynamic":
        return "dynamic"
    try:
        scale = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else 0.0
    except ValueError:
        scale = 0.0
    if not 0 < scale < float("inf"):
        raise ConfigError(f"{name}: got {shown(value)}, expected 'dynamic' or a finite number above 0")
    return scale


@dataclass(frozen=True, kw_only=True)
class _ColossalaiMode:
    """TORCH or NAIVE: its row of the table of modes, and its names for the fields of that row."""

    row: str
    scaling: Mapping[str, str]
    precision: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the loss scaling that differ from the row's."""


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_COLOSSALAI = {
    AMP_TYPE.TORCH: _ColossalaiMode(
        row="16-mixed", scaling=_same("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
    ),
    AMP_TYPE.NAIVE: _ColossalaiMode(
        row="16-naive",
        # The documented initial scale is 2**32; it reaches a usable value after about a dozen skipped steps.
        defaults={"init_scale": 2.0**32},
        scaling={"initial_scale": "init_scale"}
        | _same("min_scale", "max_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis"),
        precision={"log_num_zeros_in_grad": "log_num_zeros", "verbose": "verbose"},
    ),
}

_OPTIONS = {mode: [*row.scaling, *row.precision] for mode, row in _COLOSSALAI.items()} | {
    AMP_TYPE.APEX: [
        *("enabled", "opt_level", "cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32"),
        *("master_weights", "loss_scale", "cast_model_outputs", "num_losses", "verbosity"),
        *("min_loss_scale", "max_loss_scale"),
    ]
}


def colossalai_options(mode: AMP_TYPE, given: Mapping[str, Any]) -> ParsedOptions:
    """Parse ``fp16=dict(mode=AMP_TYPE.NAIVE, initial_scale=...)``, as Colossal-AI documents it.

    Raises:
        ConfigError: an option that the mode does not have, or an invalid value.
    """
    for name in given:
        if name not in _OPTIONS[mode]:
            others = [f"AMP_TYPE.{other.name}" for other, names in _OPTIONS.items() if name in names]
            elsewhere = f" (it belongs to {' and '.join(others)})" if others else ""
            raise ConfigError(
                f"{key_name(name)}: no such option of AMP_TYPE.{mode.name}, expected one of "
                f"{', '.join(_OPTIONS[mode])}{elsewhere}{nearest(name, _OPTIONS[mode])}"
            )
    if mode is AMP_TYPE.APEX:
        return apex_options(**given)
    row = _COLOSSALAI[mode]
    scaling = {row.scaling[name]: _checked(name, value) for name, value in given.items() if name in row.scaling}
    precision = {row.precision[name]: _as_bool(name, value) for name, value in given.items() if name in row.precision}
    return ParsedOptions(row=row.row, precision=precision, scaling={**row.defaults, **scaling})


def _checked(name: str, value: Any) -> Any:
    """``value``, after a check that it has the type of the loss scaling's option ``name``."""
    types = {"growth_interval": int, "hysteresis": int, "max_scale": float | None}
    return _as_bool(name, value) if name == "enabled" else convert(value, types.get(name, float), name)


ALIASES: dict[str | AMP_TYPE, str] = {
    **dict.fromkeys(("O1", "amp", "amp_fp16", AMP_TYPE.TORCH), "16-mixed"),
    "O0": "32-true",
    "amp_bf16": "bf16-mixed",
    AMP_TYPE.NAIVE: "16-naive",
    "amp_fp8": "fp8-mixed",
}
"""Apex's, Composer's and Colossal-AI's names of modes."""
MODES = ", ".join(f"AMP_TYPE.{kind.name}" for kind in AMP_TYPE)
"""What an ``fp16`` dict may have as its mode, for an error."""


def precision_of(value: object) -> Precision | None:
    """The mode that ``value`` names; None if it is no name of these libraries."""
    if value is AMP_TYPE.APEX:
        return precision_with(value, {})  # at its default level
    return PRESETS[ALIASES[value]] if isinstance(value, (str, AMP_TYPE)) and value in ALIASES else None


def precision_with(mode: object, options: Mapping[str, Any]) -> Precision | None:
    """The mode of ``fp16=dict(mode=..., **options)``; None if ``mode`` is no ``AMP_TYPE``, nor the name of one."""
    if isinstance(mode, str):  # a TOML file has no enums
        mode = {kind.value: kind for kind in AMP_TYPE}.get(mode.lower().removeprefix("amp_type."), mode)
    if not isinstance(mode, AMP_TYPE):
        return None
    parsed = colossalai_options(mode, options)
    row = PRESETS[parsed.row]
    scaling = None if parsed.scaling is None else replace(row.scaling or LossScaling(), **parsed.scaling)
    return replace(row, scaling=scaling, **parsed.precision)


def without_fp16(tree: Mapping[str, Any]) -> dict[str, Any]:
    """``tree``, a configuration with Colossal-AI's key ``fp16``, with ``precision`` in its place."""
    if "precision" in tree:
        raise ConfigError("fp16: given together with precision; keep one of the two")
    known = {key: value for key, value in tree.items() if key != "fp16"}
    fp16 = tree["fp16"]
    # dict(mode=None): nothing is in half precision.
    if fp16 is not None and not (isinstance(fp16, Mapping) and [*fp16] == ["mode"] and fp16["mode"] is None):
        known["precision"] = convert({"mode": fp16} if isinstance(fp16, AMP_TYPE) else fp16, Precision, "fp16")
    return known


def with_microbatches(config: Config) -> Config:
    """``config`` with Colossal-AI's ``NUM_MICRO_BATCHES`` as that of its pipeline; without one it has no effect."""
    pipeline = config.parallel.pipeline
    count = convert(config.user["NUM_MICRO_BATCHES"], int, "NUM_MICRO_BATCHES")
    if pipeline.size == 1:
        return config
    if pipeline.microbatches not in (None, count):
        raise ConfigError(
            f"NUM_MICRO_BATCHES: got {count}, but parallel.pipeline.microbatches is {pipeline.microbatches}; "
            "remove one of the two"
        )
    try:
        pipeline = replace(pipeline, microbatches=count)
    except ConfigError as error:
        raise ConfigError(f"NUM_MICRO_BATCHES: {error}") from None
    return replace(config, parallel=replace(config.parallel, pipeline=pipeline))
