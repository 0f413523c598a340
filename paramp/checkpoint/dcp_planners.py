"""Planners for ``torch.distributed.checkpoint``: they assign to each rank the slices that it writes or reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..base.errors import CheckpointError
from .chunks import Chunk, TensorSlice, ranges
from .header import StoredSlice


def rectangle(slice_: TensorSlice | StoredSlice) -> ChunkStorageMetadata:
    """The offsets and sizes of ``slice_`` in its tensor, in DCP's form."""
    return ChunkStorageMetadata(torch.Size(slice_.offsets), torch.Size(slice_.sizes))


class ChunkSavePlanner(DefaultSavePlanner):
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
        items = [_write_item(index, chunk, slice_) for index, (chunk, slice_) in self._slices.items()]
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
            own = [item for item in plan.items if item.index not in seen]
            seen.update(item.index for item in own)
            plans.append(replace(plan, items=own))
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


def _write_item(index: MetadataIndex, chunk: Chunk, slice_: TensorSlice) -> WriteItem:
    data = TensorWriteData(rectangle(slice_), TensorProperties(dtype=chunk.dtype), torch.Size(chunk.shape))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


class ChunkLoadPlanner(DefaultLoadPlanner):
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
