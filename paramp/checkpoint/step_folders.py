"""The checkpoints of a run, ``step-00000100`` and so on in one folder."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .atomic_dir import PARTIAL, REPLACED, finish_replacing, problems_together

STEP = re.compile(r"step-(\d+)")


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
    """Delete the checkpoint at ``path``: first it loses its name, so that nobody takes half of it for whole.

    Raises:
        OSError: it cannot be renamed.
    """
    doomed = path.with_name(f"{path.name}{PARTIAL}removed")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
