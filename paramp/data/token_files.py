"""Where tokens lie: in memory, in files of any size, in several places one after the other.

A :class:`TokenSource` has a length and reads any stretch of itself. Files are read with ``pread`` through an open
descriptor, not mapped. A mapped file that shrinks, on a network disk that loses it for instance, ends the process with
SIGBUS and no message, and every page touched counts as this process's memory until the kernel wants it back. ``pread``
keeps the memory constant at any size, a read that comes back short is an error that names the file and the offset, and
there is no position that processes forked from this one could move.

A file is held open, so that it may be deleted, or another put in its place under its name: what was opened is read on,
unchanged. One that is written to meanwhile is an error (:class:`FileState`), for nothing says any more that two reads
come from the same data. So is one that is no longer the same where a source is opened anew, as by the workers of a
``DataLoader``.

Two kinds of token files are known here. A flat ``.bin`` (nanoGPT's form) is one array of uint16 or uint32. Megatron's
pair is a ``.bin`` of sequences one after the other and an ``.idx``, little-endian throughout::

    9 bytes     b"MMIDIDX\\0\\0"
    uint64      version, 1
    uint8       code of the tokens' dtype
    uint64      number of sequences n
    uint64      number of document borders m
    int32[n]    tokens of each sequence
    int64[n]    where each begins in the .bin, in bytes
    int64[m]    sequences before each document, and at the end all of them

(Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``.)
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
import struct
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..base.errors import ConfigError, DataError

__all__ = [
    "ArrayTokens",
    "ChainedTokens",
    "CheckedTokens",
    "FileState",
    "FileTokens",
    "SlicedTokens",
    "TokenSource",
    "Tokens",
    "fingerprint",
    "open_flat",
    "open_indexed",
    "sample",
]

Tokens: TypeAlias = NDArray[np.integer[Any]]

INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER = struct.Struct("<9sQBQQ")
INDEX_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "float64", 7: "float32", 8: "<u2"}
FLAT_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
BLOCK = 2**18
SAMPLED_BLOCKS = 48
SAMPLED_TOKENS = 1024
SURE_FROM = 256
"""Pairs of numbers in which a pattern is taken for none of chance's."""


class TokenSource(ABC):
    """A sequence of token ids that can be read in stretches. Pickles, and may be used in forked processes."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, start: int, count: int) -> Tokens:
        """Tokens ``start`` to ``start + count - 1``, all of which exist, as a 1-d array of some integer dtype."""

    @abstractmethod
    def place(self, index: int) -> str:
        """Where token ``index`` lies, for messages."""

    def blocks(self, size: int = BLOCK) -> Iterator[Tokens]:
        """All tokens in order, ``size`` at a time."""
        for start in range(0, len(self), size):
            yield self.read(start, min(size, len(self) - start))


class ArrayTokens(TokenSource):
    """Tokens in memory (or in a buffer that somebody else has mapped, such as Arrow)."""

    def __init__(self, array: Tokens, name: str) -> None:
        self.array = array
        self.name = name

    def __len__(self) -> int:
        return len(self.array)

    def read(self, start: int, count: int) -> Tokens:
        return self.array[start : start + count]

    def place(self, index: int) -> str:
        return f"{self.name}, token {index}"


@dataclass(frozen=True)
class FileState:
    """What tells whether a file is still as it was."""

    size: int
    modified: int
    """When it was last written to, in nanoseconds since 1970."""
    inode: int
    """Another file under the same name has another."""

    @staticmethod
    def of(descriptor: int) -> FileState:
        """That of an open file.

        Raises:
            OSError: it is out of reach.
        """
        status = os.fstat(descriptor)
        return FileState(status.st_size, status.st_mtime_ns, status.st_ino)

    def difference(self, now: FileState) -> str | None:
        """What is different ``now``, in words; None if nothing is."""
        if now.size != self.size:
            return f"it had {self.size} bytes when it was opened and has {now.size} now"
        if now.inode != self.inode:
            return "it was replaced by another file since it was opened"
        if now.modified != self.modified:
            when = datetime.fromtimestamp(now.modified / 1e9)
            return f"it was written to since it was opened, at {when:%Y-%m-%d %H:%M:%S}"
        return None


class FileTokens(TokenSource):
    """``count`` tokens of ``dtype`` in a file, from the byte ``offset`` on; without ``count``, all up to its end.

    Raises:
        ConfigError: the bytes are no whole number of tokens.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path, dtype: DTypeLike, offset: int = 0, count: int | None = None) -> None:
        self.path = Path(path)
        self.dtype = np.dtype(dtype)
        self.offset = offset
        self._descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        weakref.finalize(self, os.close, self._descriptor)
        self._state = FileState.of(self._descriptor)
        if count is None:
            count, rest = divmod(self._state.size - offset, self.dtype.itemsize)
            if rest:
                raise ConfigError(
                    f"data: {str(self.path)!r} has {self._state.size} bytes, no multiple of the "
                    f"{self.dtype.itemsize} of {self.dtype.name}; set train.data_dtype to what it was written in, or "
                    "write it again if it was cut short"
                )
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (type(self), self.path, self.dtype, self.offset, self._count, self._state)

    def read(self, start: int, count: int) -> Tokens:
        """As :class:`TokenSource`.

        Raises:
            DataError: the file has become shorter, was written to since it was opened, or is out of reach.
        """
        begin = position = self.offset + start * self.dtype.itemsize
        wanted = count * self.dtype.itemsize
        parts: list[bytes] = []
        try:
            while wanted:  # the system may return less than asked for, at most 2 GiB at once
                part = os.pread(self._descriptor, wanted, position)
                if not part:
                    size = os.fstat(self._descriptor).st_size
                    raise DataError(
                        f"data: {str(self.path)!r} ends at byte {size}, where a read goes on to byte "
                        f"{position + wanted}; it has become shorter since it was opened: write it again, and start "
                        "again"
                    )
                parts.append(part)
                position += len(part)
                wanted -= len(part)
            self._check_state(begin)  # after the read, so that what was written during it is seen
        except OSError as error:
            raise DataError(
                f"data: {str(self.path)!r} cannot be read at byte {position}: {error.strerror or error}; "
                "see to its disk, and start again"
            ) from error
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), dtype=self.dtype)

    def _check_state(self, position: int) -> None:
        difference = self._state.difference(FileState.of(self._descriptor))
        if difference is not None:
            raise DataError(
                f"data: {str(self.path)!r} was changed under way, as a read at byte {position} shows: {difference}; "
                "put back what it was, and start again"
            )

    def place(self, index: int) -> str:
        return f"{str(self.path)!r} at byte {self.offset + index * self.dtype.itemsize}"


