"""Checkpoints opened for reading, so that the files that are checked are the files that are read.

When a save replaces a checkpoint, its path leads to another folder. So the folder is opened once, every file in it is
opened relative to that descriptor, and the path is not used again. Readers change nothing: leftovers of an interrupted
save are deleted by the next save. A shared lock on the manifest keeps a save from deleting the folder while it is read.
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

from ..base import loop_block_sizes
from ..base.collectives import gather_objects
from ..base.errors import CheckpointError
from ..base.values_checked_by_type import user_path
from .atomic_dir import HEADER, MANIFEST, Written, lock, parse_manifest, replaced
from .header import Header, parse_header
from .safetensors_io import TensorFile

ATTEMPTS = 50
"""How often ranks retry until all have opened the same checkpoint: for 12 s, as file systems may show changes late."""
SPARE_FILES = 64
"""The number of other files that a process can open while it reads a checkpoint."""


class OpenCheckpoint:
    """The checkpoint at ``path`` with all its files open. A context manager.

    Attributes:
        path: for messages.
        files: the files that the manifest lists, by name; empty if it cannot be read.
        damage: why a file could not be opened, by name.
        digest: the SHA-256 of the manifest, which identifies the checkpoint's content.

    Raises:
        CheckpointError: the folder does not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = user_path(path)
        self._descriptors: dict[str, int] = {}
        self._tensor_files: dict[str, TensorFile] = {}
        while not self._open():
            self.close()

    def _open(self) -> bool:
        """Open all files. False if some were missing because the folder was renamed meanwhile."""
        self.files: dict[str, Written] = {}
        self.damage: dict[str, str] = {}
        self.digest = ""
        _allow_open(2)
        self._descriptors[""] = _open_folder(self.path)
        self._open_file(MANIFEST)
        if MANIFEST not in self.damage:
            lock(self._descriptors[MANIFEST], fcntl.LOCK_SH)
            try:
                data = self._read(MANIFEST)
                self.digest = hashlib.sha256(data).hexdigest()
                self.files = parse_manifest(data, self.path / MANIFEST)
            except CheckpointError as error:
                self.damage[MANIFEST] = str(error)
            except OSError as error:
                self.damage[MANIFEST] = f"{str(self.path / MANIFEST)!r} cannot be read: {error.strerror}"
        _allow_open(len(self.files))
        for name in self.files:
            self._open_file(name)
        if not self.damage:
            return True
        real = Path(os.path.realpath(self.path))
        for place in (real, replaced(real)):  # not opened, which would fail if too many files are open
            with contextlib.suppress(FileNotFoundError):
                return os.path.samestat(os.stat(place), os.fstat(self._descriptors[""]))
        return False

    def _open_file(self, name: str) -> None:
        try:
            # Not blocking: opening a pipe of this name would wait.
            descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK, dir_fd=self._descriptors[""])
        except FileNotFoundError:
            what = ": this is not a checkpoint, or a damaged one; use another one" if name == MANIFEST else ""
            self.damage[name] = f"{str(self.path / name)!r} is missing{what}"
        except OSError as error:
            self.damage[name] = f"{str(self.path / name)!r} cannot be read: {error.strerror}"
        else:
            self._descriptors[name] = descriptor
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                self.damage[name] = f"{str(self.path / name)!r} is not a file"

    def _read(self, name: str) -> bytes:
        with open(self._descriptors[name], "rb", closefd=False) as file:
            file.seek(0)
            return file.read()

    def problems(self, part: int = 0, num_parts: int = 1) -> list[str]:
        """Damage found at opening, and in every ``num_parts``-th file from ``part`` on, which are compared here."""
        names = sorted(self.files.keys() - self.damage.keys())[part::num_parts]
        return [*self.damage.values(), *filter(None, map(self._difference, names))]

    def _difference(self, name: str) -> str | None:
        """The problem of a file; None if it has the size and checksum of the manifest."""
        file, written, descriptor = self.path / name, self.files[name], self._descriptors[name]
        if (size := os.fstat(descriptor).st_size) != written.size:
            return f"{str(file)!r} has {size} bytes, expected {written.size}"
        digest, position = hashlib.sha256(), 0
        try:
            while data := os.pread(descriptor, loop_block_sizes.CHECKED_READ, position):
                digest.update(data)
                position += len(data)
        except OSError as error:
            return f"{str(file)!r} cannot be read: {error.strerror}"
        is_whole = digest.hexdigest() == written.sha256
        return None if is_whole else f"{str(file)!r} is damaged: its checksum differs from the manifest's"

    @functools.cached_property
    def header(self) -> Header:
        """The checkpoint's header.

        Raises:
            CheckpointError: the manifest or header cannot be opened, or is not valid.
        """
        if problem := self.damage.get(MANIFEST) or self.damage.get(HEADER):
            raise CheckpointError(problem)
        return parse_header(self._read(HEADER), self.path / HEADER, self.files)

    def tensor_file(self, name: str) -> TensorFile:
        """The file of tensors called ``name``."""
        if name not in self._tensor_files:
            self._tensor_files[name] = TensorFile(self.path / name, self._descriptors[name])
        return self._tensor_files[name]

    def other_files(self) -> list[str]:
        """The names of files in the folder that do not belong to the checkpoint."""
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
    """The descriptor of the folder ``path``, or of the old one while it is being replaced."""
    real = Path(os.path.realpath(path))
    for name in (real, replaced(real)) * 8:  # a rename may happen between two attempts
        try:
            return os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    raise CheckpointError(f"{str(path)!r}: no such checkpoint; expected the path of a folder with {MANIFEST}")


