"""The table of precision modes, :data:`PRESETS`: each mode is a row, a frozen :class:`Precision`.

A mode is data. The engine never checks which mode it runs; it reads from the row the dtype of the weights, whether
autocast is on, whether fp32 masters exist and how the loss is scaled. A new mode is a new row.

"mixed" is torch AMP's scheme (Micikevicius et al., "Mixed Precision Training", 2018, with fp32 weights and
per-operation casts). "naive" is the scheme of Megatron and Colossal-AI: the whole model in half precision, norms
included, and the optimizer steps fp32 masters. O2 and O3 are Apex's levels, "true" and "transformer-engine" Lightning
Fabric's names. In every mode a gradient that is not finite skips the step.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias, cast, get_type_hints

import torch

from ..base.errors import ConfigError, key_name, nearest, require, shown
from ..base.values_checked_by_type import convert
from ..scaling.loss_scaling_options import LossScaling

FOREIGN_NAMES = "paramp.compat.foreign_config_values"
"""The module of other libraries' names, imported for a value that is none of ours."""


@dataclass(frozen=True, kw_only=True)
class Float8:
    """The linear layers that compute in float8, and the scaling of operands
    (:mod:`paramp.precision.float8_conversion`)."""

    recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    """One scale for each tensor, or one for each row of it (more exact, and slower)."""
    modules: tuple[str, ...] = ("**",)
    """Globs over module names, ``*`` for one part between dots and ``**`` for any number: matching Linear layers of a
    size that the hardware supports are converted."""
    skip: tuple[str, ...] = ("**.head", "**.lm_head", "**.output", "**.fc", "**.classifier")
    """Globs over names of modules that are not converted, even if ``modules`` matches. By default the output layer by
    its usual names: it is the most sensitive to rounding, because the loss is computed from its logits."""
    transformer_engine: bool = False
    """Use Transformer Engine's linear layers and norms if it is installed, else torchao's linear layers."""
    te_recipe: Mapping[str, Any] | None = None
    """Arguments of Transformer Engine's ``DelayedScaling``, such as ``fp8_format="HYBRID"``. None: its defaults."""


@dataclass(frozen=True, kw_only=True)
class ReduceDtypes:
    """The dtypes in which gradients are summed over ranks, for each axis of the mesh. None: the gradients' own."""

    dp: torch.dtype | None = None
    tp: torch.dtype | None = None
    """For partial sums over tensor ranks, such as those of norms under sequence parallelism."""
    pp: torch.dtype | None = None
    """For sums over pipeline ranks, of tied parameters."""

    @staticmethod
    def parse(value: Any) -> ReduceDtypes:
        """Parse one dtype for all axes, or a mapping of axes to dtypes. Raises ConfigError for other values."""
        if isinstance(value, ReduceDtypes):
            return value
        axes = [item.name for item in fields(ReduceDtypes)]
        given = value if isinstance(value, Mapping) else dict.fromkeys(axes, value)
        for axis in given:
            if axis not in axes:
                raise ConfigError(
                    f"reduce_dtype.{key_name(axis)}: no such axis, expected one of {', '.join(axes)}"
                    f"{nearest(axis, axes)}"
                )
        wanted = {axis: dtype for axis, dtype in given.items() if dtype is not None}
        return ReduceDtypes(**{axis: as_dtype(f"reduce_dtype.{axis}", dtype) for axis, dtype in wanted.items()})


