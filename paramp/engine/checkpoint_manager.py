"""The checkpoints of a run: their folder, which are kept, and which one to resume from.

::

    checkpoints = paramp.Checkpoints("runs/a", every=100, keep_best="min")
    if newest := checkpoints.newest():  # of an earlier process
        engine.load(newest)
    with paramp.StopRequest() as stop:
        for step in range(engine.num_steps + engine.num_skipped + 1, last + 1):
            ...
            engine.step()
            loss = engine.evaluate(test_loader).item() if step % 50 == 0 else None
            stopping = stop.agreed(context)
            if checkpoints.due(step, loss) or stopping:
                checkpoints.save(engine, step, metric=loss, wait=stopping)
            if stopping:
                break
"""

from __future__ import annotations

import functools
import json
import math
import operator
import re
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar, cast

import torch.distributed as dist

from ..base.errors import CheckpointError, ConfigError, require
from ..base.values_checked_by_type import is_integer, user_path
from ..checkpoint.atomic_dir import PARTIAL, REPLACED, make_folder, publish_file, remove, write_json
from ..checkpoint.open_checkpoint import problem_together
from ..distributed.context import NO_CONTEXT
from .engine import Engine

STEP = re.compile(r"step-(\d{8}|[1-9]\d{8,})")
"""The names that :meth:`Checkpoints.save` gives; others, such as ``step-100``, are not its checkpoints."""
BEST = "best.json"
"""The file in the folder that names the best checkpoint, and its metric."""
T = TypeVar("T")


@dataclass
class Checkpoints:
    """The checkpoints of one run: folders ``step-00000100`` and so on in one folder. Old ones are deleted."""

    folder: str | Path
    every: int | None = None
    """Steps between checkpoints. None: :meth:`due` is only True for a new best."""
    keep_last: int = 3
    """The number of newest checkpoints that are kept."""
    keep_every: int | None = None
    """Checkpoints of steps that are multiples of this are never deleted. None: only the newest are kept."""
    keep_best: Literal["min", "max"] | None = None
    """Keep the checkpoint with the lowest or highest ``metric``, however old; ``best.json`` in the folder names it."""

    def __post_init__(self) -> None:
        for name in ("every", "keep_last", "keep_every"):
            value, optional = getattr(self, name), name != "keep_last"
            fits = (value is None and optional) or (is_integer(value) and value >= 1)
            require(fits, name, value, f"an integer of 1 or more{', or None' if optional else ''}")
        require(self.keep_best in (None, "min", "max"), "keep_best", self.keep_best, '"min", "max" or None')
        self.folder = user_path(self.folder).absolute()  # that of now, also after os.chdir
        self._last_saved: Best | None = None  # None also if it was not the best
        self._running: Future[None] | None = None  # its save, if it is in the background

    def due(self, step: int, metric: float | None = None) -> bool:
        """Whether to save after ``step``: in turn, or because ``metric`` is the best so far. Every rank calls it.

        ``metric`` is that of the evaluation after ``step``, equal on every rank; None without one.
        """
        return (self.every is not None and step % self.every == 0) or self._is_best(metric)

    def save(self, engine: Engine, step: int, *, metric: float | None = None, wait: bool = False) -> Path:
        """Save the engine after ``step``, and return the folder. A collective; ``wait`` as for :meth:`Engine.save`.

        ``metric`` as for :meth:`due`. After writing, older checkpoints that are not kept are deleted.
        """
        step = operator.index(step)  # JSON has no integers of numpy
        path = self._path / f"step-{step:08d}"
        best = Best(step, float(metric), path.name) if metric is not None and self._is_best(metric) else None
        then = functools.partial(self._saved, step, best) if engine.context.is_main else None
        self._running = None
        engine.save(path, wait=wait, then=then)
        self._last_saved, self._running = best, engine._state.saver.running
        return path

    def newest(self) -> Path | None:
        """The newest complete checkpoint, to resume from; None in a new folder, which it creates. A collective.

        Rank 0 prints which checkpoints it skips, and why.

        Raises:
            RuntimeError: nothing was launched.
            CheckpointError: there are checkpoints, and none is complete; on every rank.
            ConfigError: the folder cannot be written to; on every rank.
        """
        return find("auto", self.folder, print if _rank() == 0 else lambda _: None)

    def best(self) -> Path | None:
        """The checkpoint with the best metric of those saved, also by an earlier process; None without one."""
        best = _read_best(self._path)
        return None if best is None else self._path / best.checkpoint

    @property
    def _path(self) -> Path:
        return user_path(self.folder)

    def _is_best(self, metric: float | None) -> bool:
        if self.keep_best is None or metric is None or not math.isfinite(metric):
            return False
        # as rank 0 knows it: other ranks may see files of a shared folder, or that a save failed, later
        best = _from_rank_0(self._best_so_far)
        return best is None or (metric < best.metric if self.keep_best == "min" else metric > best.metric)

    def _best_so_far(self) -> Best | None:
        """The last save's, if it was the best and is not written yet; else that of ``best.json``."""
        writes = self._running is not None and not self._running.done()
        return (self._last_saved if writes else None) or _read_best(self._path)

    def _saved(self, saved: int, best: Best | None) -> None:
        """Record the checkpoint of step ``saved`` if it is the ``best`` so far, and delete old ones."""
        if best is not None:
            partial = self._path / f"{BEST}.partial"
            write_json(partial, best._asdict())
            publish_file(partial, self._path / BEST)  # on the disk before the best one until now is deleted
        # also that of an earlier process, and not one whose save failed
        recorded = None if self.keep_best is None else _read_best(self._path)
        before = [(step, path) for step, path in checkpoints_in(self._path) if step <= saved]
        for step, path in before[self.keep_last :]:
            kept = recorded is not None and step == recorded.step
            if not kept and (self.keep_every is None or step % self.keep_every):
                try:
                    remove(path)
                except OSError as error:
                    warnings.warn(f"checkpoint {str(path)!r} could not be deleted: {error}", stacklevel=2)


