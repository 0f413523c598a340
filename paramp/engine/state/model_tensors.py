"""Weights, masters and buffers as chunks of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ...base.dtensor import local
from ...base.errors import CheckpointError
from ...checkpoint.chunks import Chunk, chunk_of
from ...checkpoint.header import MODEL, Header
from ...distributed.collectives import gather_objects
from ...optim.param_buffer import FlatParam
from .param_chunks import ParamChunks

DATA = "data."
"""What the names of other data ranks' buffers begin with."""
EXTRA_STATE = "_extra_state"
"""How ``state_dict`` calls what a module's ``get_extra_state`` returns."""


class ModelTensors:
    """What this rank holds of the model: trained weights or their masters, frozen weights, and buffers."""

    def __init__(self, params: ParamChunks) -> None:
        self._params = params
        self._module = params.module
        self._weights = params.weights
        self._frozen = dict(params.weights.frozen)
        self._data_rank = params.context.batch_axis.rank

    def chunks(self) -> Iterator[Chunk]:
        """All that this rank holds. Of what several ranks hold alike, one writes."""
        for param in self._stepped_here():
            if self._params.writes(param):  # where masters are kept as remainders, exact() computes them
                yield self._trained(param, self._weights.exact(param))
        for name, parameter in self._frozen.items():
            yield self._params.frozen(name, parameter, local(parameter).detach())
        for name, buffer in self._buffers():
            prefix = MODEL if self._data_rank == 0 else f"{DATA}{self._data_rank}."
            written = self._params.is_first_copy(buffer)
            yield chunk_of(f"{prefix}{name}", buffer, local(buffer), written=written)

    def _stepped_here(self) -> Iterator[FlatParam]:
        return (param for param in self._weights.params if param.own[0] < param.own[1])

    def _trained(self, param: FlatParam, values: torch.Tensor) -> Chunk:
        return self._params.trained(param, self._params.model_name(param.name), values)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The persistent ones, under the whole model's names."""
        for name, value in self._module.state_dict(keep_vars=True).items():
            if name.rpartition(".")[2] == EXTRA_STATE:
                self._check_extra_state(name, value)
            elif isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                yield name, value.detach()

    def _check_extra_state(self, name: str, value: Any) -> None:
        """Refuse what a module's ``get_extra_state`` returns, which may be anything.

        Transformer Engine's is ignored: a pickle of scales, which it computes again.

        Raises:
            CheckpointError: naming it.
        """
        module = self._module.get_submodule(name.rpartition(".")[0])
        if value is not None and not type(module).__module__.startswith("transformer_engine"):
            raise CheckpointError(
                f"{name}: {type(module).__name__} has a get_extra_state(), which a checkpoint does not hold; make it "
                "buffers, or save it with engine.track(name, thing)"
            )

    def check(self, header: Header) -> None:
        """Compare the names in the checkpoint with the model's. Every rank calls this.

        Raises:
            CheckpointError: on every rank: it lacks a tensor of the model, or has one that the model has not.
        """
        buffers = gather_objects([name for name, _ in self._buffers()])
        own = {*self._params.first_names.values(), *(name for names in buffers for name in names)}
        stored = {name.removeprefix(MODEL) for name in header.tensors if name.startswith(MODEL)}
        missing, unknown = own - stored, stored - own
        if missing:
            raise CheckpointError(
                f"{min(missing)} of the model is missing in the checkpoint{_and_others(missing)}: it is another model's"
            )
        if unknown:
            raise CheckpointError(
                f"{min(unknown)} is in the checkpoint and not in the model{_and_others(unknown)}: it is another model's"
            )

    def load(self, read: Callable[[list[Chunk]], None], header: Header) -> None:
        """Fill weights, masters and buffers. Every rank calls this.

        Args:
            read: fills chunks from the checkpoint; a collective.
        """
        # Views of what is stepped; copies where masters are kept as remainders, for take_masters() to split.
        masters = {param: self._weights.exact(param) for param in self._stepped_here()}
        chunks = [self._trained(param, values) for param, values in masters.items()]
        # Reading fills elements in row-major order; where they lie in another one, a copy of them.
        untrained = [(name, value, value.contiguous()) for name, value in self._untrained()]
        read([*chunks, *(self._untrained_chunk(name, value, header) for name, _, value in untrained)])
        for name, value, filled in untrained:
            if filled is not value:
                self._copy_back(name, value, filled)
        self._weights.take_masters(masters)

    def _untrained(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's part of frozen weights and buffers, by this rank's names."""
        for name, value in [*self._frozen.items(), *self._buffers()]:
            yield name, local(value).detach()

    def _untrained_chunk(self, name: str, values: torch.Tensor, header: Header) -> Chunk:
        """What to read into ``values`` for a frozen weight or a buffer."""
        if name in self._frozen:
            return self._params.frozen(name, self._frozen[name], values)
        # Without a buffer of this data rank, as after a run on fewer, that of the first.
        own = f"{DATA}{self._data_rank}.{name}"
        return chunk_of(own if own in header.tensors else f"{MODEL}{name}", self._module.get_buffer(name), values)

    def _copy_back(self, name: str, value: torch.Tensor, filled: torch.Tensor) -> None:
        if torch._debug_has_internal_overlap(value) == 0:
            value.copy_(filled)
            return
        # An expanded tensor cannot be written to, since its elements share memory: the copy replaces it.
        owner, _, leaf = name.rpartition(".")
        self._module.get_submodule(owner)._buffers[leaf] = filled


def _and_others(names: set[str]) -> str:
    return f", and {len(names) - 1} others" if len(names) > 1 else ""
