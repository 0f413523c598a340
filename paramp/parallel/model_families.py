"""Adapters for families of models, one class each in :data:`ADAPTERS`: plans, partitions, initial weights, outputs.

A family's modules are imported in the methods, so that only the modules that a layout needs are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from ..base.errors import ConfigError
from ..base.module_surgery import matches
from ..config.layout import PipelineConfig
from .loss_and_outputs_of_batch import loss_in
from .materialize import InitialValues, check_materializable, is_on_meta
from .microbatches import Batch
from .partition import Partition, SequentialPartition, is_sequential, partition_model

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    from .context_axis.stages_on_cut_sequences import SequenceInputs
    from .tensor.sharding_plan import Plan

UserPlan: TypeAlias = Mapping[str, "str | ParallelStyle"]
"""Styles by globs over module names."""


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

    def styles(self, plan: UserPlan | None, tensor_size: int, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        """The style of each module over ``tensor_size`` ranks, from the user's ``plan``, else from the model's own.

        Raises:
            ConfigError: the plan does not fit the model, or the model has none and there are several ranks.
        """
        if plan is None:
            plan = self.plan(tensor_size, sequence_parallel) if tensor_size > 1 else {}
        styles = self.resolved(plan)
        if styles:
            from .tensor.sharding_plan import check_divisible

            check_divisible(self.model, styles, tensor_size)
        return styles

    def experts(self, plan: UserPlan | None, size: int) -> dict[str, ParallelStyle]:
        """The style of each module of experts over the ``size`` ranks of the expert axis, from the plan or the model.

        Raises:
            ConfigError: the plan does not fit the model, or there are several ranks and no experts, or others.
        """
        if size == 1:
            return {}
        from .expert_dispatch import ExpertParallel, check_none_replicated

        styles = self.resolved_experts(plan)
        if not styles:
            raise ConfigError(
                f"parallel.expert: got {size}, but the plan of {type(self.model).__name__} names no experts; "
                'pass plan={"layers.*.experts": "experts"} to initialize, with the model\'s names'
            )
        for name, style in styles.items():
            assert isinstance(style, ExpertParallel)
            style.check(name, self.model.get_submodule(name), size)
        check_none_replicated(self.model, styles)
        return styles

    def resolved_experts(self, plan: UserPlan | None) -> dict[str, ParallelStyle]:
        """The style of each module of experts, from the plan or the model; none for a model without experts."""
        from .tensor.sharding_plan import resolve_plan

        given = {
            self.full_name(pattern): "experts" if slices_experts(style) else style
            for pattern, style in (plan or {}).items()
            if is_of_experts(style) or slices_experts(style)
        }
        names = [name for name, _ in self.model.named_modules(remove_duplicate=False)]
        own = [name for name in names if any(matches(name, pattern) for pattern in self.expert_modules())]
        return resolve_plan(given or dict.fromkeys(own, "experts"), names)

    def expert_modules(self) -> Sequence[str]:
        """The names of the modules of experts, as globs: what the model's ``expert_modules()`` returns."""
        own: Callable[[], Sequence[str]] | None = getattr(self.model, "expert_modules", None)
        return () if own is None else own()

    def resolved(self, plan: UserPlan) -> dict[str, ParallelStyle]:
        """The style of each module that ``plan`` matches, but for experts; ConfigError for one that it does not fit."""
        if isinstance(plan, Mapping):
            plan = {pattern: style for pattern, style in plan.items() if not is_of_experts(style)}
        if not plan:
            return {}
        from .huggingface.lora import extend_to_adapters
        from .tensor.sharding_plan import resolve_plan

        if isinstance(plan, Mapping):
            plan = {self.full_name(pattern): style for pattern, style in plan.items()}
        styles = resolve_plan(plan, [name for name, _ in self.model.named_modules(remove_duplicate=False)])
        return extend_to_adapters(self.model, styles)

    def stages(self, pipeline: PipelineConfig, styles: Mapping[str, ParallelStyle]) -> list[nn.Module]:
        """The module of each pipeline stage, also of other ranks' stages; the model if there is one stage only.

        Raises:
            ConfigError: the model cannot be partitioned, or ``styles`` has one for a module of several stages.
        """
        if pipeline.num_stages == 1:
            return [self.single_stage()]
        split = self.split(pipeline.num_stages) if pipeline.split is None else pipeline.split
        split = split and [self.full_name(name) for name in split]
        partition = self.partition(pipeline.num_stages, split)
        for name in partition.opened & styles.keys():
            raise ConfigError(
                f"plan: {name!r} is split by the pipeline, so a style for it would have no effect; split around it "
                "(parallel.pipeline.split), or give styles to the modules in it"
            )
        return partition_model(self.model, partition, pipeline.num_stages, split)

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

    def move_biases(self) -> None:
        """Let biases by which experts are chosen move after each step, if the model's configuration says so."""

    def sequence_inputs(self) -> SequenceInputs:
        """Which inputs the context axis cuts."""
        from .context_axis.stages_on_cut_sequences import SequenceInputs

        return SequenceInputs()

    def own_loss(self) -> Callable[[Any, Batch], Any]:
        """A function that finds the loss in the model's output for a microbatch; it returns None if there is none."""
        return lambda output, _: loss_in(output)

    def initial_values(self) -> InitialValues:
        """Where tensors on ``meta`` get their values from; ValueError for a module that cannot fill its own."""
        check_materializable(self.model)
        return InitialValues()

    def writer(self) -> Callable[[nn.Module, dict[str, torch.Tensor], Path], None]:
        """A function that writes full weights by name to a folder; the module is the model, or a stage of it."""
        raise ConfigError(
            f"save_pretrained: got {type(self.model).__name__}, expected a Hugging Face model; use engine.save(), and "
            "paramp export for one file of weights"
        )

    def written(self, module: nn.Module, weights: dict[str, torch.Tensor]) -> Collection[str]:
        """The names of those of ``weights`` that the function of :meth:`writer` writes."""
        return weights


