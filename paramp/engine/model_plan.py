"""The plan of the whole model: what is decided before a rank keeps its part of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..distributed.context import ParallelContext
from ..distributed.exact_mode_protocol import Numerics
from ..optim.user_optimizer import check_optimizers, check_same_settings
from ..parallel.activation_checkpointing import CheckpointedBlocks, repeated_blocks
from ..parallel.compiled_blocks import CompiledBlocks
from ..parallel.materialize import InitialValues
from ..parallel.microbatches import Batch
from ..parallel.model_checks import check_model, check_stages
from ..parallel.model_families import ModelAdapter, UserPlan, adapter_for, is_of_experts, slices_experts
from ..pipeline.tied_stages import SharedParameter, shared_parameters
from ..precision.choose_float8_layers import Choice, choose_layers
from ..precision.fp32_routers import check_grouped_products

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    from ..parallel.context_axis.cut_sequences import SequenceAxis


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The whole model, and what becomes of it; the same on every rank. It has the memory of the model."""

    names_of: Mapping[nn.Parameter, list[str]]
    """All names of each parameter."""
    styles: Mapping[str, ParallelStyle]
    """The tensor-parallel style of each module that has one."""
    experts: Mapping[str, ParallelStyle]
    """The style of each module of experts, if the expert axis has several ranks; it has none in :attr:`styles`."""
    stages: Sequence[nn.Module]
    """The modules of each pipeline stage, of every rank."""
    ties: Sequence[SharedParameter]
    """The parameters that stages of several pipeline ranks share."""
    blocks: Sequence[str]
    """The names of the repeated blocks."""
    checkpointed: CheckpointedBlocks
    compiled: CompiledBlocks
    float8: Choice | None
    """The layers that compute in float8; None: the mode has none."""
    initial_values: InitialValues
    """Of tensors on ``meta``."""
    own_loss: Callable[[Any, Batch], Any]
    """Finds the model's own loss in its output."""


def plan_model(
    model: nn.Module,
    plan: UserPlan | None,
    optimizers: Sequence[torch.optim.Optimizer],
    compile_options: Mapping[str, Any] | None,
    numerics: Numerics,
    context: ParallelContext,
) -> ModelPlan:
    """The plan of the whole ``model``; the user's ``plan`` has the styles of its modules, or is None. A collective.

    Raises:
        ConfigError: ranks built different models; the model, the plan or an optimizer does not fit the layout.
    """
    config = context.config
    names_of = check_model(model, context)
    check_grouped_products(model, config.precision)
    check_optimizers(optimizers, names_of)
    check_same_settings(optimizers, names_of, context.device)
    adapter = adapter_for(model)
    styles, experts = _styles(adapter, plan, numerics, context)
    float8 = _float8_layers(model, styles, context)
    initial_values, own_loss = adapter.initial_values(), adapter.own_loss()
    stages = adapter.stages(config.parallel.pipeline, styles)
    adapter.move_biases()
    check_stages(stages, context)
    if (axis := sequence_axis(context, numerics)) is not None:
        from ..parallel.context_axis.stages_on_cut_sequences import shard_stages

        inputs = adapter.sequence_inputs()
        inputs.check(model, len(stages))
        stages, own_loss = shard_stages(stages, inputs, own_loss, axis, context)
    ties = shared_parameters(names_of, stages, context)
    blocks = repeated_blocks(model)
    return ModelPlan(
        names_of=names_of,
        styles=styles,
        experts=experts,
        stages=stages,
        ties=ties,
        blocks=blocks,
        checkpointed=CheckpointedBlocks(model, blocks, config.activation_checkpointing),
        compiled=CompiledBlocks(model, blocks, compile_options, context),
        float8=float8,
        initial_values=initial_values,
        own_loss=own_loss,
    )


def _styles(
    adapter: ModelAdapter, plan: UserPlan | None, numerics: Numerics, context: ParallelContext
) -> tuple[dict[str, ParallelStyle], dict[str, ParallelStyle]]:
    """:attr:`ModelPlan.styles` and :attr:`ModelPlan.experts`."""
    parallel = context.config.parallel
    styles = numerics.plan(adapter, plan, context)
    experts = adapter.experts(plan, parallel.expert)
    both = parallel.tensor.size > 1
    own = {name for name, style in styles.items() if is_of_experts(style) or (both and slices_experts(style))}
    experts |= {name: styles[name] for name in own & experts.keys()}
    return {name: style for name, style in styles.items() if name not in experts}, experts


def _float8_layers(model: nn.Module, styles: Mapping[str, ParallelStyle], context: ParallelContext) -> Choice | None:
    """:attr:`ModelPlan.float8`."""
    options = context.config.precision.float8
    if options is None:
        return None
    dims: dict[str, int] = {}
    if styles:
        from ..parallel.tensor.sharding_plan import sharded_dims

        dims = sharded_dims(styles)
    return choose_layers(model, options, dims, context.tensor_axis.size)


def sequence_axis(context: ParallelContext, numerics: Numerics) -> SequenceAxis | None:
    """How sequences are cut in ``context``; None: they are whole."""
    axis: SequenceAxis | None = numerics.sequence_axis()
    if axis is None and context.cp.size > 1:
        from ..parallel.context_axis.cut_sequences import SequenceAxis

        axis = SequenceAxis(context.cp, context.device, context.config.parallel.context.method)
    return axis
