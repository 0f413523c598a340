"""Tokens in a file of any size, read with ``pread`` through an open descriptor.

Files are not memory-mapped. If a mapped file shrinks, a read ends the process with SIGBUS and no message, and touched
pages count as memory of this process until the kernel reclaims them. ``pread`` keeps memory constant at any size, a
short read is an error that names the file and the offset, and forked processes share no file position.

The descriptor stays open: if the file is deleted or replaced under its name, reads continue from the old one. A file
that is modified is an error (:class:`FileState`), because two reads could then come from different data. So is a file
that differs when a source is unpickled, as in the workers of a ``DataLoader``.
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

from ..base.coerce import user_path
from ..base.errors import ConfigError, DataError
from .token_sources import Tokens, TokenSource


@dataclass(frozen=True)
class FileState:
    """The properties by which a changed file is recognised."""

    size: int
    modified: int
    """The time of the last modification, in nanoseconds since 1970."""
    inode: int
    """Differs if another file has the same name."""

    @staticmethod
    def of(descriptor: int) -> FileState:
        """The state of an open file."""
        status = os.fstat(descriptor)
        return FileState(status.st_size, status.st_mtime_ns, status.st_ino)

    def difference(self, now: FileState) -> str | None:
        """The difference between this state and ``now``, in words; None if they are equal."""
        if now.size != self.size:
            return f"it had {self.size} bytes when it was opened and has {now.size} now"
        if now.inode != self.inode:
            return "it was replaced by another file since it was opened"
        if now.modified != self.modified:
            when = datetime.fromtimestamp(now.modified / 1e9)
            return f"it was written to since it was opened, at {when:%Y-%m-%d %H:%M:%S}"
        return None


class FileTokens(TokenSource):
    """``count`` tokens of ``dtype`` in a file, from the byte ``offset`` on. Without ``count``, all to its end.

    Raises:
        ConfigError: the bytes are not a whole number of tokens.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path, dtype: DTypeLike, offset: int = 0, count: int | None = None) -> None:
        self.path = user_path(path)
        self.dtype = np.dtype(dtype)
        self.offset = offset
        self._descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        weakref.finalize(self, os.close, self._descriptor)
        self._state = FileState.of(self._descriptor)
        if count is None:
            count, rest = divmod(self._state.size - offset, self.dtype.itemsize)
            if rest:
                raise ConfigError(
                    f"data: {str(self.path)!r} has {self._state.size} bytes, not a multiple of "
                    f"the {self.dtype.itemsize} of {self.dtype.name}; set train.data_dtype to the dtype it was "
                    "written in, or write it again if it is incomplete"
                )
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (type(self), self.path, self.dtype, self.offset, self._count, self._state)

    def read(self, start: int, count: int) -> Tokens:
        """As :class:`TokenSource`. Raises DataError if the file was truncated or modified, or cannot be read."""
        begin = position = self.offset + start * self.dtype.itemsize
        wanted = count * self.dtype.itemsize
        parts: list[bytes] = []
        try:
            while wanted:  # pread may return less than requested, at most 2 GiB
                part = os.pread(self._descriptor, wanted, position)
                if not part:
                    size = os.fstat(self._descriptor).st_size
                    raise DataError(
                        f"data: {str(self.path)!r} ends at byte {size}, but a read expected bytes up to "
                        f"{position + wanted}; it was truncated after it was opened: write it again, and restart "
                        "the run"
                    )
                parts.append(part)
                position += len(part)
                wanted -= len(part)
            self._check_state(begin)  # after the read, to detect a write during it
        except OSError as error:
            raise DataError(
                f"data: {str(self.path)!r} cannot be read at byte {position}: {error.strerror or error}; "
                "check its disk, and restart the run"
            ) from error
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), dtype=self.dtype)

    def _check_state(self, position: int) -> None:
        difference = self._state.difference(FileState.of(self._descriptor))
        if difference is not None:
            raise DataError(
                f"data: {str(self.path)!r} was changed during the run, found at byte {position}: {difference}; "
                "restore the file, and restart the run"
            )

    def place(self, index: int) -> str:
        return f"{str(self.path)!r} at byte {self.offset + index * self.dtype.itemsize}"


def _reopen(
    kind: type[FileTokens], path: Path, dtype: np.dtype[Any], offset: int, count: int, state: FileState
) -> FileTokens:
    """Unpickle a source. Raises DataError if the file is missing or differs from the pickled state."""
    try:
        tokens = kind(path, dtype, offset, count)
    except OSError as error:
        raise DataError(
            f"data: {str(path)!r} cannot be opened again, to read from byte {offset} on: {error.strerror or error}; "
            "restore the file, and restart the run"
        ) from error
    tokens._state = state
    tokens._check_state(offset)
    return tokens
