"""Weights, masters and buffers as chunks of a checkpoint: their names, and the rank that writes each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field

import torch
from torch import nn

from ...base.collectives import gather_objects
from ...base.dtensor import local, resolved
from ...base.errors import CheckpointError
from ...checkpoint.chunks import Chunk, chunk_of
from ...checkpoint.header import MODEL, Header
from ...distributed.context import BATCH_ROLES, ParallelContext
from ...distributed.replicated_axes import replicated_axes
from ...optim.flat_buffer import FlatParam
from ...optim.flat_weights import FlatWeights
from ...scaling.copies_per_element import TiedParameter

DATA = "data."
"""The prefix of the names of other data ranks' buffers."""
EXTRA_STATE = "_extra_state"
"""The name in ``state_dict`` of the value of a module's ``get_extra_state``."""


@dataclass(frozen=True)
class ParamChunks:
    """Makes chunks of tensors with a parameter's layout: the weight, its master, its optimizer state."""

    module: nn.Module
    """This rank's stages."""
    weights: FlatWeights
    ties: Sequence[TiedParameter]
    context: ParallelContext
    names_of: InitVar[Mapping[nn.Parameter, list[str]]]
    """All names of each parameter of the whole model, as it was given. They are not kept: they have its memory."""
    shapes: Mapping[str, torch.Size]
    """The shapes of this rank's parameters in the whole model; a tensor-parallel style may store other shapes."""

    first_names: Mapping[str, str] = field(init=False)
    """Any name of a parameter of the whole model -> its first."""
    num_parameters: int = field(init=False)
    """The elements of the whole model's parameters, tied ones once."""

    def __post_init__(self, names_of: Mapping[nn.Parameter, list[str]]) -> None:
        first_names = {name: names[0] for names in names_of.values() for name in names}
        object.__setattr__(self, "first_names", first_names)
        object.__setattr__(self, "num_parameters", sum(parameter.numel() for parameter in names_of))

    def model_name(self, name: str) -> str:
        """The parameter ``name`` in a checkpoint."""
        return f"{MODEL}{self.first_names[name]}"

    def stepped_here(self) -> list[FlatParam]:
        """The parameters of which this rank steps a part or all, and those without elements."""
        return [param for param in self.weights.params if param.own[0] < param.own[1] or not param.parameter.numel()]

    def trained(self, param: FlatParam, name: str, values: torch.Tensor) -> Chunk:
        """The chunk ``name`` of a tensor with the layout of ``param``; ``values``, 1-dim: what this rank steps."""
        shape = self.shapes[param.name]
        return chunk_of(name, param.parameter, values, shape=shape, elements=param.own, written=self.writes(param))

    def frozen(self, name: str, parameter: nn.Parameter, values: torch.Tensor) -> Chunk:
        """The chunk of the frozen ``parameter`` with ``values``, of its local shape."""
        written = self.is_first_copy(parameter) and parameter in self._written
        return chunk_of(self.model_name(name), parameter, values, shape=self.shapes[name], written=written)

    def writes(self, param: FlatParam) -> bool:
        """Whether this rank, of the ranks that hold the same elements, writes what it steps of a parameter."""
        return self.writes_whole(param) and self.is_first_copy(param.parameter)

    def writes_whole(self, param: FlatParam, exchanged: Sequence[str] = ()) -> bool:
        """As :meth:`writes`, if of the ranks along ``exchanged``, such as the tensor axis, this one alone has it."""
        if any(tie.parameter is param.parameter and not tie.owner for tie in self.ties):
            return False
        if not self.weights.is_partitioned and set(exchanged).intersection(self.context.axes_of(*BATCH_ROLES)):
            copies = set(replicated_axes(param.parameter, self.context)).difference(exchanged)
            return all(self.context.coordinates[axis] == 0 for axis in copies)
        # Under ZeRO each data rank writes its own part; else one of the data ranks that have the same elements writes.
        return self.weights.is_partitioned or param.parameter in self._written

    def is_first_copy(self, tensor: torch.Tensor) -> bool:
        """Whether this is the first rank, at its coordinates on the batch axes, that holds this part of ``tensor``."""
        copies = set(replicated_axes(tensor, self.context)).difference(self.context.axes_of(*BATCH_ROLES))
        return all(self.context.coordinates[axis] == 0 for axis in copies)

    @functools.cached_property
    def _written(self) -> set[torch.Tensor]:
        """The parameters that this rank writes, of the data ranks that hold the same elements.

        Chosen so that all write about the same number of elements.
        """
        batch_axes, coordinates = self.context.axes_of(*BATCH_ROLES), self.context.coordinates
        num_written: dict[tuple[str, ...], list[int]] = {}  # by rank along the axes on which parameters have copies
        written: set[torch.Tensor] = set()
        for parameter in self.module.parameters():
            axes = tuple(name for name in replicated_axes(parameter, self.context) if name in batch_axes)
            rank, size = 0, 1
            for name in axes:
                length = self.context.mesh.size([*self.context.roles].index(name))
                rank, size = rank * length + coordinates[name], size * length
            counts = num_written.setdefault(axes, [0] * size)
            writer = counts.index(min(counts))
            counts[writer] += local(parameter).numel()
            if writer == rank:
                written.add(parameter)
        return written


