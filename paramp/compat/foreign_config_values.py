"""Other libraries' names of modes, options and configuration keys, as values of ours.

:mod:`paramp.precision.modes` and :mod:`paramp.config.files` know none of these names: they import this module
when they meet a value that is not theirs. Options of Colossal-AI's ``fp16`` dict and of Apex's levels become changes to
a row of the table of modes.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..base.errors import ConfigError, key_name, nearest, shown
from ..base.values_checked_by_type import convert, is_integer
from ..config.schema import Config
from ..precision.modes import PRESETS, Precision, as_dtype
from ..scaling.loss_scaling_options import LossScaling


class AMP_TYPE(enum.Enum):
    """The three modes of Colossal-AI's ``fp16=dict(mode=...)``."""

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"


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


def apex_properties(opt_level: str, overrides: Mapping[str, Any]) -> Properties:
    """The properties of ``opt_level``, overridden by those of :data:`_PARSERS` in ``overrides`` that are not None.

    Strings are accepted where Apex accepts them: ``"128.0"`` and ``"dynamic"``, ``"True"`` and ``"False"``.

    Raises:
        ConfigError: an unknown level, a value of the wrong type, or one that contradicts the level.
    """
    if not isinstance(opt_level, str) or opt_level not in OPT_LEVELS:
        raise ConfigError(
            f"opt_level: got {shown(opt_level)}, expected one of {', '.join(OPT_LEVELS)} (the letter O, not a zero)"
        )
    changes = {name: value for name, value in overrides.items() if value is not None}
    if changes.get("cast_model_type") is False:
        del changes["cast_model_type"]
    parsed = {name: parse(name, changes[name]) for name, parse in _PARSERS.items() if name in changes}
    _refuse_contradictions(opt_level, parsed)
    return replace(OPT_LEVELS[opt_level], **parsed)


def _refuse_contradictions(opt_level: str, parsed: Mapping[str, Any]) -> None:
    is_o1 = opt_level == "O1"
    for name, refused, reason in (
        (
            "cast_model_type",
            is_o1 and parsed.get("cast_model_type") is not torch.float32,
            "O1 casts the inputs of functions and keeps the weights in fp32; use O2 or O3",
        ),
        ("keep_batchnorm_fp32", is_o1, "under O1 batch norms always run in fp32; leave it out"),
        ("master_weights", is_o1, "under O1 the weights themselves are in fp32; leave it out"),
        (
            "patch_torch_functions",
            not is_o1 and parsed.get("patch_torch_functions"),
            "only O1 has it, with weights in fp32; use O1",
        ),
    ):
        if refused and name in parsed:
            raise ConfigError(f"{name}: got {shown(parsed[name])} with opt_level {opt_level!r}; {reason}")


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
) -> Precision:
    """The mode of Apex's arguments; ``overrides`` are those of :func:`apex_properties`, which raises ConfigError.

    ``num_losses`` and ``verbosity`` are only checked: an engine has one loss.
    """
    properties = apex_properties(opt_level, overrides)
    if not _as_bool("enabled", enabled):
        return PRESETS["32-true"]
    for name, value, least in (("num_losses", num_losses, 1), ("verbosity", verbosity, 0)):
        if not is_integer(value) or value < least:
            raise ConfigError(f"{name}: got {shown(value)}, expected an integer of {least} or more")
    weights = properties.cast_model_type or torch.float32
    row = PRESETS[ALIASES.get(opt_level, opt_level)]
    changes: dict[str, Any] = {
        "weights": weights,
        "compute": torch.float16 if properties.patch_torch_functions else weights,
        "autocast": properties.patch_torch_functions,
        "keep_batchnorm_fp32": bool(properties.keep_batchnorm_fp32),
        "masters": bool(properties.master_weights) and weights.itemsize < 4,
        "norms": torch.float32 if properties.patch_torch_functions else weights,
        "scaling": _apex_scaling(properties, row.scaling or LossScaling(), min_loss_scale, max_loss_scale),
    }
    if cast_model_outputs is not None:
        changes["outputs"] = as_dtype("cast_model_outputs", cast_model_outputs)
    return replace(row, **changes)


def _apex_scaling(
    properties: Properties, row: LossScaling, smallest: float | None, largest: float | None
) -> LossScaling | None:
    """The loss scaling, of which a dynamic scale is limited to ``smallest`` to ``largest``."""
    scale = properties.loss_scale
    if isinstance(scale, str):
        # Apex begins at the ceiling if that is below the usual initial scale.
        first = 2.0**16 if largest is None else min(2.0**16, convert(largest, float, "max_loss_scale"))
        least = convert(smallest, float | None, "min_loss_scale")
        return replace(row, init_scale=first, min_scale=least, max_scale=largest)
    if scale == 1.0 and properties.cast_model_type in (None, torch.float32):
        return None
    return replace(row, init_scale=scale, min_scale=scale, max_scale=scale)


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


