"""Sources of token ids, read in slices: from memory or from a file of any size; and what a run takes of one."""

from __future__ import annotations

import hashlib
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from paramp import ConfigError, DataError

Tokens: TypeAlias = NDArray[np.integer[Any]]
"""1-dim, of any integer dtype."""

BLOCK = 2**18
"""Tokens that are read at once from a source of which all are read."""
NUM_SAMPLES, SAMPLED_TOKENS = 48, 1024
"""The number of slices, and the tokens of each, in a sample of a source."""


class TokenSource(ABC):
    """A sequence of token ids, read in slices."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, start: int, count: int) -> Tokens:
        """Tokens ``start`` to ``start + count - 1``, all within the source: 1-dim, of any integer dtype."""

    @abstractmethod
    def place(self, index: int) -> str:
        """The location of token ``index``, for messages."""

    def blocks(self, limit: int | None = None) -> Iterator[Tokens]:
        """All tokens in order, or the first ``limit``, :data:`BLOCK` at a time."""
        end = len(self) if limit is None else min(limit, len(self))
        for start in range(0, end, BLOCK):
            yield self.read(start, min(BLOCK, end - start))

    def sample(self) -> Iterator[tuple[int, Tokens]]:
        """Starts and tokens of a few dozen short slices, spread from end to end; all of a short source."""
        starts = range(0, len(self), max(SAMPLED_TOKENS, -(-len(self) // NUM_SAMPLES)))
        for start in sorted({*starts, max(0, len(self) - SAMPLED_TOKENS)}):
            yield start, self.read(start, min(SAMPLED_TOKENS, len(self) - start))


@dataclass(eq=False)
class ArrayTokens(TokenSource):
    """Tokens in an array of numpy, or in Arrow's ``ChunkedArray``, which may be mapped from files."""

    array: Any
    name: str

    def __len__(self) -> int:
        return len(self.array)

    def read(self, start: int, count: int) -> Tokens:
        return np.asarray(self.array[start : start + count])

    def place(self, index: int) -> str:
        return f"{self.name}, token {index}"


class FileTokens(TokenSource):
    """The tokens of a file of any size, read with ``pread`` through an open descriptor.

    Files are not memory-mapped. If a mapped file shrinks, a read ends the process with SIGBUS and no message, and
    touched pages count as memory of this process until the kernel reclaims them. A short read is an error that names
    the file and the offset.

    The descriptor stays open: if the file is deleted or replaced under its name, reads continue from the old one. A
    file that is modified is an error, because two reads could then come from different data.

    Raises:
        ConfigError: the bytes are not a whole number of tokens of ``dtype``.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, dtype: DTypeLike) -> None:
        self.path, self.dtype = path, np.dtype(dtype)
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        weakref.finalize(self, os.close, self._descriptor)
        status = os.fstat(self._descriptor)
        self._size, self._modified = status.st_size, status.st_mtime_ns
        if self._size % self.dtype.itemsize:
            raise ConfigError(
                f"data: {str(path)!r} has {self._size} bytes, not a multiple of the {self.dtype.itemsize} of "
                f"{self.dtype.name}; set train.data_dtype to the dtype it was written in, or write it again if it is "
                "incomplete"
            )

    def __len__(self) -> int:
        return self._size // self.dtype.itemsize

    def read(self, start: int, count: int) -> Tokens:
        """As :class:`TokenSource`. Raises DataError if the file was truncated or modified, or cannot be read."""
        begin, end = start * self.dtype.itemsize, (start + count) * self.dtype.itemsize
        data, block = bytearray(), b"more"
        try:
            while block and len(data) < end - begin:  # pread may return less than requested, at most 2 GiB
                block = os.pread(self._descriptor, end - begin - len(data), begin + len(data))
                data += block
            status = os.fstat(self._descriptor)  # after the read, to detect a write during it
        except OSError as error:
            raise DataError(
                f"data: {str(self.path)!r} cannot be read at byte {begin + len(data)}: {error.strerror or error}; "
                "check its disk, and restart the run"
            ) from error
        if len(data) < end - begin:
            raise DataError(
                f"data: {str(self.path)!r} ends at byte {status.st_size}, but a read expected bytes up to {end}; it "
                "was truncated after it was opened: write it again, and restart the run"
            )
        if (difference := self._difference(status)) is not None:
            raise DataError(
                f"data: {str(self.path)!r} was changed during the run, found at byte {begin}: {difference}; "
                "restore the file, and restart the run"
            )
        return np.frombuffer(data, dtype=self.dtype)

    def _difference(self, now: os.stat_result) -> str | None:
        """The difference from the file as it was opened, in words; None if there is none."""
        if now.st_size != self._size:
            return f"it had {self._size} bytes when it was opened and has {now.st_size} now"
        if now.st_mtime_ns != self._modified:
            when = datetime.fromtimestamp(now.st_mtime_ns / 1e9)
            return f"it was written to since it was opened, at {when:%Y-%m-%d %H:%M:%S}"
        return None

    def place(self, index: int) -> str:
        return f"{str(self.path)!r} at byte {index * self.dtype.itemsize}"


@dataclass(eq=False)
class CheckedTokens(TokenSource):
    """``count`` tokens of ``source`` from ``start`` on, each checked against the vocabulary when it is read.

    Without the check, a token outside is an index error in the embedding, or on a GPU a device-side assertion without
    details.
    """

    source: TokenSource
    start: int
    count: int
    vocab_size: int

    def __len__(self) -> int:
        return self.count

    def read(self, start: int, count: int) -> Tokens:
        """As :class:`TokenSource`. Raises DataError for a token that is negative or not below ``vocab_size``."""
        tokens = self.source.read(self.start + start, count)
        if count and (int(tokens.max()) >= self.vocab_size or int(tokens.min()) < 0):
            first = int(np.argmax((tokens >= self.vocab_size) | (tokens < 0)))
            raise DataError(
                f"data: {self.place(start + first)} is {int(tokens[first])}, expected 0 to {self.vocab_size - 1}, the "
                f"vocabulary's {self.vocab_size} tokens; set train.vocab_size or train.tokenizer to that of the data, "
                f"or train.data_dtype if it is not {tokens.dtype.name}"
            )
        return tokens

    def place(self, index: int) -> str:
        return self.source.place(self.start + index)


def fingerprint(*parts: CheckedTokens) -> str:
    """A SHA-256 of ``parts`` in hexadecimal: of their lengths and their tokens, of a file or of Arrow's a sample.

    So two large files that differ in few places may have the same fingerprint.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}\0".encode())
        in_memory = isinstance(part.source, ArrayTokens) and isinstance(part.source.array, np.ndarray)
        for tokens in part.blocks() if in_memory else (tokens for _, tokens in part.sample()):
            digest.update(np.ascontiguousarray(tokens).tobytes())
    return digest.hexdigest()