STORAGE = ("masters", "grad_dtype", "reduce_dtype", "rounding", "optimizer_state")
"""The options of every mode: :meth:`Precision.storing`."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """One mode of precision. Build one with :meth:`parse`; vary one with :func:`dataclasses.replace`."""

    name: str
    weights: torch.dtype
    """The dtype of parameters and floating-point buffers on the device."""
    compute: torch.dtype
    """The dtype of matrix products, and of activations sent between pipeline stages."""
    autocast: bool = False
    """Weights stay in ``weights`` and each operation casts to ``compute`` (``torch.autocast``)."""
    norms: torch.dtype
    """The input and output dtype of norms, softmax, and the sums and exponentials that autocast on CUDA widens; the
    same on the CPU and on CUDA. (Statistics inside a norm are always in fp32 at least.) Without autocast it has to be
    ``compute``."""
    keep_batchnorm_fp32: bool = False
    """Batch norms keep their weights and statistics in fp32, whatever the dtype of the other weights."""
    outputs: torch.dtype | None = None
    """The dtype to which the model's floating-point output is cast. None: fp32, or fp64 if it is fp64."""
    default_dtype: bool = False
    """Tensors that the forward makes without a dtype get the dtype of the weights, as in Fabric's "true" modes."""
    float8: Float8 | None = None
    """The linear layers whose products run in float8; other operations run in ``compute``."""
    masters: bool | Literal["remainder"] = False
    """The optimizer steps fp32 copies of the weights. With ``"remainder"`` not the copies are stored, but the 16 bits
    by which each differs from its half-precision weight (:mod:`paramp.optim.remainder_masters`)."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How stepped half-precision weights without masters are rounded (:mod:`paramp.precision.stochastic_rounding`)."""
    optimizer_state: Literal["full", "bf16"] = "full"
    """How optimizer state with one value per element of its weight is stored between steps: in the dtype of what is
    stepped; or in bfloat16, rounded stochastically (:mod:`paramp.precision.stochastic_rounding`)."""
    grad_dtype: torch.dtype | None = None
    """The dtype in which gradients are accumulated over microbatches. None: the weights' dtype."""
    reduce_dtypes: ReduceDtypes = field(default_factory=lambda: ReduceDtypes())
    scaling: LossScaling | None = None
    """None: gradients of this compute dtype do not underflow, so the loss is not scaled."""
    log_num_zeros: bool = False
    """Count the zeros in the gradients at every step, the first sign of underflow."""
    verbose: bool = field(default=False, compare=False)
    """Log every change of the loss scale."""

    def __post_init__(self) -> None:
        if not self.autocast and self.norms is not self.compute:
            raise ConfigError(f"norms: got {self.norms}, expected {self.compute}, as the mode has no autocast")
        require(self.rounding in ("nearest", "stochastic"), "rounding", self.rounding, "'nearest' or 'stochastic'")
        if self.rounding == "stochastic":
            kept = "because the mode steps fp32 or fp64 values; bf16-true, 16-true and O3 step half-precision weights"
            steps_half = self.weights.itemsize < 4 and not self.masters
            require(steps_half, "rounding", self.rounding, f"'nearest', {kept} (this is {self.name})")
        state, allowed = self.optimizer_state, "'full' or 'bf16'"
        require(state in ("full", "bf16"), "optimizer_state", state, allowed)
        fits = state == "full" or self.weights.itemsize <= 4
        require(fits, "optimizer_state", state, f"'full', because {self.name} steps fp64 values")

    def storing(
        self,
        masters: str | None = None,
        grad_dtype: Any = None,
        reduce_dtype: Any = None,
        rounding: str | None = None,
        optimizer_state: str | None = None,
    ) -> Precision:
        """This mode with other masters, gradients, reductions, rounding or optimizer state; None: unchanged.

        Args:
            masters: ``"full"``, in modes that have masters, or ``"remainder"``, which only these take.
            grad_dtype: the weights' dtype, or float32 to accumulate microbatches in.
            reduce_dtype: a dtype, or a mapping of the axes ``dp``, ``tp`` and ``pp`` to dtypes.
            rounding: ``"nearest"``; or ``"stochastic"``, in modes that step half-precision weights without masters.
            optimizer_state: ``"full"``; or ``"bf16"``, in all modes but 64-true.

        Raises:
            ConfigError: the mode does not support it.
        """
        changes: dict[str, Any] = {"rounding": rounding, "optimizer_state": optimizer_state}
        if masters is not None:
            require(masters in ("full", "remainder"), "masters", masters, "'full' or 'remainder'")
            allowed = "'full', because the mode has no masters; 16-naive, bf16-naive and O2 have"
            is_default = masters == "full"
            require(is_default or bool(self.masters), "masters", masters, f"{allowed} (this is {self.name})")
            changes["masters"] = bool(self.masters) if is_default else masters
        if grad_dtype is not None:
            dtype, half = as_dtype("grad_dtype", grad_dtype), self.weights.itemsize < 4
            allowed = f"{self.weights} or torch.float32" if half else f"{self.weights}"
            require(dtype is self.weights or (dtype is FP32 and half), "grad_dtype", grad_dtype, allowed)
            changes["grad_dtype"] = dtype
        if reduce_dtype is not None:
            changes["reduce_dtypes"] = ReduceDtypes.parse(reduce_dtype)
        changes = {name: value for name, value in changes.items() if value is not None}
        return replace(self, **changes) if changes else self

    @property
    def as_sharded(self) -> Precision:
        """How FSDP2's sharded parameters are stored and stepped: where the mode has masters, as fp32 masters."""
        return replace(self, weights=FP32, masters=False) if self.masters else self

    @staticmethod
    def parse(value: Mode) -> Precision:
        """The mode for ``value``: a name or alias, or a mapping of a ``mode`` and options.

        ``"fp16"`` and ``torch.float16`` are ``16-mixed``, ``"bfloat16"`` and ``torch.bfloat16`` ``bf16-mixed``; other
        libraries' names are those of :mod:`paramp.compat.foreign_config_values`.

        The options in ``{"mode": "16-mixed", "init_scale": 1024.0}`` are the fields of the mode's :class:`LossScaling`
        and :class:`Float8`, and the arguments of :meth:`storing`. With an ``AMP_TYPE`` as the mode, they are those of
        Colossal-AI's ``fp16`` dict.

        Raises:
            ConfigError: an unknown name, or an option that the dict's mode does not have.
        """
        if isinstance(value, Precision):
            return value
        if isinstance(value, Mapping):
            return _parse_options(value)
        key = ALIASES.get(value, value) if isinstance(value, (str, int, torch.dtype)) else value
        if isinstance(key, str) and key in PRESETS:
            return PRESETS[key]
        foreign_config_values = importlib.import_module(FOREIGN_NAMES)
        if (mode := foreign_config_values.precision_of(value)) is not None:
            return cast(Precision, mode)
        known = [*PRESETS, *(alias for alias in (*ALIASES, *foreign_config_values.ALIASES) if isinstance(alias, str))]
        raise ConfigError(f"precision: got {shown(value)}, expected one of {', '.join(known)}{nearest(value, known)}")