class ModelTensors:
    """This rank's part of the model: trained weights or their masters, frozen weights, and buffers."""

    def __init__(self, params: ParamChunks) -> None:
        self._params = params
        self._module = params.module
        self._weights = params.weights
        self._frozen = dict(params.weights.frozen)
        self._data_rank = params.context.batch_axis.rank

    def chunks(self) -> Iterator[Chunk]:
        """All chunks of this rank. Of the ranks that hold the same chunk, one writes it.

        Raises:
            CheckpointError: ``state_dict`` has an entry that :meth:`load` could not restore.
        """
        self._weights.put_back()
        self._check_state_dict()
        for param in self._params.stepped_here():
            if self._params.writes(param):  # exact() computes masters that are stored as remainders
                yield self._trained(param, self._weights.exact(param))
        for name, parameter in self._frozen.items():
            yield self._params.frozen(name, parameter, local(parameter).detach())
        for name, buffer in self._buffers():
            prefix = MODEL if self._data_rank == 0 else f"{DATA}{self._data_rank}."
            written = self._params.is_first_copy(buffer)
            yield chunk_of(f"{prefix}{name}", buffer, local(buffer), written=written)

    def _trained(self, param: FlatParam, values: torch.Tensor) -> Chunk:
        return self._params.trained(param, self._params.model_name(param.name), values)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The persistent buffers by the whole model's names, without those that a hook removes from ``state_dict``."""
        saved = self._module.state_dict(keep_vars=True)
        for name, buffer in self._module.named_buffers(remove_duplicate=False):
            if name in saved:  # not its value there, which a hook may have changed, such as its dtype
                yield name, buffer.detach()

    def _check_state_dict(self) -> None:
        """Refuse entries that a user's module or hook adds to ``state_dict``."""
        named = self._module.named_buffers, self._module.named_parameters
        known = {name for tensors in named for name, _ in tensors(remove_duplicate=False)}
        for name, value in self._module.state_dict(keep_vars=True).items():
            owner, _, leaf = name.rpartition(".")
            if leaf == EXTRA_STATE:
                kind = type(self._module.get_submodule(owner))
                # Transformer Engine's are scales, which it recomputes.
                if value is not None and not kind.__module__.startswith("transformer_engine"):
                    raise CheckpointError(
                        f"{name}: {kind.__name__} has a get_extra_state(), which a checkpoint does not hold; make it "
                        "buffers, or save it with engine.track(name, thing)"
                    )
            elif isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and name not in known:
                raise CheckpointError(
                    f"{name}: state_dict() has a tensor of that name, which is not a parameter or buffer of the model, "
                    "so it could not be loaded; make it a buffer, or save it with engine.track(name, thing)"
                )

    def check_names(self, header: Header) -> None:
        """Compare the names in the checkpoint with the model's. Every rank calls this.

        Raises:
            CheckpointError: on every rank: it lacks a tensor of the model, or has one that the model lacks.
        """
        buffers = gather_objects([name for name, _ in self._buffers()])
        whole = {*self._params.first_names.values(), *(name for names in buffers for name in names)}
        stored = {name.removeprefix(MODEL) for name in header.tensors if name.startswith(MODEL)}
        for names, where in (
            (whole - stored, "of the model is missing in the checkpoint"),
            (stored - whole, "is in the checkpoint and not in the model"),
        ):
            if names:
                others = f", and {len(names) - 1} others" if len(names) > 1 else ""
                raise CheckpointError(f"{min(names)} {where}{others}; load a checkpoint of this model")

    def load(self, read: Callable[[list[Chunk]], None], header: Header) -> None:
        """Fill weights, masters and buffers; ``read`` fills chunks from the checkpoint. A collective."""
        self._weights.put_back()
        self._resize_buffers(header)
        # Views of the stepped tensors; for masters stored as remainders, copies that take_masters() splits.
        masters = {param: self._weights.exact(param) for param in self._params.stepped_here()}
        chunks = [self._trained(param, values) for param, values in masters.items()]
        # Chunks are filled in row-major order, so a tensor with other strides is read into a copy.
        rest = [(name, local(value).detach()) for name, value in (*self._frozen.items(), *self._buffers())]
        untrained = [(name, value, value.contiguous()) for name, value in rest]
        read([*chunks, *(self._untrained_chunk(name, filled, header) for name, _, filled in untrained)])
        for name, value, filled in untrained:
            if filled is value:
                continue
            if resolved(value) is value:
                value.copy_(filled)
            else:  # a buffer that was replaced after initialize cannot be written to, so the copy replaces it
                owner, _, leaf = name.rpartition(".")
                self._module.get_submodule(owner)._buffers[leaf] = filled
        self._weights.take_masters(masters)

    def _untrained_chunk(self, name: str, values: torch.Tensor, header: Header) -> Chunk:
        """The chunk to read into ``values`` for a frozen weight or a buffer."""
        if name in self._frozen:
            return self._params.frozen(name, self._frozen[name], values)
        return chunk_of(self._stored_name(name, header), self._module.get_buffer(name), values)

    def _stored_name(self, buffer: str, header: Header) -> str:
        """The name of a buffer in the checkpoint: the first data rank's if this one has none, as of fewer ranks."""
        local_name = f"{DATA}{self._data_rank}.{buffer}"
        return local_name if local_name in header.tensors else f"{MODEL}{buffer}"

    def _resize_buffers(self, header: Header) -> None:
        """Let modules give their buffers the shapes in the checkpoint, as those do whose first forward resizes them.

        Where they do not, what reads the chunks finds that the shapes differ.
        """
        for name, buffer in list(self._buffers()):
            shape = header.tensors[self._stored_name(name, header)].shape
            if shape == tuple(buffer.shape):
                continue
            owner, _, leaf = name.rpartition(".")
            module = self._module.get_submodule(owner)
            state = {leaf: buffer.new_zeros(shape)}
            module._load_from_state_dict(state, "", {"version": module._version}, False, [], [], [])
