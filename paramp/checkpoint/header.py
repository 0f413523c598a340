"""The header of a checkpoint, ``checkpoint.json``: plain values, and in which file each slice of each tensor lies."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..base.errors import CheckpointError
from .atomic_dir import HEADER, Written, write_json
from .json_codec import decode
from .safetensors_io import DTYPES

MODEL = "model."
"""What the names of weights and buffers begin with."""
DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
VALUES: dict[str, type] = {
    "layout": dict,
    "config": dict,
    "counts": list,
    "scaler": dict,
    "optimizer": str,
    "groups": list,
    "tracked": dict,
}
"""The types of what a run's checkpoint holds beside its tensors."""


class StoredSlice(NamedTuple):
    """A rectangle of a tensor in a checkpoint."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint."""

    name: str
    """In its files."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    slices: tuple[StoredSlice, ...]
    """Together they are the whole tensor."""

    def to_json(self) -> dict[str, Any]:
        """As the header has it."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
            "chunks": [[list(offsets), list(sizes), file] for offsets, sizes, file in self.slices],
        }

    @classmethod
    def from_json(cls, name: str, item: Mapping[str, Any], files: Collection[str]) -> StoredTensor:
        """The tensor ``name``, of which the header has ``item``; an error unless it is whole and in ``files``."""
        shape = tuple(int(size) for size in item["shape"])
        slices = tuple(StoredSlice(tuple(offsets), tuple(sizes), file) for offsets, sizes, file in item["chunks"])
        inside = all(
            len(offsets) == len(sizes) == len(shape)
            and all(0 <= low <= low + size <= whole for low, size, whole in zip(offsets, sizes, shape, strict=True))
            for offsets, sizes, _ in slices
        )
        num_elements = sum(math.prod(sizes) for _, sizes, _ in slices)
        distinct = len({offsets for offsets, _, _ in slices}) == len(slices)
        if not inside or not distinct or num_elements != math.prod(shape):
            raise ValueError(f"the slices of {name} are not the whole of it")
        if not all(file in files for _, _, file in slices):
            raise ValueError(f"a slice of {name} lies in a file that is not in the manifest")
        return cls(name, DTYPE_NAMES[item["dtype"]], shape, slices)


@dataclass(frozen=True)
class Header:
    """What a checkpoint holds."""

    values: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @property
    def only_weights(self) -> bool:
        """Whether it was imported from a file of weights, and has nothing else."""
        return "layout" not in self.values


def key_in_file(name: str, offsets: Sequence[int]) -> str:
    """The name of a slice in its file: the tensor's, and where the slice begins unless that is its origin."""
    return f"{name}@{','.join(map(str, offsets))}" if any(offsets) else name


def write_header(folder: Path, values: Any, tensors: Sequence[StoredTensor]) -> Written:
    """Write the header of the checkpoint in ``folder``; ``values`` are encoded ones (:mod:`.json_codec`)."""
    described = {tensor.name: tensor.to_json() for tensor in sorted(tensors, key=lambda tensor: tensor.name)}
    return write_json(folder / HEADER, {"values": values, "tensors": described})


def parse_header(data: bytes, file: Path, files: Collection[str]) -> Header:
    """The header that ``file`` holds, of a checkpoint of ``files``; ``data`` is its content.

    Raises:
        CheckpointError: it is not what :func:`write_header` writes.
    """
    # Checksums show damage, not who wrote the file: nothing in it is trusted to be of its type.
    try:
        content = json.loads(data)
        tensors = {name: StoredTensor.from_json(name, item, files) for name, item in content["tensors"].items()}
        values = decode(content["values"])
        for name, kind in VALUES.items() if "layout" in values else ():
            if not isinstance(values.get(name), kind):
                raise ValueError(f"its {name!r} is {type(values.get(name)).__name__}, expected {kind.__name__}")
        return Header(values, tensors)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{str(file)!r} is no header of a checkpoint: {type(error).__name__}: {error}") from None
