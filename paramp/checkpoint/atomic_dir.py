"""Atomic folders: a checkpoint is either complete or not visible.

``step-00000100`` is first written as ``step-00000100.partial-...``. When every file is on the disk, ``manifest.json``
is written, with the size and the SHA-256 of each, and the folder is renamed, which is atomic. So a folder with the
final name was complete once; the checksums show whether it still is. Each file is synced, and each folder after its
names have changed: what is deleted next is needed no more, even if the machine then loses all that was not synced. The
manifest contains its own checksum, and is valid only if it equals, byte by byte, the manifest that would be written for
its content.

Other processes may save to a path or load from it at the same time. A save holds a lock, ``NAME.partial-lock``, which
the system releases when the process ends: a partial folder without a lock was left by a save that failed, and the next
save deletes it. Replacing a folder takes two renames; between them the old one is called ``NAME.replaced``, so that
readers find it, and it is not deleted while a reader holds it (:mod:`.open_checkpoint`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import CheckpointError

MANIFEST = "manifest.json"
HEADER = "checkpoint.json"
FORMAT = "paramp checkpoint"
PARTIAL = ".partial-"
LOCK = f"{PARTIAL}lock"
REPLACED = ".replaced"
LEFTOVER = re.compile(rf"(.+){re.escape(PARTIAL)}(?:[0-9a-f]{{8}}|lock)")
CHECKPOINT_FILE = re.compile(r"manifest\.json|checkpoint\.json|rank-\d+\.safetensors")
PLAIN_NAME = re.compile(r"\w[\w.-]*")
PATIENCE = 60.0
"""Seconds that a save waits for another process's save to the same path."""


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A new partial folder beside ``path``, to be filled and then renamed to ``path`` by :func:`publish`.

    One at a time, over all processes. It is deleted at the end unless it was published. Partial folders that failed
    saves left beside ``path`` are deleted first, to free the space.

    Raises:
        CheckpointError: ``path`` exists and is not a checkpoint, or has a file that no save writes; or another process
            is saving there.
    """
    make_folder(path.parent)
    with _locked(path, PATIENCE) as is_ours:
        if not is_ours:
            raise CheckpointError(
                f"{str(path)!r} is being saved by another process, for {PATIENCE:g} s or longer; save to a path from "
                "one process at a time, or choose another path"
            )
        if path.exists() and not _may_be_replaced(path):
            other = _other_file(path) if (path / HEADER).is_file() else None
            problem = "exists and is not a checkpoint" if other is None else f"has {other!r}, which no save writes"
            raise CheckpointError(
                f"{str(path)!r} {problem}, so it is not replaced; move it away, or choose another path"
            )
        _delete_leftovers(path)
        partial = unnamed(path)
        partial.mkdir()
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # it does not exist if it was published


def make_folder(folder: Path) -> None:
    """Make ``folder``, and those above it, where they are missing; their names are synced to the disk."""
    if not folder.exists():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def unnamed(path: Path) -> Path:
    """A new random name for a folder or file that will be ``path``, or was."""
    return path.with_name(f"{path.name}{PARTIAL}{os.urandom(4).hex()}")


def replaced(path: Path) -> Path:
    """The name of the old checkpoint while it is being replaced, between the two renames."""
    return path.parent / f"{path.name}{REPLACED}"


def _may_be_replaced(path: Path) -> bool:
    """Whether ``path`` is an empty folder or a checkpoint, even a damaged one, without other files in it."""
    if not _has_only_checkpoint_files(path):
        return False
    try:
        return bool(json.loads((path / MANIFEST).read_bytes())["format"] == FORMAT)
    except FileNotFoundError:
        return True
    # A damaged manifest; a valid one of another format, such as a web page's, has returned False above.
    except (OSError, ValueError, KeyError, TypeError):
        return (path / HEADER).is_file()


def _has_only_checkpoint_files(folder: Path) -> bool:
    try:
        return _other_file(folder) is None
    except (FileNotFoundError, NotADirectoryError):  # another process may have deleted it
        return False


def _other_file(folder: Path) -> str | None:
    """The first name in ``folder`` that no save writes, such as that of an export; None if there is none."""
    return min((name for name in os.listdir(folder) if not CHECKPOINT_FILE.fullmatch(name)), default=None)


# ---------------------------------------------------------------------------------------------- locks and leftovers


@contextlib.contextmanager
def _locked(path: Path, patience: float = 0.0) -> Iterator[bool]:
    """Hold the lock on saving to ``path``, over all processes. False if another has it for ``patience`` seconds."""
    file = path.with_name(path.name + LOCK)
    deadline = time.monotonic() + patience
    while (descriptor := _lock_file(file)) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            file.unlink(missing_ok=True)
            lock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor too
            os.close(descriptor)


def _lock_file(file: Path) -> int | None:
    """Make ``file`` and lock it; its descriptor, or None if another process has locked it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    with contextlib.suppress(FileNotFoundError):
        # The previous holder deletes the file: only a lock on the file that still has this name counts.
        if lock(descriptor, fcntl.LOCK_EX) and os.path.samestat(file.stat(), os.fstat(descriptor)):
            return descriptor
    os.close(descriptor)
    return None


