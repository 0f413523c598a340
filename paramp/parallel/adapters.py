"""Adapters for families of models, one class each in :data:`ADAPTERS`: plans, partitions, initial weights, outputs.

A family's modules are imported in the methods, so that only the modules that a layout needs are loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..base.errors import ConfigError
from .batches import Batch, loss_in
from .materialize import check_materializable, is_on_meta, reset_parameters
from .partition import Partition, SequentialPartition, is_sequential

if TYPE_CHECKING:
    from .huggingface.pretrained_weights import PretrainedFiles
    from .tensor.sharding_plan import Plan


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

    def full_name(self, name: str) -> str:
        """The name in the model of what the user calls ``name`` in a plan or split."""
        return name

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
        return lambda output, _: loss_in(output)

    def filler(self) -> Callable[[nn.Module], None]:
        """A function that fills the tensors of one module of the model, which are on ``meta``."""
        check_materializable(self.model)
        return reset_parameters

    def stored(self) -> Callable[[str], torch.Tensor | None]:
        """A function that returns the full value of a tensor on ``meta`` by name; None if the filler makes it."""
        return lambda _: None

    def writer(self) -> Callable[[nn.Module, dict[str, torch.Tensor], Path], None]:
        """A function that writes full weights by name to a folder; the module is the model, or a stage of it."""
        raise ConfigError(
            f"save_pretrained: got {type(self.model).__name__}, expected a Hugging Face model; use engine.save(), and "
            "paramp export for one file of weights"
        )


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
        from .huggingface.lora import without_adapters
        from .huggingface.pretrained_plan import pretrained_plan

        return pretrained_plan(without_adapters(self.model), tensor_size, sequence_parallel)

    def partition(self, num_stages: int, split: Sequence[str] | None) -> Partition:
        from .huggingface.decoder_partition import PretrainedPartition
        from .huggingface.missing_plans import find_architecture

        known, _ = find_architecture(self.model)
        if (known is None or known.is_chain) and not self._is_on_meta:
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
        if not self._is_on_meta:
            return super().filler()
        from .huggingface.lora import without_adapters
        from .huggingface.pretrained_weights import pretrained_filler

        return pretrained_filler(without_adapters(self.model), self._files or ())

    def stored(self) -> Callable[[str], torch.Tensor | None]:
        return self._files or super().stored()

    @functools.cached_property
    def _files(self) -> PretrainedFiles | None:
        """The files of a model that ``from_pretrained`` has put on ``meta``."""
        from .huggingface.lora import without_adapters
        from .huggingface.pretrained_weights import PretrainedFiles, is_from_folder

        is_stored = self._is_on_meta and is_from_folder(self.model)
        return PretrainedFiles(without_adapters(self.model)) if is_stored else None

    @property
    def _is_on_meta(self) -> bool:
        return any(is_on_meta(module) for module in self.model.modules())

    def writer(self) -> Callable[[nn.Module, dict[str, torch.Tensor], Path], None]:
        from .huggingface.pretrained_weights import write_folder

        return write_folder


class PeftAdapter(ModelAdapter):
    """A model that peft has wrapped, by the adapter of the model in it, whose names get a prefix."""

    def __init__(self, model: nn.Module) -> None:
        from .huggingface import lora

        super().__init__(model)
        self._lora = lora
        self._inside = adapter_for(model.get_submodule(lora.PREFIX.strip(".")))

    @staticmethod
    def accepts(model: nn.Module) -> bool:
        is_wrapped = any(
            kind.__name__ == "PeftModel" and kind.__module__.startswith("peft.") for kind in type(model).__mro__
        )
        return is_wrapped and not model.active_peft_config.is_prompt_learning  # type: ignore[union-attr]

    def full_name(self, name: str) -> str:
        return name if name.startswith(self._lora.PREFIX) else f"{self._lora.PREFIX}{name}"

    def plan(self, tensor_size: int, sequence_parallel: bool) -> Plan:
        plan = self._inside.plan(tensor_size, sequence_parallel)
        return {self.full_name(name): style for name, style in plan.items()}

    def split(self, num_stages: int) -> Sequence[str] | None:
        split = self._inside.split(num_stages)
        return split and [self.full_name(name) for name in split]

    def partition(self, num_stages: int, split: Sequence[str] | None) -> Partition:
        inside = split and [name.removeprefix(self._lora.PREFIX) for name in split]
        return self._lora.WrappedPartition(self.model, self._inside.partition(num_stages, inside))

    def single_stage(self) -> nn.Module:
        return self._lora.wrapped(self.model, self._inside.single_stage())

    def own_loss(self) -> Callable[[Any, Batch], Any]:
        return self._inside.own_loss()

    def filler(self) -> Callable[[nn.Module], None]:
        self._lora.check_filled(self.model)
        return self._inside.filler()

    def stored(self) -> Callable[[str], torch.Tensor | None]:
        inside = self._inside.stored()
        return lambda name: inside(self._lora.original_name(name))

    def writer(self) -> Callable[[nn.Module, dict[str, torch.Tensor], Path], None]:
        return self._lora.write_adapters


class TracedAdapter(ModelAdapter):
    """Any other model. For a pipeline its forward is traced."""

    def partition(self, num_stages: int, split: Sequence[str] | None) -> Partition:
        from .partition_fx import TracedPartition

        return TracedPartition(self.model, num_stages, split)


ADAPTERS: tuple[type[ModelAdapter], ...] = (PeftAdapter, SequentialAdapter, HuggingFaceAdapter, TracedAdapter)
"""The first one that accepts a model is used."""


def adapter_for(model: nn.Module) -> ModelAdapter:
    """The adapter of ``model``, of its family."""
    return next(adapter(model) for adapter in ADAPTERS if adapter.accepts(model))
