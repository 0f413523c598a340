"""This rank's part of the model: its stages, on its device, sharded and filled."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..base.dtensor import resolved
from ..base.module_surgery import named_tensors
from ..distributed.context import ParallelContext
from ..distributed.exact_mode_protocol import Numerics
from ..distributed.random_across_tensor_ranks import keep_place
from ..distributed.replicated_axes import broadcast_replicas
from ..parallel.expert_balance import token_counts
from ..parallel.fsdp.units import ShardedUnits
from ..parallel.materialize import materialize, outline
from ..parallel.model_families import slices_experts
from ..parallel.partition import buffers_of_several
from ..parallel.returned_parts import refuse_returned_parts
from ..pipeline.joined_stages import Joined
from ..pipeline.stage import Stage, Stages
from ..pipeline.tied_stages import tie_stages
from ..precision.choose_float8_layers import Choice
from ..precision.float8_conversion import convert
from ..precision.fp32_routers import keep_routers_wide
from ..scaling.copies_per_element import TiedParameter
from .given_model import redirect_saving
from .model_plan import ModelPlan


@dataclass(frozen=True)
class LocalModel:
    """The modules of this rank's stages, whose weights are in full precision."""

    stages: Stages
    shapes: Mapping[str, torch.Size]
    """The shapes of the parameters in the whole model; a tensor-parallel style may store other shapes."""
    units: ShardedUnits | None
    """Those into which FSDP2 has sharded the stages; None if it has not."""
    ties: Sequence[TiedParameter]
    """The parameters that other pipeline ranks hold too."""
    overflow: torch.Tensor
    """0-dim: layers in float8 set it to 1 when they receive a non-finite gradient."""


def make_local(plan: ModelPlan, numerics: Numerics, context: ParallelContext) -> LocalModel:
    """This rank's part of the model: moved to the device, sharded over tensor and data ranks, filled if on ``meta``.

    All replicas get the values of the first rank that has one, whatever the other ranks were built with.
    """
    config = context.config
    shared_buffers = buffers_of_several(plan.stages)
    joined = Joined(plan.stages[index] for index in context.local_stages)
    numerics.watch(plan.stages, joined.parts, plan.styles)
    plan.checkpointed.apply(joined.parts)
    shapes = {name: value.shape for name, value in joined.module.named_parameters(remove_duplicate=False)}
    keep_routers_wide(joined.module, config.precision)
    for counts in token_counts(joined.module):
        counts.join(context.batch_axis.group)
    _move(joined.module, context.device)
    broadcast_replicas([tensor for _, tensor in named_tensors(joined.module) if not tensor.is_meta], context)
    whole = outline(joined.module)  # with the layers' own classes, which define how they are filled
    overflow = torch.zeros((), device=context.device)
    module = joined.module if plan.float8 is None else _in_float8(joined.module, plan.float8, overflow, context)
    _shard(module, plan, numerics, context)
    joined.take_over(module)
    units = None
    if config.parallel.shard > 1:
        units = ShardedUnits(joined.parts, plan.blocks, context, experts=plan.experts, reduces=numerics.units_reduce)
    _fill(module, whole, plan, context)
    ties = tie_stages(plan.ties, module, context)
    redirect_saving(module, elsewhere={name for names in plan.names_of.values() for name in names} - shapes.keys())
    stages = Stages(joined, _stages(joined.parts, shared_buffers, numerics, context), units)
    stages.elsewhere = _elsewhere(plan, shapes)
    return LocalModel(stages, shapes, units, ties, overflow)


def _in_float8(module: nn.Module, choice: Choice, overflow: torch.Tensor, context: ParallelContext) -> nn.Module:
    """``module`` with the layers of ``choice`` in float8, which set ``overflow``."""
    return convert(
        module,
        context.config.precision,
        context.device,
        choice=choice,
        tensor_size=context.tensor_axis.size,
        overflow=overflow,
        group=context.batch_axis.group,
        verbose=context.is_main,
    )


def _shard(module: nn.Module, plan: ModelPlan, numerics: Numerics, context: ParallelContext) -> None:
    """Shard ``module`` over the tensor axis, and its experts over theirs."""
    if plan.styles and context.tensor_axis.size > 1:
        from ..parallel.tensor.sharding_plan import apply_plan

        mesh = context.mesh[context.axes_of("tensor")]
        apply_plan(module, plan.styles, mesh)
        keep_place(module, mesh)
    else:
        numerics.apply_styles(module, plan.styles)
    if plan.experts:
        from ..parallel.tensor.sharding_plan import apply_plan

        for sliced, axes in (False, context.axes_of("expert")), (True, context.axes_of("expert", "tensor")):
            those = {name: style for name, style in plan.experts.items() if slices_experts(style) == sliced}
            apply_plan(module, those, context.expert_mesh[axes])


def _fill(module: nn.Module, whole: nn.Module, plan: ModelPlan, context: ParallelContext) -> None:
    """Fill the tensors of ``module`` on ``meta``, the same on all replicas; ``whole``: its outline."""
    on_meta = [name for name, tensor in named_tensors(module) if tensor.is_meta]
    config = context.config
    # Masters start from the full-precision values.
    precision = None if config.precision.masters else config.precision
    materialize(module, config.seed, context.device, whole=whole, values=plan.initial_values, precision=precision)
    filled = dict(named_tensors(module))
    broadcast_replicas([filled[name] for name in on_meta], context)


def _elsewhere(plan: ModelPlan, here: Mapping[str, torch.Size]) -> list[tuple[str, weakref.ref[nn.Parameter]]]:
    """The parameters of the model that are not ``here``, as :attr:`Stages.elsewhere` has them."""
    return [
        (names[0], weakref.ref(one))  # their memory is not kept
        for one, names in plan.names_of.items()
        if one.requires_grad and one.grad is None and here.keys().isdisjoint(names)
    ]


def _stages(
    parts: Sequence[nn.Module], shared_buffers: frozenset[str], numerics: Numerics, context: ParallelContext
) -> list[Stage]:
    """``parts`` as stages that compute in the mode's precision, each with a random stream."""
    last = context.config.parallel.pipeline.num_stages - 1
    stages = []
    for index, part in zip(context.local_stages, parts, strict=True):
        random = context.activation_stream(index, engine=context.num_engines)
        ends = {"is_first": index == 0, "is_last": index == last}
        stages.append(Stage(part, context.config.precision, context.device, **ends, random=random))
        stages[-1].keeps_dtypes, stages[-1].shared_buffers = numerics.keeps_dtypes, shared_buffers
        if index == last:
            refuse_returned_parts(part)
    return stages


def _move(module: nn.Module, device: torch.device) -> None:
    """Move the tensors of ``module`` to ``device``, each once, with memory that is contiguous or its own."""
    moved: dict[torch.Tensor, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in moved:  # False for another name of the same tensor
            there = tensor if tensor.is_meta else tensor.to(device)
            # A DTensor keeps the strides of the whole parameter, which differ from those of its local part.
            moved[tensor] = there.contiguous() if isinstance(tensor, nn.Parameter) else resolved(there)
        return moved[tensor]

    module._apply(move)