def _reopen(
    kind: type[FileTokens], path: Path, dtype: np.dtype[Any], offset: int, count: int, state: FileState
) -> FileTokens:
    """What was pickled, in this process.

    Raises:
        DataError: the file is missing, or not the one that it was.
    """
    try:
        tokens = kind(path, dtype, offset, count)
    except OSError as error:
        raise DataError(
            f"data: {str(path)!r} cannot be opened again, to be read from byte {offset} on: {error.strerror or error}; "
            "put it back, and start again"
        ) from error
    tokens._state = state
    tokens._check_state(offset)
    return tokens


class ChainedTokens(TokenSource):
    """Sources one after the other; a stretch may cross their borders."""

    def __init__(self, parts: Sequence[TokenSource]) -> None:
        self.parts = list(parts)
        self._ends = list(itertools.accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, count: int) -> Tokens:
        index, found = bisect.bisect_right(self._ends, start), []
        while count > 0:
            within = start - (self._ends[index] - len(self.parts[index]))
            size = min(count, len(self.parts[index]) - within)
            found.append(self.parts[index].read(within, size))
            start, count, index = start + size, count - size, index + 1
        return found[0] if len(found) == 1 else np.concatenate(found or [np.zeros(0, np.uint8)])

    def place(self, index: int) -> str:
        part = bisect.bisect_right(self._ends, index)
        return self.parts[part].place(index - (self._ends[part] - len(self.parts[part])))


class SlicedTokens(TokenSource):
    """``count`` tokens of ``source`` from ``start`` on."""

    def __init__(self, source: TokenSource, start: int, count: int) -> None:
        assert 0 <= start <= start + count <= len(source)
        self.source = source
        self.start = start
        self._count = count

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, count: int) -> Tokens:
        return self.source.read(self.start + start, count)

    def place(self, index: int) -> str:
        return self.source.place(self.start + index)


class CheckedTokens(TokenSource):
    """``source``, with every token that is read compared with the vocabulary.

    A token outside would otherwise be an index error deep in the embedding, or, on a GPU, a failed assertion that
    names nothing.
    """

    def __init__(self, source: TokenSource, vocab_size: int) -> None:
        self.source = source
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self.source)

    def read(self, start: int, count: int) -> Tokens:
        """As the source does.

        Raises:
            DataError: a token is negative, or not below ``vocab_size``.
        """
        tokens = self.source.read(start, count)
        if count and (int(tokens.max()) >= self.vocab_size or int(tokens.min()) < 0):
            first = int(np.argmax((tokens >= self.vocab_size) | (tokens < 0)))
            raise DataError(
                f"data: {self.source.place(start + first)} is {int(tokens[first])}, expected 0 to "
                f"{self.vocab_size - 1}, the vocabulary's {self.vocab_size} tokens; set train.vocab_size or "
                "train.tokenizer to the one it was made with, or train.data_dtype if it is not "
                f"{tokens.dtype.name}"
            )
        return tokens

    def place(self, index: int) -> str:
        return self.source.place(index)


