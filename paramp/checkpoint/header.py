"""The header of a checkpoint, ``checkpoint.json``: plain values, and the file of each slice of each tensor."""

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
"""The prefix of the names of weights and buffers."""
DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
_DICTS = dict.fromkeys(("layout", "config", "scaler", "tracked"), dict)
VALUES: dict[str, type] = {**_DICTS, "counts": list, "groups": list, "optimizer": str}
"""The types of the values in a run's checkpoint."""


class StoredSlice(NamedTuple):
    """A rectangle of a tensor in a checkpoint."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint."""

    name: str
    """The tensor's name in its files."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    slices: tuple[StoredSlice, ...]
    """The slices, which together cover the tensor."""

    def to_json(self) -> dict[str, Any]:
        """The tensor's entry in the header."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
            "chunks": [[list(offsets), list(sizes), file] for offsets, sizes, file in self.slices],
        }

    @classmethod
    def from_json(cls, name: str, item: Mapping[str, Any], files: Collection[str]) -> StoredTensor:
        """The tensor ``name`` from its header entry ``item``; an error unless it is complete and in ``files``."""
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
            raise ValueError(f"the slices of {name} do not cover it")
        if not all(file in files for _, _, file in slices):
            raise ValueError(f"a slice of {name} is in a file that is not in the manifest")
        return cls(name, DTYPE_NAMES[item["dtype"]], shape, slices)


@dataclass(frozen=True)
class Header:
    """The content of a checkpoint."""

    values: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @property
    def only_weights(self) -> bool:
        """Whether the checkpoint was imported from a file of weights."""
        return "layout" not in self.values


def key_in_file(name: str, offsets: Sequence[int]) -> str:
    """The name of a slice in its file: the tensor's name, and the slice's offsets unless all are 0."""
    return f"{name}@{','.join(map(str, offsets))}" if any(offsets) else name


def write_header(folder: Path, values: Any, tensors: Sequence[StoredTensor]) -> Written:
    """Write the header of the checkpoint in ``folder``; ``values`` are already encoded (:mod:`.json_codec`)."""
    described = {tensor.name: tensor.to_json() for tensor in sorted(tensors, key=lambda tensor: tensor.name)}
    return write_json(folder / HEADER, {"values": values, "tensors": described})


def parse_header(data: bytes, file: Path, files: Collection[str]) -> Header:
    """The header in ``file``, of a checkpoint of ``files``; ``data`` is the content of ``file``.

    Raises:
        CheckpointError: it is not a header that :func:`write_header` writes.
    """
    # Checksums detect damage, but not who wrote the file, so every type is checked.
    try:
        content = json.loads(data)
        tensors = {name: StoredTensor.from_json(name, item, files) for name, item in content["tensors"].items()}
        values = decode(content["values"])
        for name, kind in VALUES.items() if "layout" in values else ():
            if not isinstance(values.get(name), kind):
                raise ValueError(f"its {name!r} is {type(values.get(name)).__name__}, expected {kind.__name__}")
        return Header(values, tensors)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{str(file)!r} is not a checkpoint header: {type(error).__name__}: {error}") from None