class Best(NamedTuple):
    """The best checkpoint so far, as ``best.json`` has it."""

    step: int
    metric: float
    checkpoint: str


def _read_best(folder: Path) -> Best | None:
    """The best checkpoint in ``folder``; None if there is none, or it was deleted."""
    try:
        best = Best(**json.loads((folder / BEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return best if (folder / best.checkpoint).is_dir() else None


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of each checkpoint in ``folder``, newest first; also of damaged ones and of one being replaced."""
    if not folder.is_dir():
        return []
    names = {path.name.removesuffix(REPLACED) for path in folder.iterdir()}
    return sorted(((int(match[1]), folder / name) for name in names if (match := STEP.fullmatch(name))), reverse=True)


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
    folder = None if folder is None else user_path(folder)
    if folder is not None:
        check_folder("checkpoint_dir", folder)
    if resume == "auto":
        if folder is None:
            raise ConfigError("resume: got 'auto', expected a path, as there is no checkpoint_dir")
        return _newest(folder, report)
    start = None if resume is None else user_path(resume)
    if start is not None and (damage := problem_together(start, _world())):
        raise CheckpointError(damage)
    if folder is not None and (later := _from_rank_0(functools.partial(_newer_than, start, folder))):
        raise ConfigError(
            f"checkpoint_dir: {str(folder)!r} has checkpoints of an earlier run, up to {later[0].name}; continue from "
            "there with --resume auto, or choose another folder"
        )
    return start


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
    # samples of each microbatch position of a rank in one optimizer step; the accumulation divides them
    samples, rest = divmod(batch_size, data_size * num_microbatches)
    if rest:
        raise ConfigError(
            f"batch_size: got {batch_size}, which does not divide over {data_size} data ranks x {num_microbatches} "
            f"microbatches; resume with numbers of them that divide it (there were {ranks} data ranks)"
        )
    least = min(-(-accumulation * ranks // data_size), samples)  # microbatches of one sample are no larger than before
    return next(fitting for fitting in range(least, samples + 1) if samples % fitting == 0)


def check_folder(name: str, folder: Path | None) -> None:
    """Create rank 0's ``folder``, if it has one; a ConfigError on every rank if it cannot be written to. A collective.

    ``name``: what it is, for the error. Other ranks may have none, or another one.
    """

    def problem() -> str | None:
        found = None if folder is None else _write_problem(folder)
        return found and f"{name}: {str(folder)!r} cannot be written to: {found}; choose another folder"

    if text := _from_rank_0(problem):
        raise ConfigError(text)


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _rank() -> int:
    if not dist.is_initialized():
        raise RuntimeError(NO_CONTEXT)
    return dist.get_rank()


def _from_rank_0(read: Callable[[], T]) -> T:
    """What ``read`` returns on rank 0, on every rank."""
    result: list[T | None] = [read() if _rank() == 0 else None]
    dist.broadcast_object_list(result, src=0)
    return cast(T, result[0])


def _write_problem(folder: Path) -> str | None:
    """Create ``folder``; why it cannot be written to, before a run saves, or None."""
    try:
        make_folder(folder)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _newest(folder: Path, report: Callable[[str], None]) -> Path | None:
    """The newest complete checkpoint in ``folder``; ``report`` gets the problems of the newer ones."""
    # rank 0's listing: file systems of several machines may list a new folder at different times
    paths, unfinished = _from_rank_0(lambda: (_newer_than(None, folder), _unfinished_in(folder)))
    skipped = [f"{str(path)!r} is unfinished: saving it was interrupted" for path in unfinished]
    newest: Path | None = None
    for path in paths:
        if (problem := problem_together(path, _world())) is None:
            newest = path
            break
        skipped.append(problem)
    for reason in skipped:
        report(f"resume: skipped: {reason}")
    if newest is None and paths:
        raise CheckpointError(
            f"none of the checkpoints in {str(folder)!r} is complete ({skipped[0]}); move them away to start from step "
            "1, or copy a complete one there"
        )
    return newest


def _unfinished_in(folder: Path) -> list[Path]:
    """The partial folders in ``folder`` of steps after the newest checkpoint's."""
    newest = max((step for step, _ in checkpoints_in(folder)), default=-1)
    partial = [(STEP.fullmatch(path.name.partition(PARTIAL)[0]), path) for path in folder.glob(f"*{PARTIAL}*")]
    return sorted(path for match, path in partial if match and int(match[1]) > newest and path.is_dir())


def _newer_than(start: Path | None, folder: Path) -> list[Path]:
    """The checkpoints in ``folder`` after ``start`` if it is one of them, else all; the newest first."""
    existing = checkpoints_in(folder)
    first = next((step for step, path in existing if start is not None and path.resolve() == start.resolve()), -1)
    return [path for step, path in existing if step > first]
