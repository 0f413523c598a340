"""Sharded checkpoints on ``torch.distributed.checkpoint`` (DCP) that can be read in any layout and contain no pickles.

The callers pass :class:`~paramp.checkpoint.chunks.Chunk` s, the slices that each rank holds of tensors under the whole
model's names, and a tree of plain values. DCP plans, over all ranks, which slices of which tensors each rank writes, or
reads from which files. DCP's own storage uses pickle, whose reading can run any code; this one does not::

    step-00000100/
      manifest.json            size and SHA-256 of every other file
      checkpoint.json          the header: plain values, and the file of each slice of each tensor
      rank-00000.safetensors   the slices that rank 0 wrote
      ...

Nothing is read before every file has been compared with the manifest.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ..base.errors import CheckpointError
from .atomic_dir import HEADER, Written, new_folder, publish
from .chunks import Chunk, ranges
from .dcp_planners import ChunkLoadPlanner, ChunkSavePlanner, rectangle
from .header import Header, StoredSlice, StoredTensor, key_in_file, write_header
from .open_checkpoint import OpenCheckpoint
from .safetensors_io import TensorFile, write_tensors


@contextmanager
def _one_error(what: str, path: str | Path) -> Iterator[None]:
    """Replace DCP's exception, a collection of every rank's failures, by one error."""
    try:
        yield
    except CheckpointException as error:
        rank, (failure, _) = min(error.failures.items())
        if isinstance(failure, CheckpointError):
            raise CheckpointError(str(failure)) from None
        raise CheckpointError(
            f"{str(path)!r} was not {what}: rank {rank} failed: {type(failure).__name__}: {failure}"
        ) from failure


# ----------------------------------------------------------------------------------------------------------- writing


def write(
    path: Path, chunks: Sequence[Chunk], values: Any, group: dist.ProcessGroup, failure: CheckpointError | None
) -> None:
    """Write a checkpoint to the folder ``path``, which appears when it is complete. Every rank of ``group`` calls this.

    Args:
        chunks: this rank's chunks. A slice that several ranks have is written by the first of them.
        values: plain values, encoded (:mod:`paramp.checkpoint.json_codec`); those of the first rank are written.
        failure: the error that kept this rank from collecting its chunks. All ranks raise it.

    Raises:
        CheckpointError: on every rank, with the first rank's problem.
    """
    planner = ChunkSavePlanner(chunks, failure, str(path))
    with _one_error("written", path), ExitStack() as unpublished:
        writer = _Writer(path, values, unpublished)
        state_dict_saver.save({}, storage_writer=writer, planner=planner, process_group=group)


def rank_file(rank: int) -> str:
    """The name of the file that ``rank`` writes."""
    return f"rank-{rank:05d}.safetensors"


class _Storage:
    """DCP storage methods that are not needed here, because each object serves one checkpoint, on every rank."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """No action."""

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # DCP does not choose the storage by a path


class _Writer(_Storage, StorageWriter):
    """Writes one file of tensors for each rank that has any, in a partial folder that is renamed at the end.

    ``unpublished`` deletes the folder, when it is closed, if it was not renamed.
    """

    def __init__(self, path: Path, values: Any, unpublished: ExitStack) -> None:
        self._path = path
        self._values = values
        self._unpublished = unpublished
        self._partial = path

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """No action: the folder is made after planning."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # On the first rank only; the others get the folder's name, which contains a random number, with their plan.
        self._partial = self._unpublished.enter_context(new_folder(self._path))
        return [replace(plan, storage_data=(self._partial.name, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        folder, rank = plan.storage_data
        values: dict[str, Any] = {
            key_in_file(item.index.fqn, item.index.offset or ()): planner.resolve_data(item) for item in plan.items
        }
        results = []
        if values:
            path = self._path.with_name(folder) / rank_file(rank)
            shapes = {key: (value.dtype, value.shape) for key, value in values.items()}
            written = write_tensors(path, shapes, values.__getitem__)
            results = [WriteResult(item.index, written.size, (path.name, written)) for item in plan.items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        placed = {result.index: result.storage_data for own in results for result in own}
        files: dict[str, Written] = dict(placed.values())
        tensors = [
            _stored(name, tensor, placed)
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        ]
        files[HEADER] = write_header(self._partial, self._values, tensors)
        publish(self._partial, self._path, files)


def _stored(name: str, tensor: TensorStorageMetadata, placed: Mapping[MetadataIndex, Any]) -> StoredTensor:
    places = [(chunk.offsets, chunk.sizes, placed[MetadataIndex(name, chunk.offsets)][0]) for chunk in tensor.chunks]
    slices = tuple(StoredSlice(tuple(offsets), tuple(sizes), file) for offsets, sizes, file in places)
    return StoredTensor(name, tensor.properties.dtype, tuple(tensor.size), slices)


# ----------------------------------------------------------------------------------------------------------- reading


def read(checkpoint: OpenCheckpoint, chunks: Sequence[Chunk], header: Header, group: dist.ProcessGroup) -> None:
    """Fill the slices of ``chunks`` from a checkpoint. Every rank of ``group`` calls this.

    The stored values are converted to the dtype of the slice's values and copied to their device.

    Args:
        header: the checkpoint's header, with tensors under the names that ``chunks`` have.

    Raises:
        CheckpointError: on every rank, if a tensor of any rank is missing in the checkpoint or has another shape there.
    """
    reader, planner = _Reader(checkpoint, header), ChunkLoadPlanner(chunks)
    with _one_error("read", checkpoint.path):
        state_dict_loader.load({}, storage_reader=reader, planner=planner, process_group=group)


class _Reader(_Storage, StorageReader):
    """Reads slices from the files that :class:`_Writer` wrote."""

    def __init__(self, checkpoint: OpenCheckpoint, header: Header) -> None:
        self._checkpoint = checkpoint
        self._header = header
        self._slices = functools.cache(lambda name: {each.offsets: each for each in header.tensors[name].slices})

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=tensor.dtype),
                    torch.Size(tensor.shape),
                    [rectangle(slice_) for slice_ in tensor.slices],
                )
                for name, tensor in self._header.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """No action: the header was read before."""

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            name, offsets = item.storage_index.fqn, tuple(item.storage_index.offset or ())
            slice_ = self._slices(name)[offsets]
            wanted = ranges(item.storage_offsets, item.lengths)
            value = _read(self._checkpoint.tensor_file(slice_.file), self._header.tensors[name], slice_, wanted)
            planner.resolve_tensor(item).copy_(value)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _read(file: TensorFile, stored: StoredTensor, slice_: StoredSlice, wanted: tuple[slice, ...] = ()) -> torch.Tensor:
    """The values at ``wanted`` of a slice of ``stored``; by default the whole slice. On the CPU."""
    key = key_in_file(stored.name, slice_.offsets)
    if file.shapes.get(key) != (stored.dtype, slice_.sizes):
        raise CheckpointError(
            f"{str(file.path)!r} does not have {stored.name} as {HEADER} describes it; use another checkpoint"
        )
    return file.read(key, wanted)


def read_tensor(checkpoint: OpenCheckpoint, name: str) -> torch.Tensor:
    """One complete tensor, in the dtype in which it is stored, on the CPU.

    Raises:
        CheckpointError: its files do not have it as the header describes it.
    """
    stored = checkpoint.header.tensors[name]
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    for slice_ in stored.slices:
        whole[ranges(slice_.offsets, slice_.sizes)] = _read(checkpoint.tensor_file(slice_.file), stored, slice_)
    return whole
