"""The checkpoints of a run: their folder, which are kept, and which one to resume from.

::

    checkpoints = Checkpoints("runs/a", every=100)
    with StopRequest() as stop:
        for step in range(first, last + 1):
            ...
            engine.step()
            stopping = stop.agreed(context)
            if checkpoints.due(step) or stopping:
                checkpoints.save(engine, step, wait=stopping)
            if stopping:
                break
"""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from ..base.errors import CheckpointError, ConfigError
from ..checkpoint.atomic_dir import remove
from ..checkpoint.open_checkpoint import problem_together
from ..checkpoint.run_folder import checkpoints_in, newest_whole, step_folder
from .engine import Engine


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run: folders ``step-00000100`` and so on in one folder. Old ones are deleted."""

    folder: str | Path
    every: int | None = None
    """Steps between checkpoints. None: :meth:`due` is never True."""
    keep_last: int = 3
    """The number of newest checkpoints that are kept."""
    keep_every: int | None = None
    """Checkpoints of steps that are multiples of this are never deleted. None: only the newest are kept."""

    def due(self, step: int) -> bool:
        """Whether to save after ``step``."""
        return self.every is not None and step % self.every == 0

    def save(self, engine: Engine, step: int, *, wait: bool = False) -> Path:
        """Save the engine after ``step``, and return the folder. A collective; ``wait`` as for :meth:`Engine.save`.

        After writing, older checkpoints that are not kept are deleted.
        """
        path = step_folder(Path(self.folder), step)
        then = functools.partial(self._delete_old, step) if engine.context.is_main else None
        engine.save(path, wait=wait, then=then)
        return path

    def _delete_old(self, saved: int) -> None:
        before = [(step, path) for step, path in checkpoints_in(Path(self.folder)) if step <= saved]
        for step, path in before[self.keep_last :]:
            if self.keep_every is None or step % self.keep_every:
                try:
                    remove(path)
                except OSError as error:
                    warnings.warn(f"checkpoint {str(path)!r} could not be deleted: {error}", stacklevel=2)


def find(resume: str | Path | None, folder: str | Path | None, report: Callable[[str], None] = print) -> Path | None:
    """The checkpoint to resume from, equal on every rank. A collective.

    Args:
        resume: ``auto`` for the newest complete one in ``folder``, the path of a checkpoint, or None.
        folder: where the run will save; None if it does not.
        report: called with a message and the reason for each checkpoint that was skipped.

    Returns:
        None if the run starts at step 1.

    Raises:
        CheckpointError: on every rank: ``resume`` is not complete, or no checkpoint in ``folder`` is.
        ConfigError: on every rank: ``folder`` has checkpoints of later steps than the run would start with, so those of
            two runs would mix; or it cannot be written to; or ``auto`` without a folder.
    """
    group = dist.group.WORLD
    assert group is not None
    folder = None if folder is None else Path(folder)
    if folder is not None:
        _check_writable(folder, group)
    if resume == "auto":
        if folder is None:
            raise ConfigError("resume: got 'auto', expected a path, as there is no checkpoint_dir")
        return _newest(folder, group, report)
    found = None if resume is None else Path(resume)
    if found is not None and (damage := problem_together(found, group)):
        raise CheckpointError(damage)
    if folder is not None and (later := _later_than(found, folder, group)):
        raise ConfigError(
            f"checkpoint_dir: {str(folder)!r} has checkpoints of an earlier run, up to {later[0]}; continue from there "
            "with --resume auto, or choose another folder"
        )
    return found


def _check_writable(folder: Path, group: dist.ProcessGroup) -> None:
    """Create ``folder`` and test that it is writable, before a run saves; a ConfigError on every rank if not."""
    problem: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            problem = [f"checkpoint_dir: {str(folder)!r} cannot be written to: {error.strerror}; choose another folder"]
    dist.broadcast_object_list(problem, group=group, group_src=0)
    if problem[0] is not None:
        raise ConfigError(problem[0])


def _newest(folder: Path, group: dist.ProcessGroup, report: Callable[[str], None]) -> Path | None:
    found, skipped = newest_whole(folder, group)
    for reason in skipped:
        report(f"resume: skipped: {reason}")
    if found is None and _later_than(None, folder, group):
        raise CheckpointError(
            f"none of the checkpoints in {str(folder)!r} is complete ({skipped[0]}); move them away to start from step "
            "1, or copy a complete one there"
        )
    return found


def _later_than(found: Path | None, folder: Path, group: dist.ProcessGroup) -> list[str]:
    """The names of the checkpoints in ``folder`` after ``found`` if it is one of them, else of all."""
    names: list[Any] = [None]
    if dist.get_rank(group) == 0:
        existing = checkpoints_in(folder)
        start = next((step for step, path in existing if found is not None and path.resolve() == found.resolve()), -1)
        names = [[path.name for step, path in existing if step > start]]
    dist.broadcast_object_list(names, group=group, group_src=0)
    return cast(list[str], names[0])


def accumulation_for(batch_size: int, num_microbatches: int, data_size: int, before: tuple[int, int]) -> int:
    """The accumulation that keeps the global batch on ``data_size`` ranks, with microbatches no larger than before.

    Args:
        batch_size: samples of an optimizer step, over all ranks.
        num_microbatches: the microbatches of a rank in each call.
        before: accumulation and data ranks of the run that is resumed.

    Raises:
        ConfigError: the batch does not divide for any accumulation.
    """
    accumulation, ranks = before
    least = max(1, -(-accumulation * ranks // data_size))
    # samples of each microbatch position of a rank in one optimizer step; the accumulation divides them
    samples, rest = divmod(batch_size, data_size * num_microbatches)
    fitting = (one for one in range(least, samples + 1) if not rest and samples % one == 0)
    if found := next(fitting, None):
        return found
    raise ConfigError(
        f"train.batch_size: got {batch_size}, which does not divide over {data_size} data ranks x {num_microbatches} "
        f"microbatches, nor with accumulation; resume with a number of data ranks that divides it, such as {ranks}"
    )
