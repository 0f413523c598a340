"""Files of tensors in the safetensors format: raw bytes behind a header of JSON, so that reading them runs no code.

::

    uint64      length of the header, little-endian
    header      {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {...}}
    bytes       the tensors, row-major, little-endian, one after the other

(https://github.com/huggingface/safetensors, "Format".) The format is all that is needed of it, and it is short; so it
is written and read here, without the package, and checked against that in the tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..base.errors import CheckpointError

__all__ = ["DTYPES", "Entry", "Written", "read_header", "read_rows", "write_tensors"]

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The format's name of each dtype."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LENGTH = struct.Struct("<Q")
LONGEST_HEADER = 10**8
"""Bytes; the format's own limit."""


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """The byte at which it begins, from the start of the file."""

    @property
    def size(self) -> int:
        """In bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Written:
    """A file that was written."""

    size: int
    """In bytes."""
    sha256: str


def write_tensors(
    path: Path,
    shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    tensor: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> Written:
    """Write tensors, one after the other, and have them on the disk before this returns.

    Args:
        shapes: dtype and shape of each, by name.
        tensor: gives each one when its turn comes, on any device.

    Raises:
        CheckpointError: a dtype that the format has no name for.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape) in shapes.items():
        if dtype not in NAMES:
            raise CheckpointError(f"{name}: a tensor of {dtype}, which the safetensors format has no name for")
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:

        def put(data: Any) -> None:
            file.write(data)
            digest.update(data)

        put(LENGTH.pack(len(text)))
        put(text)
        for name in shapes:
            value = tensor(name).detach().cpu().contiguous()
            put(value.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    return Written(LENGTH.size + len(text) + position, digest.hexdigest())


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors in the file at ``path``, and its metadata.

    Raises:
        CheckpointError: it is no such file, or not whole.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        first = file.read(LENGTH.size)
        length = LENGTH.unpack(first)[0] if len(first) == LENGTH.size else LONGEST_HEADER + 1
        text = file.read(length) if length <= LONGEST_HEADER else b""
    size = path.stat().st_size
    try:
        if len(text) != length:
            raise ValueError("its header is cut short")
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        entries = {name: _entry(item, LENGTH.size + length, size) for name, item in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        raise CheckpointError(
            f"{str(path)!r} is no whole safetensors file ({reason}); get it again, or convert what it is to that format"
        ) from None
    return entries, metadata


def _entry(item: Mapping[str, Any], base: int, size: int) -> Entry:
    start, stop = item["data_offsets"]
    if item["dtype"] not in DTYPES:
        raise ValueError(f"a tensor of the dtype {item['dtype']!r}")
    entry = Entry(DTYPES[item["dtype"]], tuple(int(length) for length in item["shape"]), base + int(start))
    if min(entry.shape, default=0) < 0 or start < 0 or stop - start != entry.size or base + stop > size:
        raise ValueError("its tensors do not fit its size")
    return entry


def read_rows(path: Path, entry: Entry, start: int = 0, count: int | None = None) -> torch.Tensor:
    """Rows (along dim 0) ``start`` to ``start + count - 1`` of a tensor, on the CPU; all of it without ``count``.

    Raises:
        CheckpointError: the file ends before.
        OSError: it cannot be read.
    """
    shape = entry.shape if count is None else (count, *entry.shape[1:])
    row = torch.Size(entry.shape[1:]).numel() * entry.dtype.itemsize
    data = bytearray(torch.Size(shape).numel() * entry.dtype.itemsize)
    with path.open("rb") as file:
        file.seek(entry.start + start * row)
        if file.readinto(data) != len(data):
            raise CheckpointError(f"{str(path)!r} ends before byte {entry.start + start * row + len(data)}")
    if not data:
        return torch.empty(shape, dtype=entry.dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(entry.dtype).reshape(shape)
