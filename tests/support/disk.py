"""What programs do to the files of a folder, in order, and the folders that a machine's crash may leave of it.

:func:`recording` records each change that this process makes below a folder. :func:`crashes` replays the record up to
each operation and gives what may then be on the disk. A write is there for certain when its file was synced, a name
when its folder was. What was not synced may be there or not: whole, in part, or the data without the name.

The record is complete if replaying it gives the files that are there, which :meth:`Recorder.check` tests: a program
that writes by other functions than the recorded ones does not pass it.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

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
        self._full_at = full_at
        self._num_filling = 0

    def note(self, text: str) -> None:
        """Write ``text`` into the record: from here on it is true."""
        self.operations.append(Operation(time.monotonic_ns(), "note", text))

    def check(self) -> None:
        """Raise an AssertionError unless the record explains every byte below the folder."""
        assert after(self.before, self.operations) == picture_of(self.folder), "something else has written there"

    def below(self, path: Any, dir_fd: int | None = None) -> str | None:
        """``path`` relative to the folder; None outside of it."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        elif dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fspath(path))
        path = os.path.abspath(os.fspath(path))
        if path == str(self.folder):
            return "."
        return path.removeprefix(f"{self.folder}/") if path.startswith(f"{self.folder}/") else None

    def add(self, kind: str, path: str, **more: Any) -> None:
        self.operations.append(Operation(time.monotonic_ns(), kind, path, **more))

    def is_full(self, kind: str, path: str) -> bool:
        """Whether the next operation of a ``kind`` that needs room finds none."""
        self._num_filling += 1
        if self._full_at is None or self._num_filling != self._full_at + 1:
            return False
        self.failed = f"{kind} {path}"
        return True

    def need_room(self, kind: str, path: str) -> None:
        if self.is_full(kind, path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


class _File(io.FileIO):
    """A file open for writing, whose writes are recorded."""

    def __init__(self, path: Any, mode: str, recorder: Recorder) -> None:
        super().__init__(path, mode)
        self._recorder = recorder

    def write(self, data: Any) -> int:
        path, offset = self._recorder.below(self.fileno()), self.tell()
        assert path is not None
        full = self._recorder.is_full("write", path)
        written = super().write(memoryview(data).cast("B")[: len(data) // 2] if full else data)
        self._recorder.add("write", path, offset=offset, data=bytes(memoryview(data).cast("B")[:written]))
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return written


@contextmanager
def recording(folder: Path, full_at: int | None = None) -> Iterator[Recorder]:
    """Record what this process, with all its threads, does below ``folder``."""
    recorder = Recorder(folder, full_at)
    patched = _wrappers(recorder)
    originals = [(module, name, getattr(module, name)) for module, name, _ in patched]
    for module, name, wrapper in patched:
        setattr(module, name, wrapper)
    try:
        yield recorder
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


def _wrappers(recorder: Recorder) -> list[tuple[Any, str, Callable[..., Any]]]:
    os_open, os_fsync, io_open = os.open, os.fsync, io.open

    def wrapped_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        below = recorder.below(path, dir_fd) if flags & os.O_CREAT else None
        new = below is not None and not os.path.exists(recorder.folder / below)
        if new:
            recorder.need_room("create", below)
        descriptor = os_open(path, flags, mode, dir_fd=dir_fd)
        if new:
            recorder.add("create", below)
        return descriptor

    def wrapped_fsync(descriptor: Any) -> None:
        below = recorder.below(descriptor if isinstance(descriptor, int) else descriptor.fileno())
        if below is not None:
            recorder.need_room("sync", below)
        os_fsync(descriptor)
        if below is not None:
            recorder.add("sync", below)

    def wrapped_io_open(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        below = None if isinstance(file, int) or not set(mode) & set("wxa+") else recorder.below(file)
        if below is None or os.path.isdir(file):  # of a folder: a temporary file without a name in it
            return io_open(file, mode, buffering, *args, **kwargs)
        assert set(mode) <= set("wxbt"), f"not recorded: open({below!r}, {mode!r})"
        new = not os.path.exists(file)
        if new:
            recorder.need_room("create", below)
        raw = _File(file, mode.strip("bt"), recorder)
        recorder.add("create" if new else "truncate", below)
        buffered = io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **kwargs)

    def one_path(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any, *args: Any, dir_fd: int | None = None) -> None:
            below = recorder.below(path, dir_fd)
            if below is not None and kind in NEEDS_ROOM and not os.path.exists(recorder.folder / below):
                recorder.need_room(kind, below)
            original(path, *args, dir_fd=dir_fd)
            if below is not None:
                recorder.add(kind, below)

        return wrapped

    def two_paths(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(source: Any, target: Any, **kwargs: Any) -> None:
            below, to = recorder.below(source), recorder.below(target)
            if below is not None and os.path.exists(source):
                recorder.need_room("rename", below)
            original(source, target, **kwargs)
            if below is not None or to is not None:
                assert below is not None, f"not recorded: a rename of {source} into the folder"
                assert to is not None, f"not recorded: a rename of {source} out of the folder"
                recorder.add("rename", below, to=to)

        return wrapped

    return [
        (os, "open", wrapped_open),
        (os, "fsync", wrapped_fsync),
        (io, "open", wrapped_io_open),
        (builtins, "open", wrapped_io_open),
        (os, "mkdir", one_path("mkdir", os.mkdir)),
        (os, "unlink", one_path("unlink", os.unlink)),
        (os, "remove", one_path("unlink", os.remove)),
        (os, "rmdir", one_path("rmdir", os.rmdir)),
        (os, "rename", two_paths(os.rename)),
        (os, "replace", two_paths(os.replace)),
    ]


# ------------------------------------------------------------------------------------------------------------ crashes


class _Data:
    """A file: the bytes that programs read, and those that are on the disk for certain."""

    def __init__(self, data: bytes = b"") -> None:
        self.now = bytearray(data)
        self.synced = data

    def write(self, offset: int, data: bytes) -> None:
        self.now[offset : offset + len(data)] = data

    def picture(self, keep: float = 1.0) -> bytes:
        """``keep``: how much of what was written since the last sync is there; 0: none."""
        if keep == 1.0:
            return bytes(self.now)
        if self.synced == bytes(self.now):
            return self.synced
        return self.synced if keep == 0.0 else bytes(self.now[: int(len(self.now) * keep)])


class _Folder:
    """A folder: the names that programs see, and those that are on the disk for certain."""

    def __init__(self) -> None:
        self.now: dict[str, _Data | _Folder] = {}
        self.synced: dict[str, _Data | _Folder] = {}

    @classmethod
    def of(cls, picture: Picture) -> _Folder:
        folder = cls()
        for name, content in picture.items():
            folder.now[name] = cls.of(content) if isinstance(content, dict) else _Data(content)
        folder.synced = dict(folder.now)
        return folder

    def _at(self, path: str) -> Any:
        node: Any = self
        for name in path.split("/") if path not in ("", ".") else ():
            node = node.now[name]
        return node

    def _parent(self, path: str) -> tuple[_Folder, str]:
        above, _, name = path.rpartition("/")
        return self._at(above), name

    def apply(self, operation: Operation) -> None:
        kind, path = operation.kind, operation.path
        if kind == "note":
            return
        if kind == "write":
            self._at(path).write(operation.offset, operation.data)
            return
        if kind == "truncate":
            self._at(path).now.clear()
            return
        if kind == "sync":
            node = self._at(path)
            node.synced = dict(node.now) if isinstance(node, _Folder) else bytes(node.now)
            return
        folder, name = self._parent(path)
        if kind in ("mkdir", "create"):
            folder.now[name] = _Folder() if kind == "mkdir" else _Data()
        elif kind in ("unlink", "rmdir"):
            del folder.now[name]
        else:
            assert kind == "rename"
            target, new_name = self._parent(operation.to)
            target.now[new_name] = folder.now.pop(name)

    def picture(self, keep: float = 1.0, behind: frozenset[int] | None = frozenset()) -> Picture:
        """``behind``: the folders, by ``id``, whose names are those of their last sync; None: all of them."""
        entries = self.synced if behind is None or id(self) in behind else self.now
        return {
            name: node.picture(keep, behind) if isinstance(node, _Folder) else node.picture(keep)
            for name, node in entries.items()
        }

    def unsynced(self) -> Iterator[_Folder]:
        """The folders whose names are not all on the disk for certain."""
        if self.now != self.synced:
            yield self
        for node in self.now.values():
            if isinstance(node, _Folder):
                yield from node.unsynced()


def crashes(before: Picture, operations: Iterable[Operation]) -> Iterator[tuple[str, frozenset[str], Picture]]:
    """After each operation, every different folder that a crash may leave: (where, notes that are true, folder)."""
    tree, notes, seen = _Folder.of(before), frozenset[str](), set()
    for number, operation in enumerate([None, *sorted(operations, key=lambda one: one.at)]):
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
                f"the unsynced names of folder {index} are lost": tree.picture(keep, frozenset({id(folder)}))
                for index, folder in enumerate(tree.unsynced())
                for keep in (0.0, 1.0)
            },
        }.items():
            key = repr((notes, _sorted(picture)))
            if hash(key) not in seen:
                seen.add(hash(key))
                yield f"{where}; {what}", notes, picture


def after(before: Picture, operations: Iterable[Operation], *, only_synced: bool = False) -> Picture:
    """The folder after ``operations``, on a machine that goes on; or with ``only_synced`` what is there for certain."""
    tree = _Folder.of(before)
    for operation in sorted(operations, key=lambda one: one.at):
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
    for operation in sorted(operations, key=lambda one: one.at):
        line = " ".join(filter(None, (operation.kind, operation.path, operation.to and f"to {operation.to}")))
        if found[-1:] != [line] or operation.kind != "write":
            found.append(line)
    return found
