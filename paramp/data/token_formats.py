"""The formats of token files: a flat ``.bin``, and Megatron's pair of ``.bin`` and ``.idx``.

A flat ``.bin`` (nanoGPT's form) is one array of uint16 or uint32. Megatron's pair is a ``.bin`` of concatenated
sequences and an ``.idx``, little-endian throughout::

    9 bytes     b"MMIDIDX\\0\\0"
    uint64      version, 1
    uint8       code of the tokens' dtype
    uint64      number of sequences n
    uint64      number of document borders m
    int32[n]    tokens of each sequence
    int64[n]    offset of each sequence in the .bin, in bytes
    int64[m]    index of the first sequence of each document, then n

(Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``.)
"""

import struct
from pathlib import Path

import numpy as np

from ..base.errors import ConfigError
from .token_files import FileTokens
from .token_sources import sample

INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER = struct.Struct("<9sQBQQ")
INDEX_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "float64", 7: "float32", 8: "<u2"}
FLAT_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
SURE_FROM = 256
"""With fewer pairs of numbers, a pattern may be chance."""


def open_flat(path: Path, dtype: str, *, guessed: bool = False) -> FileTokens:
    """A flat ``.bin`` of ``dtype``, ``uint16`` or ``uint32``. Raises ConfigError if it is empty, or not of that dtype.

    With ``guessed``, neither the user nor ``meta.json`` gave the dtype. Then a file that looks like uint32 is refused
    as uint16: every second number would be (nearly) zero, and a model would train on it without an error.
    """
    tokens = FileTokens(path, FLAT_DTYPES[dtype])
    if not len(tokens):
        raise ConfigError(f"data: {str(path)!r} is empty; write it again, for instance with examples/prepare_data.py")
    if guessed and dtype == "uint16":
        # slices start at even indices, so that the halves of a uint32 keep their order
        slices = [part[: len(part) // 2 * 2] for start, part in sample(tokens) if start % 2 == 0]
        pairs = np.concatenate(slices).reshape(-1, 2)
        if len(pairs) >= SURE_FROM and pairs[:, 1].max() < 16 <= pairs[:, 0].max():
            raise ConfigError(
                f"data: {str(path)!r} seems to hold uint32, not uint16: every second number in it is below 16; "
                "set train.data_dtype to 'uint32', or to 'uint16' if it is uint16"
            )
    return tokens


def open_indexed(prefix: Path) -> FileTokens:
    """Megatron's pair ``prefix.bin`` and ``prefix.idx``: the concatenated sequences, in the order of the file.

    The index is read once, block by block. Raises ConfigError if a file is missing, or the two do not match.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, data):
        if not path.is_file():
            raise ConfigError(
                f"data: no file {str(path)!r}; Megatron's data is a pair of .bin and .idx: put both there"
            )
    dtype, num_sequences, num_borders = _read_index_header(index)
    tokens = FileTokens(data, dtype, count=data.stat().st_size // np.dtype(dtype).itemsize)
    lengths_at = INDEX_HEADER.size
    pointers_at = lengths_at + 4 * num_sequences
    expected = pointers_at + 8 * num_sequences + 8 * num_borders
    if index.stat().st_size not in (expected, expected + num_sequences):  # optionally one byte per sequence, its mode
        raise ConfigError(
            f"data: {str(index)!r} has {index.stat().st_size} bytes, expected {expected} for its {num_sequences} "
            f"sequences and {num_borders} document borders; it is incomplete or damaged: make it again"
        )
    lengths = FileTokens(index, "<i4", lengths_at, num_sequences)
    pointers = FileTokens(index, "<i8", pointers_at, num_sequences)
    position = 0
    for sizes, starts in zip(lengths.blocks(), pointers.blocks(), strict=True):
        ends = position + np.cumsum(sizes, dtype=np.int64) * tokens.dtype.itemsize
        if (sizes < 0).any() or not np.array_equal(starts, np.concatenate([[position], ends[:-1]])):
            raise _misfit(index, data, "its sequences are not contiguous")
        position = int(ends[-1])
    if position != data.stat().st_size:
        raise _misfit(index, data, f"it counts {position} bytes, the .bin has {data.stat().st_size}")
    if not len(tokens):
        raise ConfigError(f"data: {str(data)!r} is empty; write it again")
    return tokens


def _read_index_header(index: Path) -> tuple[str, int, int]:
    """The tokens' dtype, the number of sequences and the number of document borders."""
    with index.open("rb") as file:
        header = file.read(INDEX_HEADER.size)
    if len(header) < INDEX_HEADER.size or header[: len(INDEX_MAGIC)] != INDEX_MAGIC:
        raise ConfigError(
            f"data: {str(index)!r} begins with {header[: len(INDEX_MAGIC)]!r}, expected {INDEX_MAGIC!r}: it is not "
            "an index of Megatron; if the .bin is flat, move the .idx away"
        )
    _, version, code, num_sequences, num_borders = INDEX_HEADER.unpack(header)
    if version != 1:
        raise ConfigError(f"data: {str(index)!r} has version {version}, expected 1; make it again with Megatron-LM")
    dtype = INDEX_DTYPES.get(code)
    if dtype is None or dtype.startswith("float"):
        known = ", ".join(f"{key} {np.dtype(name).name}" for key, name in INDEX_DTYPES.items() if name[0] == "<")
        raise ConfigError(
            f"data: {str(index)!r} has the dtype code {code}{f' ({dtype})' if dtype else ''}, expected an "
            f"integer dtype: {known}"
        )
    return dtype, num_sequences, num_borders


def _misfit(index: Path, data: Path, reason: str) -> ConfigError:
    return ConfigError(f"data: {str(index)!r} does not match {str(data)!r}: {reason}; take both from the same run")
