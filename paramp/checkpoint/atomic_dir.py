"""Folders that exist whole or not at all.

What is to become ``step-00000100`` is written to ``step-00000100.partial-...`` first. When every file is on the disk,
``manifest.json`` is written, with the size and the SHA-256 of each, and the folder gets its name: one rename, which a
file system does or does not do. So a folder by the right name was complete once; the checksums tell whether it still
is. The manifest guards itself: it holds its own checksum, and counts only if it is, byte by byte, what would be written
for its content.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.errors import CheckpointError
from .safetensors_io import Written

__all__ = [
    "HEADER",
    "MANIFEST",
    "checkpoints_in",
    "damage",
    "finish_replacing",
    "listed",
    "new_partial",
    "publish",
    "remove",
    "step_folder",
    "unfinished_in",
    "write_json",
]

MANIFEST = "manifest.json"
HEADER = "checkpoint.json"
FORMAT = "paramp checkpoint"
PARTIAL = ".partial-"
REPLACED = ".replaced"
STEP = re.compile(r"step-(\d+)")
OWN_FILE = re.compile(r"manifest\.json|checkpoint\.json|rank-\d+\.safetensors")
PLAIN_NAME = re.compile(r"\w[\w.-]*")
CHUNK = 2**22


def new_partial(path: Path) -> Path:
    """Where to write what will be ``path``: a new folder beside it.

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
    """Whether ``path`` is an empty folder or a checkpoint, or what damage has left of one, and has nothing else."""
    if not path.is_dir() or not all(OWN_FILE.fullmatch(child.name) for child in path.iterdir()):
        return False
    try:
        return bool(json.loads((path / MANIFEST).read_bytes())["format"] == FORMAT)
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError, TypeError):  # damaged; that of a web page would be whole
        return (path / HEADER).is_file()


def _remove_partials(path: Path) -> None:
    """Delete what attempts to write ``path`` have left."""
    for left in path.parent.glob(f"{glob.escape(path.name)}{PARTIAL}*"):
        shutil.rmtree(left, ignore_errors=True)


def write_json(path: Path, content: Mapping[str, Any]) -> Written:
    """Write ``content`` and have it on the disk."""
    return _write(path, (json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n").encode())


def _write(path: Path, data: bytes) -> Written:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Written(len(data), hashlib.sha256(data).hexdigest())


def publish(partial: Path, path: Path, files: Mapping[str, Written]) -> None:
    """Write the manifest of ``files`` into ``partial`` and let it be ``path``, in place of a checkpoint that was there.

    Raises:
        CheckpointError: a file is not there: the ranks do not share the file system.
    """
    for name, written in files.items():
        if not (partial / name).is_file() or (partial / name).stat().st_size != written.size:
            raise CheckpointError(
                f"{str(partial / name)!r} was written by another rank, but is not to be seen from here; all machines "
                "have to share the file system that checkpoints go to"
            )
    _write(partial / MANIFEST, _manifest(files))
    _sync(partial)
    replaced = path.with_name(path.name + REPLACED)
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    partial.rename(path)
    _sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    _remove_partials(path)


def finish_replacing(path: Path) -> None:
    """If replacing ``path`` was cut short after the old one had moved away, bring it back."""
    if path.name:
        with contextlib.suppress(OSError):  # there is nothing to bring back, or another rank was quicker
            replaced = path.with_name(path.name + REPLACED)
            if replaced.is_dir() and not path.exists():
                replaced.rename(path)


def _sync(folder: Path) -> None:
    """Have the names in ``folder`` on the disk."""
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
        raise CheckpointError(
            f"{str(file)!r} is missing: this is no checkpoint, or one that was damaged; take another one"
        )
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


def damage(path: Path, name: str, written: Written) -> str | None:
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
            while chunk := opened.read(CHUNK):
                digest.update(chunk)
    except FileNotFoundError:
        return f"{str(file)!r} is missing"
    except OSError as error:
        return f"{str(file)!r} cannot be read: {error.strerror}"
    if digest.hexdigest() != written.sha256:
        return f"{str(file)!r} is damaged: its checksum is not that of what was written"
    return None


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


def unfinished_in(folder: Path) -> list[Path]:
    """What was begun to be written in ``folder`` after the newest checkpoint there, and never finished."""
    newest = max((path.stat().st_mtime for _, path in checkpoints_in(folder)), default=0.0)
    return sorted(path for path in folder.glob(f"step-*{PARTIAL}*") if path.stat().st_mtime >= newest)


def remove(path: Path) -> None:
    """Delete the checkpoint at ``path``: first it loses its name, so that nobody takes half of it for whole."""
    doomed = path.with_name(f"{path.name}{PARTIAL}removed")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
