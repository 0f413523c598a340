"""Tensor-parallel styles, which shard one module over the tensor axis.

A style is a class, torch's own or one below. Plans use its name in :data:`STYLES`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from ...base.dtensor import is_dtensor
from ...base.errors import ConfigError
from ...base.module_surgery import run_within, with_parameters
from ...distributed.random_across_tensor_ranks import place_on, replicated_random, sharded_random
from ..expert_dispatch import ExpertParallel
from .colwise_and_rowwise import (
    SEQUENCE,
    Colwise,
    PackedColwise,
    PackedRowwise,
    Rowwise,
    distribute,
)
from .differentiable_collectives import gather, local_shard, own_slice
from .expert_slices import ExpertSlices


class ShardedRandom(ParallelStyle):
    """A module whose random numbers differ over the tensor axis: for dropout on sharded activations."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        random = self._random(device_mesh)
        run_within(module, lambda module: None if _is_idle_dropout(module) else random())
        return module

    def _random(self, device_mesh: DeviceMesh) -> Callable[[], AbstractContextManager[None]]:
        return partial(sharded_random, place_on(device_mesh))


def _is_idle_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.Dropout) and not (module.training and module.p)


class ReplicatedRandom(ShardedRandom):
    """A module whose random numbers are equal over the tensor axis, inside a :class:`ShardedRandom` module."""

    def _random(self, device_mesh: DeviceMesh) -> Callable[[], AbstractContextManager[None]]:
        return replicated_random


class LocalHeads(ShardedRandom):
    """An attention module that computes its rank's heads, with different dropout masks on each rank.

    ``sizes`` are its attributes with the number of features of all heads. They are divided by the size of the axis.
    """

    def __init__(self, *sizes: str) -> None:
        super().__init__()
        self.sizes = sizes

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in self.sizes:
            setattr(module, name, getattr(module, name) // device_mesh.size())
        return super()._apply(module, device_mesh)


class PartialGradient(ParallelStyle):
    """A replicated module with partial gradients: each rank applies it to its slice, such as a norm of each head."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for child in module.modules():
            for name in list(child._parameters):
                distribute(child, name, device_mesh, Replicate(), is_partial=True)
            if child._parameters:
                run_within(child, _partial_gradients)
        return module


class SliceOfSequence(PartialGradient):
    """A module that each rank applies to its slice of the sequence, such as a norm; others may draw random numbers."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        is_norm = hasattr(module, "normalized_shape")
        return module if is_norm else ShardedRandom()._apply(module, device_mesh)


def _partial_gradients(module: nn.Module) -> AbstractContextManager[None] | None:
    own = module._parameters.items()
    shards = {name: local_shard(value, is_partial=True) for name, value in own if is_dtensor(value)}
    return with_parameters(module, shards) if shards else None  # a compiled block has local shards already


class ScatterSequence(ParallelStyle):
    """Shard the module's replicated output (batch, sequence, ...), or the first of several, along the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def scatter(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return scatter(_module, _inputs, output[0]), *output[1:]
            if output.shape[SEQUENCE.dim] % device_mesh.size():
                multiple = f"a multiple of parallel.tensor.size {device_mesh.size()} under sequence_parallel"
                raise ConfigError(f"sequence of {output.shape[SEQUENCE.dim]}: expected {multiple}")
            return own_slice(output, device_mesh.get_group(), SEQUENCE.dim)

        module.register_forward_hook(scatter)
        return module


class GatherSequence(ParallelStyle):
    """Gather the module's first input (batch, sequence, ...), a slice of the sequence, to the whole sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather_input(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return gather(inputs[0], device_mesh.get_group(), SEQUENCE.dim), *inputs[1:]

        module.register_forward_pre_hook(gather_input)
        return module


class WholeSequence(ParallelStyle):
    """A module between slices of the sequence that every rank applies to all of it, such as a mixture of experts."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return ScatterSequence()._apply(GatherSequence()._apply(module, device_mesh), device_mesh)


def sharded_dim(style: ParallelStyle | None) -> int | None:
    """The dim of a Linear's weight (outputs, inputs) that ``style`` shards; None if it does not shard the weight."""
    if isinstance(style, (RowwiseParallel, PackedRowwise)):
        return 1
    return 0 if isinstance(style, (ColwiseParallel, PackedColwise)) else None


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    # A Linear whose outputs are sharded, and one whose inputs are: a pair needs one all-reduce in each direction.
    "colwise": Colwise,
    "rowwise": Rowwise,
    # A colwise Linear whose output is gathered, for a last layer without a rowwise partner.
    "colwise_gather": lambda: Colwise(output_layouts=Replicate()),
    # A Linear of two or three fused layers, one after the other in its rows: gate and up; query, key and value.
    "packed_colwise_2": lambda: PackedColwise(2),
    "packed_colwise_3": lambda: PackedColwise(3),
    # An Embedding whose rows, the vocabulary, are sharded.
    "vocab": lambda: Rowwise(input_layouts=Replicate()),
    # A Linear to logits whose vocabulary stays sharded, as a DTensor: the loss reduces it.
    "vocab_logits": lambda: Colwise(output_layouts=Shard(-1), use_local_output=False),
    # Between such pairs each rank keeps a slice of the sequence.
    "sequence": SliceOfSequence,
    "scatter_sequence": ScatterSequence,
    # A module without weights whose input is gathered to the whole sequence on every rank.
    "gather_sequence": GatherSequence,
    # A module whose input is gathered, and whose output is sliced again.
    "whole_sequence": WholeSequence,
    "sequence_colwise": lambda: Colwise(input_layouts=SEQUENCE),
    "sequence_rowwise": lambda: Rowwise(output_layouts=SEQUENCE),
    "sequence_vocab_logits": lambda: Colwise(input_layouts=SEQUENCE, output_layouts=Shard(-1), use_local_output=False),
    "sharded_random": ShardedRandom,
    "replicated_random": ReplicatedRandom,
    # Stacked experts, each rank of the expert axis with a part of them.
    "experts": ExpertParallel,
    # Each rank of the tensor axis with a slice of the features of the experts that its rank of the expert axis has.
    "expert_slices": ExpertSlices,
    # A rowwise Linear whose input is replicated.
    "rowwise_scatter": lambda: Rowwise(input_layouts=Replicate()),
    # A replicated module that each rank applies to its slice of an activation.
    "partial_gradient": PartialGradient,
}
"""The styles by the names that plans use."""