def is_of_experts(style: str | ParallelStyle) -> bool:
    """Whether a style shards experts over the expert axis, and not a module over the tensor axis."""
    return style == "experts" or getattr(style, "is_of_experts", False)


def slices_experts(style: str | ParallelStyle | None) -> bool:
    """Whether a style shards each expert over the tensor axis."""
    return style == "expert_slices" or getattr(style, "slices_experts", False)


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

    def expert_modules(self) -> Sequence[str]:
        from .huggingface.pretrained_plan import expert_modules

        return expert_modules(self.model)

    def partition(self, num_stages: int, split: Sequence[str] | None) -> Partition:
        from .huggingface.decoder_partition import PretrainedPartition

        if self._is_chain:
            return PretrainedPartition(self.model)
        from .huggingface.encoder_decoder_partition import CalledUnitsPartition

        return CalledUnitsPartition(self.model)

    def single_stage(self) -> nn.Module:
        from .huggingface.model_output import without_cache

        return without_cache(self.model)

    def move_biases(self) -> None:
        from .huggingface.router_biases import move_biases

        move_biases(self.model)

    def sequence_inputs(self) -> SequenceInputs:
        from .huggingface.context_inputs import PretrainedInputs

        return PretrainedInputs(self.model, is_chain=self._is_chain)

    def own_loss(self) -> Callable[[Any, Batch], Any]:
        from .huggingface.model_output import token_loss

        return token_loss(self.model)

    def initial_values(self) -> InitialValues:
        if not self._is_on_meta:
            return super().initial_values()
        from .huggingface.lora import without_adapters
        from .huggingface.pretrained_weights import PretrainedFiles, is_from_folder, pretrained_filler

        plain = without_adapters(self.model)
        if not is_from_folder(self.model):
            return InitialValues(pretrained_filler(plain))
        files = PretrainedFiles(plain)
        return InitialValues(pretrained_filler(plain, files), files)

    @property
    def _is_chain(self) -> bool:
        """Whether its stages are parts of a chain of hidden states, and it can run to show that."""
        from .huggingface.missing_plans import find_architecture

        known, _ = find_architecture(self.model)
        return (known is None or known.is_chain) and not self._is_on_meta

    @property
    def _is_on_meta(self) -> bool:
        return any(is_on_meta(module) for module in self.model.modules())

    def writer(self) -> Callable[[nn.Module, dict[str, torch.Tensor], Path], None]:
        from .huggingface.pretrained_weights import write_folder

        return write_folder

    def written(self, module: nn.Module, weights: dict[str, torch.Tensor]) -> Collection[str]:
        from .huggingface.lora import written_of_adapters
        from .huggingface.pretrained_weights import whole_on_meta

        return written_of_adapters(whole_on_meta(module), weights) if hasattr(module, "peft_config") else weights


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

    def expert_modules(self) -> Sequence[str]:
        return [self.full_name(name) for name in self._inside.expert_modules()]

    def split(self, num_stages: int) -> Sequence[str] | None:
        split = self._inside.split(num_stages)
        return split and [self.full_name(name) for name in split]

    def partition(self, num_stages: int, split: Sequence[str] | None) -> Partition:
        inside = split and [name.removeprefix(self._lora.PREFIX) for name in split]
        return self._lora.WrappedPartition(self.model, self._inside.partition(num_stages, inside))

    def single_stage(self) -> nn.Module:
        return self._lora.wrapped(self.model, self._inside.single_stage())

    def move_biases(self) -> None:
        self._inside.move_biases()

    def sequence_inputs(self) -> SequenceInputs:
        return self._inside.sequence_inputs()

    def own_loss(self) -> Callable[[Any, Batch], Any]:
        return self._inside.own_loss()

    def initial_values(self) -> InitialValues:
        self._lora.check_filled(self.model)
        inside = self._inside.initial_values()
        return InitialValues(inside.fill, lambda name, kept: inside.stored(self._lora.original_name(name), kept))

    def writer(self) -> Callable[[nn.Module, dict[str, torch.Tensor], Path], None]:
        return self._lora.write_adapters

    def written(self, module: nn.Module, weights: dict[str, torch.Tensor]) -> Collection[str]:
        return self._lora.written_of_adapters(module.__dict__[self._lora.WHOLE], weights)


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
