"""The training state of an engine: how it is saved, under names that do not depend on the layout, and loaded.

========================================  ==============================================================================
``model.NAME``                            a weight, or its fp32 master if the mode has masters; a buffer of the first
                                          data rank
``optimizer.NAME.KEY``                    optimizer state of a weight
``ema.NAME``                              the average of a trained weight
``data.RANK.NAME``                        a buffer of another data rank: running statistics are each rank's own
``random.stage.STAGE.RANK.I``             the random stream of a stage on a data rank
``random.rank.PP.DP.TP.I``                the default streams of a rank: torch's, Python's, NumPy's
========================================  ==============================================================================

A parameter that has several names is saved under its first name in the whole model, and found under any of them.
Half-precision weights with masters are not saved: they are the rounded masters. In addition to these chunks, plain
values equal on all ranks are saved.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ...base.collectives import gather_objects
from ...base.errors import CheckpointError, ConfigError
from ...checkpoint.async_save import Saver
from ...checkpoint.chunks import Chunk
from ...checkpoint.header import MODEL, Header
from ...checkpoint.open_checkpoint import open_together
from ...config.schema import flatten
from ...distributed.phase_of_rank import SAVE
from ...optim.fused_step import FusedStep
from ...pipeline.stage import Stages
from ...scaling.loss_scaler import DistributedGradScaler
from ...scaling.loss_scaling_options import resumed_state
from ..accumulation_window import AccumulationWindow
from ..moving_averages_of_weights import EMA, WeightAverages
from ..step import OptimizerStep
from .model_tensors import ModelTensors, ParamChunks
from .optimizer_state import OPTIMIZER, OptimizerAttributes, OptimizerState
from .random_streams import RandomStreams, saved_layout


class Stateful(Protocol):
    """An object for :meth:`paramp.Engine.track`."""

    def state_dict(self) -> dict[str, Any]:
        """The state to save."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Restore a state that :meth:`state_dict` returned."""


