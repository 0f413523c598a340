"""Checkpoints open for reading: what is compared with the manifest is what is read, whatever becomes of the names.

A name leads to another folder as soon as a save replaces the checkpoint. So the folder is opened once, every file in it
is opened relative to that, and no name is used again. Readers change nothing: what an interrupted save has left is for
the next save to delete. A shared lock on the manifest keeps a save from deleting the folder while it is read.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import resource
import stat
import time
from pathlib import Path

import torch.distributed as dist

from ..base.errors import CheckpointError
from ..distributed.collectives import gather_objects
from .atomic_dir import HEADER, MANIFEST, Written, lock, parse_manifest, replaced
from .header import Header, parse_header
from .safetensors_io import TensorFile

READ_SIZE = 2**22
"""Bytes that are hashed at once."""
ATTEMPTS = 50
"""How often ranks open a checkpoint until they have the same: for 12 s, since file systems show changes late."""
SPARE_FILES = 64
"""How many more files a process can open while it reads a checkpoint."""


class OpenCheckpoint:
    """The checkpoint at ``path``, all its files open. A context manager.

    Attributes:
        path: for messages.
        files: what the manifest lists, by name; empty if it cannot be read.
        damage: why a file could not be opened, by name.
        digest: the SHA-256 of the manifest: equal digests, equal checkpoints.

    Raises:
        CheckpointError: there is no such folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._descriptors: dict[str, int] = {}
        self._tensor_files: dict[str, TensorFile] = {}
        while not self._open():
            self.close()

    def _open(self) -> bool:
        """Open everything. False if something was not there because the folder has lost its name meanwhile."""
        self.files: dict[str, Written] = {}
        self.damage: dict[str, str] = {}
        self.digest = ""
        self._descriptors[""] = _open_folder(self.path)
        self._open_file(MANIFEST)
        if MANIFEST not in self.damage:
            lock(self._descriptors[MANIFEST], fcntl.LOCK_SH)
            self._read_manifest()
        _allow_open(len(self.files))
        for name in self.files:
            self._open_file(name)
        return not self.damage or self._has_its_name()

    def _open_file(self, name: str) -> None:
        try:
            # Not blocking: something else by this name, such as a pipe, would keep the process waiting.
            descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK, dir_fd=self._descriptors[""])
        except FileNotFoundError:
            what = "this is no checkpoint, or a damaged one; take another one"
            self.damage[name] = f"{str(self.path / name)!r} is missing" + (f": {what}" if name == MANIFEST else "")
        except OSError as error:
            self.damage[name] = f"{str(self.path / name)!r} cannot be read: {error.strerror}"
        else:
            self._descriptors[name] = descriptor
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                self.damage[name] = f"{str(self.path / name)!r} is no file"

    def _read_manifest(self) -> None:
        try:
            data = self._read(MANIFEST)
            self.digest = hashlib.sha256(data).hexdigest()
            self.files = parse_manifest(data, self.path / MANIFEST)
        except CheckpointError as error:
            self.damage[MANIFEST] = str(error)
        except OSError as error:
            self.damage[MANIFEST] = f"{str(self.path / MANIFEST)!r} cannot be read: {error.strerror}"

    def _has_its_name(self) -> bool:
        real = Path(os.path.realpath(self.path))
        for name in (real, replaced(real)):  # opening it would fail where too many files are open
            with contextlib.suppress(FileNotFoundError):
                return os.path.samestat(os.stat(name), os.fstat(self._descriptors[""]))
        return False

    def _read(self, name: str) -> bytes:
        with open(self._descriptors[name], "rb", closefd=False) as file:
            file.seek(0)
            return file.read()

    def problems(self, part: int = 0, num_parts: int = 1) -> list[str]:
        """What is damaged: by what could be seen at opening, and of every ``num_parts``-th file, from ``part`` on."""
        names = sorted(self.files.keys() - self.damage.keys())[part::num_parts]
        return [*self.damage.values(), *(found for name in names if (found := self._compare(name)))]

    def _compare(self, name: str) -> str | None:
        """What is wrong with a file; None if it is what was written."""
        file, written, descriptor = self.path / name, self.files[name], self._descriptors[name]
        size = os.fstat(descriptor).st_size
        if size != written.size:
            return f"{str(file)!r} has {size} bytes, of {written.size} that were written"
        digest, position = hashlib.sha256(), 0
        try:
            while data := os.pread(descriptor, READ_SIZE, position):
                digest.update(data)
                position += len(data)
        except OSError as error:
            return f"{str(file)!r} cannot be read: {error.strerror}"
        if digest.hexdigest() != written.sha256:
            return f"{str(file)!r} is damaged: its checksum is not that of what was written"
        return None

    @functools.cached_property
    def header(self) -> Header:
        """What the checkpoint holds.

        Raises:
            CheckpointError: it cannot be opened, or is not what is written there.
        """
        if problem := self.damage.get(MANIFEST) or self.damage.get(HEADER):
            raise CheckpointError(problem)
        return parse_header(self._read(HEADER), self.path / HEADER, self.files)

    def tensor_file(self, name: str) -> TensorFile:
        """One of the files of tensors."""
        if name not in self._tensor_files:
            self._tensor_files[name] = TensorFile(self.path / name, self._descriptors[name])
        return self._tensor_files[name]

    def other_files(self) -> list[str]:
        """The names of files in the folder that are not of the checkpoint."""
        return sorted(set(os.listdir(self._descriptors[""])) - {MANIFEST, *self.files})

    def close(self) -> None:
        """Close all files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_folder(path: Path) -> int:
    """The descriptor of the folder ``path``; while it is being replaced, that of the old one."""
    real = Path(os.path.realpath(path))
    for name in (real, replaced(real)) * 8:  # between two tries, one may have gone and the other come
        try:
            return os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    raise CheckpointError(f"{str(path)!r}: no such checkpoint; expected the path of a folder with {MANIFEST}")


def _allow_open(num_files: int) -> None:
    """Raise the process's own limit on open files, if need be, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/dev/fd")) + num_files + SPARE_FILES
    if soft not in (resource.RLIM_INFINITY, hard) and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def problems(path: str | Path) -> list[str]:
    """What is damaged in the checkpoint at ``path``."""
    try:
        with OpenCheckpoint(path) as checkpoint:
            return checkpoint.problems()
    except CheckpointError as error:
        return [str(error)]


