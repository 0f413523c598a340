"""The configuration. :func:`paramp.config.files.load` builds it from a dict, a TOML file or a Python file.

Every :class:`~paramp.base.errors.ConfigError` names the key's full path, the value, what is allowed, and the nearest
known key.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Literal

import torch

from ..base.errors import nearest, one_line, require, shown
from ..base.values_checked_by_type import UNLISTED, convert, keys
from ..precision.modes import STORAGE, Precision
from .layout import ParallelConfig
from .reproducible import MODES, Reproducible, is_power_of_two

DEFAULT_SEED = 1024
COMPILE_OPTIONS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "backend": ("the name of a backend or a callable", lambda value: isinstance(value, str) or callable(value)),
    "mode": ("the name of a mode, or None", lambda value: isinstance(value, str | None)),
    "dynamic": ("True, False or None", lambda value: isinstance(value, bool | None)),
    "fullgraph": ("True or False", lambda value: isinstance(value, bool)),
    "options": ("a table of the backend's options, or None", lambda value: isinstance(value, Mapping | None)),
}
"""The options of ``torch.compile`` that the key ``compile`` takes: what is allowed, and whether a value is."""
ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")
"""In the ``repr`` of an object that has none of its own."""


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """An exponential moving average of the weights."""

    decay: float = 0.999
    """The weight of the old average at each step that is made, from 0 to below 1."""

    def __post_init__(self) -> None:
        require(0 <= self.decay < 1, "decay", self.decay, "a number of 0 or more, below 1")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration. Keys in capitals are the user's own: ``config.BATCH_SIZE``."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The layout."""
    precision: Precision = field(default_factory=lambda: Precision.parse("32-true"))
    """The precision mode: a name, or a table with ``mode`` and its options."""
    clip_grad_norm: float | None = None
    """The largest norm of the whole model's gradient; a larger one is scaled down to it. None: no clipping."""
    gradient_accumulation: int = 1
    """Calls of ``step()`` that make one optimizer step."""
    activation_checkpointing: Literal["none", "full", "selective"] | int = "none"
    """Which of the model's repeated blocks compute their activations again in the backward instead of keeping them: all
    (``full``), or every N-th. ``selective``: all, but products of matrices and attention outputs are kept."""
    compile: bool | Mapping[str, Any] = False
    """Compile each of the model's repeated blocks with ``torch.compile``, and the optimizer step. A table: its options,
    of :data:`COMPILE_OPTIONS`."""
    masters: Literal["full", "remainder"] | None = None
    """How fp32 masters are stored, in modes that have them: in full, or as the 16 bits that the half-precision weight
    lacks (:mod:`paramp.optim.remainder_masters`). None: the mode's default."""
    grad_dtype: torch.dtype | str | None = None
    """The dtype in which gradients are accumulated over microbatches: float32, or the weights'. None: the mode's
    default. Those of complex weights keep the weights' dtype."""
    reduce_dtype: torch.dtype | str | Mapping[str, Any] | None = None
    """The dtype in which gradients are summed over ranks: one for all axes, or one for each of ``dp``, ``tp`` and
    ``pp``. None: the mode's default."""
    rounding: Literal["nearest", "stochastic"] | None = None
    """How the optimizer step rounds half-precision weights that have no masters
    (:mod:`paramp.precision.stochastic_rounding`). None: the mode's default, ``"nearest"``."""
    optimizer_state: Literal["full", "bf16"] | None = None
    """How the optimizer's state with one value per element of its weight, such as AdamW's moments, is stored between
    steps: in the dtype of what is stepped, or in bfloat16, rounded stochastically. None: the mode's default,
    ``"full"``."""
    ema: EmaConfig | None = None
    """Average the weights over the steps that are made: ``engine.ema``
    (:class:`~paramp.engine.moving_averages_of_weights.WeightAverages`). None: no averages."""
    reproducible: bool | Reproducible = False
    """Train with the same bits on every layout: True, or a table (:class:`~paramp.config.reproducible.Reproducible`).
    False: sums are made in the order that is fastest."""
    max_skipped_in_a_row: int | None = 50
    """Optimizer steps skipped in a row after which training stops with a diagnosis. None: never."""
    trace_overflow: bool = False
    """``launch/train.py`` runs the batch of the first skipped step of a series again, and names the module, microbatch
    and pass that produced the first value that is not finite. Other loops call ``engine.diagnose_overflow()``."""
    check_replicas_every: int | None = None
    """Steps after which weights, masters and loss scale are compared between the ranks that replicate them
    (:mod:`paramp.observe.replica_check`). None: never."""
    repair_replicas: bool = False
    """On a difference, copy the value of the lowest rank to its replicas and continue, instead of stopping."""
    hang_timeout: float | None = 300.0
    """Seconds of silence after which a rank is reported missing and the job ends
    (:mod:`paramp.distributed.heartbeat`). None: no heartbeat."""
    hang_end_after: int | None = 4
    """Times ``hang_timeout`` after which the job ends if all ranks are alive, every one is in a training batch or waits
    to save, and none moves. Loading data, saving, evaluating and compiling are not waiting. None: never."""
    seed: int = DEFAULT_SEED
    """The seed of every random number: weights, dropout, the order of the data."""
    emulate_fp16: bool | Literal["auto"] = "auto"
    """On CPUs without fp16 arithmetic, compute fp16 products in fp32 and round
    (:mod:`paramp.precision.fp16_emulation_cpu`)."""
    user: Mapping[str, Any] = field(default_factory=dict, metadata=UNLISTED)
    """The user's own keys, in capitals."""

    def __post_init__(self) -> None:
        kinds = {"parallel": ParallelConfig, "precision": Precision, "ema": EmaConfig | None}
        for name, kind in {**kinds, "reproducible": bool | Reproducible}.items():
            object.__setattr__(self, name, convert(getattr(self, name), kind, name))
        if self.reproducible is True:
            object.__setattr__(self, "reproducible", Reproducible())
        stored = self.precision.storing(**{name: getattr(self, name) for name in STORAGE})
        object.__setattr__(self, "precision", stored)
        clip, every, timeout = self.clip_grad_norm, self.activation_checkpointing, self.hang_timeout
        unlimited = "a finite number above 0, or None for no clipping"
        require(clip is None or (clip > 0 and math.isfinite(clip)), "clip_grad_norm", clip, unlimited)
        allowed = "'none', 'full', 'selective', or an integer of 1 or more"
        require(isinstance(every, str) or every >= 1, "activation_checkpointing", every, allowed)
        self._check_halves()
        self._check_compile_options()
        self._check_shard()
        self._check_reproducible()
        accumulation = self.gradient_accumulation
        require(accumulation >= 1, "gradient_accumulation", accumulation, "an integer of 1 or more")
        for name in ("max_skipped_in_a_row", "check_replicas_every", "hang_end_after"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "an integer of 1 or more, or None")
        unchecked = "False, because check_replicas_every is None and nothing is compared"
        compares = self.check_replicas_every is not None or not self.repair_replicas
        require(compares, "repair_replicas", self.repair_replicas, unchecked)
        seconds = "a number of seconds of 1 or more, or None"
        require(timeout is None or 1 <= timeout < math.inf, "hang_timeout", timeout, seconds)
        require(0 <= self.seed < 2**63, "seed", self.seed, "an integer from 0 to 2**63 - 1")

    def _check_halves(self) -> None:
        """Check what does not go with a schedule that runs each backward in two halves."""
        pipeline, every = self.parallel.pipeline, self.activation_checkpointing
        if pipeline.size > 1 and pipeline.row.splits_backward:
            why = f"because the schedule {pipeline.schedule!r} runs each backward in two halves"
            require(every != "selective", "activation_checkpointing", every, f"'full' or 'none', {why}")
            require(self.compile is False, "compile", self.compile, f"False, {why}")

    def _check_compile_options(self) -> None:
        names = ", ".join(COMPILE_OPTIONS)
        for name, value in self.compile.items() if isinstance(self.compile, Mapping) else ():
            require(name in COMPILE_OPTIONS, "compile", name, f"one of {names}{nearest(name, COMPILE_OPTIONS)}")
            allowed, is_allowed = COMPILE_OPTIONS[name]
            require(is_allowed(value), f"compile.{name}", value, allowed)

    def _check_shard(self) -> None:
        """Check what does not go with parameters that are sharded over data ranks."""
        shard, precision = self.parallel.shard, self.precision
        if shard > 1:
            why = f"because parallel.data.shard is {shard}, and"
            kept = f"'full', {why} the sharded fp32 parameters are the masters"
            require(precision.masters != "remainder", "masters", precision.masters, kept)
            added = f"None, {why} FSDP2 adds gradients up in reduce_dtype; set that instead"
            require(precision.grad_dtype is None, "grad_dtype", precision.grad_dtype, added)

    def _check_reproducible(self) -> None:
        """Check what would let bits depend on the layout."""
        if not isinstance(self.reproducible, Reproducible):
            return
        tensor, most, because = self.parallel.tensor.size, self.reproducible.slices, "because reproducible is set"
        fits = is_power_of_two(tensor) and tensor <= most
        require(fits, "parallel.tensor.size", tensor, f"a power of two, at most reproducible.slices {most}")
        self._check_slices_of_sequences(self.reproducible.sequence_slices)
        mode = self.precision.name
        require(mode in MODES, "precision", mode, f"one of {', '.join(MODES)}, {because}")
        require(self.compile is False, "compile", self.compile, f"False, {because}")
        for name in ("grad_dtype", "reduce_dtype"):
            value = getattr(self, name)
            require(value is None, name, value, f"None, {because}, and gradients are added up in float32")

    def _check_slices_of_sequences(self, slices: int) -> None:
        """Check how sequences are cut over the context axis."""
        context = self.parallel.context
        fits = is_power_of_two(context.size) and context.size <= slices
        most = f"a power of two, at most reproducible.sequence_slices {slices}"
        require(fits, "parallel.context.size", context.size, most)
        if slices > 1:
            why = f"because reproducible.sequence_slices is {slices}"
            ways = "auto", "all-gather"
            require(context.method in ways, "parallel.context.method", context.method, f"{' or '.join(ways)}, {why}")
            sliced, key = self.parallel.sequence_parallel, "parallel.sequence_parallel"
            require(not sliced, key, sliced, f"False, {why}, and tensor ranks would have parts of these slices")

    @property
    def compile_options(self) -> dict[str, Any] | None:
        """The options to pass to ``torch.compile``; None if nothing is compiled."""
        options = self.compile if isinstance(self.compile, Mapping) else {}
        return None if self.compile is False else dict(options)

    def __getattr__(self, name: str) -> Any:
        if name.isupper() and name in self.user:
            return self.user[name]
        raise AttributeError(f"the configuration has no key {name!r}{nearest(name, keys(Config))}")


