"""What is computed in which dtype: one frozen :class:`Precision` a mode, one row of :data:`PRESETS` each.

A mode is data. The engine never asks which mode it runs; it asks a row what the weights are stored in, whether
autocast is on, whether fp32 masters exist and how the loss is scaled. A new mode is a new row.

=============  =======  ==================  =======  ========================
mode           weights  compute             masters  loss scaling
=============  =======  ==================  =======  ========================
32-true        fp32     fp32                no       none
16-mixed       fp32     autocast to fp16    no       dynamic
bf16-mixed     fp32     autocast to bf16    no       none
16-naive       fp16     fp16                fp32     dynamic, with hysteresis
bf16-naive     bf16     bf16                fp32     none
=============  =======  ==================  =======  ========================

"mixed" is torch AMP's scheme (Micikevicius et al., "Mixed Precision Training", 2018, with fp32 weights and
per-operation casts). "naive" is Megatron's and Colossal-AI's: the whole model in half precision, norms included,
and the optimizer stepping fp32 masters.
"""

from __future__ import annotations

import difflib
import enum
import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

__all__ = ["AMP_TYPE", "PRESETS", "ConfigError", "LossScaling", "Precision", "nearest"]


class ConfigError(ValueError):
    """The user asked for something impossible. The message names the value, what is allowed, and the fix."""


def nearest(word: object, known: Iterable[str]) -> str:
    """``" (did you mean 'tensor'?)"`` for the closest of ``known``, or an empty string when nothing is close."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


class AMP_TYPE(enum.Enum):
    """The three spellings of Colossal-AI's ``fp16=dict(mode=...)``."""

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """How the loss scale starts and moves; the arguments of :class:`paramp.DistributedGradScaler`."""

    init_scale: float = 2.0**16
    """The first scale. It adapts within a few steps, so only its order of magnitude matters."""
    growth_factor: float = 2.0
    """The scale is multiplied by this after ``growth_interval`` steps in a row without overflow."""
    backoff_factor: float = 0.5
    """The scale is multiplied by this on an overflow."""
    growth_interval: int = 2000
    hysteresis: int = 1
    """The scale backs off from this overflow on, counted since the last growth; earlier ones only skip the step."""
    min_scale: float | None = None
    max_scale: float | None = None
    enabled: bool = True
    """False: losses are not scaled. Non-finite gradients skip the step all the same."""

    def __post_init__(self) -> None:
        def require(condition: bool, name: str, allowed: str) -> None:
            if not condition:
                raise ConfigError(f"{name}: got {getattr(self, name)!r}, expected {allowed}")

        require(0 < self.init_scale < math.inf, "init_scale", "a finite number above 0")
        require(1 < self.growth_factor < math.inf, "growth_factor", "a finite number above 1")
        require(0 < self.backoff_factor < 1, "backoff_factor", "a number between 0 and 1")
        require(self.growth_interval >= 1, "growth_interval", "an integer of 1 or more")
        require(self.hysteresis >= 1, "hysteresis", "an integer of 1 or more")
        require(self.min_scale is None or self.min_scale > 0, "min_scale", "a number above 0, or None")
        floor = self.min_scale or 0.0
        require(self.max_scale is None or self.max_scale >= floor, "max_scale", "a number of at least min_scale")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """One mode of precision.

    Build one with :meth:`parse`; vary one with :func:`dataclasses.replace`.
    """

    name: str
    weights: torch.dtype
    """What parameters and floating-point buffers are stored in on the device."""
    compute: torch.dtype
    """What matrix products run in, and what activations travel in between pipeline stages."""
    autocast: bool = False
    """Weights stay in ``weights`` and each operation casts to ``compute`` (``torch.autocast``)."""
    masters: bool = False
    """The optimizer steps fp32 copies of the weights."""
    scaling: LossScaling | None = None
    """None: gradients of this compute dtype do not underflow, so the loss is not scaled."""
    log_num_zeros: bool = False
    """Count the zeros in the gradients at every step (underflow shows there first)."""
    verbose: bool = field(default=False, compare=False)
    """Log every change of the loss scale."""

    @staticmethod
    def parse(value: Precision | str | int | AMP_TYPE | Mapping[str, Any]) -> Precision:
        """The mode called ``value``: a name or alias of API.md's table, or a Colossal-AI ``fp16`` dict.

        Raises:
            ConfigError: an unknown name, or an option that the dict's mode does not have.
        """
        if isinstance(value, Precision):
            return value
        if isinstance(value, Mapping):
            return _parse_colossalai(value)
        key = ALIASES.get(value, value) if isinstance(value, (str, int, AMP_TYPE)) else value
        if isinstance(key, str) and key in PRESETS:
            return PRESETS[key]
        known = [*PRESETS, *(alias for alias in ALIASES if isinstance(alias, str))]
        raise ConfigError(f"precision: got {value!r}, expected one of {', '.join(known)}{nearest(value, known)}")

    @property
    def reduced(self) -> bool:
        """Whether anything is computed below fp32."""
        return self.compute.itemsize < 4

    def autocast_context(self, device_type: str) -> AbstractContextManager[Any]:
        """``torch.autocast`` for this mode; a no-op where weights already have the compute dtype."""
        return torch.autocast(device_type, dtype=self.compute) if self.autocast else nullcontext()