def open_together(path: str | Path, group: dist.ProcessGroup, *, check: bool = True) -> OpenCheckpoint:
    """The same checkpoint on every rank of ``group``, all of which call this, each of which compares a part of it.

    Args:
        check: False trusts that the files are what was written.

    Raises:
        CheckpointError: on every rank, with the first problem of any: it is not whole.
    """
    checkpoint = _open_the_same(path, group)
    damage = checkpoint.problems(dist.get_rank(group), dist.get_world_size(group)) if check else []
    unreadable = None
    try:
        checkpoint.header  # noqa: B018  # is read here, so that an error is every rank's
    except (CheckpointError, OSError) as error:
        unreadable = str(error)
    found_damage = gather_objects((damage[:1], unreadable), group)
    # A damaged header is seen as damaged by one rank, and cannot be read by any.
    if failures := [each for own, _ in found_damage for each in own] + [each for _, each in found_damage if each]:
        checkpoint.close()
        raise CheckpointError(failures[0])
    return checkpoint


def _open_the_same(path: str | Path, group: dist.ProcessGroup) -> OpenCheckpoint:
    for attempt in range(ATTEMPTS):
        checkpoint, problem = _try_to_open(path)
        found = gather_objects((problem, checkpoint and checkpoint.digest), group)
        if checkpoint is not None:
            if problem is None and len(set(found)) == 1:
                return checkpoint
            checkpoint.close()
        if failures := [problem for problem, _ in found if problem]:
            raise CheckpointError(failures[0])
        time.sleep(0.01 * attempt)  # a save has replaced it between two ranks' opening it
    raise CheckpointError(
        f"{str(path)!r} leads to different checkpoints on different ranks; all machines have to share the file system "
        "that checkpoints are in"
    )


def _try_to_open(path: str | Path) -> tuple[OpenCheckpoint | None, str | None]:
    """The checkpoint at ``path``, and what is wrong with it as far as opening it shows."""
    try:
        checkpoint = OpenCheckpoint(path)
    except (CheckpointError, OSError) as error:
        return None, str(error)
    return checkpoint, next(iter(checkpoint.damage.values()), None)


def problem_together(path: str | Path, group: dist.ProcessGroup) -> str | None:
    """What is wrong with the checkpoint at ``path``; None if it is whole. The same on every rank of ``group``."""
    try:
        open_together(path, group).close()
    except CheckpointError as error:
        return str(error)
    return None