_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "cast_model_type": as_dtype,
    **dict.fromkeys(("patch_torch_functions", "keep_batchnorm_fp32", "master_weights"), _as_bool),
    "loss_scale": _as_scale,
}

_SHARED = ("growth_factor", "backoff_factor", "growth_interval")
_SCALING = {
    AMP_TYPE.TORCH: {name: name for name in ("init_scale", *_SHARED, "enabled")},
    AMP_TYPE.NAIVE: {"initial_scale": "init_scale"}
    | {name: name for name in ("min_scale", "max_scale", *_SHARED, "hysteresis")},
    AMP_TYPE.APEX: {},
}
"""Colossal-AI's names of options of the loss scaling, and ours."""
_PRECISION = {"log_num_zeros_in_grad": "log_num_zeros", "verbose": "verbose"}
"""The same of the mode, for NAIVE."""
_OPTIONS = {
    AMP_TYPE.TORCH: [*_SCALING[AMP_TYPE.TORCH]],
    AMP_TYPE.NAIVE: [*_SCALING[AMP_TYPE.NAIVE], *_PRECISION],
    AMP_TYPE.APEX: [
        *("enabled", "opt_level", *_PARSERS, "cast_model_outputs", "num_losses", "verbosity"),
        *("min_loss_scale", "max_loss_scale"),
    ],
}


def colossalai_options(mode: AMP_TYPE, options: Mapping[str, Any]) -> Precision:
    """The mode of ``fp16=dict(mode=AMP_TYPE.NAIVE, initial_scale=...)``, as Colossal-AI documents it.

    Raises:
        ConfigError: an option that the mode does not have, or an invalid value.
    """
    for name in options:
        if name not in _OPTIONS[mode]:
            others = [f"AMP_TYPE.{other.name}" for other, names in _OPTIONS.items() if name in names]
            elsewhere = f" (it belongs to {' and '.join(others)})" if others else ""
            raise ConfigError(
                f"{key_name(name)}: no such option of AMP_TYPE.{mode.name}, expected one of "
                f"{', '.join(_OPTIONS[mode])}{elsewhere}{nearest(name, _OPTIONS[mode])}"
            )
    if mode is AMP_TYPE.APEX:
        return apex_options(**options)
    row, ours = PRESETS[ALIASES[mode]], _SCALING[mode]
    scaling = {ours[name]: _checked(name, value) for name, value in options.items() if name in ours}
    if mode is AMP_TYPE.NAIVE:
        # The documented initial scale is 2**32; it reaches a usable value after about a dozen skipped steps.
        scaling = {"init_scale": 2.0**32} | scaling
    precision: dict[str, Any] = {
        _PRECISION[name]: _as_bool(name, value) for name, value in options.items() if name in _PRECISION
    }
    return replace(row, scaling=replace(row.scaling or LossScaling(), **scaling), **precision)


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
    return colossalai_options(mode, options) if isinstance(mode, AMP_TYPE) else None


KEYS = ("fp16",)
"""Keys of a configuration that :func:`translated` replaces."""


def translated(tree: Mapping[str, Any]) -> dict[str, Any]:
    """``tree``, a configuration, with ``precision`` in place of Colossal-AI's key ``fp16``."""
    known = {key: value for key, value in tree.items() if key != "fp16"}
    if "fp16" in tree and "precision" in tree:
        raise ConfigError("fp16: given together with precision; keep one of the two")
    fp16 = tree.get("fp16")
    # dict(mode=None): nothing is in half precision.
    if fp16 is not None and not (isinstance(fp16, Mapping) and [*fp16] == ["mode"] and fp16["mode"] is None):
        try:
            known["precision"] = convert({"mode": fp16} if isinstance(fp16, AMP_TYPE) else fp16, Precision, "fp16")
        except ConfigError as error:
            raise ConfigError(re.sub("^precision: ", "fp16: ", str(error))) from None
    return known


def without_replaced(tree: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``tree``, into which ``overrides`` were merged, without ``fp16`` or ``precision`` if they give the other."""
    for key, other in (("precision", "fp16"), ("fp16", "precision")):
        if key in overrides and other not in overrides:  # two keys for one setting; both together are refused
            tree.pop(other, None)
    return tree


def with_user_keys(config: Config) -> Config:
    """``config`` with Colossal-AI's ``NUM_MICRO_BATCHES`` as that of its pipeline; without one it has no effect."""
    pipeline = config.parallel.pipeline
    if config.user.get("NUM_MICRO_BATCHES") is None:
        return config
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