class TrainingState:
    """Saves and loads the training state of a rank. Its methods are those of :class:`~paramp.Engine`.

    Attributes:
        saver: writes the checkpoints.
    """

    def __init__(
        self,
        params: ParamChunks,
        stages: Stages,
        window: AccumulationWindow,
        step: OptimizerStep,
        scaler: DistributedGradScaler,
        averages: WeightAverages | None,
    ) -> None:
        self._context = params.context
        self._first_names = params.first_names
        self._model = ModelTensors(params)
        self._optimizer = OptimizerState(params)
        self._attributes = OptimizerAttributes([one.optimizer for one in params.weights.by_optimizer])
        self._random = RandomStreams(stages, params.context)
        self._window, self._step, self._scaler, self._averages = window, step, scaler, averages
        self.saver = Saver(params.context)
        self._number = params.context.num_engines  # of this engine
        self._num_saves = 0
        self._tracked: dict[str, Stateful] = {}
        self._left: dict[str, dict[str, Any]] = {}  # states that were loaded before their names are tracked

    def track(self, name: str, thing: Stateful, *, replace: bool) -> None:
        if not callable(getattr(thing, "state_dict", None)) or not callable(getattr(thing, "load_state_dict", None)):
            raise ConfigError(
                f"track: got {type(thing).__name__}, expected an object with state_dict() and load_state_dict()"
            )
        taken = self._tracked.get(name, thing)
        if taken is not thing and not replace:
            raise ConfigError(
                f"track: the name {name!r} is that of the {type(taken).__name__} which is tracked already; choose "
                "another, or pass replace=True to save this one in its place"
            )
        if name in self._left:
            thing.load_state_dict(self._left[name])
            del self._left[name]
        self._tracked[name] = thing

    def save(self, path: str | Path, *, wait: bool, then: Callable[[], None] | None) -> None:
        self._context.check_open()
        self._window.check_not_averaged()
        self._num_saves += 1
        with self._context.phase(SAVE):  # by the store, as other ranks may be in collectives of a batch
            self._context.departures.gather(f"save/{self._number}/{self._num_saves}", "engine.save")
        with self._context.phase("checkpoint"):
            unit = self._window.losses.unit.everywhere()
            collect = functools.partial(self._contents, self._optimizer.numbers_everywhere(), unit)
            self.saver.save(path, collect, wait=wait, then=then)

    def finish_saving(self) -> None:
        with self._context.phase("checkpoint"):
            self.saver.finish()

    def load(self, path: str | Path, *, weights_only: bool, check: bool) -> None:
        from ...checkpoint.resharding import read  # imports torch's checkpointing and DTensor, as the first save does

        self._context.check_open()
        self._window.check_not_averaged()
        with self._context.phase("checkpoint"):
            self.saver.finish()
            group = self.saver.group
            with open_together(path, group, check=check) as checkpoint:
                everything = not weights_only and not checkpoint.header.only_weights
                header = self._by_first_names(checkpoint.header, everything=everything)
                fill = functools.partial(read, checkpoint, header=header, group=group)
                self._load(fill, header, everything=everything)

    def _load(self, fill: Callable[[list[Chunk]], None], header: Header, *, everything: bool) -> None:
        """``fill`` fills chunks from the checkpoint. Without ``everything``, load only weights and buffers."""
        self._left = {}
        self._model.check_names(header)
        if everything:
            self._optimizer.check_kind(header)
        self._model.load(fill, header)
        if self._averages is not None:
            self._averages.load(fill, header, everything=everything)
        if everything:
            begins_at_zero = [isinstance(update, FusedStep) for update in self._step.updates]
            has_stepped = self._step.counters.read()[0] > 0
            self._attributes.load(header.values.get("attributes", ()), has_stepped=has_stepped)
            self._optimizer.load(fill, header, begins_at_zero=begins_at_zero)
            for update in self._step.updates:
                update.state_loaded()
            self._load_values(header.values)
            self._random.load(fill, header, self._step.counters.read()[0])
        self._window.restart()
        if everything and self._context.is_main:
            self._warn_of_lacking(header.values["tracked"])

    def _contents(self, numbers: dict[str, str], count_unit: float | None) -> tuple[list[Chunk], dict[str, Any]]:
        """The chunks of this rank, and the values that are equal on all ranks, the arguments among them."""
        self._window.check_ended()
        values = {
            "layout": saved_layout(self._context),
            "config": flatten(self._context.config),
            "counts": self._step.counters.read(),
            "count_unit": count_unit,
            "scaler": self._scaler.state_dict(),
            "optimizer": self._optimizer.kind,
            "groups": self._optimizer.groups(),
            "members": self._optimizer.members(),
            "numbers": numbers,
            "attributes": self._attributes.changed(),
            "tracked": {name: thing.state_dict() for name, thing in self._tracked.items()},
        }
        averages = () if self._averages is None else self._averages.chunks()
        return [*self._model.chunks(), *averages, *self._optimizer.chunks(), *self._random.chunks()], values

    def _by_first_names(self, header: Header, *, everything: bool) -> Header:
        """``header`` with each parameter, its average and its state under its first name, whatever name they have.

        Raises:
            CheckpointError: with ``everything``, one parameter is two in the checkpoint, each with its own state.
        """
        tensors = dict(header.tensors)
        saved_as: dict[str, str] = {}  # a parameter's first name -> its name in the checkpoint
        for name, first in self._first_names.items():
            if f"{MODEL}{name}" not in tensors:
                continue
            if (saved := saved_as.setdefault(first, name)) == name:
                continue
            if everything:
                raise CheckpointError(
                    f"{saved} and {name} are two parameters in the checkpoint, but one in the model, which ties them; "
                    "load a checkpoint of this model, or pass weights_only=True, which takes the first"
                )
            del tensors[f"{MODEL}{name}"]  # as files of weights have each name of a tied one
        first_of = {saved: first for first, saved in saved_as.items()}

        def renamed(name: str) -> str:
            if name.startswith(OPTIMIZER):
                parameter, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
                return f"{OPTIMIZER}{first_of.get(parameter, parameter)}.{key}"
            for prefix in (MODEL, EMA):
                if name.startswith(prefix):
                    parameter = name.removeprefix(prefix)
                    return f"{prefix}{first_of.get(parameter, parameter)}"
            return name

        return replace(header, tensors={renamed(name): stored for name, stored in tensors.items()})

    def _load_scaler(self, saved: dict[str, Any], mode: str | None) -> None:
        """From another mode only scale and counters; nothing if one of the two runs fixes the scale by its settings."""
        own = self._scaler.state_dict()
        resumed = resumed_state(own, saved)
        takes_all = mode == self._context.config.precision.name and resumed is not own
        self._scaler.load_state_dict(saved if takes_all else resumed)

    def _load_values(self, values: Mapping[str, Any]) -> None:
        self._step.counters.load(values["counts"])
        self._window.losses.unit.load(values["count_unit"])
        if values["scaler"] and self._scaler.is_enabled():
            self._load_scaler(values["scaler"], values["config"].get("precision"))
        self._left = dict(values["tracked"])
        failure: Exception | None = None
        try:
            for name, thing in self._tracked.items():
                if name in self._left:
                    thing.load_state_dict(self._left.pop(name))
        except Exception as error:  # raised on this rank alone, it would leave the others waiting
            failure = error
        failures = gather_objects(failure and f"{type(failure).__name__}: {failure}", self.saver.group)
        if failure is not None:
            raise failure
        if any(failures):
            raise CheckpointError(f"load: another rank failed: {next(message for message in failures if message)}")

    def _warn_of_lacking(self, saved: Mapping[str, Any]) -> None:
        """Warn of what is tracked and not ``saved``; where warnings are errors, the load is complete."""
        if lacking := [repr(name) for name in self._tracked if name not in saved]:
            others = ", ".join(map(repr, self._left))
            warnings.warn(
                f"load: the checkpoint has no state of {', '.join(lacking)}, which stays as it is"
                + (f"; it has {others}, which nothing tracks yet" if others else ""),
                stacklevel=5,
            )
