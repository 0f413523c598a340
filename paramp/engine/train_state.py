"""What of an engine's training is saved, under names that no layout shows through, and how it comes back.

========================================  ==============================================================================
``model.NAME``                            a weight, or its fp32 master where the mode has masters; a buffer of the first
                                          data rank
``optimizer.NAME.KEY``                    what the optimizer keeps for a weight
``data.RANK.NAME``                        a buffer of another data rank: running statistics are each rank's own
``random.stage.STAGE.RANK.I``             the random stream of a stage on a data rank
``random.rank.PP.DP.TP.I``                the default streams of a rank: torch's, Python's, NumPy's
========================================  ==============================================================================

A parameter that has several names is saved under the first of the whole model. Half-precision weights with masters are
not saved: they are their masters, rounded.
"""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..base.dtensor import local
from ..base.errors import CheckpointError
from ..checkpoint.chunks import Chunk, TensorSlice, chunk_of
from ..checkpoint.dcp_storage import MODEL, Header
from ..checkpoint.json_codec import decode, encode
from ..distributed.collectives import gather_objects
from ..distributed.context import ParallelContext, TiedParameter
from ..distributed.rng import RandomStream, derive_seed, random_states, set_random_states
from ..optim.flat_params import NO_GROUP, FlatWeights
from ..optim.param_buffer import FlatParam
from ..parallel.stage import Stages

__all__ = ["TrainingState"]

OPTIMIZER, DATA, STAGE, RANK = "optimizer.", "data.", "random.stage.", "random.rank."
IMPLEMENTATION = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Options of a param group that say how to step, not what the step is."""
STATE_OPTIONS = ("amsgrad", "momentum", "nesterov", "centered")
"""Options of a param group on which depends what state there is."""
EXTRA_STATE = "_extra_state"
"""How ``state_dict`` calls what a module's ``get_extra_state`` gives."""
PYTHON_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}


