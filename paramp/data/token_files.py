"""Tokens in a file of any size, read with ``pread`` through an open descriptor.

Files are not mapped. A mapped file that shrinks, on a network disk that loses it for instance, ends the process with
SIGBUS and no message, and every page touched counts as this process's memory until the kernel wants it back. ``pread``
keeps the memory constant at any size, a read that comes back short is an error that names the file and the offset, and
there is no position that processes forked from this one could move.

A file is held open: it may be deleted or replaced under its name, and what was opened is read on, unchanged. A file
that is written to meanwhile is an error (:class:`FileState`), because two reads could then come from different data. So
is one that has changed where a source is opened anew, as by the workers of a ``DataLoader``.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..base.errors import ConfigError, DataError
from .token_sources import Tokens, TokenSource


@dataclass(frozen=True)
class FileState:
    """By which a file that was changed is recognised."""

    size: int
    modified: int
    """When it was last written to, in nanoseconds since 1970."""
    inode: int
    """Another file under the same name has another."""

    @staticmethod
    def of(descriptor: int) -> FileState:
        """That of an open file."""
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
                    "write it again if it is incomplete"
                )
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (type(self), self.path, self.dtype, self.offset, self._count, self._state)

    def read(self, start: int, count: int) -> Tokens:
        """As :class:`TokenSource`. Raises DataError if the file has become shorter, was changed or is out of reach."""
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
    """What was pickled, in this process. Raises DataError if the file is missing, or not the one that it was."""
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
