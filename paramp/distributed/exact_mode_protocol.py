"""What training with the same bits on every layout changes in the rest of the package: nothing, unless it is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ..config.schema import Config
from ..scaling.local_norm import norm_power
from .context import ParallelContext

EXACT = "paramp.exact.exact_mode"
"""The module of the exact mode, which is imported on first use; its ``ExactNumerics`` implements :class:`Numerics`."""


def numerics_of(config: Config) -> Numerics:
    """New numerics for one engine, or one process, with ``config``: those of the exact mode with ``reproducible``."""
    if not config.reproducible:
        return Numerics()
    numerics: Numerics = importlib.import_module(EXACT).ExactNumerics(config)
    return numerics


class Numerics:
    """How layers, gradients, sums and batches of one engine are computed. The methods stand in the order of the calls.

    Attributes:
        consecutive_samples: whether a data rank has consecutive samples of a global batch, else every n-th.
        keeps_dtypes: whether stages exchange hidden states as they are, else in the mode's compute dtype.
        units_reduce: whether FSDP2's units sum gradients over data ranks; else the gradients do.
        counts_first_rank: whether the unit of counts follows the first count of the first data rank, else of all.
        computes_cross_entropy: whether :meth:`computing` replaces the cross-entropy.
        depends_on_accumulation: whether a batch split into another number of calls has other bits.
    """

    consecutive_samples = False
    keeps_dtypes = False
    units_reduce = True
    counts_first_rank = False
    computes_cross_entropy = False
    depends_on_accumulation = False

    def batch_divisor(self, config: Config) -> tuple[str, int]:
        """What the samples of a call on one data rank have to be a multiple of: its name, and the number."""
        return "microbatches", config.parallel.pipeline.num_microbatches

    def prepare_process(self) -> None:
        """A process that computes on a GPU has not initialised CUDA yet."""

    def prepare(self, context: ParallelContext, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Check the whole model, and what trains it."""

    def plan(self, adapter: Any, plan: Mapping[str, Any] | None, context: ParallelContext) -> dict[str, Any]:
        """The style of each module of the model of ``adapter``, from the user's ``plan``, or the model's own."""
        styles: dict[str, Any] = adapter.styles(
            plan, context.tensor_axis.size, context.config.parallel.sequence_parallel
        )
        return styles

    def sequence_axis(self) -> Any:
        """How sequences are cut, if in a way of its own; else None. Called after :meth:`prepare`."""
        return None

    def watch(self, all_stages: Sequence[nn.Module], local: Sequence[nn.Module], styles: Mapping[str, Any]) -> None:
        """The model is partitioned. Called before activation checkpointing changes forwards.

        ``local``: the stages of this rank; ``styles``: as :meth:`plan` returned them.
        """

    def apply_styles(self, module: nn.Module, styles: Mapping[str, Any]) -> None:
        """Apply ``styles`` to the modules of this rank, which is the only one of its tensor axis."""

    def gradient_reduction(self, default: type[Any]) -> type[Any]:
        """The class of what sums gradients over data ranks; ``default`` is that for the layout."""
        return default

    def connect(self, stages: Any, params: Any, window: Any, step_counts: Callable[[], list[int]]) -> None:
        """The parts of an engine are there: its stages, parameters, and accumulation window with its losses."""

    def computing(self) -> AbstractContextManager[Any]:
        """A context for forwards, criteria and backwards."""
        return nullcontext()

    def check_own_forward(self) -> None:
        """Raise a RuntimeError if the user may not train with a forward of a whole batch."""

    def num_microbatches(self, num_samples: int, default: int) -> int:
        """Into how many microbatches a batch that is trained on is split."""
        return default

    def begin_batch(self, microbatches: list[Any]) -> list[Any]:
        """Begin a forward and backward of ``microbatches``, none after a failure; return those that are to run."""
        return microbatches

    def begin_rerun(self, call: int) -> None:
        """Begin the forward and backward of the ``call``-th batch of a window again."""

    def begin_forward(self, microbatch: int) -> None:
        """The forward of a microbatch of this rank's batch follows, by its index."""

    def begin_backward(self, microbatch: int) -> None:
        """The backward of a microbatch follows, or a half of it."""

    def end_backward(self, stage: int, microbatch: int) -> None:
        """The gradients of a microbatch in a stage are complete; not called after a failure."""

    norm_power = staticmethod(norm_power)
    """This rank's term of the squared norm of all gradients (:func:`paramp.scaling.local_norm.norm_power`)."""