def lock(descriptor: int, kind: int) -> bool:
    """Lock an open file as ``fcntl.flock`` does. False if another process has a conflicting lock.

    On file systems without locks it always succeeds: there, only one process at a time may save to a path.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _delete_leftovers(path: Path) -> None:
    """Delete the leftovers of failed saves and removals in the parent of ``path``, whose lock is held."""
    if path.exists():
        _discard(replaced(path), path)
    for left in path.parent.iterdir():
        if not (match := LEFTOVER.fullmatch(left.name)):
            continue
        owner = path.with_name(match[1])
        with contextlib.nullcontext(True) if owner == path else _locked(owner) as is_ours:
            if is_ours and _has_only_checkpoint_files(left):
                _delete(left)


def remove(path: Path) -> None:
    """Delete the checkpoint at ``path``, and an old one that it was replacing.

    Files that no save writes, such as an export, stay in the folder.

    Raises:
        OSError: it cannot be deleted.
    """
    if path.exists() and _other_file(path) is not None:
        _delete_files(path)
    else:
        _discard(path, path)
    _discard(replaced(path), path)


def _discard(folder: Path, path: Path) -> None:
    """Delete ``folder`` if it exists; it is renamed first, so that a partly deleted one is not taken for complete.

    The new name is synced to the disk, with those of renames before: a crash may not bring the old name back.
    """
    with contextlib.suppress(FileNotFoundError):
        doomed = unnamed(path)
        folder.rename(doomed)
        _sync(folder.parent)
        _delete(doomed)


def _delete_files(folder: Path) -> None:
    """Delete the files of a checkpoint in ``folder``, the manifest first; if a reader holds it, nothing is deleted."""
    with _unread(folder) as is_unread:
        for name in sorted(os.listdir(folder), key=MANIFEST.__ne__) if is_unread else ():
            if CHECKPOINT_FILE.fullmatch(name):
                (folder / name).unlink()
                if name == MANIFEST:
                    _sync(folder)


def _delete(folder: Path) -> None:
    """Delete a renamed folder; if a reader holds it, a later save deletes it."""
    with _unread(folder) as is_unread:
        if is_unread:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _unread(folder: Path) -> Iterator[bool]:
    """Keep readers from the checkpoint ``folder``; False if one holds it."""
    with contextlib.ExitStack() as opened:
        is_unread = True
        with contextlib.suppress(OSError):  # a folder without a manifest has no readers
            descriptor = os.open(folder / MANIFEST, os.O_RDWR)
            opened.callback(os.close, descriptor)
            is_unread = lock(descriptor, fcntl.LOCK_EX)
        yield is_unread


# ----------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class Written:
    """A file that was written."""

    size: int
    """In bytes."""
    sha256: str


def write_file(path: Path, parts: Iterable[Any]) -> Written:
    """Write ``parts``, bytes or buffers of bytes, to a file, and sync it to the disk."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for part in parts:
            size += file.write(part)
            digest.update(part)
        file.flush()
        os.fsync(file.fileno())
    return Written(size, digest.hexdigest())


def write_json(path: Path, content: Mapping[str, Any]) -> Written:
    """Write ``content``, in which all numbers are finite, as JSON, and sync it to the disk."""
    return write_file(path, [(json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n").encode()])


def publish(partial: Path, path: Path, files: Mapping[str, Written]) -> None:
    """Write the manifest of ``files`` into ``partial`` and rename it to ``path``, replacing a checkpoint there.

    Raises:
        CheckpointError: a file is missing, because the ranks do not share the file system.
    """
    for file, written in ((partial / name, written) for name, written in files.items()):
        if not file.is_file() or file.stat().st_size != written.size:
            raise CheckpointError(
                f"{str(file)!r} was written by another rank, but is not visible on rank 0; all machines "
                "have to share the file system of the checkpoints"
            )
    write_file(partial / MANIFEST, [_manifest(files)])
    _sync(partial)
    if path.exists():  # a rename cannot replace a folder that has files, so the old one is renamed first
        path.rename(replaced(path))
    partial.rename(path)
    _sync(path.parent)
    with contextlib.suppress(OSError):  # the new one is in place; the next save deletes what is left
        _discard(replaced(path), path)


def publish_file(partial: Path, path: Path) -> None:
    """Rename a file that :func:`write_file` wrote to ``path``, in the same folder, replacing one there."""
    partial.replace(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Sync the entries of ``folder`` to the disk: syncing a file does not write its entry in the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _manifest(files: Mapping[str, Written]) -> bytes:
    body: dict[str, Any] = {
        "format": FORMAT,
        "version": 1,
        "files": {name: {"bytes": files[name].size, "sha256": files[name].sha256} for name in sorted(files)},
    }
    body["sha256"] = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return (json.dumps(body, indent=1) + "\n").encode()


def parse_manifest(data: bytes, file: Path) -> dict[str, Written]:
    """The files that a manifest lists, by name; ``data`` is the content of ``file``.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        body = json.loads(data)
        if body.get("format") == FORMAT and body.get("version", 1) > 1:
            raise CheckpointError(
                f"{str(file)!r} is of version {body['version']}, expected 1; update paramp to read it"
            )
        files = {name: Written(item["bytes"], item["sha256"]) for name, item in body["files"].items()}
        whole = _manifest(files) == data and all(PLAIN_NAME.fullmatch(name) for name in files)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError(f"{str(file)!r} is damaged: it was changed after it was written; use another checkpoint")
    if HEADER not in files:
        raise CheckpointError(f"{str(file.with_name(HEADER))!r} is not in the manifest: this is not a checkpoint")
    return files
