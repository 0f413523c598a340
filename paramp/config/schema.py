"""What the user asks for: frozen dataclasses, built from a dict, a TOML or Python file, and flags.

:func:`load` takes any of these and returns a :class:`Config`. Every complaint is a :class:`ConfigError` that names
the key's full path, the value, what is allowed, and the nearest known key.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..base.coerce import convert, keys
from ..base.errors import ConfigError, nearest, one_line, shown
from ..precision.policy import STORAGE, Precision
from .schedules import SCHEDULES, Schedule, canonical_name

__all__ = ["Config", "ParallelConfig", "PipelineConfig", "TensorConfig", "TrainConfig", "flatten"]

DEFAULT_SEED = 1024


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{name}: got {shown(value)}, expected {allowed}")


@dataclass(frozen=True, kw_only=True)
class TensorConfig:
    """The tensor axis: each layer shared over several ranks."""

    size: int = 1
    """How many ranks share each layer."""
    mode: Literal["1d"] = "1d"
    """How matrices are cut: ``1d`` is Megatron's column and row parallelism."""

    def __post_init__(self) -> None:
        _require(self.size >= 1, "size", self.size, "an integer of 1 or more")


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The pipeline axis: the layers dealt to several ranks."""

    size: int = 1
    """How many ranks the layers are dealt to."""
    schedule: str = "1f1b"
    """The order of forwards and backwards (:mod:`paramp.config.schedules`): ``gpipe``, ``1f1b``, ``interleaved-1f1b``,
    ``looped-bfs``, ``interleaved-zero-bubble``, ``zbv`` or ``dualpipev``; torch's own spellings are taken too."""
    microbatches: int | None = None
    """Pieces the local batch is cut into. None: one a pipeline rank, or the fewest that the schedule takes."""
    stages_per_rank: int | None = None
    """Stages that each rank has. None: one for ``gpipe`` and ``1f1b``, two for the others."""
    split: tuple[str, ...] | None = None
    """Names of the modules that begin the second and each later stage. None: balanced by parameters."""

    def __post_init__(self) -> None:
        _require(self.size >= 1, "size", self.size, "an integer of 1 or more")
        object.__setattr__(self, "schedule", canonical_name(self.schedule))
        _require(
            self.schedule in SCHEDULES,
            "schedule",
            self.schedule,
            f"one of {', '.join(SCHEDULES)}{nearest(self.schedule, SCHEDULES)}",
        )
        _require(
            self.microbatches is None or self.microbatches >= 1,
            "microbatches",
            self.microbatches,
            "an integer of 1 or more",
        )
        self._check_stages()
        if self.size > 1 and self.microbatches is not None:
            self._check_microbatches(self.microbatches)
        if self.split is not None:
            own = f", {self.num_local_stages} on each of {self.size} ranks" if self.num_local_stages > 1 else ""
            _require(
                len(self.split) == self.num_stages - 1,
                "split",
                list(self.split),
                f"{self.num_stages - 1} module names, one for each stage after the first of {self.num_stages}{own}",
            )

    def _check_stages(self) -> None:
        given = self.stages_per_rank
        if self.row.any_stages:
            _require(given is None or given >= 1, "stages_per_rank", given, "an integer of 1 or more")
        else:
            exact = self.row.stages_per_rank
            _require(given in (None, exact), "stages_per_rank", given, f"{exact} for the schedule {self.schedule!r}")

    def _check_microbatches(self, given: int) -> None:
        least = self.row.least_microbatches(self.size)
        of = "one" if least == self.size else f"{least // self.size}"
        _require(
            given >= least,
            "microbatches",
            given,
            f"at least {least}, {of} for each of the {self.size} ranks, for the schedule {self.schedule!r}",
        )
        rounds = max(1, given // self.size)
        _require(
            not self.row.in_rounds or given % rounds == 0,
            "microbatches",
            given,
            f"a multiple of {rounds}, such as {given - given % rounds}, because the schedule {self.schedule!r} runs "
            f"them in {rounds} rounds of {self.size} or more",
        )

    @property
    def row(self) -> Schedule:
        """What is known of the schedule."""
        return SCHEDULES[self.schedule]

    @property
    def num_local_stages(self) -> int:
        """Stages that each rank has; 1 without a pipeline."""
        return 1 if self.size == 1 else self.stages_per_rank or self.row.stages_per_rank

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return self.size * self.num_local_stages

    @property
    def num_microbatches(self) -> int:
        """Pieces the local batch is cut into."""
        return self.microbatches or (1 if self.size == 1 else max(self.size, self.row.least_microbatches(self.size)))

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that has ``stage``."""
        return self.row.rank_of(stage, self.size)

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a pipeline rank, in the model's order."""
        return [stage for stage in range(self.num_stages) if self.rank_of(stage) == rank]

    @property
    def theoretical_bubble(self) -> float | None:
        """The share of a step that ranks idle (:mod:`paramp.config.schedules`); None with too few microbatches to say."""
        return self.row.bubble(self.size, self.num_local_stages, self.num_microbatches) if self.size > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The layout: the sizes of the three axes and how they are used."""

    tensor: TensorConfig = field(default_factory=TensorConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    data: int | Literal["auto"] = "auto"
    """Replicas of the model. ``auto``: the world divided by tensor x pipeline."""
    zero: int = 0
    """ZeRO stage: 0 replicates masters and optimizer state over ``dp``, 1 shards them."""
    sequence_parallel: bool = False
    """Norms and dropout between tensor-parallel layers work on a shard of the sequence each."""

    def __post_init__(self) -> None:
        _require(self.data == "auto" or self.data >= 1, "data", self.data, "'auto' or an integer of 1 or more")
        _require(self.zero in (0, 1), "zero", self.zero, "0 or 1")
        _require(
            not self.sequence_parallel or self.tensor.size > 1,
            "sequence_parallel",
            self.sequence_parallel,
            f"False, because tensor.size is {self.tensor.size} and there is nothing to shard the sequence over",
        )

    def data_size(self, world_size: int) -> int:
        """The size of the data axis in a world of ``world_size`` ranks.

        Raises:
            ConfigError: the three sizes do not make up the world.
        """
        model = self.tensor.size * self.pipeline.size
        sizes = f"tensor {self.tensor.size} x pipeline {self.pipeline.size}"
        if self.data == "auto":
            if world_size % model:
                raise ConfigError(
                    f"parallel: {sizes} = {model} does not divide the world of {world_size} ranks; "
                    f"start a multiple of {model} processes, or change the sizes"
                )
            return world_size // model
        if self.data * model != world_size:
            raise ConfigError(
                f"parallel: {sizes} x data {self.data} = {self.data * model}, but the world has {world_size} ranks; "
                f"start {self.data * model} processes, or set parallel.data to 'auto'"
            )
        return self.data


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What ``launch/train.py`` trains. The library itself does not read it."""

    model: str = "tiny"
    """A preset of :class:`paramp.models.GPT`."""
    data: str = "stdlib"
    """``stdlib``: the source of Python's standard library on this machine, as bytes. Else the path of a text file or a
    folder of text, a ``.bin`` of tokens or a folder with ``train.bin`` and ``val.bin``, Megatron's ``.bin`` and
    ``.idx``, or a folder that ``datasets`` has saved (:func:`paramp.data.corpus.load_corpus`)."""
    validation_data: str | None = None
    """What to hold out, a path of the same kinds. None: a part of ``data``."""
    tokenizer: str | None = None
    """The path of a Hugging Face ``tokenizer.json``, or of a folder with one. None: text is read as bytes."""
    vocab_size: int | None = None
    """Tokens that exist. None: as the tokenizer or the data says, else the model preset's own."""
    data_dtype: Literal["auto", "uint16", "uint32"] = "auto"
    """What a ``.bin`` holds. ``auto``: what a ``meta.json`` beside it says, else uint16."""
    norms: Literal["plain", "low-precision", "fused"] = "plain"
    """``low-precision``: norms take and give autocast's dtype; ``fused``: the same, with Apex's kernels where they are
    installed (:mod:`paramp.precision.norms`)."""
    seq_len: int = 256
    batch_size: int = 32
    """Sequences a step over all ranks, accumulation included."""
    steps: int = 300
    lr: float = 2e-3
    """The highest learning rate: 5 % of the steps rise to it, a cosine then falls to a tenth."""
    weight_decay: float = 0.1
    eval_every: int = 100
    eval_sequences: int = 64
    """Held-out sequences an evaluation reads; always the same ones."""
    checkpoint_dir: str | None = None
    """Where checkpoints go, one folder each (:mod:`paramp.engine.checkpoint_manager`). The last step's is always saved."""
    checkpoint_every: int | None = None
    """Steps from one checkpoint to the next. None: only the last step's, and before an end that was asked for."""
    checkpoint_keep_last: int = 3
    """How many of the newest checkpoints stay."""
    checkpoint_keep_every: int | None = None
    """Checkpoints of steps that are multiples of this stay for good."""
    resume: str | None = None
    """``auto``: go on from the newest whole checkpoint in ``checkpoint_dir``, from the start if there is none yet. Else
    the path of a checkpoint."""
    log_dir: str | None = None
    tensorboard: bool = False
    """Write scalars for TensorBoard too, to the folder ``tensorboard`` in ``log_dir``."""
    trace: int | None = None
    """A step whose timeline is written to ``log_dir`` as ``trace.json``, for ``ui.perfetto.dev``."""
    histogram: int | None = None
    """A step whose gradients are counted by their exponents, in ``gradients.json`` and ``gradients.png`` in
    ``log_dir``."""
    peak_tflops: float | None = None
    """What one device can do, in 10**12 dense FLOPs a second, for the utilisation (``mfu``). None: from a table of GPUs
    (:mod:`paramp.observe.mfu`), and no utilisation where the device is not in it."""

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size", "steps", "eval_every", "eval_sequences"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "an integer of 1 or more")
        _require(
            self.vocab_size is None or self.vocab_size >= 1, "vocab_size", self.vocab_size, "an integer of 1 or more"
        )
        _require(self.lr > 0 and math.isfinite(self.lr), "lr", self.lr, "a finite number above 0")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "a number of 0 or more")
        for name in ("checkpoint_every", "checkpoint_keep_last", "checkpoint_keep_every"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "an integer of 1 or more")
        _require(
            self.checkpoint_every is None or self.checkpoint_dir is not None,
            "checkpoint_every",
            self.checkpoint_every,
            "nothing, because there is no checkpoint_dir to write to; set it with --checkpoint-dir DIR",
        )
        for name in ("checkpoint_dir", "resume"):
            _require(getattr(self, name) != "", name, getattr(self, name), "a path")
        _require(
            self.resume != "auto" or self.checkpoint_dir is not None,
            "resume",
            self.resume,
            "the path of a checkpoint, because there is no checkpoint_dir to look in; set it with --checkpoint-dir DIR",
        )
        _require(
            not self.tensorboard or self.log_dir is not None,
            "tensorboard",
            self.tensorboard,
            "False, because there is no log_dir to write to; set it with --log-dir DIR",
        )
        for name in ("trace", "histogram"):
            step = getattr(self, name)
            _require(step is None or 1 <= step <= self.steps, name, step, f"a step from 1 to {self.steps}")
            _require(
                step is None or self.log_dir is not None,
                name,
                step,
                "nothing, because there is no log_dir to write to; set it with --log-dir DIR",
            )
        _require(
            self.peak_tflops is None or 0 < self.peak_tflops < math.inf,
            "peak_tflops",
            self.peak_tflops,
            "a finite number above 0, or None",
        )


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration. Keys in capitals are the user's own: ``config.BATCH_SIZE``."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: Precision = field(default_factory=lambda: Precision.parse("32-true"))
    clip_grad_norm: float | None = None
    """The largest norm of the whole model's gradient; larger ones are scaled down to it. None: no clipping."""
    gradient_accumulation: int = 1
    """Calls of ``step()`` that make one optimizer step."""
    masters: Literal["full", "remainder"] | None = None
    """How fp32 masters are kept, in modes that have them: whole, or as the 16 bits that the half-precision weight lacks
    (:mod:`paramp.optim.master_residuals`). None: as the mode says."""
    grad_dtype: torch.dtype | str | None = None
    """What gradients are added up in over microbatches: float32, or the weights' dtype. None: as the mode says."""
    reduce_dtype: torch.dtype | str | Mapping[str, Any] | None = None
    """What gradients are summed in over ranks: a dtype, or one for each of ``dp``, ``tp`` and ``pp``. None: as the mode
    says."""
    max_skipped_in_a_row: int | None = 50
    """Optimizer steps skipped one after the other from which on training stops, with a diagnosis. None: never."""
    trace_overflow: bool = False
    """``launch/train.py`` runs the batch of the first skipped step of a series again, and names the module, microbatch
    and pass that gave the first value that is not finite. A loop of your own calls ``engine.diagnose_overflow()``."""
    check_replicas_every: int | None = None
    """Steps after which weights, masters and loss scale are compared between the ranks that hold the same
    (:mod:`paramp.observe.replica_check`). None: never."""
    repair_replicas: bool = False
    """Copy what differs from the lowest rank that holds it, and go on, instead of stopping."""
    hang_timeout: float | None = 300.0
    """Seconds of silence after which a rank is reported missing and the job ends (:mod:`paramp.distributed.heartbeat`). None: no
    heartbeat."""
    seed: int = DEFAULT_SEED
    emulate_fp16: bool | Literal["auto"] = "auto"
    """On CPUs without fp16 arithmetic, compute fp16 products in fp32 and round (:mod:`paramp.precision.fp16_emulation`)."""
    train: TrainConfig = field(default_factory=TrainConfig)
    user: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kind in (("parallel", ParallelConfig), ("precision", Precision), ("train", TrainConfig)):
            object.__setattr__(self, name, convert(getattr(self, name), kind, name))
        storing = self.precision.storing(self.masters, self.grad_dtype, self.reduce_dtype)
        object.__setattr__(self, "precision", storing)
        clip = self.clip_grad_norm
        _require(
            clip is None or (clip > 0 and math.isfinite(clip)),
            "clip_grad_norm",
            clip,
            "a finite number above 0, or None for no clipping",
        )
        _require(
            self.gradient_accumulation >= 1,
            "gradient_accumulation",
            self.gradient_accumulation,
            "an integer of 1 or more",
        )
        for name in ("max_skipped_in_a_row", "check_replicas_every"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "an integer of 1 or more, or None")
        _require(
            not self.repair_replicas or self.check_replicas_every is not None,
            "repair_replicas",
            self.repair_replicas,
            "False, because check_replicas_every is None and nothing is compared",
        )
        _require(
            self.hang_timeout is None or 1 <= self.hang_timeout < math.inf,
            "hang_timeout",
            self.hang_timeout,
            "a number of seconds of 1 or more, or None",
        )
        _require(0 <= self.seed < 2**63, "seed", self.seed, "an integer from 0 to 2**63 - 1")

    def __getattr__(self, name: str) -> Any:
        if name.isupper() and name in self.user:
            return self.user[name]
        raise AttributeError(f"the configuration has no key {name!r}{nearest(name, keys(Config))}")


