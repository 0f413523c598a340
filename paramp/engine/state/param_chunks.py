"""A rank's parameters as chunks of a checkpoint: under which name, in which shape, and which rank writes them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...base.dtensor import local
from ...checkpoint.chunks import Chunk, chunk_of
from ...checkpoint.header import MODEL
from ...distributed.axes import replicated_axes
from ...distributed.context import ROLES, ParallelContext, TiedParameter
from ...optim.flat_params import FlatWeights
from ...optim.param_buffer import FlatParam


@dataclass(frozen=True)
class ParamChunks:
    """Makes chunks of what is laid out as a parameter: the weight, its master, its optimizer state.

    Attributes:
        module: this rank's stages.
        ties: those of ``module``, as recorded in the context.
        first_names: any name of a parameter of the whole model -> its first.
        shapes: those of this rank's parameters in the whole model, where a tensor-parallel style keeps another one.
    """

    module: nn.Module
    weights: FlatWeights
    ties: Sequence[TiedParameter]
    context: ParallelContext
    first_names: Mapping[str, str]
    shapes: Mapping[str, torch.Size]

    def model_name(self, name: str) -> str:
        """The parameter ``name`` in a checkpoint."""
        return f"{MODEL}{self.first_names[name]}"

    def trained(self, param: FlatParam, name: str, values: torch.Tensor) -> Chunk:
        """The chunk ``name`` of a tensor laid out as ``param``: ``values``, 1-dim, are the elements this rank steps."""
        shape = self.shapes[param.name]
        return chunk_of(name, param.parameter, values, shape=shape, own=param.own, written=self.writes(param))

    def frozen(self, name: str, parameter: nn.Parameter, values: torch.Tensor) -> Chunk:
        """The chunk of the frozen ``parameter``: ``values``, of its local shape."""
        written = self.is_first_copy(parameter) and self._is_writer(parameter)
        return chunk_of(self.model_name(name), parameter, values, shape=self.shapes[name], written=written)

    def writes(self, param: FlatParam) -> bool:
        """Whether this rank writes what it steps of a parameter, of the ranks that hold the same."""
        if any(tie.parameter is param.parameter and not tie.owner for tie in self.ties):
            return False
        # Under ZeRO each data rank has another part and writes it; else all have the same, and one writes.
        chosen = self.weights.is_partitioned or self._is_writer(param.parameter)
        return chosen and self.is_first_copy(param.parameter)

    def is_first_copy(self, tensor: torch.Tensor) -> bool:
        """Whether this is the first rank, at its place on the batch axes, that holds this part of ``tensor``."""
        copies = set(replicated_axes(tensor, self.context)).difference(ROLES["batch"])
        coordinates = self.context.coordinates
        return all(coordinates[axis] == 0 for axis in copies)

    def _is_writer(self, parameter: torch.Tensor) -> bool:
        return self._writer_of[parameter] == self.context.batch_axis.rank

    @functools.cached_property
    def _writer_of(self) -> dict[torch.Tensor, int]:
        """The data rank that writes each parameter. Each writes about as many elements as the others."""
        num_written = [0] * self.context.batch_axis.size
        writers: dict[torch.Tensor, int] = {}
        for parameter in self.module.parameters():
            writers[parameter] = num_written.index(min(num_written))
            num_written[writers[parameter]] += local(parameter).numel()
        return writers
