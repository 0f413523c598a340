"""Adapters for families of models, one class each in :data:`ADAPTERS`: plans, partitions, initial weights, outputs.

A family's modules are imported in the methods, so that only the modules that a layout needs are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..base.errors import ConfigError
from .batches import Batch
from .materialize import check_materializable, is_on_meta, reset_parameters
from .partition import Partition, SequentialPartition, is_sequential

if TYPE_CHECKING:
    from .tensor_plan import Plan


class ModelAdapter:
    """The adapter of one model. A family overrides the methods in which it differs.

    If the model has a ``tensor_parallel_plan(tensor_size, sequence_parallel)`` or ``pipeline_split(num_stages)``, it
    takes precedence over its family's.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @staticmethod
    def accepts(model: nn.Module) -> bool:
        """Whether ``model`` is of this family."""
        return True

    def plan(self, tensor_size: int, sequence_parallel: bool) -> Plan:
        """The tensor-parallel plan of the model over ``tensor_size`` ranks; ConfigError if it has none."""
        own: Callable[[int, bool], Plan] = getattr(self.model, "tensor_parallel_plan", None) or self.family_plan
        return own(tensor_size, sequence_parallel)

    def family_plan(self, tensor_size: int, sequence_parallel: bool) -> Plan:
        """The plan of a model without a ``tensor_parallel_plan`` of its own."""
        raise ConfigError(
            f"parallel.tensor.size: got {tensor_size}, but {type(self.model).__name__} has no tensor_parallel_plan(); "
            'pass plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"} to initialize, with the model\'s names'
        )

    def split(self, num_stages: int) -> Sequence[str] | None:
        """The first unit of the second and each later stage. None: stages are balanced by parameters."""
        own: Callable[[int], Sequence[str] | None] | None = getattr(self.model, "pipeline_split", None)
        return None if own is None else own(num_stages)

    def partition(self, num_stages: int, split: Sequence[str] | None) -> Partition:
        """The model's partition for ``num_stages`` stages; ConfigError if it cannot be partitioned."""
        raise NotImplementedError

    def single_stage(self) -> nn.Module:
        """The module to run if there is only one stage."""
        return self.model

    def own_loss(self) -> Callable[[Any, Batch], Any]:
        """A function that finds the loss in the model's output for a microbatch; it returns None if there is none."""
        return loss_in

    def filler(self) -> Callable[[nn.Module], None]:
        """A function that fills the tensors of one module of the model, which are on ``meta``."""
        check_materializable(self.model)
        return reset_parameters

    def writer(self) -> Callable[[nn.Module, dict[str, torch.Tensor], Path], None]:
        """A function that writes full weights by name to a folder; the module is the model, or a stage of it."""
        raise ConfigError(
            f"save_pretrained: got {type(self.model).__name__}, expected a Hugging Face model; use engine.save(), and "
            "paramp export for one file of weights"
        )


def loss_in(output: Any, microbatch: Batch) -> Any:
    """The ``loss`` of ``output``, a mapping, dataclass or other object; None if it has none."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


class SequentialAdapter(ModelAdapter):
    """An ``nn.Sequential``, which may contain others."""

    @staticmethod
    def accepts(model: nn.Module) -> bool:
        return is_sequential(model)

    def partition(self, num_stages: int, split: Sequence[str] | None) -> Partition:
        return SequentialPartition(self.model)


class HuggingFaceAdapter(ModelAdapter):
    """A model of the transformers library, with its own plans."""

    @staticmethod
    def accepts(model: nn.Module) -> bool:
        bases = [kind for kind in type(model).__mro__ if kind.__name__ == "PreTrainedModel"]
        return any(kind.__module__.startswith("transformers.") for kind in bases)

    def family_plan(self, tensor_size: int, sequence_parallel: bool) -> Plan:
        from .huggingface.plan import pretrained_plan

        return pretrained_plan(self.model, tensor_size, sequence_parallel)

    def partition(self, num_stages: int, split: Sequence[str] | None) -> Partition:
        from .huggingface.missing_plans import find_architecture
        from .huggingface.partition import PretrainedPartition

        known, _ = find_architecture(self.model)
        if known is None or known.is_chain:
            return PretrainedPartition(self.model)
        from .huggingface.called_units import CalledUnitsPartition

        return CalledUnitsPartition(self.model)

    def single_stage(self) -> nn.Module:
        from .huggingface.output import without_cache

        return without_cache(self.model)

    def own_loss(self) -> Callable[[Any, Batch], Any]:
        from .huggingface.output import token_loss

        return token_loss(self.model)

    def filler(self) -> Callable[[nn.Module], None]:
        from .huggingface.initial_weights import pretrained_filler

        on_meta = any(is_on_meta(module) for module in self.model.modules())
        return pretrained_filler(self.model) if on_meta else super().filler()

    def writer(self) -> Callable[[nn.Module, dict[str, torch.Tensor], Path], None]:
        from .huggingface.pretrained_folder import write_folder

        return write_folder


class TracedAdapter(ModelAdapter):
    """Any other model. For a pipeline its forward is traced."""

    def partition(self, num_stages: int, split: Sequence[str] | None) -> Partition:
        from .partition_fx import TracedPartition

        return TracedPartition(self.model, num_stages, split)


ADAPTERS: tuple[type[ModelAdapter], ...] = (SequentialAdapter, HuggingFaceAdapter, TracedAdapter)
"""The first one that accepts a model is used."""


def adapter_for(model: nn.Module) -> ModelAdapter:
    """The adapter of ``model``, of its family."""
    return next(adapter(model) for adapter in ADAPTERS if adapter.accepts(model))
