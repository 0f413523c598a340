"""Sharded checkpoints on ``torch.distributed.checkpoint`` that any layout can read, and that run no code.

What the layers above hand over are :class:`~paramp.checkpoint.chunks.Chunk` s, tensors by the whole model's names, and a tree of
plain values. torch's machinery plans, over all ranks, which box of which tensor each writes, and at loading which boxes
of which files make up what each rank holds now. Its own storage pickles; this one does not::

    step-00000100/
      manifest.json            size and SHA-256 of every other file
      checkpoint.json          the plain values, and in which file each box of each tensor lies
      rank-00000.safetensors   what rank 0 wrote
      ...

Nothing is read before every file has been compared with the manifest.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ..base.errors import CheckpointError
from ..distributed.collectives import gather_objects
from . import atomic_dir as manifest
from .atomic_dir import HEADER
from .chunks import Chunk, TensorSlice
from .json_codec import decode
from .safetensors_io import DTYPES, Entry, Written, read_header, read_rows, write_tensors

__all__ = [
    "MODEL",
    "Header",
    "StoredTensor",
    "newest_whole",
    "problems",
    "problems_together",
    "read",
    "read_header_of",
    "read_tensor",
    "write",
    "write_alone",
]

MODEL = "model."
"""What the names of weights and buffers begin with."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint."""

    name: str
    """In its files."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...]
    """Offsets, sizes and file of each box."""


@dataclass(frozen=True)
class Header:
    """What a checkpoint says of itself."""

    values: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @property
    def only_weights(self) -> bool:
        """Whether it was imported from a file of weights, and has nothing else."""
        return "layout" not in self.values


# ----------------------------------------------------------------------------------------------------------- writing


def write(
    path: str | Path,
    wanted: Sequence[Chunk],
    values: Any,
    group: dist.ProcessGroup,
    failure: CheckpointError | None = None,
) -> None:
    """Write a checkpoint to the folder ``path``, which appears when it is whole. Every rank of ``group`` calls this.

    Args:
        wanted: what this rank has to write; of what several ranks write alike, the first one's is taken.
        values: plain ones, encoded (:mod:`paramp.checkpoint.json_codec`); those of the first rank are written.
        failure: why this rank has nothing to write, for all ranks to be told.

    Raises:
        CheckpointError: on every rank, naming the first problem of any.
    """
    writer = _Writer(Path(path), values)
    planner = _SavePlanner(wanted, failure, str(path))
    _translated(
        "written",
        path,
        lambda: state_dict_saver.save({}, storage_writer=writer, planner=planner, process_group=group),
    )


def _translated(what: str, path: str | Path, action: Callable[[], Result]) -> Result:
    """``action()``, with torch's collection of every rank's failures as one error."""
    try:
        return action()
    except CheckpointException as error:
        rank, (failure, _) = min(error.failures.items())
        if isinstance(failure, CheckpointError):
            raise CheckpointError(str(failure)) from None
        raise CheckpointError(
            f"{str(path)!r} was not {what}: rank {rank} failed: {type(failure).__name__}: {failure}"
        ) from failure


class _SavePlanner(SavePlanner):
    """Plans to write the boxes of ``wanted``, each by one rank."""

    def __init__(self, wanted: Sequence[Chunk], failure: CheckpointError | None, path: str) -> None:
        self._failure = failure
        self._path = path
        self._boxes: dict[MetadataIndex, tuple[Chunk, TensorSlice]] = {
            MetadataIndex(named.name, slice_.offsets): (named, slice_) for named in wanted for slice_ in named.slices
        }

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: the wanted are known."""

    def create_local_plan(self) -> SavePlan:
        if self._failure is not None:
            raise self._failure
        items = [_write_item(index, named, slice_) for index, (named, slice_) in self._boxes.items()]
        return SavePlan(items, planner_data=self._path)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        for rank, plan in enumerate(all_plans):
            if plan.planner_data != self._path:
                raise CheckpointError(
                    f"path: got {self._path!r} on rank 0 and {plan.planner_data!r} on rank {rank}; give every rank the "
                    "same, for instance by broadcasting what is made of the time"
                )
        seen: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:  # what several ranks hold alike, such as a buffer in several stages, is the first one's
            own = [item for item in plan.items if item.index not in seen]
            seen.update(item.index for item in own)
            plans.append(replace(plan, items=own))
        final, metadata = create_default_global_save_plan(plans)
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            held = sum(chunk.sizes.numel() for chunk in tensor.chunks)
            if held != tensor.size.numel():
                raise CheckpointError(
                    f"{name}: all ranks together hold {held} of its {tensor.size.numel()} elements, so it is not saved"
                )
        return final, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._boxes[write_item.index][1].values


