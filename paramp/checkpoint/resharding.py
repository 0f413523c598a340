"""The reading of sharded checkpoints in any layout: rectangles of a tensor, out of the slices of another layout.

DCP plans, over all ranks, from which slices of which files each rank fills the slices of its own chunks. Nothing is
read before every file has been compared with the manifest (:mod:`.open_checkpoint`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..base.errors import CheckpointError
from .atomic_dir import HEADER
from .chunks import Chunk, ranges
from .header import Header, StoredSlice, StoredTensor, key_in_file
from .open_checkpoint import OpenCheckpoint
from .sharded_save import Storage, one_error, rectangle


def read(checkpoint: OpenCheckpoint, chunks: Sequence[Chunk], header: Header, group: dist.ProcessGroup) -> None:
    """Fill the slices of ``chunks`` from a checkpoint. Every rank of ``group`` calls this.

    The stored values are converted to the dtype of the slice's values and copied to their device.

    Args:
        header: the checkpoint's header, with tensors under the names that ``chunks`` have.

    Raises:
        CheckpointError: on every rank, if a tensor of any rank is missing in the checkpoint or has another shape there.
    """
    reader, planner = _Reader(checkpoint, header), _LoadPlanner(chunks)
    with one_error("read", checkpoint.path):
        state_dict_loader.load({}, storage_reader=reader, planner=planner, process_group=group)


def read_tensor(checkpoint: OpenCheckpoint, name: str) -> torch.Tensor:
    """One complete tensor, in the dtype in which it is stored, on the CPU.

    Raises:
        CheckpointError: its files do not have it as the header describes it.
    """
    stored = checkpoint.header.tensors[name]
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    for slice_ in stored.slices:
        whole[ranges(slice_.offsets, slice_.sizes)] = _read(checkpoint, stored, slice_)
    return whole


class _LoadPlanner(DefaultLoadPlanner):
    """Plans to fill the slices of ``chunks``."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__()
        self._chunks = chunks
        self._values = {(chunk.name, slice_.offsets): slice_.values for chunk in chunks for slice_ in chunk.slices}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for chunk in self._chunks:
            if not chunk.slices:
                continue
            stored = self.metadata.state_dict_metadata.get(chunk.name)
            if not isinstance(stored, TensorStorageMetadata):
                raise CheckpointError(f"{chunk.name} is missing in the checkpoint")
            if tuple(stored.size) != chunk.shape:
                raise CheckpointError(
                    f"{chunk.name} has the shape {tuple(stored.size)} in the checkpoint, expected {chunk.shape}; load "
                    "a checkpoint of the same model"
                )
            items += create_read_items_for_chunk_list(chunk.name, stored, [rectangle(each) for each in chunk.slices])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._values[read_item.dest_index.fqn, tuple(read_item.dest_index.offset or ())]
        return target[ranges(read_item.dest_offsets, read_item.lengths)]


class _Reader(Storage, StorageReader):
    """Reads rectangles from the files that :func:`~paramp.checkpoint.sharded_save.write` wrote."""

    def __init__(self, checkpoint: OpenCheckpoint, header: Header) -> None:
        self._checkpoint = checkpoint
        self._header = header
        self._slices = functools.cache(lambda name: {each.offsets: each for each in header.tensors[name].slices})

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), [*map(rectangle, tensor.slices)]
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
            wanted = ranges(item.storage_offsets, item.lengths)
            value = _read(self._checkpoint, self._header.tensors[name], self._slices(name)[offsets], wanted)
            planner.resolve_tensor(item).copy_(value)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _read(
    checkpoint: OpenCheckpoint, stored: StoredTensor, slice_: StoredSlice, wanted: tuple[slice, ...] = ()
) -> torch.Tensor:
    """The values at ``wanted`` of a slice of ``stored``; by default the whole slice. On the CPU."""
    file, key = checkpoint.tensor_file(slice_.file), key_in_file(stored.name, slice_.offsets)
    if file.shapes.get(key) != (stored.dtype, slice_.sizes):
        raise CheckpointError(
            f"{str(file.path)!r} does not have {stored.name} as {HEADER} describes it; use another checkpoint"
        )
    return file.read(key, wanted)
