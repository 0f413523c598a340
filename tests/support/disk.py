"""What programs do to the files of a folder, in order, and the folders that a machine's crash may leave of it.

:func:`recording` records each change that this process makes below a folder. :func:`crashes` replays the record up to
each operation and gives what may then be on the disk. A write is there for certain when its file was synced, a name
when its folder was. What was not synced may be there or not: whole, in part, or the data without the name.

The record is complete if replaying it gives the files that are there, which :meth:`Recorder.check` tests: a program
that writes by other functions than the recorded ones does not pass it.
"""

import builtins
import errno
import io
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

Picture = dict[str, Any]
"""A folder: the bytes of its files and the pictures of its folders, by name."""
NEEDS_ROOM = ("mkdir", "create", "write", "sync", "rename")
"""The operations that fail on a full disk."""


class Operation(NamedTuple):
    """One change below the folder, or a note of the test."""

    at: int
    """When it was done: the clock is that of all processes of the machine, so it orders those of several."""
    kind: str
    """``mkdir``, ``create``, ``truncate``, ``write``, ``sync``, ``rename``, ``unlink``, ``rmdir`` or ``note``."""
    path: str
    """Below the folder; of a note, its text."""
    to: str = ""
    """The new name of what was renamed."""
    offset: int = 0
    data: bytes = b""


