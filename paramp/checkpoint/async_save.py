"""Asynchronous saving of checkpoints: training waits only for the copy to the CPU.

The state is copied to CPU buffers (page-locked ones, from a GPU), which are reused by the next save; a thread writes it
from there, with a process group of the engine's own, so that its collectives do not mix with those of the training or
of another engine's save. The next call raises the error of a save that failed, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from ..base.collectives import gather_objects
from ..base.errors import CheckpointError
from ..base.values_checked_by_type import user_path
from ..distributed.context import ParallelContext
from .chunks import Chunk, TensorSlice
from .json_codec import encode

Collected = tuple[Sequence[Chunk], Mapping[str, Any]]


class Saver:
    """Writes the checkpoints of one engine, one after the other. Every rank calls each method.

    Attributes:
        running: the save in the background whose end was not waited for; None if there is none.
    """

    def __init__(self, context: ParallelContext) -> None:
        self._context = context
        self._name = f"save/{context.num_engines}"  # of this engine's process group
        self._group: dist.ProcessGroup | None = None
        self._thread: ThreadPoolExecutor | None = None
        self.running: Future[None] | None = None
        self._staged: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks, over gloo, for this engine alone; made on first use, by all of them."""
        if self._group is None:
            everyone = torch.arange(self._context.world_size).view(1, -1)
            group = self._context.make_group(self._name, everyone, backend="gloo", shared=False)
            self._group = cast(dist.ProcessGroup, group)
            self._context.before_close.append(self._end)
        return self._group

    def save(
        self, path: str | Path, collect: Callable[[], Collected], *, wait: bool, then: Callable[[], None] | None = None
    ) -> None:
        """Write the result of ``collect`` to the folder ``path``; ``wait`` for the write, else only for the copy.

        Raises:
            CheckpointError: on every rank, if any has a value that cannot be saved, or if this save, ``then`` or the
                last save failed.
        """
        from .sharded_save import write  # imports torch's checkpointing and DTensor, which not every training needs

        self.finish()
        path, group = user_path(path).resolve(), self.group
        chunks, values, failure = self._collected(collect, staged=not wait)

        def work() -> None:
            write(path, chunks, values, group, failure)
            self._call_together(then)

        # A failure on any rank is raised here on every rank, as all of them go on with the same save.
        if wait or any(gather_objects(failure is not None, group)):
            work()
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="paramp-save")
        self.running = self._thread.submit(work)

    def _collected(
        self, collect: Callable[[], Collected], *, staged: bool
    ) -> tuple[list[Chunk], Any, CheckpointError | None]:
        """This rank's chunks and the encoded values; or the error, which all ranks get by the plan of the writing."""
        try:
            chunks, values = collect()
            written = [chunk for chunk in chunks if chunk.written]
            return self._stage(written) if staged else written, encode(dict(values), "checkpoint"), None
        except CheckpointError as error:
            return [], None, error
        except Exception as error:  # raised by a user's state_dict(), or for want of memory for the copies
            failure = CheckpointError(f"save: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return [], None, failure

    def _call_together(self, then: Callable[[], None] | None) -> None:
        """Call ``then``, if given; an exception on one rank is raised on every rank."""
        failure: Exception | None = None
        try:
            if then is not None:
                then()
        except Exception as error:
            failure = error
        for rank, text in enumerate(gather_objects(failure and f"{type(failure).__name__}: {failure}", self.group)):
            if text is not None:
                where = self._context.name_of(rank)
                raise CheckpointError(f"save: the checkpoint was written, but then: {text}; on {where}") from failure

    def finish(self) -> None:
        """Wait for the running save, if there is one.

        Raises:
            CheckpointError: on every rank, if it failed.
        """
        if self.running is not None:
            running, self.running = self.running, None
            running.result()

    def _stage(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """``chunks`` with copies of their values on the CPU."""
        staged = [replace(chunk, slices=tuple(self._copied(chunk.name, s) for s in chunk.slices)) for chunk in chunks]
        # Copies to page-locked memory are asynchronous, so the stream has to be synchronised.
        if self._context.device.type == "cuda":
            torch.cuda.current_stream(self._context.device).synchronize()
        return staged

    def _copied(self, name: str, slice_: TensorSlice) -> TensorSlice:
        key = name, slice_.offsets
        copy = self._staged.get(key)
        if copy is None or copy.shape != slice_.values.shape or copy.dtype is not slice_.values.dtype:
            copy = torch.empty(slice_.values.shape, dtype=slice_.values.dtype, pin_memory=slice_.values.is_cuda)
            self._staged[key] = copy
        return TensorSlice(slice_.offsets, copy.copy_(slice_.values, non_blocking=True))

    def _end(self) -> None:
        """Finish the running save before the process groups are destroyed."""
        try:
            self.finish()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