PRESETS: dict[str, Precision] = {
    row.name: row
    for row in (
        Precision(name="32-true", weights=torch.float32, compute=torch.float32),
        Precision(
            name="16-mixed",
            weights=torch.float32,
            compute=torch.float16,
            autocast=True,
            scaling=LossScaling(),
        ),
        Precision(name="bf16-mixed", weights=torch.float32, compute=torch.bfloat16, autocast=True),
        Precision(
            name="16-naive",
            weights=torch.float16,
            compute=torch.float16,
            masters=True,
            scaling=LossScaling(growth_interval=1000, hysteresis=2, min_scale=1.0, max_scale=2.0**32),
        ),
        Precision(name="bf16-naive", weights=torch.bfloat16, compute=torch.bfloat16, masters=True),
    )
}

ALIASES: dict[str | int | AMP_TYPE, str] = {
    32: "32-true",
    "32": "32-true",
    "fp32": "32-true",
    "O0": "32-true",
    16: "16-mixed",
    "16": "16-mixed",
    "amp": "16-mixed",
    "amp_fp16": "16-mixed",
    "O1": "16-mixed",
    AMP_TYPE.TORCH: "16-mixed",
    "bf16": "bf16-mixed",
    "amp_bf16": "bf16-mixed",
    AMP_TYPE.NAIVE: "16-naive",
}


@dataclass(frozen=True, kw_only=True)
class _ColossalaiMode:
    """One mode of Colossal-AI's ``fp16`` dict: the preset it starts from and the options it takes."""

    preset: Precision
    scaling_options: Mapping[str, str]
    """The document's name of an option -> the field of :class:`LossScaling`."""
    precision_options: Mapping[str, str] = field(default_factory=dict)
    """The document's name of an option -> the field of :class:`Precision`."""


_COLOSSALAI: dict[AMP_TYPE, _ColossalaiMode] = {
    AMP_TYPE.TORCH: _ColossalaiMode(
        preset=PRESETS["16-mixed"],
        scaling_options={
            name: name for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
        },
    ),
    AMP_TYPE.NAIVE: _ColossalaiMode(
        # The document's scale starts at 2**32; it reaches a usable value after about a dozen skipped steps.
        preset=replace(
            PRESETS["16-naive"], scaling=replace(PRESETS["16-naive"].scaling or LossScaling(), init_scale=2.0**32)
        ),
        scaling_options={"initial_scale": "init_scale"}
        | {
            name: name
            for name in ("min_scale", "max_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis")
        },
        precision_options={"log_num_zeros_in_grad": "log_num_zeros", "verbose": "verbose"},
    ),
}


def _parse_colossalai(options: Mapping[str, Any]) -> Precision:
    """``fp16=dict(mode=AMP_TYPE.NAIVE, initial_scale=...)`` as the Colossal-AI document writes it."""
    given = dict(options)
    mode = given.pop("mode", None)
    if isinstance(mode, str):  # a TOML file has no enums
        mode = {kind.value: kind for kind in AMP_TYPE}.get(mode.lower().removeprefix("amp_type."), mode)
    if not isinstance(mode, AMP_TYPE) or mode not in _COLOSSALAI:
        allowed = ", ".join(f"AMP_TYPE.{kind.name}" for kind in _COLOSSALAI)
        raise ConfigError(f"fp16.mode: got {mode!r}, expected one of {allowed}")
    row = _COLOSSALAI[mode]
    scaling: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    known = [*row.scaling_options, *row.precision_options]
    for name, value in given.items():
        if name not in known:
            raise ConfigError(
                f"fp16.{name}: no such option of AMP_TYPE.{mode.name}, expected one of "
                f"{', '.join(known)}{nearest(name, known)}"
            )
        boolean = name == "enabled" or name in row.precision_options
        if boolean and not isinstance(value, bool):
            raise ConfigError(f"fp16.{name}: got {value!r}, expected True or False")
        whole = name in ("growth_interval", "hysteresis")
        if not boolean and (isinstance(value, bool) or not isinstance(value, int if whole else (int, float))):
            raise ConfigError(f"fp16.{name}: got {value!r}, expected {'an integer' if whole else 'a number'}")
        if name in row.precision_options:
            changes[row.precision_options[name]] = value
        else:
            scaling[row.scaling_options[name]] = value
    try:
        scaled = replace(row.preset.scaling or LossScaling(), **scaling)
    except ConfigError as error:
        raise ConfigError(f"fp16.{error}") from None
    return replace(row.preset, scaling=scaled, **changes)