class Recorder:
    """The operations of this process below ``folder``, and the disk that they fill.

    ``full_at``: the number of the operation that finds the disk full, of those that need room; a write writes half.
    """

    def __init__(self, folder: Path, full_at: int | None = None) -> None:
        self.folder = folder.resolve()
        self.before = picture_of(self.folder)
        self.operations: list[Operation] = []
        self.failed: str | None = None
        self._full_at, self._num_filling = full_at, 0

    def note(self, text: str) -> None:
        """Write ``text`` into the record: from here on it is true."""
        self.add("note", text)

    def check(self) -> None:
        """Raise an AssertionError unless the record explains every byte below the folder."""
        assert after(self.before, self.operations) == picture_of(self.folder), "something else has written there"

    def add(self, kind: str, path: str, *to: str, **more: Any) -> None:
        self.operations.append(Operation(time.monotonic_ns(), kind, path, *to, **more))

    def below(self, path: Any, dir_fd: int | None = None) -> str | None:
        """``path``, or that of an open file, relative to the folder; None outside of it."""
        if isinstance(path, int) or hasattr(path, "fileno"):
            path = os.readlink(f"/proc/self/fd/{path if isinstance(path, int) else path.fileno()}")
        elif dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fspath(path))
        path = Path(os.path.abspath(os.fspath(path)))
        return str(path.relative_to(self.folder)) if path.is_relative_to(self.folder) else None

    def is_full(self, kind: str, path: str) -> bool:
        """Whether the next operation of a ``kind`` that needs room finds none."""
        self._num_filling += 1
        if self._full_at is None or self._num_filling != self._full_at + 1:
            return False
        self.failed = f"{kind} {path}"
        return True

    def is_refused(self, kind: str, path: str) -> bool:
        """The same; what fails for another reason does not count."""
        may_succeed = os.path.lexists(self.folder / path) == (kind in ("rename", "sync"))
        return kind in NEEDS_ROOM and may_succeed and self.is_full(kind, path)

    def wrap(self, original: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
        """``original``, with calls recorded as what ``change`` says of them: a kind and paths; None: no change."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            kind, path, *to = change(*args, **kwargs)
            if kind is None or path is None:
                return original(*args, **kwargs)
            if self.is_refused(kind, path):
                raise _no_room(path)
            result = original(*args, **kwargs)
            self.add(kind, path, *to)
            return result

        return wrapped

    def wrappers(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> tuple[Any, ...]:
            below = self.below(path, dir_fd) if flags & os.O_CREAT else None
            return (None if below is None or os.path.exists(self.folder / below) else "create"), below

        def renamed(source: Any, target: Any) -> tuple[Any, ...]:
            below, to = self.below(source), self.below(target)
            assert (below is None) == (to is None), f"not recorded: a rename of {source} to {target}"
            return "rename", below, to

        def changed(kind: str) -> Callable[..., Any]:
            return lambda path, *_, dir_fd=None, **__: (kind, self.below(path, dir_fd))

        yield os, "open", self.wrap(os.open, opened)
        for name, change in {"rename": renamed, "replace": renamed, "fsync": changed("sync")}.items():
            yield os, name, self.wrap(getattr(os, name), change)
        for name, kind in {"mkdir": "mkdir", "unlink": "unlink", "remove": "unlink", "rmdir": "rmdir"}.items():
            yield os, name, self.wrap(getattr(os, name), changed(kind))
        original = io.open
        for module in (io, builtins):
            yield module, "open", lambda *args, **kwargs: self._open(original, *args, **kwargs)

    def _open(self, original: Any, file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        below = None if isinstance(file, int) or not set(mode) & set("wxa+") else self.below(file)
        if below is None or os.path.isdir(file):  # of a folder: a temporary file without a name in it
            return original(file, mode, buffering, *args, **kwargs)
        assert set(mode) <= set("wxbt"), f"not recorded: open({below!r}, {mode!r})"
        kind = "truncate" if os.path.exists(file) else "create"
        if self.is_refused(kind, below):
            raise _no_room(below)
        buffered = io.BufferedWriter(_File(file, mode.strip("bt"), self))
        self.add(kind, below)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **kwargs)


class _File(io.FileIO):
    """A file open for writing, whose writes are recorded."""

    def __init__(self, path: Any, mode: str, recorder: Recorder) -> None:
        super().__init__(path, mode)
        self._recorder = recorder

    def write(self, data: Any) -> int:
        path, offset, data = self._recorder.below(self.fileno()), self.tell(), memoryview(data).cast("B")
        full = self._recorder.is_full("write", path)
        written = super().write(data[: len(data) // 2] if full else data)
        self._recorder.add("write", path, offset=offset, data=bytes(data[:written]))
        if full:
            raise _no_room(path)
        return written


def _no_room(path: str) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


@contextmanager
def recording(folder: Path, full_at: int | None = None) -> Iterator[Recorder]:
    """Record what this process, with all its threads, does below ``folder``."""
    recorder = Recorder(folder, full_at)
    patches = [mock.patch.object(*patch) for patch in [*recorder.wrappers()]]
    for patch in patches:
        patch.start()
    try:
        yield recorder
    finally:
        for patch in patches:
            patch.stop()


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A context in which a longer file of this process is an error, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ------------------------------------------------------------------------------------------------------------ crashes


class _Node:
    """A file's bytes, or a folder's nodes by name: what programs see, and what is on the disk for certain."""

    def __init__(self, content: Any) -> None:
        is_folder = isinstance(content, dict)
        self.now = {name: _Node(inner) for name, inner in content.items()} if is_folder else content
        self.sync()

    def sync(self) -> None:
        self.synced = dict(self.now) if isinstance(self.now, dict) else self.now

    def at(self, path: str) -> "_Node":
        node = self
        for name in path.split("/") if path not in ("", ".") else ():
            node = node.now[name]
        return node

    def apply(self, operation: Operation) -> None:
        _, kind, path, to, offset, data = operation
        above, _, name = path.rpartition("/")
        if kind == "write":
            node = self.at(path)
            node.now = node.now[:offset] + data + node.now[offset + len(data) :]
        elif kind == "truncate":
            self.at(path).now = b""
        elif kind == "sync":
            self.at(path).sync()
        elif kind in ("mkdir", "create"):
            self.at(above).now[name] = _Node({} if kind == "mkdir" else b"")
        elif kind in ("unlink", "rmdir"):
            del self.at(above).now[name]
        elif kind == "rename":
            target, _, new_name = to.rpartition("/")
            self.at(target).now[new_name] = self.at(above).now.pop(name)

    def picture(self, keep: float = 1.0, behind: frozenset[int] | None = frozenset()) -> Any:
        """What may be on the disk.

        Args:
            keep: how much of the data written since the last sync is there; 0: none.
            behind: the folders, by ``id``, whose names are those of their last sync; None: all of them.
        """
        if isinstance(self.now, dict):
            entries = self.synced if behind is None or id(self) in behind else self.now
            return {name: node.picture(keep, behind) for name, node in entries.items()}
        if keep in (0.0, 1.0) or self.synced == self.now:
            return self.now if keep else self.synced
        return self.now[: int(len(self.now) * keep)]

    def unsynced(self) -> "Iterator[_Node]":
        """The folders whose names are not all on the disk for certain."""
        if isinstance(self.now, dict):
            yield from [self] if self.now != self.synced else []
            for node in self.now.values():
                yield from node.unsynced()


def _in_order(operations: Iterable[Operation]) -> list[Operation]:
    return sorted(operations, key=lambda one: one.at)


def crashes(before: Picture, operations: Iterable[Operation]) -> Iterator[tuple[str, frozenset[str], Picture]]:
    """After each operation, every different folder that a crash may leave: (where, notes that are true, folder)."""
    tree, notes, seen = _Node(before), frozenset[str](), set()
    for number, operation in enumerate([None, *_in_order(operations)]):
        if operation is not None:
            tree.apply(operation)
            notes |= {operation.path} if operation.kind == "note" else set()
        where = f"after operation {number}: " + (f"{operation.kind} {operation.path}" if operation else "none")
        for what, picture in {
            "the process was killed": tree.picture(),
            "half of the unsynced data is lost": tree.picture(0.5),
            "the unsynced data is lost": tree.picture(0.0),
            "all that was not synced is lost": tree.picture(0.0, None),
            **{
                f"the unsynced names of folder {index} are lost, {keep}": tree.picture(keep, frozenset({id(folder)}))
                for index, folder in enumerate(tree.unsynced())
                for keep in (0.0, 1.0)
            },
        }.items():
            key = hash(repr((notes, _sorted(picture))))
            if key not in seen:
                seen.add(key)
                yield f"{where}; {what}", notes, picture


def after(before: Picture, operations: Iterable[Operation], *, only_synced: bool = False) -> Picture:
    """The folder after ``operations``, on a machine that goes on; or with ``only_synced`` what is there for certain."""
    tree = _Node(before)
    for operation in _in_order(operations):
        tree.apply(operation)
    return tree.picture(0.0, None) if only_synced else tree.picture()


def _sorted(picture: Picture) -> Any:
    return [(name, _sorted(item) if isinstance(item, dict) else hash(item)) for name, item in sorted(picture.items())]


def picture_of(folder: Path) -> Picture:
    return {path.name: picture_of(path) if path.is_dir() else path.read_bytes() for path in folder.iterdir()}


def make(picture: Picture, folder: Path) -> Path:
    """Write ``picture`` to the new folder ``folder``."""
    folder.mkdir()
    for name, content in picture.items():
        if isinstance(content, dict):
            make(content, folder / name)
        else:
            (folder / name).write_bytes(content)
    return folder


def lines(operations: Iterable[Operation]) -> list[str]:
    """The operations in words; consecutive writes to a file are one."""
    found: list[str] = []
    for operation in _in_order(operations):
        line = " ".join(filter(None, (operation.kind, operation.path, operation.to and f"to {operation.to}")))
        if found[-1:] != [line] or operation.kind != "write":
            found.append(line)
    return found
