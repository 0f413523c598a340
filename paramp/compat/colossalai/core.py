"""Colossal-AI's ``global_context``: the current :class:`~paramp.ParallelContext` with Colossal-AI's names."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist

from ...config.schema import Config
from ...distributed.context import current_context, get_context
from .context import ParallelMode


class GlobalContext:
    """The context of the latest ``launch`` that is still open.

    Without one, everything except :meth:`is_initialized` raises a RuntimeError.
    """

    @property
    def config(self) -> Config:
        """The configuration; keys in capitals are the user's own: ``global_context.config.BATCH_SIZE``."""
        return get_context().config

    def get_global_rank(self) -> int:
        """The rank of this process in the world."""
        return get_context().rank

    def get_local_rank(self, parallel_mode: ParallelMode) -> int:
        """The rank of this process in its group of ``parallel_mode``. (On its machine it is ``context.local_rank``.)"""
        return dist.get_rank(self.get_group(parallel_mode))

    def get_world_size(self, parallel_mode: ParallelMode) -> int:
        """The number of ranks in this process's group of ``parallel_mode``."""
        return dist.get_world_size(self.get_group(parallel_mode))

    def get_group(self, parallel_mode: ParallelMode) -> dist.ProcessGroup:
        """This process's group of ``parallel_mode``."""
        context = get_context()
        groups: dict[ParallelMode, Any] = {
            ParallelMode.GLOBAL: dist.group.WORLD,
            ParallelMode.MODEL: context.model_group,
            ParallelMode.DATA: context.dp.group,
            ParallelMode.PIPELINE: context.stage_axis.group,
            ParallelMode.TENSOR: context.tensor_axis.group,
        }
        if parallel_mode not in groups:
            allowed = ", ".join(f"ParallelMode.{name}" for name in ParallelMode.__members__)
            raise ValueError(f"parallel_mode: got {parallel_mode!r}, expected one of {allowed}")
        return cast(dist.ProcessGroup, groups[parallel_mode])

    def get_ranks_in_group(self, parallel_mode: ParallelMode) -> list[int]:
        """The global ranks of this process's group of ``parallel_mode``."""
        return dist.get_process_group_ranks(self.get_group(parallel_mode))

    def is_first_rank(self, parallel_mode: ParallelMode) -> bool:
        """Whether this process is the first in its group."""
        return self.get_local_rank(parallel_mode) == 0

    def is_last_rank(self, parallel_mode: ParallelMode) -> bool:
        """Whether this process is the last in its group."""
        return self.get_local_rank(parallel_mode) == self.get_world_size(parallel_mode) - 1

    def is_initialized(self, parallel_mode: ParallelMode) -> bool:
        """Whether there is an open context and, for PIPELINE, as in Colossal-AI, several stages."""
        context = current_context()
        return context is not None and (parallel_mode is not ParallelMode.PIPELINE or context.stage_axis.size > 1)

    @property
    def data_parallel_size(self) -> int:
        """The number of replicas of the model."""
        return get_context().batch_axis.size

    @property
    def pipeline_parallel_size(self) -> int:
        """The number of pipeline ranks."""
        return get_context().stage_axis.size

    @property
    def tensor_parallel_size(self) -> int:
        """The number of ranks that each layer is sharded over."""
        return get_context().tensor_axis.size

    def destroy(self) -> None:
        """Close the context. At the end of a script this happens automatically."""
        get_context().close()


global_context = GlobalContext()
"""Import it with ``from paramp.compat.colossalai.core import global_context as gpc``."""