@dataclass(frozen=True)
class TrainingState:
    """What a rank trains, as named pieces of the whole.

    Attributes:
        first_names: any name of a parameter of the whole model -> its first.
        shapes: those of this rank's parameters in the whole model, where a tensor-parallel style keeps another one.
    """

    module: nn.Module
    stages: Stages
    weights: FlatWeights
    optimizer: torch.optim.Optimizer
    ties: Sequence[TiedParameter]
    context: ParallelContext
    first_names: Mapping[str, str]
    shapes: Mapping[str, torch.Size]

    # ------------------------------------------------------------------------------------------------------- saving

    def chunks(self) -> list[Chunk]:
        """All that this rank holds. Of what several hold alike, one writes."""
        return [*self._trained(), *self._frozen(), *self._buffers(), *self._optimizer(), *self._random()]

    def groups(self) -> list[dict[str, Any]]:
        """The options of each param group."""
        return [
            {key: value for key, value in group.items() if key not in IMPLEMENTATION}
            for group in self.optimizer.param_groups
        ]

    def _trained(self) -> Iterator[Chunk]:
        for param in self._stepped_here():
            if self._writes(param):  # masters that are kept as remainders are put together for it
                yield self._chunk_of(param, self._name(param), self.weights.exact(param))

    def _stepped_here(self) -> Iterator[FlatParam]:
        return (param for param in self.weights.params if param.own[0] < param.own[1])

    def _name(self, param: FlatParam) -> str:
        return f"{MODEL}{self.first_names[param.name]}"

    def _chunk_of(self, param: FlatParam, name: str, values: torch.Tensor) -> Chunk:
        """The piece of a tensor that is laid out as a parameter, of which this rank has ``values``."""
        shape = self.shapes[param.name]
        return chunk_of(name, param.parameter, values, shape=shape, own=param.own, written=self._writes(param))

    def _writes(self, param: FlatParam) -> bool:
        """Whether this rank writes its part of a parameter, of those that hold the same."""
        if any(tie.parameter is param.parameter and not tie.owner for tie in self.ties):
            return False
        return self._is_first(param.parameter) and (self._is_sharded or self._turn_of(param.parameter))

    @property
    def _is_sharded(self) -> bool:
        """Whether each data rank has a part of its own (ZeRO)."""
        return self.weights.overlapped is not None

    def _is_first(self, parameter: torch.Tensor) -> bool:
        """Whether this is the first rank that holds this part of ``parameter``, but for data ranks."""
        if not isinstance(parameter, DTensor):
            return self.context.tp.rank == 0
        places: Sequence[int] = parameter.device_mesh.get_coordinate() or ()
        return all(
            place == 0
            for place, placement in zip(places, parameter.placements, strict=True)
            if placement.is_replicate()
        )

    def _turn_of(self, parameter: torch.Tensor) -> bool:
        """Whether it is this data rank's turn to write."""
        return self._writer_of[parameter] == self.context.dp.rank

    @functools.cached_property
    def _writer_of(self) -> dict[torch.Tensor, int]:
        """The data rank that writes each parameter: each writes about as much as the others."""
        written = [0] * self.context.dp.size
        writers: dict[torch.Tensor, int] = {}
        for parameter in self.module.parameters():
            writers[parameter] = written.index(min(written))
            written[writers[parameter]] += local(parameter).numel()
        return writers

    def _frozen(self) -> Iterator[Chunk]:
        for name, parameter in self.weights.frozen:
            yield self._frozen_piece(name, parameter, local(parameter).detach())

    @functools.cached_property
    def _frozen_by_name(self) -> dict[str, nn.Parameter]:
        return dict(self.weights.frozen)

    def _frozen_piece(self, name: str, parameter: nn.Parameter, values: torch.Tensor) -> Chunk:
        written = self._is_first(parameter) and self._turn_of(parameter)
        return chunk_of(f"{MODEL}{self.first_names[name]}", parameter, values, shape=self.shapes[name], written=written)

    def _buffers(self) -> Iterator[Chunk]:
        for name, buffer in self._own_buffers():
            prefix = MODEL if self.context.dp.rank == 0 else f"{DATA}{self.context.dp.rank}."
            yield chunk_of(f"{prefix}{name}", buffer, local(buffer), written=self._is_first(buffer))

    def _own_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self.module.state_dict(keep_vars=True).items():
            if name.rpartition(".")[2] == EXTRA_STATE:
                self._check_extra_state(name, value)
            elif isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                yield name, value.detach()

    def _check_extra_state(self, name: str, value: Any) -> None:
        """Refuse what a module makes itself, but for Transformer Engine's: a pickle of scales that it finds again.

        Raises:
            CheckpointError: naming it.
        """
        module = self.module.get_submodule(name.rpartition(".")[0])
        if value is not None and not type(module).__module__.startswith("transformer_engine"):
            raise CheckpointError(
                f"{name}: {type(module).__name__} has a get_extra_state(), which a checkpoint does not hold; make it "
                "buffers, or save it with engine.track(name, thing)"
            )

    def _optimizer(self) -> Iterator[Chunk]:
        for param, stepped in self._with_state():
            for key, value in self.optimizer.state.get(stepped, {}).items():
                yield self._state_piece(param, stepped, key, value)

    def _with_state(self) -> Iterator[tuple[FlatParam, nn.Parameter]]:
        return (
            (param, stepped)
            for param, stepped, _ in self.weights.pairs()
            if param.own[0] < param.own[1] and param.group != NO_GROUP
        )

    def numbers(self) -> dict[str, str]:
        """The kind of each state that the optimizer keeps as a number of Python's."""
        return {
            key: type(value).__name__
            for _, stepped in self._with_state()
            for key, value in self.optimizer.state.get(stepped, {}).items()
            if type(value) in PYTHON_NUMBERS
        }

    def _state_piece(self, param: FlatParam, stepped: nn.Parameter, key: str, value: Any) -> Chunk:
        name = f"{OPTIMIZER}{self.first_names[param.name]}.{key}"
        if type(value) in PYTHON_NUMBERS:
            value = torch.tensor(value, dtype=PYTHON_NUMBERS[type(value)])
        if not isinstance(value, torch.Tensor) or "." in key:
            raise CheckpointError(
                f"{name}: the optimizer keeps a {type(value).__name__} there, which a checkpoint does not hold; "
                "expected tensors and numbers, under names without a dot"
            )
        if value.shape == stepped.shape:
            return self._chunk_of(param, name, value)
        whole = param.own == (0, math.prod(self.shapes[param.name]))
        if value.ndim and not whole:
            raise CheckpointError(
                f"{name}: a tensor of {tuple(value.shape)} for a part of a weight, of {tuple(stepped.shape)}: how it "
                "is made up of several ranks' is not known; use an elementwise optimizer"
            )
        return _whole_chunk(name, value, written=self._writes(param) and param.own[0] == 0)

    # ------------------------------------------------------------------------------------------------ random numbers

    def _random(self) -> Iterator[Chunk]:
        dp, tp = self.context.dp.rank, self.context.tp.rank
        for place, stream in self._streams():
            for index, state in enumerate(stream.states):
                yield _whole_chunk(f"{STAGE}{place}.{dp}.{index}", state, written=tp == 0)
        for index, state in enumerate(_default_streams(self.context.device)):
            yield _whole_chunk(f"{self._place}.{index}", state)

    @property
    def _place(self) -> str:
        return f"{RANK}{self.context.pp.rank}.{self.context.dp.rank}.{self.context.tp.rank}"

    def _streams(self) -> Iterator[tuple[int, RandomStream]]:
        places = self.context.config.parallel.pipeline.stages_of(self.context.pp.rank)
        for place, stage in zip(places, self.stages, strict=True):
            yield place, cast(RandomStream, stage.random)

    def load_random(self, read: Callable[[list[Chunk]], None], header: Header, num_steps: int) -> None:
        """Let random numbers go on where they were; in another layout, from a place that depends on the steps made.

        Args:
            read: fills pieces from the checkpoint; a collective.
        """
        own = list(self._random())
        chunks = [chunk for chunk in own if chunk.name in header.tensors]
        chunks = [_copied(chunk) for chunk in chunks if header.tensors[chunk.name].shape == chunk.shape]
        layout = header.values["layout"]
        read(chunks)
        loaded = {chunk.name: chunk.slices[0].values for chunk in chunks}
        seed, dp = self.context.config.seed, self.context.dp.rank
        same_stages = layout["stages"] == self.context.config.parallel.pipeline.num_stages
        for place, stream in self._streams():
            names = [f"{STAGE}{place}.{dp}.{index}" for index in range(len(stream.states))]
            if same_stages and all(name in loaded for name in names):
                stream.states = [loaded[name] for name in names]
            else:
                anew = RandomStream(derive_seed(seed, "activations", place, dp, num_steps), self.context.device)
                stream.states = anew.states
        names = [chunk.name for chunk in own if chunk.name.startswith(f"{self._place}.")]
        if layout == self.layout() and all(name in loaded for name in names):
            _set_default_streams(self.context.device, [loaded[name] for name in names])
        else:
            torch.manual_seed(derive_seed(seed, "resumed", num_steps))

    def layout(self) -> dict[str, int]:
        """The sizes on which depends what each rank holds."""
        parallel = self.context.config.parallel
        return {
            "pp": self.context.pp.size,
            "dp": self.context.dp.size,
            "tp": self.context.tp.size,
            "stages": parallel.pipeline.num_stages,
            "zero": parallel.zero,
        }

    # ------------------------------------------------------------------------------------------------------ loading

    def by_first_names(self, header: Header) -> Header:
        """``header``, with what was saved under another name of a parameter under its first."""
        tensors = dict(header.tensors)
        for name, first in self.first_names.items():
            if name != first and (other := tensors.pop(f"{MODEL}{name}", None)) is not None:
                tensors.setdefault(f"{MODEL}{first}", other)
        return replace(header, tensors=tensors)

    def check_model(self, header: Header) -> None:
        """Compare the names in the checkpoint with the model's. Every rank calls this.

        Raises:
            CheckpointError: on every rank: it lacks something of the model, or has something that the model has not.
        """
        buffers = gather_objects([name for name, _ in self._own_buffers()])
        own = {*self.first_names.values(), *(name for names in buffers for name in names)}
        there = {name.removeprefix(MODEL) for name in header.tensors if name.startswith(MODEL)}
        missing, unknown = own - there, there - own
        if missing:
            raise CheckpointError(
                f"{min(missing)} of the model is missing in the checkpoint{_and_others(missing)}: it is another model's"
            )
        if unknown:
            raise CheckpointError(
                f"{min(unknown)} is in the checkpoint and not in the model{_and_others(unknown)}: it is another model's"
            )

    def load_model(self, read: Callable[[list[Chunk]], None], header: Header) -> None:
        """Fill weights, masters and buffers."""
        copies = {
            param: torch.empty_like(self.weights.exact(param))
            for param in self._stepped_here()
            if self.weights.has_remainder(param)
        }
        chunks = [
            self._chunk_of(param, self._name(param), copies[param] if param in copies else self.weights.exact(param))
            for param in self._stepped_here()
        ]
        # Reading fills elements in order; where they lie in another one, a copy of them.
        untrained = [(name, value, value.contiguous()) for name, value in self._untrained()]
        read([*chunks, *(self._stored(name, value, header) for name, _, value in untrained)])
        for name, value, filled in untrained:
            if filled is not value:
                self._put_back(name, value, filled)
        self.weights.take_masters(copies)

    def _untrained(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's part of frozen weights and buffers, by this rank's names."""
        for name, value in [*self.weights.frozen, *self._own_buffers()]:
            yield name, local(value).detach()

    def _stored(self, name: str, values: torch.Tensor, header: Header) -> Chunk:
        """What is to be read for a frozen weight or a buffer, into ``values``."""
        if name in self._frozen_by_name:
            return self._frozen_piece(name, self._frozen_by_name[name], values)
        own = f"{DATA}{self.context.dp.rank}.{name}"
        return chunk_of(own if own in header.tensors else f"{MODEL}{name}", self.module.get_buffer(name), values)

    def _put_back(self, name: str, value: torch.Tensor, filled: torch.Tensor) -> None:
        if torch._debug_has_internal_overlap(value) == 0:
            value.copy_(filled)
            return
        owner, _, leaf = name.rpartition(".")
        self.module.get_submodule(owner)._buffers[leaf] = filled  # elements of the old one share memory

    def check_optimizer(self, header: Header) -> None:
        """Compare the checkpoint's optimizer with this one.

        Raises:
            CheckpointError: it is another kind, or has other groups.
        """
        groups, kind = header.values["groups"], type(self.optimizer).__name__
        if kind != header.values["optimizer"]:
            raise CheckpointError(
                f"optimizer: got {kind}, expected the checkpoint's {header.values['optimizer']}; make the same, or "
                "load with weights_only=True"
            )
        if len(groups) != len(self.optimizer.param_groups):
            raise CheckpointError(
                f"optimizer: it has {len(self.optimizer.param_groups)} param groups, the checkpoint's had "
                f"{len(groups)}; make the same groups, or load with weights_only=True"
            )
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            for key in STATE_OPTIONS:
                if bool(saved.get(key)) != bool(group.get(key)):
                    raise CheckpointError(
                        f"optimizer: got {key}={group.get(key)!r}, expected the checkpoint's {saved.get(key)!r}: "
                        "other state is kept for it; set the same, or load with weights_only=True"
                    )

    def load_optimizer(self, read: Callable[[list[Chunk]], None], header: Header, *, begins_at_zero: bool) -> None:
        """Fill what the optimizer keeps, and set its groups' options.

        Args:
            begins_at_zero: the state that was not there yet is zero; else it is left to the optimizer to make it.
        """
        groups = header.values["groups"]
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            for key, value in saved.items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                elif key not in IMPLEMENTATION:
                    group[key] = value
        keys: dict[str, list[str]] = {}
        for name in header.tensors:
            if name.startswith(OPTIMIZER):
                parameter, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
                keys.setdefault(parameter, []).append(key)
        chunks: list[Chunk] = []
        kinds = {kind.__name__: kind for kind in PYTHON_NUMBERS}
        python = {key: kinds[name] for key, name in header.values.get("numbers", {}).items()}
        numbers: list[tuple[dict[str, Any], str, type]] = []
        for param, stepped in self._with_state():
            state = self.optimizer.state[stepped]
            own = self.first_names[param.name]
            for key in set(state) - set(keys.get(own, ())):  # saved before its first step
                if begins_at_zero:
                    state[key].zero_()
                else:
                    del state[key]
            for key in keys.get(own, ()):
                if key in python:
                    numbers.append((state, key, python[key]))
                if not isinstance(state.get(key), torch.Tensor):
                    state[key] = self._room(stepped, param, key, header)
                chunks.append(self._state_piece(param, stepped, key, state[key]))
        read(chunks)
        for state, key, kind in numbers:
            state[key] = kind(state[key].item())

    def _room(self, stepped: nn.Parameter, param: FlatParam, key: str, header: Header) -> torch.Tensor:
        """Where to put a state that the optimizer does not have yet; ``step`` where torch's own would have it."""
        stored = header.tensors[f"{OPTIMIZER}{self.first_names[param.name]}.{key}"]
        if stored.shape == tuple(self.shapes[param.name]) and stored.shape:
            # An optimizer keeps state in the dtype of what it steps, which another mode may have changed.
            same = header.tensors[self._name(param)].dtype is stepped.dtype or not stored.dtype.is_floating_point
            return torch.zeros_like(stepped.detach(), dtype=stored.dtype if same else stepped.dtype)
        group = next(
            group for group in self.optimizer.param_groups if any(member is stepped for member in group["params"])
        )
        on_device = key != "step" or group.get("capturable") or group.get("fused")
        return torch.zeros(stored.shape, dtype=stored.dtype, device=stepped.device if on_device else "cpu")


def _and_others(names: set[str]) -> str:
    return f", and {len(names) - 1} others" if len(names) > 1 else ""


def _whole_chunk(name: str, value: torch.Tensor, *, written: bool = True) -> Chunk:
    return Chunk(name, value.dtype, tuple(value.shape), (TensorSlice((0,) * value.ndim, value),), written)


def _copied(chunk: Chunk) -> Chunk:
    return _whole_chunk(chunk.name, chunk.slices[0].values.clone())


def _default_streams(device: torch.device) -> list[torch.Tensor]:
    """The states of the default random streams, as uint8 tensors: torch's, and as JSON Python's and NumPy's."""
    text = json.dumps(encode([random.getstate(), list(np.random.get_state())])).encode()
    return [*random_states(device), torch.frombuffer(bytearray(text.ljust(PYTHON_STATE)), dtype=torch.uint8)]


PYTHON_STATE = 2**15
"""Bytes for the states of Python's and NumPy's streams, as JSON: two times 624 numbers of 32 bits."""


def _set_default_streams(device: torch.device, states: list[torch.Tensor]) -> None:
    set_random_states(states[:-1], device)
    python, numpy = decode(json.loads(states[-1].numpy().tobytes()))
    random.setstate(python)
    np.random.set_state(tuple(numpy))
