"""Optimizer state as chunks of a checkpoint, and the options of param groups as plain values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from ...base.collectives import gather_objects
from ...base.errors import CheckpointError
from ...checkpoint.chunks import Chunk, whole_chunk
from ...checkpoint.header import MODEL, Header, StoredTensor
from ...optim.flat_buffer import FlatParam
from ...optim.flat_weights import NO_GROUP
from ...optim.user_optimizer import own_attributes, with_inner
from .model_tensors import ParamChunks

OPTIMIZER = "optimizer."
"""The prefix of the names of optimizer state."""
OWN_STATE = "state."
"""The prefix of the keys of an optimizer's state that are of no parameter, among its numbers."""
IMPLEMENTATION = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Options of a param group that select an implementation and do not change the result. They are not saved."""
STATE_OPTIONS = ("amsgrad", "momentum", "nesterov", "centered")
"""Options of a param group that determine which state exists."""
PYTHON_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""The dtype that holds a Python number exactly; a checkpoint's state is tensors."""


class OptimizerState:
    """The optimizers' state of the weights that this rank steps, and their param groups."""

    def __init__(self, params: ParamChunks) -> None:
        self._params = params
        self._weights = params.weights.by_optimizer

    @property
    def kind(self) -> str:
        """The optimizer's class; of several optimizers the classes, with the numbers of their param groups."""
        names = [type(weights.optimizer).__name__ for weights in self._weights]
        if len(names) == 1:
            return names[0]
        counts = [len(weights.optimizer.param_groups) for weights in self._weights]
        return ", ".join(f"{name} ({count} groups)" for name, count in zip(names, counts, strict=True))

    def _groups(self) -> list[dict[str, Any]]:
        """The param groups of all optimizers."""
        return [group for weights in self._weights for group in weights.optimizer.param_groups]

    def groups(self) -> list[dict[str, Any]]:
        """The options of each param group."""
        return [{key: value for key, value in group.items() if key not in IMPLEMENTATION} for group in self._groups()]

    def members(self) -> list[list[str]]:
        """The whole model's weights in each of :meth:`groups`, by their first names; empty if there is one group."""
        members: dict[tuple[int, int], list[str]] = {place: [] for place in self._places()}
        for name, place in self._params.weights.group_of.items():
            if self._params.first_names[name] == name:
                members[place].append(name)
        return [*members.values()] if len(members) > 1 else []

    def _places(self) -> list[tuple[int, int]]:
        """The indices of the optimizer, and of the group in it, of each of :meth:`groups`."""
        counts = [len(weights.optimizer.param_groups) for weights in self._weights]
        return [(number, index) for number, count in enumerate(counts) for index in range(count)]

    def numbers_everywhere(self) -> dict[str, str]:
        """The type's name of each state that an optimizer keeps as a Python number, by the state's :meth:`_key`.

        A collective: this rank may step no parameter of an optimizer.
        """
        local_names = {
            self._key(param, key): type(value).__name__
            for param, _, state in self._stepped_here()
            for key, value in state.items()
            if type(value) in PYTHON_NUMBERS
        }
        return {key: name for numbers in gather_objects(local_names) for key, name in numbers.items()}

    def _key(self, param: FlatParam, key: str) -> str:
        """``key`` of the state of ``param``, with the index of its optimizer after the first."""
        return f"{param.optimizer}.{key}" if param.optimizer else key

    def chunks(self) -> Iterator[Chunk]:
        """All chunks of this rank. Of the ranks that hold the same chunk, one writes it.

        Raises:
            CheckpointError: a state is neither a tensor nor a number, or a tensor of unknown layout.
        """
        for param, stepped, state in self._stepped_here():
            for key, value in state.items():
                yield self._chunk(param, stepped, key, value)

    def _stepped_here(self, *, begin: bool = False) -> Iterator[tuple[FlatParam, nn.Parameter, dict[str, Any]]]:
        """Each parameter of which an optimizer steps a part or all on this rank, the tensor that it steps, its state.

        ``begin``: a parameter without state gets an empty one.
        """
        for weights in self._weights:
            states = weights.optimizer.state
            for param, stepped in weights.pairs():
                if weights.exchanged_axes(param) or (param.own[0] < param.own[1] and param.group != NO_GROUP):
                    yield param, stepped, states[stepped] if begin else states.get(stepped, {})

    def _name(self, param: FlatParam, key: str) -> str:
        return f"{OPTIMIZER}{self._params.first_names[param.name]}.{key}"

    def _chunk(self, param: FlatParam, stepped: nn.Parameter, key: str, value: Any) -> Chunk:
        name = self._name(param, key)
        if type(value) in PYTHON_NUMBERS:
            value = torch.tensor(value, dtype=PYTHON_NUMBERS[type(value)])
        if not isinstance(value, torch.Tensor) or "." in key:
            raise CheckpointError(
                f"{name}: got {type(value).__name__} as state, expected tensors and numbers with names without a dot"
            )
        if hasattr(value, "__tensor_flatten__"):  # of several tensors, such as 8-bit state of torchao
            raise CheckpointError(
                f"{name}: got {type(value).__name__} as state, expected plain tensors: a checkpoint holds no quantized "
                "state; use torch's AdamW, with optimizer_state='bf16' where memory is short"
            )
        if exchanged := self._weights[param.optimizer].exchanged_axes(param):  # of all of it
            return whole_chunk(name, value, written=self._params.writes_whole(param, exchanged))
        if value.shape == stepped.shape:  # elementwise, such as a moment: sliced like the weight
            return self._params.trained(param, name, value)
        whole = param.own == (0, math.prod(self._params.shapes[param.name]))
        if value.ndim and not whole:
            raise CheckpointError(
                f"{name}: got a tensor of shape {tuple(value.shape)} for a part of a weight of shape "
                f"{tuple(stepped.shape)}, expected the same shape; use an elementwise optimizer"
            )
        # One value for the whole weight, such as a step count: equal on all ranks that step a part of it.
        return whole_chunk(name, value, written=self._params.writes(param) and param.own[0] == 0)

    def check_kind(self, header: Header) -> None:
        """Compare the checkpoint's optimizer with this one.

        Raises:
            CheckpointError: it is of another kind, has other groups or a weight in another one, or has other state.
        """
        groups, saved, kind = self._groups(), header.values["groups"], header.values["optimizer"]
        problem = None
        if kind != self.kind:
            problem = f"{self.kind}, expected the checkpoint's {kind}; use the same"
        elif len(saved) != len(groups):
            problem = f"{len(groups)} param groups, expected the checkpoint's {len(saved)}; use the same groups"
        elif (moved := self._moved(header)) is not None:
            problem = f"{moved}; use the same groups in the same order"
        else:
            for group, options in zip(groups, saved, strict=True):
                for key in STATE_OPTIONS:
                    got, expected = group.get(key), options.get(key)
                    if bool(expected) != bool(got) and problem is None:
                        problem = (
                            f"{key}={got!r}, expected the checkpoint's {expected!r}: it changes which state exists; "
                            "set the same"
                        )
        if problem is not None:
            raise CheckpointError(f"optimizer: got {problem}, or load with weights_only=True")

    def _moved(self, header: Header) -> str | None:
        """The first weight that is in another group than in the checkpoint, and both groups; None if there is none.

        A group of the same optimizer with the same options will do. Older checkpoints do not say.
        """
        group_of, places, saved = self._params.weights.group_of, self._places(), header.values["groups"]

        def called(place: tuple[int, int]) -> str:
            return f"param group {place[1]}" + (f" of optimizer {place[0]}" if len(self._weights) > 1 else "")

        for place, names in zip(places, header.values.get("members", ()), strict=False):
            for name in names:
                now = group_of.get(name, place)
                same_options = now[0] == place[0] and saved[places.index(now)] == saved[places.index(place)]
                if now != place and not same_options:
                    return f"{name} in {called(now)}, expected {called(place)} as in the checkpoint"
        return None

    def load(self, read: Callable[[list[Chunk]], None], header: Header, *, begins_at_zero: Sequence[bool]) -> None:
        """Fill the optimizers' state, and set their groups' options; ``read`` fills chunks, a collective.

        State that the checkpoint lacks is set to zero where ``begins_at_zero``, one for each optimizer; else it is
        deleted, and the optimizer creates it at its next step.
        """
        self._set_options(header)
        keys: dict[str, list[str]] = {}  # keys of the state in the checkpoint, by the parameter's first name
        whole = {"step"}  # keys with one value for a whole weight; the shape does not show it for a 0-dim weight
        for name, stored in header.tensors.items():
            if name.startswith(OPTIMIZER):
                parameter, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
                keys.setdefault(parameter, []).append(key)
                if not stored.shape and header.tensors[f"{MODEL}{parameter}"].shape:
                    whole.add(key)
        types = {kind.__name__: kind for kind in PYTHON_NUMBERS}
        python = {key: types[name] for key, name in header.values.get("numbers", {}).items()}
        chunks: list[Chunk] = []
        numbers: list[tuple[dict[str, Any], str, type]] = []
        for param, stepped, state in self._stepped_here(begin=True):
            in_checkpoint = keys.get(self._params.first_names[param.name], [])
            for key in set(state).difference(in_checkpoint):  # the checkpoint was saved before the first step
                if begins_at_zero[param.optimizer]:
                    state[key].zero_()
                else:
                    del state[key]
            for key in in_checkpoint:
                if not isinstance(state.get(key), torch.Tensor):
                    state[key] = self._allocate(param, stepped, key, header, elementwise=key not in whole)
                chunks.append(self._chunk(param, stepped, key, state[key]))
            found = {key: python.get(self._key(param, key)) for key in in_checkpoint}
            numbers += [(state, key, kind) for key, kind in found.items() if kind is not None]
        read(chunks)
        for state, key, kind in numbers:
            state[key] = kind(state[key].item())

    def _set_options(self, header: Header) -> None:
        for group, saved in zip(self._groups(), header.values["groups"], strict=True):
            for key, value in saved.items():
                if isinstance(group.get(key), torch.Tensor):  # such as the learning rate of a compiled step
                    group[key].fill_(value)
                elif key not in IMPLEMENTATION:
                    group[key] = value

    def _allocate(
        self, param: FlatParam, stepped: nn.Parameter, key: str, header: Header, *, elementwise: bool
    ) -> torch.Tensor:
        """A tensor to load a state into that the optimizer does not have yet, as the optimizer would create it."""
        stored = header.tensors[self._name(param, key)]
        if elementwise and stored.shape == tuple(self._params.shapes[param.name]):
            return torch.zeros_like(stepped.detach(), dtype=self._elementwise_dtype(param, stepped, stored, header))
        group = self._weights[param.optimizer].optimizer.param_groups[param.group]
        # torch's optimizers keep ``step`` on the CPU unless their kernels read it on the device.
        on_device = key != "step" or group.get("capturable") or group.get("fused")
        return torch.zeros(stored.shape, dtype=stored.dtype, device=stepped.device if on_device else "cpu")

    def _elementwise_dtype(
        self, param: FlatParam, stepped: nn.Parameter, stored: StoredTensor, header: Header
    ) -> torch.dtype:
        """The dtype of a state with one value per element of ``stepped``, which the checkpoint has as ``stored``."""
        if not stored.dtype.is_floating_point:
            return stored.dtype
        # Optimizer state has the dtype of the stepped tensor, which may be another one in another mode.
        weight = header.tensors[self._params.model_name(param.name)]
        was_narrow = header.values["config"].get("precision.optimizer_state") == "bf16"
        dtype = stepped.dtype if was_narrow or weight.dtype is not stepped.dtype else stored.dtype
        narrow = self._params.context.config.precision.optimizer_state == "bf16" and stepped.ndim
        return torch.bfloat16 if narrow and dtype is stepped.dtype else dtype