def sample(source: TokenSource) -> Iterator[tuple[int, Tokens]]:
    """A few dozen short stretches with their starts, spread from end to end: all of a short source."""
    starts = range(0, len(source), max(SAMPLED_TOKENS, -(-len(source) // SAMPLED_BLOCKS)))
    last = max(0, len(source) - SAMPLED_TOKENS)
    for start in sorted({*starts, last}):
        yield start, source.read(start, min(SAMPLED_TOKENS, len(source) - start))


def fingerprint(*sources: TokenSource) -> str:
    """A SHA-256 that tells data apart at little cost, in hexadecimal.

    Of each source it takes the length and the tokens: all of them where they are in memory, else those of
    :func:`sample`. Two large files that differ in a few places only may thus have the same.
    """
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{len(source)}\0".encode())
        if isinstance(source, ArrayTokens):
            stretches: Iterator[Tokens] = source.blocks()
        else:
            stretches = (tokens for _, tokens in sample(source))
        for tokens in stretches:
            digest.update(np.ascontiguousarray(tokens).tobytes())
    return digest.hexdigest()


def open_flat(path: Path, dtype: str, *, guessed: bool = False) -> FileTokens:
    """A flat ``.bin`` of ``dtype``, ``uint16`` or ``uint32``.

    Args:
        path: the file.
        dtype: what it holds.
        guessed: nobody said so. Then a file of uint16 that looks like one of uint32 is refused: each second number of
            those is (nearly) zero, and a model would train on it without complaint.

    Raises:
        ConfigError: it is empty, or not of that dtype.
    """
    tokens = FileTokens(path, FLAT_DTYPES[dtype])
    if not len(tokens):
        raise ConfigError(f"data: {str(path)!r} is empty; write it again, for instance with examples/prepare_data.py")
    if guessed and dtype == "uint16":
        # sampled from even places on, so that halves of uint32 keep their order
        stretches = [part[: len(part) // 2 * 2] for start, part in sample(tokens) if start % 2 == 0]
        pairs = np.concatenate(stretches).reshape(-1, 2)
        if len(pairs) >= SURE_FROM and pairs[:, 1].max() < 16 <= pairs[:, 0].max():
            raise ConfigError(
                f"data: {str(path)!r} seems to hold uint32 rather than uint16, every second number in it is below 16; "
                "set train.data_dtype to 'uint32', or to 'uint16' if that is right nonetheless"
            )
    return tokens


def open_indexed(prefix: Path) -> FileTokens:
    """Megatron's pair ``prefix.bin`` and ``prefix.idx``: the sequences one after the other, as they lie.

    The index is read through once, block by block, to see that it fits the ``.bin``.

    Raises:
        ConfigError: a file is missing, or is not what it should be.
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
    if index.stat().st_size not in (expected, expected + num_sequences):  # one more byte a sequence: its mode
        raise ConfigError(
            f"data: {str(index)!r} has {index.stat().st_size} bytes, expected {expected} for its {num_sequences} "
            f"sequences and {num_borders} document borders; it was cut short or damaged: make it again"
        )
    lengths = FileTokens(index, "<i4", lengths_at, num_sequences)
    pointers = FileTokens(index, "<i8", pointers_at, num_sequences)
    position = 0
    for sizes, starts in zip(lengths.blocks(), pointers.blocks(), strict=True):
        ends = position + np.cumsum(sizes, dtype=np.int64) * tokens.dtype.itemsize
        if (sizes < 0).any() or not np.array_equal(starts, np.concatenate([[position], ends[:-1]])):
            raise _misfit(index, data, "its sequences do not lie one after the other")
        position = int(ends[-1])
    if position != data.stat().st_size:
        raise _misfit(index, data, f"it counts {position} bytes, the .bin has {data.stat().st_size}")
    if not len(tokens):
        raise ConfigError(f"data: {str(data)!r} is empty; write it again")
    return tokens


def _read_index_header(index: Path) -> tuple[str, int, int]:
    """The tokens' dtype, the number of sequences and that of document borders."""
    with index.open("rb") as file:
        header = file.read(INDEX_HEADER.size)
    if len(header) < INDEX_HEADER.size or header[: len(INDEX_MAGIC)] != INDEX_MAGIC:
        raise ConfigError(
            f"data: {str(index)!r} begins with {header[: len(INDEX_MAGIC)]!r}, expected {INDEX_MAGIC!r}: it is no "
            "index of Megatron's; for a flat .bin, move it away"
        )
    _, version, code, num_sequences, num_borders = INDEX_HEADER.unpack(header)
    if version != 1:
        raise ConfigError(f"data: {str(index)!r} is of version {version}, expected 1; make it again with Megatron-LM")
    dtype = INDEX_DTYPES.get(code)
    if dtype is None or dtype.startswith("float"):
        known = ", ".join(f"{key} {np.dtype(name).name}" for key, name in INDEX_DTYPES.items() if name[0] == "<")
        raise ConfigError(
            f"data: {str(index)!r} has the dtype code {code}{f' ({dtype})' if dtype else ''}, expected that of an "
            f"integer: {known}"
        )
    return dtype, num_sequences, num_borders


def _misfit(index: Path, data: Path, reason: str) -> ConfigError:
    return ConfigError(f"data: {str(index)!r} does not fit {str(data)!r}: {reason}; take both from the same run")