def flatten(config: Any) -> dict[str, Any]:
    """Every setting of a dataclass as ``{"parallel.tensor.size": 2, ...}``, with plain values for printing and JSON."""
    return {key: _plain(value) for key, value in _settings(config, "")}


def _settings(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The keys below ``path`` and their values."""
    if isinstance(value, Precision):
        yield path, value.name
        yield from ((f"{path}.{name}", text) for name, text in _storage(value).items())
        if value.scaling is not None:
            yield from _settings(value.scaling, f"{path}.scaling")
    elif dataclasses.is_dataclass(value):
        for item in dataclasses.fields(value):
            if path or item.name not in STORAGE:  # the precision shows what they resolve to
                yield from _settings(getattr(value, item.name), f"{path}.{item.name}" if path else item.name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _settings(item, str(key) if path == "user" else f"{path}.{key}")
    else:
        yield path, value


def _storage(precision: Precision) -> dict[str, str]:
    """How a precision stores masters and gradients, with every default resolved."""
    masters, grads = precision.masters, precision.grad_dtype or precision.weights
    dtypes = {f"reduce_dtype.{axis}": dtype or grads for axis, dtype in vars(precision.reduce_dtypes).items()}
    names = {name: str(dtype).removeprefix("torch.") for name, dtype in {"grad_dtype": grads, **dtypes}.items()}
    kept = masters if isinstance(masters, str) else "full" if masters else "none"
    return {"masters": kept, "rounding": precision.rounding, "optimizer_state": precision.optimizer_state, **names}


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it; an object of another type, the user's own or the compiler's, as a string.

    Ranks that make an object alike have the same string.
    """
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    small = isinstance(value, int) and abs(value) < 2**63  # a bool, too
    if small or isinstance(value, (str, float, type(None))):
        return value
    named = isinstance(value, FunctionType | type)
    return one_line(f"{value.__module__}.{value.__qualname__}" if named else ADDRESS.sub("", shown(value)))
