"""The layout: how many ranks each axis has, and how the pipeline runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..base.errors import ConfigError, nearest, require
from .pipeline_schedules import SCHEDULES, Schedule, canonical_name


@dataclass(frozen=True, kw_only=True)
class TensorConfig:
    """The tensor axis: each layer's weights are sharded over its ranks."""

    size: int = 1
    """The number of ranks that shard each layer."""
    mode: Literal["1d"] | None = "1d"
    """How weight matrices are sharded: ``1d`` is Megatron's column and row parallelism. None: they are not."""

    def __post_init__(self) -> None:
        require(self.size >= 1, "size", self.size, "an integer of 1 or more")
        require(self.size == 1 or self.mode is not None, "mode", None, f"'1d', because size is {self.size}")


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The pipeline axis: the layers are partitioned into stages, and each rank runs one or more of them."""

    size: int = 1
    """The number of pipeline ranks."""
    schedule: str = "1f1b"
    """The order of forwards and backwards (:mod:`paramp.config.pipeline_schedules`): ``gpipe``, ``1f1b``,
    ``interleaved-1f1b``, ``looped-bfs``, ``interleaved-zero-bubble``, ``zbv`` or ``dualpipev``. torch's names are
    accepted, too."""
    microbatches: int | None = None
    """Microbatches that each rank's batch is split into. None: one for each pipeline rank, or the fewest that the
    schedule allows."""
    stages_per_rank: int | None = None
    """Stages on each rank. None: one for ``gpipe`` and ``1f1b``, two for the others."""
    split: tuple[str, ...] | None = None
    """Names of the modules that begin the second and each later stage. None: balanced by parameters."""

    def __post_init__(self) -> None:
        count = "an integer of 1 or more"
        require(self.size >= 1, "size", self.size, count)
        object.__setattr__(self, "schedule", canonical_name(self.schedule))
        names = f"one of {', '.join(SCHEDULES)}{nearest(self.schedule, SCHEDULES)}"
        require(self.schedule in SCHEDULES, "schedule", self.schedule, names)
        row, stages = self.row, self.stages_per_rank
        fits = stages is None or (stages >= 1 if row.any_stages else stages == row.stages_per_rank)
        allowed = count if row.any_stages else f"{row.stages_per_rank} for the schedule {self.schedule!r}"
        require(fits, "stages_per_rank", stages, allowed)
        if self.microbatches is not None:
            self.check_microbatches(self.microbatches)
        if self.split is not None:
            per_rank = f", {self.num_local_stages} on each of {self.size} ranks" if self.num_local_stages > 1 else ""
            needed = self.num_stages - 1
            names = f"{needed} module names, one for each stage after the first of {self.num_stages}{per_rank}"
            require(len(self.split) == needed, "split", list(self.split), names)

    def check_microbatches(self, given: int) -> None:
        """Raise a ConfigError for a number of microbatches that the schedule does not accept."""
        require(given >= 1, "microbatches", given, "an integer of 1 or more")
        if self.size == 1:
            return
        least = self.row.least_microbatches(self.size)
        per_rank = "one" if least == self.size else f"{least // self.size}"
        enough = f"at least {least}, {per_rank} for each of the {self.size} ranks, for the schedule {self.schedule!r}"
        require(given >= least, "microbatches", given, enough)
        rounds = max(1, given // self.size)
        why = f"because the schedule {self.schedule!r} runs them in {rounds} rounds of {self.size} or more"
        multiple = f"a multiple of {rounds}, such as {given - given % rounds}, {why}"
        require(not self.row.in_rounds or given % rounds == 0, "microbatches", given, multiple)

    @property
    def row(self) -> Schedule:
        """The schedule's row in :data:`~paramp.config.pipeline_schedules.SCHEDULES`."""
        return SCHEDULES[self.schedule]

    @property
    def num_local_stages(self) -> int:
        """Stages on each rank; 1 without a pipeline."""
        return 1 if self.size == 1 else self.stages_per_rank or self.row.stages_per_rank

    @property
    def num_stages(self) -> int:
        """The number of stages of the whole model."""
        return self.size * self.num_local_stages

    @property
    def num_microbatches(self) -> int:
        """Microbatches that each rank's batch is split into."""
        return self.microbatches or (1 if self.size == 1 else max(self.size, self.row.least_microbatches(self.size)))

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that runs ``stage``."""
        return self.row.rank_of(stage, self.size)

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a pipeline rank, in the model's order."""
        return [stage for stage in range(self.num_stages) if self.rank_of(stage) == rank]

    @property
    def theoretical_bubble(self) -> float | None:
        """The fraction of a step that ranks idle; None if there are too few microbatches to fill the pipeline."""
        return self.row.bubble(self.size, self.num_local_stages, self.num_microbatches) if self.size > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data axis: ranks with different samples, over which parameters are sharded (FSDP2) or replicated."""

    replicate: int | Literal["auto"] = "auto"
    """Replicas of the sharded model (HSDP). ``auto``: the world divided by tensor x pipeline x context x shard."""
    shard: int = 1
    """The number of ranks that shard parameters, gradients, masters and optimizer state
    (``torch.distributed.fsdp.fully_shard``). They are gathered block by block where they are computed with."""
    reshard_after_forward: bool = True
    """Free the gathered parameters after a block's forward, and gather them again in the backward. Without it they stay
    until then: more memory, one all-gather less. Under a pipeline they stay for the whole batch in any case."""
    prefetch: int = 0
    """Blocks whose all-gather begins while an earlier block computes, forward and backward. 0: torch's own choice."""

    def __post_init__(self) -> None:
        number = "an integer of 1 or more"
        require(self.replicate == "auto" or self.replicate >= 1, "replicate", self.replicate, f"'auto' or {number}")
        require(self.shard >= 1, "shard", self.shard, number)
        require(self.prefetch >= 0, "prefetch", self.prefetch, "an integer of 0 or more")


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """The context axis: its ranks have parts of each sequence (:mod:`paramp.parallel.context_axis`)."""

    size: int = 1
    """The number of ranks that share each sequence."""
    method: Literal["auto", "ring", "all-gather", "ulysses"] = "auto"
    """How attention exchanges keys and values. ``auto``: by the shapes of each call."""

    def __post_init__(self) -> None:
        require(self.size >= 1, "size", self.size, "an integer of 1 or more")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The layout: the sizes of the axes and how they are used."""

    tensor: TensorConfig = field(default_factory=TensorConfig)
    """The tensor axis. A number is its size."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """The pipeline axis. A number is its size."""
    data: int | Literal["auto"] | DataConfig = "auto"
    """Replicas of the model. ``auto``: the world divided by tensor x pipeline x context. A table: parameters are
    sharded."""
    zero: int = 0
    """ZeRO stage: 0 replicates masters and optimizer state over the data axis, 1 shards them."""
    sequence_parallel: bool = False
    """Shard the sequence over the tensor axis in the norms and dropout between tensor-parallel layers."""
    expert: int = 1
    """The number of data ranks that share the experts of each mixture of experts. It adds no ranks: the others of their
    parameters are replicated over them, as over all data ranks. With ``data.shard`` they are among the ranks that shard
    all parameters, of which ``data.shard / expert x context`` share each part of the experts."""
    context: ContextConfig = field(default_factory=ContextConfig)
    """The context axis. A number is its size. With ``data.shard`` parameters are sharded over its ranks too."""

    def __post_init__(self) -> None:
        positive = not isinstance(self.data, int) or self.data >= 1
        require(positive, "data", self.data, "'auto' or an integer of 1 or more")
        require(self.zero in (0, 1), "zero", self.zero, "0 or 1")
        require(self.expert >= 1, "expert", self.expert, "an integer of 1 or more")
        divisor = f"a divisor of {self.shard}, because data.shard is {self.shard}, and its ranks share the experts"
        require(self.shard == 1 or self.shard % self.expert == 0, "expert", self.expert, divisor)
        if self.shard > 1:
            done = "0, because data.shard shards masters and optimizer state, and parameters and gradients too"
            require(self.zero == 0, "zero", self.zero, done)
            name, row = self.pipeline.schedule, self.pipeline.row
            lost = f"1f1b, gpipe, interleaved-1f1b or looped-bfs, because data.shard is {self.shard}, and fully_shard"
            lost += " loses gradients of backwards that run in two halves"
            require(self.pipeline.size == 1 or not row.splits_backward, "pipeline.schedule", name, lost)
        if self.sequence_parallel:
            unsharded = "False, because tensor.size is 1 and there is nothing to shard the sequence over"
            require(self.tensor.size > 1, "sequence_parallel", True, unsharded)

    @property
    def data_axes(self) -> DataConfig:
        """:attr:`data` as a table."""
        return self.data if isinstance(self.data, DataConfig) else DataConfig(replicate=self.data)

    @property
    def shard(self) -> int:
        """The number of ranks that shard the parameters of one replica."""
        return self.data_axes.shard

    @property
    def data_ranks_wait(self) -> bool:
        """Whether data ranks wait for each other in forwards: for parameters, for tokens of experts, for keys."""
        return self.shard > 1 or self.expert > 1 or self.context.size > 1

    def data_size(self, world_size: int) -> int:
        """The data ranks in a world of ``world_size`` ranks; a ConfigError if the sizes do not fit it."""
        model = self.tensor.size * self.pipeline.size * self.context.size * self.shard
        sizes = f"tensor {self.tensor.size} x pipeline {self.pipeline.size}"
        sizes += f" x context {self.context.size}" if self.context.size > 1 else ""
        sizes += f" x shard {self.shard}" if self.shard > 1 else ""
        replicate = self.data_axes.replicate
        key = "data" if self.shard == 1 else "data.replicate"
        start = f"start a multiple of {model} processes, or change the sizes"
        if replicate == "auto" and world_size % model:
            raise ConfigError(f"parallel: {sizes} = {model} does not divide the world of {world_size} ranks; {start}")
        replicate = world_size // model if replicate == "auto" else replicate
        if replicate * model != world_size:
            raise ConfigError(
                f"parallel: {sizes} x {key.removeprefix('data.')} {replicate} = {replicate * model}, but the world has "
                f"{world_size} ranks; start {replicate * model} processes, or set parallel.{key} to 'auto'"
            )
        size = replicate * self.shard
        if size % self.expert:
            raise ConfigError(
                f"parallel.expert: got {self.expert}, expected a divisor of {size}, the number of data ranks; "
                f"start a multiple of {model * self.expert} processes, or change it"
            )
        return size

    @property
    def least_world_size(self) -> int:
        """The smallest world that the layout fits."""
        replicate = self.data_axes.replicate
        replicate = self.expert if replicate == "auto" else replicate
        return self.tensor.size * self.pipeline.size * self.context.size * self.shard * replicate