def _write_item(index: MetadataIndex, named: Chunk, slice_: TensorSlice) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(slice_.offsets), torch.Size(slice_.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=named.dtype), torch.Size(named.shape))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


class _Writer(StorageWriter):
    """One file of tensors for each rank that has any, in a folder that gets its name in the end."""

    def __init__(self, path: Path, values: Any) -> None:
        self._path = path
        self._values = values
        self._partial = path
        self._rank = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: the folder is made when all plans are there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        manifest.finish_replacing(self._path)
        self._partial = manifest.new_partial(self._path)
        return [replace(plan, storage_data=(self._partial.name, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        folder, rank = plan.storage_data
        file = f"rank-{rank:05d}.safetensors"
        items = {_key(item.index): item for item in plan.items}
        shapes = {key: _dtype_and_shape(item) for key, item in items.items()}
        results = []
        if items:
            path = self._path.with_name(folder) / file
            written = write_tensors(path, shapes, lambda key: _resolved(planner, items[key]))
            results = [WriteResult(item.index, written.size, (file, written)) for item in items.values()]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        placed = {result.index: result.storage_data for own in results for result in own}
        files: dict[str, Written] = dict(placed.values())
        tensors = {
            name: _described(name, tensor, placed)
            for name, tensor in sorted(metadata.state_dict_metadata.items())
            if isinstance(tensor, TensorStorageMetadata)
        }
        header = {"values": self._values, "tensors": tensors}
        files[HEADER] = manifest.write_json(self._partial / HEADER, header)
        manifest.publish(self._partial, self._path, files)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # only for those who ask for it by name


def _key(index: MetadataIndex) -> str:
    """A box's name in its file: the tensor's, and where the box begins unless that is its origin."""
    offsets = index.offset or ()
    return f"{index.fqn}@{','.join(map(str, offsets))}" if any(offsets) else index.fqn


def _dtype_and_shape(item: WriteItem) -> tuple[torch.dtype, torch.Size]:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes


def _resolved(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    value = planner.resolve_data(item)
    assert isinstance(value, torch.Tensor)
    return value


def _described(name: str, tensor: TensorStorageMetadata, placed: Mapping[MetadataIndex, Any]) -> dict[str, Any]:
    chunks = [(chunk.offsets, chunk.sizes, placed[MetadataIndex(name, chunk.offsets)][0]) for chunk in tensor.chunks]
    return _description(tensor.properties.dtype, tensor.size, chunks)


def _description(
    dtype: torch.dtype, shape: Sequence[int], chunks: Sequence[tuple[Sequence[int], Sequence[int], str]]
) -> dict[str, Any]:
    """A tensor as the header has it; :func:`_stored` reads it."""
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
        "chunks": [[list(offsets), list(sizes), file] for offsets, sizes, file in chunks],
    }


def write_alone(
    path: Path,
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    tensor: Callable[[str], torch.Tensor],
    values: Any,
) -> None:
    """Write a checkpoint of whole tensors, from one process.

    Args:
        tensors: dtype and shape of each, by name.
        tensor: gives each one when its turn comes.
        values: plain ones, encoded.
    """
    partial, file = manifest.new_partial(path), "rank-00000.safetensors"
    files = {file: write_tensors(partial / file, tensors, tensor)}
    header = {
        name: _description(dtype, shape, [([0] * len(shape), shape, file)])
        for name, (dtype, shape) in sorted(tensors.items())
    }
    files[HEADER] = manifest.write_json(partial / HEADER, {"values": values, "tensors": header})
    manifest.publish(partial, path, files)


# ----------------------------------------------------------------------------------------------------------- reading


def problems(path: str | Path, part: int = 0, num_parts: int = 1) -> list[str]:
    """What is damaged in the checkpoint at ``path``, by file; nothing if it is whole.

    Args:
        part, num_parts: look at every ``num_parts``-th file only, from the ``part``-th on.
    """
    path = Path(path)
    try:
        files = sorted(manifest.listed(path).items())
    except (CheckpointError, OSError) as error:
        return [str(error)]
    if HEADER not in dict(files):
        return [f"{str(path / HEADER)!r} is not in the manifest: this is no checkpoint of a run"]
    return [found for name, written in files[part::num_parts] if (found := manifest.damage(path, name, written))]


def problems_together(path: str | Path, group: dist.ProcessGroup) -> list[str]:
    """What is damaged in the checkpoint at ``path``, the same on every rank; each reads a part of the files."""
    manifest.finish_replacing(Path(path))
    size = dist.get_world_size(group)
    everyone = gather_objects(problems(path, dist.get_rank(group), size), group)
    return list(dict.fromkeys(found for own in everyone for found in own))


def newest_whole(folder: str | Path, group: dist.ProcessGroup) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint among the ``step-...`` of ``folder``, and what is wrong with those passed over.

    The same on every rank; all of them call it.
    """
    folder = Path(folder)
    listing: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        listing = [[path for _, path in manifest.checkpoints_in(folder)], manifest.unfinished_in(folder)]
    dist.broadcast_object_list(listing, group=group, group_src=0)
    paths, unfinished = listing
    skipped = [f"{str(path)!r} is unfinished: saving it was cut short" for path in unfinished]
    for path in paths:
        found = problems_together(path, group)
        if not found:
            return path, skipped
        skipped.append(found[0])
    return None, skipped


def read_header_of(path: str | Path) -> Header:
    """What the checkpoint at ``path``, known to be whole, says of itself.

    Raises:
        CheckpointError: it says nothing that can be understood.
        OSError: it cannot be read.
    """
    file = Path(path) / HEADER
    files = manifest.listed(Path(path))
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        tensors = {name: _stored(name, item, files) for name, item in content["tensors"].items()}
        values = decode(content["values"])
        _check_values(values)
        return Header(values, tensors)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{str(file)!r} is no header of a checkpoint: {type(error).__name__}: {error}") from None


DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def _stored(name: str, item: Mapping[str, Any], files: Mapping[str, Written]) -> StoredTensor:
    """A tensor as the header has it.

    Raises:
        ValueError: its boxes do not make it up, or lie in files that are none of ``files``.
    """
    shape = tuple(int(size) for size in item["shape"])
    chunks = tuple((tuple(offsets), tuple(sizes), file) for offsets, sizes, file in item["chunks"])
    inside = all(
        len(offsets) == len(sizes) == len(shape)
        and all(0 <= low <= low + size <= whole for low, size, whole in zip(offsets, sizes, shape, strict=True))
        for offsets, sizes, _ in chunks
    )
    held = sum(math.prod(sizes) for _, sizes, _ in chunks)
    if not inside or held != math.prod(shape) or len({offsets for offsets, _, _ in chunks}) != len(chunks):
        raise ValueError(f"the parts of {name} do not make it up")
    if not all(file in files for _, _, file in chunks):
        raise ValueError(f"a part of {name} lies in a file that is not in the manifest")
    return StoredTensor(name, DTYPE_NAMES[item["dtype"]], shape, chunks)


VALUES: dict[str, type] = {
    "layout": dict,
    "config": dict,
    "counts": list,
    "scaler": dict,
    "optimizer": str,
    "groups": list,
    "tracked": dict,
}
"""What a run's checkpoint says beside its tensors."""


def _check_values(values: Any) -> None:
    """Look at what a run's checkpoint says beside its tensors.

    Raises:
        ValueError: something is missing, or of another type.
    """
    for name, kind in VALUES.items() if "layout" in values else ():
        if not isinstance(values.get(name), kind):
            raise ValueError(f"its {name!r} is {type(values.get(name)).__name__}, expected {kind.__name__}")


def read(path: str | Path, wanted: Sequence[Chunk], header: Header, group: dist.ProcessGroup) -> None:
    """Fill the boxes of ``wanted`` from the checkpoint at ``path``. Every rank of ``group`` calls this.

    Each is converted to its named's dtype and brought to its device.

    Raises:
        CheckpointError: on every rank, if a named of any has another shape there or is missing.
    """
    reader = _Reader(Path(path), header)
    planner = _LoadPlanner(wanted)
    _translated(
        "read", path, lambda: state_dict_loader.load({}, storage_reader=reader, planner=planner, process_group=group)
    )


class _LoadPlanner(LoadPlanner):
    """Plans to fill the boxes of ``wanted``."""

    def __init__(self, wanted: Sequence[Chunk]) -> None:
        self._pieces = wanted
        self._values = {(named.name, slice_.offsets): slice_.values for named in wanted for slice_ in named.slices}
        self._metadata: Metadata | None = None

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        items: list[ReadItem] = []
        for named in self._pieces:
            if not named.slices:
                continue
            stored = self._metadata.state_dict_metadata.get(named.name)
            if not isinstance(stored, TensorStorageMetadata):
                raise CheckpointError(f"{named.name} is missing in the checkpoint")
            if tuple(stored.size) != named.shape:
                raise CheckpointError(
                    f"{named.name} has the shape {tuple(stored.size)} in the checkpoint, expected {named.shape}: it is "
                    "another model's"
                )
            chunks = [
                ChunkStorageMetadata(torch.Size(slice_.offsets), torch.Size(slice_.sizes)) for slice_ in named.slices
            ]
            items += create_read_items_for_chunk_list(named.name, stored, chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("checkpoints hold tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._values[read_item.dest_index.fqn, tuple(read_item.dest_index.offset or ())]
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: the tensor is a view of what was to be filled."""


class _Reader(StorageReader):
    """Reads boxes of the files that :class:`_Writer` wrote."""

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self._header = header
        self._entries = functools.cache(lambda file: read_header(self._path / file)[0])
        self._files = functools.cache(
            lambda name: {offsets: file for offsets, _, file in self._header.tensors[name].chunks}
        )

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=tensor.dtype),
                    torch.Size(tensor.shape),
                    [
                        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                        for offsets, sizes, _ in tensor.chunks
                    ],
                )
                for name, tensor in self._header.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: the header was read before."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            planner.resolve_tensor(item).copy_(self._read(item))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem) -> torch.Tensor:
        index = item.storage_index
        file = self._files(index.fqn)[tuple(index.offset or ())]
        stored = self._header.tensors[index.fqn]
        entry = _entry(self._path / file, self._entries(file), stored, index)
        ranges = list(zip(item.storage_offsets, item.lengths, strict=True))
        value = read_rows(self._path / file, entry, *ranges[0]) if ranges else read_rows(self._path / file, entry)
        for dim, (offset, length) in enumerate(ranges[1:], start=1):
            value = value.narrow(dim, offset, length)
        return value

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # only for those who ask for it by name


def _entry(path: Path, entries: Mapping[str, Entry], stored: StoredTensor, index: MetadataIndex) -> Entry:
    """Where a box of ``stored`` lies in the file at ``path``.

    Raises:
        CheckpointError: it does not lie there as the header says.
    """
    entry = entries.get(_key(replace(index, fqn=stored.name)))
    sizes = next(sizes for offsets, sizes, _ in stored.chunks if offsets == tuple(index.offset or ()))
    if entry is None or (entry.dtype, entry.shape) != (stored.dtype, sizes):
        raise CheckpointError(f"{str(path)!r} does not hold {stored.name} as {HEADER} says; take another checkpoint")
    return entry


def read_tensor(path: Path, header: Header, name: str) -> torch.Tensor:
    """The whole of one tensor, on the CPU."""
    stored = header.tensors[name]
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    for offsets, sizes, file in stored.chunks:
        entry = _entry(path / file, read_header(path / file)[0], stored, MetadataIndex(name, offsets))
        target = whole
        for dim, (offset, length) in enumerate(zip(offsets, sizes, strict=True)):
            target = target.narrow(dim, offset, length)
        target.copy_(read_rows(path / file, entry))
    return whole
