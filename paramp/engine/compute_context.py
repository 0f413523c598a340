"""The compute context of forward, criterion and backward: one implementation for the engine and other front ends.

A :class:`ComputeContext` has up to three parts. fp16 products are emulated on CPUs without fp16 arithmetic
(:mod:`paramp.precision.fp16_emulation_cpu`). Autocast and the default dtype follow the mode, with norms and softmax in
fp32 on the CPU as on CUDA (:mod:`paramp.precision.autocast`). In the criterion, cross-entropy takes logits whose
vocabulary is sharded (:mod:`paramp.parallel.tensor.sharded_loss`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ..base.dtensor import is_dtensor
from ..distributed.context import ParallelContext, current_context
from ..exact.functions import ExactFunctions
from ..precision.autocast import computing, widening, widening_kernels
from ..precision.capabilities import has_native_fp16
from ..precision.fp16_emulation_cpu import emulate_fp16, fp16_kernels
from ..precision.policy import Precision


@dataclass(frozen=True)
class ComputeContext:
    """The compute context of one model on one device."""

    precision: Precision
    device: torch.device
    emulation: bool | Literal["auto"] | None = "auto"
    """``emulate_fp16`` of the configuration. ``"auto"`` or None: if the device has no fp16 arithmetic."""
    sharded: bool = False
    """Whether parameters are DTensors, so that the vocabulary of the logits may be sharded."""

    exact: ExactFunctions | None = None
    """What makes functions of torch have the same bits on every layout; None: they run as they are."""

    @staticmethod
    def of(model: nn.Module, precision: Precision) -> ComputeContext:
        """The context of ``model``, on the device of its first parameter, with the current ``emulate_fp16``."""
        context = current_context()
        first = next(model.parameters(), None)
        device = first.device if first is not None else context.device if context else torch.device("cpu")
        emulation = context.config.emulate_fp16 if context else "auto"
        return ComputeContext(precision, device, emulation, sharded=any(map(is_dtensor, model.parameters())))

    @staticmethod
    def in_layout(context: ParallelContext) -> ComputeContext:
        """The context of an engine in ``context``."""
        config, sharded = context.config, context.tensor_axis.size > 1
        return ComputeContext(config.precision, context.device, config.emulate_fp16, sharded=sharded)

    @functools.cached_property
    def emulate(self) -> bool:
        """Whether fp16 products are computed in fp32 and rounded."""
        if self.precision.compute is not torch.float16:
            return False
        return not has_native_fp16(self.device) if self.emulation in ("auto", None) else bool(self.emulation)

    @functools.cached_property
    def kernels(self) -> list[torch.library.Library | None]:
        """What replaces kernels of torch in :meth:`enter`: kept from the first one on, as long as this object is."""
        widened = widening_kernels(self.device.type) if self.precision.autocast else None
        return [widened, fp16_kernels() if self.emulate else None]

    def __getstate__(self) -> dict[str, Any]:
        """What a copy gets: not the kernels, which cannot be copied."""
        return {name: value for name, value in vars(self).items() if name != "kernels"}

    @contextmanager
    def enter(self, *, autocast: bool = False) -> Iterator[None]:
        """The context for a backward, and around modules that enter autocast themselves, as pipeline stages do.

        With ``autocast``, for a forward: also autocast and the default dtype, if the mode has them.
        """
        # The backward needs the widening too, because checkpointing recomputes forwards in it.
        compute = computing if autocast else widening
        _ = self.kernels
        exact = nullcontext() if self.exact is None else self.exact
        if self.exact is not None:
            self.exact.begin_chunk()
        with emulate_fp16(self.emulate), compute(self.precision, self.device.type), exact:
            yield

    def sharded_loss(self, *, in_model: bool = False) -> AbstractContextManager[None]:
        """The context for a criterion: cross-entropy over a sharded vocabulary; ``in_model``, for a whole forward."""
        if not self.sharded:
            return nullcontext()
        from ..parallel.tensor.sharded_loss import (
            vocab_parallel_loss,  # imports DTensor, which other layouts do not need
        )

        return vocab_parallel_loss(others=not in_model, computes=self.exact is None)
