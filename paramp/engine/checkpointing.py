"""What an engine saves and loads: the training state, and the counters and tracked objects beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..base.errors import CheckpointError, ConfigError
from ..checkpoint.async_save import Saver
from ..checkpoint.atomic_dir import problems_together
from ..checkpoint.chunks import Chunk
from ..checkpoint.header import Header, read_header
from ..config.schema import flatten
from ..distributed.collectives import gather_objects
from ..distributed.context import ParallelContext
from ..optim.fused_step import FusedStep, Step
from ..optim.loss_scaler import DistributedGradScaler
from .loss_window import LossWindow
from .step_result import StepCounters
from .train_state import TrainingState


class Stateful(Protocol):
    """What :meth:`Checkpointed.track` takes."""

    def state_dict(self) -> dict[str, Any]:
        """What is to be saved."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Go on from what :meth:`state_dict` returned."""


class Checkpointed:
    """The part of an :class:`~paramp.Engine` that saves and loads it, which sets the attributes."""

    context: ParallelContext
    scaler: DistributedGradScaler
    _state: TrainingState
    _update: Step
    _counters: StepCounters
    _losses: LossWindow
    _saver: Saver
    _tracked: dict[str, Stateful]

    def track(self, name: str, thing: Stateful) -> None:
        """Save the state of ``thing`` with the engine's from now on, as of rank 0, and load it on every rank.

        :func:`paramp.initialize` tracks the learning-rate scheduler and the loaders that it returns.

        Args:
            thing: its ``state_dict()`` is made of numbers, strings, small tensors, lists and dicts.

        Raises:
            ConfigError: it has no ``state_dict`` or no ``load_state_dict``.
        """
        if not callable(getattr(thing, "state_dict", None)) or not callable(getattr(thing, "load_state_dict", None)):
            raise ConfigError(
                f"track: got {type(thing).__name__}, expected something with state_dict() and load_state_dict()"
            )
        self._tracked[name] = thing

    def save(self, path: str | Path, *, wait: bool = True, then: Callable[[], None] | None = None) -> None:
        """Write a checkpoint, which :meth:`load` reads in any layout, to the folder ``path``. Every rank calls it.

        It holds weights (masters where there are), optimizer, scaler with all counters, scheduler, random streams,
        the position in loaders and the configuration. The folder appears when it is complete; a checkpoint that was
        there is replaced.

        Args:
            path: on a file system that all machines share.
            wait: False returns as soon as all is copied to the CPU, and writes it beside the training. The next save,
                :meth:`finish_saving` and the end of the context wait for it.
            then: called on every rank when it is written; from another thread without ``wait``.

        Raises:
            CheckpointError: on every rank: something cannot be saved or written, or gradients are being accumulated;
                without ``wait`` by the next call.
        """
        with self.context.phase("checkpoint"):
            self._saver.save(path, lambda: _contents(self), wait=wait, then=then)

    def finish_saving(self) -> None:
        """Wait until what :meth:`save` began is written. Every rank calls it.

        Raises:
            CheckpointError: on every rank, if it failed.
        """
        with self.context.phase("checkpoint"):
            self._saver.finish()

    def load(self, path: str | Path, *, weights_only: bool = False, check: bool = True) -> None:
        """Go on from the checkpoint at ``path``, saved in this layout or another. Every rank calls it.

        In the layout that saved it training goes on bit by bit as if it had never stopped. Nothing is changed before
        every file of it has been compared with its checksum. One that was imported has weights only.

        Args:
            weights_only: leave optimizer, scaler, scheduler, random streams and position as they are.
            check: False trusts that the files have just been compared with their checksums.

        Raises:
            CheckpointError: on every rank: it is not there, damaged, or of another model or optimizer.
        """
        from ..checkpoint.dcp_storage import read  # brings torch's checkpointing and DTensor, as the first save does

        with self.context.phase("checkpoint"):
            self._saver.finish()
            group = self._saver.group
            damage = problems_together(path, group) if check else []
            if damage:
                raise CheckpointError(damage[0])
            header = self._state.by_first_names(read_header(path))
            fill = functools.partial(read, path, header=header, group=group)
            _load(self, header, fill, everything=not weights_only and not header.only_weights)


def _contents(engine: Checkpointed) -> tuple[Sequence[Chunk], Mapping[str, Any]]:
    """This rank's chunks, and the values that are equal on all ranks.

    Raises:
        CheckpointError: gradients are being accumulated.
    """
    engine._losses.check_ended()
    values = {
        "layout": engine._state.layout(),
        "config": flatten(engine.context.config),
        "counts": engine._counters.read(),
        "count_unit": engine._losses.count_unit,
        "scaler": engine.scaler.state_dict(),
        "optimizer": type(engine._state.optimizer).__name__,
        "groups": engine._state.groups(),
        "numbers": engine._state.numbers(),
        "tracked": {name: thing.state_dict() for name, thing in engine._tracked.items()},
    }
    return engine._state.chunks(), values


def _load(engine: Checkpointed, header: Header, fill: Callable[[list[Chunk]], None], *, everything: bool) -> None:
    """Load what ``header`` lists, weights only or ``everything``; ``fill`` fills chunks from the checkpoint."""
    state = engine._state
    state.check_model(header)
    if everything:
        state.check_optimizer(header)
    state.load_model(fill, header)
    if everything:
        state.load_optimizer(fill, header, begins_at_zero=isinstance(engine._update, FusedStep))
        engine._update.state_loaded()
        _load_values(engine, header.values)
        state.load_random(fill, header, engine._counters.read()[0])
    engine._losses.restart()


def _load_values(engine: Checkpointed, values: Mapping[str, Any]) -> None:
    engine._counters.load(values["counts"])
    engine._losses.count_unit = values["count_unit"]
    if values["scaler"] and engine.scaler.is_enabled():
        same_mode = values["config"].get("precision") == engine.context.config.precision.name
        _load_scaler(engine.scaler, values["scaler"], same_mode=same_mode)
    failure: Exception | None = None
    try:
        for name, thing in engine._tracked.items():
            if name in values["tracked"]:
                thing.load_state_dict(values["tracked"][name])
    except Exception as error:  # a rank that raised here alone would leave the others waiting in the next collective
        failure = error
    failures = gather_objects(failure and f"{type(failure).__name__}: {failure}", engine._saver.group)
    if failure is not None:
        raise failure
    if any(failures):
        raise CheckpointError(f"load: another rank failed: {next(message for message in failures if message)}")


def _load_scaler(scaler: DistributedGradScaler, state: dict[str, Any], *, same_mode: bool) -> None:
    """Load the scaler's state. From another mode only the scale and its counters, and only if both modes move it."""
    own = scaler.state_dict()
    if same_mode:
        scaler.load_state_dict(state)
    elif all(one["min_scale"] is None or one["min_scale"] != one["max_scale"] for one in (own, state)):
        moved = ("scale", "_growth_tracker", "_overflow_tracker")
        scaler.load_state_dict(own | {key: state[key] for key in moved})