Mode: TypeAlias = Precision | str | int | torch.dtype | enum.Enum | Mapping[str, Any]
"""What :meth:`Precision.parse` accepts."""


def _row(name: str, weights: torch.dtype, compute: torch.dtype, **changes: Any) -> Precision:
    """A row; with autocast if ``compute`` differs from ``weights``.

    Under autocast norms and softmax compute in fp32, otherwise in ``compute``.
    """
    autocast = weights is not compute
    norms = torch.float32 if autocast else compute
    return Precision(name=name, weights=weights, compute=compute, autocast=autocast, norms=norms, **changes)


FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

_NAIVE_SCALING = LossScaling(growth_interval=1000, hysteresis=2, min_scale=1.0, max_scale=2.0**32)
_ENGINE = Float8(transformer_engine=True)

PRESETS: dict[str, Precision] = {
    row.name: row
    for row in (
        _row("32-true", FP32, FP32),
        _row("64-true", FP64, FP64, default_dtype=True),
        _row("16-mixed", FP32, FP16, scaling=LossScaling()),
        _row("bf16-mixed", FP32, BF16),
        _row("16-naive", FP16, FP16, masters=True, scaling=_NAIVE_SCALING),
        _row("bf16-naive", BF16, BF16, masters=True),
        _row("O2", FP16, FP16, keep_batchnorm_fp32=True, masters=True, scaling=LossScaling(max_scale=2.0**24)),
        _row("O3", FP16, FP16, scaling=LossScaling.static(1.0)),
        _row("16-true", FP16, FP16, default_dtype=True),
        _row("bf16-true", BF16, BF16, default_dtype=True),
        _row("fp8-mixed", FP32, BF16, float8=Float8()),
        _row("transformer-engine", BF16, BF16, default_dtype=True, float8=_ENGINE),
        _row("transformer-engine-float16", FP16, FP16, default_dtype=True, float8=_ENGINE, scaling=LossScaling()),
    )
}