def flatten(config: Config) -> dict[str, Any]:
    """Every setting as ``{"parallel.tensor.size": 2, ...}``, plain values only: what is printed and saved."""

    def walk(value: Any, path: str) -> typing.Iterator[tuple[str, Any]]:
        if isinstance(value, Precision):
            yield f"{path}", value.name
            yield (
                f"{path}.masters",
                "remainder" if value.masters == "remainder" else "full" if value.masters else "none",
            )
            yield f"{path}.grad_dtype", _spelled(value.grad_dtype or value.weights)
            for axis in dataclasses.fields(value.reduce_dtypes):
                dtype = getattr(value.reduce_dtypes, axis.name) or value.grad_dtype or value.weights
                yield f"{path}.reduce_dtype.{axis.name}", _spelled(dtype)
            if value.scaling is not None:
                yield from walk(value.scaling, f"{path}.scaling")
        elif dataclasses.is_dataclass(value):
            for item in dataclasses.fields(value):
                if path or item.name not in STORAGE:  # what they come to is shown with the precision
                    yield from walk(getattr(value, item.name), f"{path}.{item.name}" if path else item.name)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield from walk(item, str(key) if path == "user" else f"{path}.{key}")
        else:
            yield path, value

    def _spelled(dtype: torch.dtype) -> str:
        return str(dtype).removeprefix("torch.")

    return {key: _plain(value) for key, value in walk(config, "")}


def _plain(value: Any) -> Any:
    """``value`` as JSON knows it; what is odd, among the user's own keys, as a string."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    small = isinstance(value, int) and abs(value) < 2**63  # a bool, too
    return value if small or isinstance(value, (str, float, type(None))) else one_line(shown(value))
