"""Sharded checkpoints on ``torch.distributed.checkpoint`` (DCP) that any layout reads, without pickles: the writing.

The callers pass :class:`~paramp.checkpoint.chunks.Chunk` s, the slices that each rank holds of tensors under the whole
model's names, and a tree of plain values. DCP plans, over all ranks, which slices of which tensors each rank writes.
DCP's own storage uses pickle, whose reading can run any code; this one does not::

    step-00000100/
      manifest.json            size and SHA-256 of every other file
      checkpoint.json          the header: plain values, and the file of each slice of each tensor
      rank-00000.safetensors   the slices that rank 0 wrote
      ...
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..base.errors import CheckpointError
from .atomic_dir import HEADER, Written, new_folder, publish
from .chunks import Chunk, TensorSlice
from .header import StoredSlice, StoredTensor, key_in_file, write_header
from .safetensors_io import write_tensors


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
    planner = _SavePlanner(chunks, failure, str(path))
    with one_error("written", path), ExitStack() as unpublished:
        writer = _Writer(path, values, unpublished)
        state_dict_saver.save({}, storage_writer=writer, planner=planner, process_group=group)


def rank_file(rank: int) -> str:
    """The name of the file that ``rank`` writes."""
    return f"rank-{rank:05d}.safetensors"


@contextmanager
def one_error(what: str, path: str | Path) -> Iterator[None]:
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


def rectangle(slice_: TensorSlice | StoredSlice) -> ChunkStorageMetadata:
    """The offsets and sizes of ``slice_`` in its tensor, in DCP's form."""
    return ChunkStorageMetadata(torch.Size(slice_.offsets), torch.Size(slice_.sizes))


class _SavePlanner(DefaultSavePlanner):
    """Plans to write the slices of ``chunks``, each by one rank."""

    def __init__(self, chunks: Sequence[Chunk], failure: CheckpointError | None, path: str) -> None:
        super().__init__()
        self._failure = failure
        self._path = path
        self._slices: dict[MetadataIndex, tuple[Chunk, TensorSlice]] = {
            MetadataIndex(chunk.name, slice_.offsets): (chunk, slice_) for chunk in chunks for slice_ in chunk.slices
        }

    def create_local_plan(self) -> SavePlan:
        # DCP passes errors raised here to every rank. If it was raised before, the others would wait for this plan.
        if self._failure is not None:
            raise self._failure
        items = []
        for index, (chunk, slice_) in self._slices.items():
            data = TensorWriteData(rectangle(slice_), TensorProperties(dtype=chunk.dtype), torch.Size(chunk.shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items, planner_data=self._path)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        for rank, plan in enumerate(all_plans):
            if plan.planner_data != self._path:
                raise CheckpointError(
                    f"path: got {self._path!r} on rank 0 and {plan.planner_data!r} on rank {rank}; pass the same path "
                    "on every rank, for instance by broadcasting a name that contains the time"
                )
        seen: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:  # a slice that several ranks have, such as a buffer in two stages, the first writes
            plans.append(replace(plan, items=[item for item in plan.items if item.index not in seen]))
            seen.update(item.index for item in plan.items)
        final, metadata = create_default_global_save_plan(plans)
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            num_elements = sum(rectangle.sizes.numel() for rectangle in tensor.chunks)
            if num_elements != tensor.size.numel():
                raise CheckpointError(
                    f"{name}: all ranks together hold {num_elements} of its {tensor.size.numel()} elements, so it "
                    "cannot be saved"
                )
        return final, metadata

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._slices[write_item.index][1].values


class Storage:
    """DCP storage methods that are not needed here, because each object serves one checkpoint, on every rank."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """No action."""

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # DCP does not choose the storage by a path


class _Writer(Storage, StorageWriter):
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
        placed = {result.index: result.storage_data for of_rank in results for result in of_rank}
        tensors = []
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            slices = tuple(
                StoredSlice(tuple(chunk.offsets), tuple(chunk.sizes), placed[MetadataIndex(name, chunk.offsets)][0])
                for chunk in tensor.chunks
            )
            tensors.append(StoredTensor(name, tensor.properties.dtype, tuple(tensor.size), slices))
        files: dict[str, Written] = dict(placed.values())
        files[HEADER] = write_header(self._partial, self._values, tensors)
        publish(self._partial, self._path, files)