ALIASES: dict[str | int | torch.dtype, str] = {
    **dict.fromkeys((32, "32", "fp32", "float32", FP32), "32-true"),
    **dict.fromkeys((64, "64", "fp64", "float64", FP64), "64-true"),
    **dict.fromkeys((16, "16", "fp16", "float16", FP16), "16-mixed"),
    **dict.fromkeys(("bf16", "bfloat16", BF16), "bf16-mixed"),
}

_SHORT_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


def as_dtype(name: str, value: object) -> torch.dtype:
    """``value`` as a floating-point dtype; it may be a name: ``"float16"``, ``"torch.float16"`` or ``"fp16"``."""
    found = value
    if isinstance(value, str):
        name_in_torch = value.removeprefix("torch.")
        found = getattr(torch, _SHORT_DTYPES.get(name_in_torch, name_in_torch), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise ConfigError(f"{name}: got {shown(value)}, expected a floating-point dtype such as torch.float16, or None")
    return found


def _parse_options(options: Mapping[str, Any]) -> Precision:
    """Parse ``{"mode": ..., option: value}``. The options of a mode's name are the fields of its row's
    :class:`LossScaling` and :class:`Float8`."""
    given = {name: value for name, value in options.items() if name not in STORAGE}
    if storage := {name: options[name] for name in STORAGE if name in options}:
        return _parse_options(given).storing(**storage)
    mode = given.pop("mode", None)
    if not isinstance(mode, (str, int)) or mode not in (*PRESETS, *ALIASES):
        foreign_config_values = importlib.import_module(FOREIGN_NAMES)
        if (parsed := foreign_config_values.precision_with(mode, given)) is not None:
            return cast(Precision, parsed)
        if not isinstance(mode, (str, int)) or isinstance(mode, bool):
            raise ConfigError(
                f"mode: got {shown(mode)}, expected one of {foreign_config_values.MODES}, or a name such as 16-mixed"
            )
    row = Precision.parse(mode)
    internal = {"transformer_engine"}  # set by the mode's name
    if row.float8 is not None and not row.float8.transformer_engine:
        internal.add("te_recipe")
    parts = {name: part for name in ("scaling", "float8") if (part := getattr(row, name)) is not None}
    where = {item.name: name for name, part in parts.items() for item in fields(part)}
    where = {name: part for name, part in where.items() if name not in internal}
    for name in given:
        if name not in where:
            known = [*where, *STORAGE]
            raise ConfigError(
                f"{key_name(name)}: no such option of mode {row.name!r}, expected one of {', '.join(known)}"
                f"{nearest(name, known)}"
            )
    for name, part in parts.items():
        hints = get_type_hints(type(part))
        changes = {key: convert(value, hints[key], key) for key, value in given.items() if where[key] == name}
        if "init_scale" in changes and part == LossScaling.static(getattr(part, "init_scale", 1.0)):
            changes = {"min_scale": changes["init_scale"], "max_scale": changes["init_scale"], **changes}
        row = replace(row, **{name: replace(part, **changes)})
    return row
