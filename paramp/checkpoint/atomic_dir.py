"""Folders that exist whole or not at all.

What is to become ``step-00000100`` is written to ``step-00000100.partial-...`` first. When every file is on the disk,
``manifest.json`` is written, with the size and the SHA-256 of each, and the folder gets its name: one rename, which is
atomic. So a folder by the right name was complete once; the checksums show whether it still is. The manifest holds its
own checksum, and is valid only if it is, byte by byte, what would be written for its content.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..base.errors import CheckpointError
from ..distributed.collectives import gather_objects

MANIFEST = "manifest.json"
HEADER = "checkpoint.json"
FORMAT = "paramp checkpoint"
PARTIAL = ".partial-"
REPLACED = ".replaced"
STEP = re.compile(r"step-(\d+)")
OWN_FILE = re.compile(r"manifest\.json|checkpoint\.json|rank-\d+\.safetensors")
PLAIN_NAME = re.compile(r"\w[\w.-]*")
READ_SIZE = 2**22
"""Bytes that are hashed at once."""


def new_partial(path: Path) -> Path:
    """Make the folder in which to write what will be ``path``: beside it, so that one rename gives it its name.

    Raises:
        CheckpointError: something else than a checkpoint lies at ``path``.
    """
    if path.exists() and not _may_be_replaced(path):
        raise CheckpointError(
            f"{str(path)!r} is there already and no checkpoint, so it is not replaced; choose another path"
        )
    partial = path.with_name(f"{path.name}{PARTIAL}{os.urandom(4).hex()}")
    partial.mkdir(parents=True)
    return partial


def _may_be_replaced(path: Path) -> bool:
    """Whether ``path`` is an empty folder or a checkpoint, be it damaged, with no other files in it."""
    if not path.is_dir() or not all(OWN_FILE.fullmatch(child.name) for child in path.iterdir()):
        return False
    try:
        return bool(json.loads((path / MANIFEST).read_bytes())["format"] == FORMAT)
    except FileNotFoundError:
        return True
    # A damaged manifest; a whole one of another format, such as a web page's, has just returned False.
    except (OSError, ValueError, KeyError, TypeError):
        return (path / HEADER).is_file()


@dataclass(frozen=True)
class Written:
    """A file that was written."""

    size: int
    """In bytes."""
    sha256: str


def write_file(path: Path, parts: Iterable[Any]) -> Written:
    """Write ``parts``, bytes or buffers of bytes, to a file and have them on the disk before this returns."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for part in parts:
            size += file.write(part)
            digest.update(part)
        file.flush()
        os.fsync(file.fileno())
    return Written(size, digest.hexdigest())


