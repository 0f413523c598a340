"""The options of ``paramp verify``, and the configuration of each of its two runs."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...base.errors import require
from ...compat.composer.algorithms import FusedLayerNorm, LowPrecisionLayerNorm
from ...config.files import SCRIPT_TABLES, load, merge, read_file
from ...config.layout import ParallelConfig, PipelineConfig
from ...config.schema import Config
from ...scaling.loss_scaling_options import LossScaling
from ..flags import LAYOUT, PRECISION, SEED

EXACT = "paramp.exact.verify_bits.exact_run"
"""The module that configures, runs and compares with ``exact``, imported on first use."""
RUNS = ("single", "sharded")
"""The names of the two runs: in one process, and on the layout asked for."""
FLAGS = {**LAYOUT, "precision": PRECISION, "optimization": (SEED,)}
"""Those that set keys of the configuration, by group in ``--help``."""
NORMS: dict[str, list[Any]] = {"plain": [], "low-precision": [LowPrecisionLayerNorm()], "fused": [FusedLayerNorm()]}
"""Value of ``--norms`` -> the algorithms that :func:`paramp.initialize` applies."""
INIT_SCALE = 2.0**10
"""The largest initial loss scale. With 2**16 or 2**32 a run of a few steps would skip most of them."""
CLIP = 1.0
"""The gradient norm that steps are clipped to, so that no learning rate that suits other models is far too large."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``paramp verify``: plain values, passed to the ranks as JSON."""

    model: str
    """``module:attribute`` or ``file.py:attribute``: a module, or a callable that builds one."""
    batches: str | None = None
    """``module:attribute``; the same for the next two. None: random tokens."""
    criterion: str | None = None
    """None: the model's own ``loss``, else the cross-entropy."""
    plan: str | None = None
    config: str | None = None
    """A ``.toml`` or ``.py`` file."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """A configuration tree that overrides the file's."""
    norms: str = "plain"
    steps: int = 3
    batch_size: int | None = None
    """Samples a step. None: two for each microbatch of each data rank."""
    seq_len: int = 16
    lr: float | None = None
    """None: 0.1 for SGD, 0.001 for AdamW with ``exact``."""
    exact: bool = False
    """Compare bits, with ``reproducible``, dropout, gradient accumulation and AdamW."""
    timeout: float = 600.0
    """The time limit of each run, in seconds."""

    def __post_init__(self) -> None:
        for name in ("model", "batches", "criterion", "plan"):
            if getattr(self, name) is not None:
                check_target(getattr(self, name), name)
        for name in ("steps", "seq_len", "batch_size"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "an integer of 1 or more")
        for name in ("lr", "timeout"):
            value = getattr(self, name)
            require(value is None or 0 < value < float("inf"), name, value, "a finite number above 0")


def configure(options: Options, run: str) -> Config:
    """The configuration of ``run``, one of :data:`RUNS`; a ConfigError if the options or the file are wrong.

    The single run has as many microbatches as all data ranks of the sharded run together, of the same samples.
    """
    file = read_file(options.config) if options.config else {}
    config = load(merge({key: file[key] for key in file if key not in SCRIPT_TABLES}, options.settings))
    precision = config.precision
    if precision.masters:  # remainders give the same values
        precision = dataclasses.replace(precision, masters=True)
    if (scaling := precision.scaling) is not None and adapts(scaling):
        first = max(min(INIT_SCALE, scaling.init_scale), scaling.min_scale or 0.0)
        precision = dataclasses.replace(precision, scaling=dataclasses.replace(scaling, init_scale=first))
    parallel = config.parallel
    if parallel.data_axes.replicate == "auto":
        data = parallel.expert if parallel.shard == 1 else dataclasses.replace(parallel.data_axes, replicate=1)
        parallel = dataclasses.replace(parallel, data=data)
    if run == "single":
        chunks = parallel.data_size(parallel.least_world_size) * parallel.pipeline.num_microbatches
        parallel = ParallelConfig(data=1, pipeline=PipelineConfig(microbatches=chunks))
    changes: dict[str, Any] = {"parallel": parallel, "precision": precision, "masters": None}
    if options.exact:
        in_exact_mode = importlib.import_module(EXACT).in_exact_mode
        exact: Config = in_exact_mode(dataclasses.replace(config, **changes), config.parallel.context.size)
        return exact
    return dataclasses.replace(config, **changes, gradient_accumulation=1, reproducible=False, clip_grad_norm=CLIP)


def adapts(scaling: LossScaling) -> bool:
    """Whether the loss scale changes."""
    return scaling.enabled and (scaling.min_scale is None or scaling.min_scale != scaling.max_scale)


def check_target(text: str, option: str) -> None:
    """Raise a ConfigError unless ``text`` has the form ``module:attribute``."""
    where, _, name = text.rpartition(":")
    require(bool(where and name), option, text, "module:attribute or path/to/file.py:attribute")
