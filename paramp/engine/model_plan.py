"""The plan of the whole model: what is decided before a rank keeps its part of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..distributed.context import ParallelContext
from ..distributed.numerics import Numerics
from ..optim.user_optimizer import check_optimizers, names_by_parameter
from ..parallel.activation_checkpointing import CheckpointedBlocks, repeated_blocks
from ..parallel.adapters import ModelAdapter, adapter_for
from ..parallel.batches import Batch
from ..parallel.materialize import InitialValues
from ..parallel.model_checks import check_model, check_stages
from ..pipeline.tied_stages import SharedParameter, shared_parameters
from ..precision.float8_layers import Choice, choose_layers

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

UserPlan = Mapping[str, "str | ParallelStyle"]


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The whole model, and what becomes of it; the same on every rank. It has the memory of the model."""

    names_of: Mapping[nn.Parameter, list[str]]
    """All names of each parameter."""
    styles: Mapping[str, ParallelStyle]
    """The tensor-parallel style of each module that has one."""
    stages: Sequence[nn.Module]
    """The modules of each pipeline stage, of every rank."""
    ties: Sequence[SharedParameter]
    """The parameters that stages of several pipeline ranks share."""
    blocks: Sequence[str]
    """The names of the repeated blocks."""
    checkpointed: CheckpointedBlocks
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
    numerics: Numerics,
    context: ParallelContext,
) -> ModelPlan:
    """The plan of the whole ``model``; the user's ``plan`` has the styles of its modules, or is None. A collective.

    Raises:
        ConfigError: ranks built different models; the model, the plan or an optimizer does not fit the layout.
    """
    names_of = names_by_parameter(model)
    check_model(model, names_of, context)
    check_optimizers(optimizers, names_of)
    adapter = adapter_for(model)
    styles = numerics.plan(adapter, plan, lambda: _styles(adapter, plan, context))
    float8 = _float8_layers(model, styles, context)
    initial_values, own_loss = adapter.initial_values(), adapter.own_loss()
    stages = adapter.stages(context.config.parallel.pipeline, styles)
    check_stages(stages, context)
    return ModelPlan(
        names_of=names_of,
        styles=styles,
        stages=stages,
        ties=shared_parameters(names_of, stages, context),
        blocks=repeated_blocks(model),
        checkpointed=CheckpointedBlocks(model, context.config.activation_checkpointing),
        float8=float8,
        initial_values=initial_values,
        own_loss=own_loss,
    )


def _styles(adapter: ModelAdapter, plan: UserPlan | None, context: ParallelContext) -> dict[str, ParallelStyle]:
    """The tensor-parallel style of each module, from the user's ``plan``, else from the model's own."""
    size = context.tensor_axis.size
    if plan is None:
        plan = adapter.plan(size, context.config.parallel.sequence_parallel) if size > 1 else {}
    styles = adapter.styles(plan)
    if styles:
        from ..parallel.tensor.sharding_plan import check_divisible

        check_divisible(adapter.model, styles, size)
    return styles


def _float8_layers(model: nn.Module, styles: Mapping[str, ParallelStyle], context: ParallelContext) -> Choice | None:
    """The layers that compute in float8; None if the mode has none."""
    float8 = context.config.precision.float8
    if float8 is None:
        return None
    dims: dict[str, int] = {}
    if styles:
        from ..parallel.tensor.sharding_plan import sharded_dims

        dims = sharded_dims(styles)
    return choose_layers(model, float8, dims, context.tensor_axis.size)