def write_json(path: Path, content: Mapping[str, Any]) -> Written:
    """Write ``content``, without numbers that are not finite, as JSON, and have it on the disk before this returns."""
    return write_file(path, [(json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n").encode()])


def publish(partial: Path, path: Path, files: Mapping[str, Written]) -> None:
    """Write the manifest of ``files`` into ``partial`` and rename it to ``path``, replacing a checkpoint there.

    Raises:
        CheckpointError: a file is not there: the ranks do not share the file system.
    """
    for file, written in ((partial / name, written) for name, written in files.items()):
        if not file.is_file() or file.stat().st_size != written.size:
            raise CheckpointError(
                f"{str(file)!r} was written by another rank, but is not to be seen from here; all machines "
                "have to share the file system that checkpoints go to"
            )
    write_file(partial / MANIFEST, [_manifest(files)])
    _sync(partial)
    replaced = path.with_name(path.name + REPLACED)
    if path.exists():  # a folder that has files cannot be renamed over: the old one moves away first
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    partial.rename(path)
    _sync(path.parent)
    for left in (replaced, *path.parent.glob(f"{glob.escape(path.name)}{PARTIAL}*")):  # and of unfinished attempts
        shutil.rmtree(left, ignore_errors=True)


def finish_replacing(path: Path) -> None:
    """If replacing ``path`` was interrupted after the old one had moved away, move it back."""
    if path.name:
        with contextlib.suppress(OSError):  # there is nothing to move back, or another rank did it first
            replaced = path.with_name(path.name + REPLACED)
            if replaced.is_dir() and not path.exists():
                replaced.rename(path)


def _sync(folder: Path) -> None:
    """Have the names in ``folder`` on the disk: syncing a file does not write its entry in the folder."""
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


def listed(path: Path) -> dict[str, Written]:
    """The files of the checkpoint at ``path``, as its manifest has them.

    Raises:
        CheckpointError: there is no manifest, or it is damaged.
    """
    if not path.is_dir():
        raise CheckpointError(f"{str(path)!r}: no such checkpoint; expected the path of a folder with {MANIFEST}")
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{str(file)!r} is missing: this is no checkpoint, or a damaged one; take another one")
    data = file.read_bytes()
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
        raise CheckpointError(f"{str(file)!r} is damaged: it is not what was written; take another checkpoint")
    return files


def _damage(path: Path, name: str, written: Written) -> str | None:
    """What is wrong with the file ``name`` of the checkpoint at ``path``; None if it is what was ``written``."""
    file = path / name
    try:
        size = file.stat().st_size
        if not file.is_file():
            return f"{str(file)!r} is no file"
        if size != written.size:
            return f"{str(file)!r} has {size} bytes, of {written.size} that were written"
        digest = hashlib.sha256()
        with file.open("rb") as opened:
            while data := opened.read(READ_SIZE):
                digest.update(data)
    except FileNotFoundError:
        return f"{str(file)!r} is missing"
    except OSError as error:
        return f"{str(file)!r} cannot be read: {error.strerror}"
    if digest.hexdigest() != written.sha256:
        return f"{str(file)!r} is damaged: its checksum is not that of what was written"
    return None


def problems(path: str | Path, part: int = 0, num_parts: int = 1) -> list[str]:
    """What is damaged in every ``num_parts``-th file of the checkpoint at ``path``, from the ``part``-th on."""
    path = Path(path)
    try:
        files = sorted(listed(path).items())
    except (CheckpointError, OSError) as error:
        return [str(error)]
    if HEADER not in dict(files):
        return [f"{str(path / HEADER)!r} is not in the manifest: this is no checkpoint of a run"]
    return [found for name, written in files[part::num_parts] if (found := _damage(path, name, written))]


def problems_together(path: str | Path, group: dist.ProcessGroup) -> list[str]:
    """As :func:`problems`, the same on every rank of ``group``. All of them call it; each reads a part of the files."""
    finish_replacing(Path(path))
    size = dist.get_world_size(group)
    everyone = gather_objects(problems(path, dist.get_rank(group), size), group)
    return list(dict.fromkeys(found for own in everyone for found in own))


# ------------------------------------------------------------------------------------------ the checkpoints of a run


def step_folder(folder: Path, step: int) -> Path:
    """Where in ``folder`` the checkpoint of ``step`` lies."""
    return folder / f"step-{step:08d}"


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of each checkpoint in ``folder``, the newest first; whole or not."""
    if not folder.is_dir():
        return []
    for replaced in folder.glob(f"step-*{REPLACED}"):
        finish_replacing(replaced.with_name(replaced.name.removesuffix(REPLACED)))
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := STEP.fullmatch(path.name))]
    return sorted(found, reverse=True)


def newest_whole(folder: str | Path, group: dist.ProcessGroup) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint in ``folder``, and what is wrong with the newer ones.

    The same on every rank of ``group``; all of them call it.
    """
    folder = Path(folder)
    listing: list[Any] = [None, None]
    if dist.get_rank(group) == 0:  # file systems of several machines may list a new folder at different times
        listing = [[path for _, path in checkpoints_in(folder)], _unfinished_in(folder)]
    dist.broadcast_object_list(listing, group=group, group_src=0)
    paths, unfinished = listing
    skipped = [f"{str(path)!r} is unfinished: saving it was interrupted" for path in unfinished]
    for path in paths:
        found = problems_together(path, group)
        if not found:
            return path, skipped
        skipped.append(found[0])
    return None, skipped


def _unfinished_in(folder: Path) -> list[Path]:
    """What was begun to be written in ``folder`` after the newest checkpoint there, and never finished."""
    newest = max((path.stat().st_mtime for _, path in checkpoints_in(folder)), default=0.0)
    return sorted(path for path in folder.glob(f"step-*{PARTIAL}*") if path.stat().st_mtime >= newest)


def remove(path: Path) -> None:
    """Delete the checkpoint at ``path``: first it loses its name, so that nobody takes half of it for whole."""
    doomed = path.with_name(f"{path.name}{PARTIAL}removed")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