def _allow_open(num_files: int) -> None:
    """Raise the process's soft limit on open files if necessary, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        wanted = max(map(int, os.listdir("/dev/fd"))) + num_files + SPARE_FILES
    except OSError:  # not one more file can be opened
        wanted = soft + 2**16
    if soft not in (resource.RLIM_INFINITY, hard) and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def open_together(path: str | Path, group: dist.ProcessGroup, *, check: bool = True) -> OpenCheckpoint:
    """Open the same checkpoint on every rank of ``group``. Each rank checks a part of the files; all ranks call this.

    Args:
        check: False: the files' checksums are not checked.

    Raises:
        CheckpointError: on every rank, with the first problem found: it is damaged or incomplete.
    """
    checkpoint = _open_the_same(path, group)
    damage = checkpoint.problems(dist.get_rank(group), dist.get_world_size(group)) if check else []
    unreadable = None
    try:
        checkpoint.header  # noqa: B018  # read here, so that an error is raised on every rank
    except (CheckpointError, OSError) as error:
        unreadable = str(error)
    everyone = gather_objects((damage[:1], unreadable), group)
    # One rank finds the checksum of a damaged header, and no rank can read it: the checksum's message comes first.
    if failures := [text for texts, _ in everyone for text in texts] + [text for _, text in everyone if text]:
        checkpoint.close()
        raise CheckpointError(failures[0])
    return checkpoint


def _open_the_same(path: str | Path, group: dist.ProcessGroup) -> OpenCheckpoint:
    for attempt in range(ATTEMPTS):
        checkpoint: OpenCheckpoint | None = None
        try:
            checkpoint = OpenCheckpoint(path)
            problem = next(iter(checkpoint.damage.values()), None)
        except (CheckpointError, OSError) as error:
            problem = str(error)
        opened = gather_objects((problem, checkpoint and checkpoint.digest), group)
        if checkpoint is not None:
            if problem is None and len(set(opened)) == 1:
                return checkpoint
            checkpoint.close()
        if failures := [failure for failure, _ in opened if failure]:
            raise CheckpointError(failures[0])
        time.sleep(0.01 * attempt)  # a save has replaced it between the ranks' opens
    raise CheckpointError(
        f"{str(path)!r} leads to different checkpoints on different ranks; all machines have to share the file system "
        "of the checkpoints"
    )


def problem_together(path: str | Path, group: dist.ProcessGroup) -> str | None:
    """The first problem of the checkpoint at ``path``, the same on every rank of ``group``; None if it is intact."""
    try:
        open_together(path, group).close()
    except CheckpointError as error:
        return str(error)
    return None
