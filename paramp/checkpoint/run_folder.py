"""The folder of a run's checkpoints, ``step-00000100`` and so on: a list of them, and the newest complete one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .atomic_dir import PARTIAL, REPLACED
from .open_checkpoint import problem_together

STEP = re.compile(r"step-(\d+)")


def step_folder(folder: Path, step: int) -> Path:
    """The path of the checkpoint of ``step`` in ``folder``."""
    return folder / f"step-{step:08d}"


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of each checkpoint in ``folder``, newest first; also of damaged ones and of one being replaced."""
    if not folder.is_dir():
        return []
    names = {path.name.removesuffix(REPLACED) for path in folder.iterdir()}
    return sorted(((int(match[1]), folder / name) for name in names if (match := STEP.fullmatch(name))), reverse=True)


def newest_whole(folder: Path, group: dist.ProcessGroup) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint in ``folder``, and the problems of the newer ones.

    The same on every rank of ``group``; all of them call it.
    """
    listing: list[Any] = [None, None]
    if dist.get_rank(group) == 0:  # file systems of several machines may list a new folder at different times
        listing = [[path for _, path in checkpoints_in(folder)], _unfinished_in(folder)]
    dist.broadcast_object_list(listing, group=group, group_src=0)
    paths, unfinished = listing
    skipped = [f"{str(path)!r} is unfinished: saving it was interrupted" for path in unfinished]
    for path in paths:
        problem = problem_together(path, group)
        if problem is None:
            return path, skipped
        skipped.append(problem)
    return None, skipped


def _unfinished_in(folder: Path) -> list[Path]:
    """The partial folders in ``folder`` of steps after the newest checkpoint's."""
    newest = max((step for step, _ in checkpoints_in(folder)), default=-1)
    found = [(STEP.fullmatch(path.name.partition(PARTIAL)[0]), path) for path in folder.glob(f"*{PARTIAL}*")]
    return sorted(path for match, path in found if match and int(match[1]) > newest and path.is_dir())