class OptimizerAttributes:
    """The numbers that optimizers of a user's class count in attributes, such as the steps of a Lookahead, or in
    entries of their state that are of no parameter.

    Only those that have changed since ``initialize`` are saved: an option that the constructor was given stays as the
    run that resumes has it, and so does a rank's own number. Flags are left out: they may tell what a process has set
    up.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = [one for optimizer in optimizers for one in with_inner(optimizer)]
        self._initial = [*map(_numbers, self._optimizers)]

    def changed(self) -> list[dict[str, float]]:
        """Those to save of each optimizer, and of the optimizers in it."""
        pairs = zip(map(_numbers, self._optimizers), self._initial, strict=True)
        return [{key: value for key, value in now.items() if value != then.get(key)} for now, then in pairs]

    def load(self, saved: Sequence[Mapping[str, float]], *, has_stepped: bool) -> None:
        """Set what :meth:`changed` returned; if this run ``has_stepped``, the others as they were at ``initialize``."""
        for one, then, changed in zip(self._optimizers, self._initial, saved, strict=False):
            for key, value in {**(then if has_stepped else {}), **changed}.items():
                name = key.removeprefix(OWN_STATE)
                (vars(one) if name == key else cast(dict[str, Any], one.state))[name] = value


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    states: Mapping[Any, Any] = optimizer.state
    own = {f"{OWN_STATE}{key}": value for key, value in states.items() if isinstance(key, str)}
    return {key: value for key, value in (own_attributes(optimizer) | own).items() if type(value) in (int, float)}
