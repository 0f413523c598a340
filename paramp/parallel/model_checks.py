"""What of a whole model cannot be trained in a layout, as errors before it is partitioned and sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..base.collectives import first_difference_over_ranks
from ..base.errors import ConfigError
from ..base.module_surgery import named_tensors, names_by_parameter, num_hooks
from ..distributed.context import ParallelContext


def check_model(model: nn.Module, context: ParallelContext) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter of the whole ``model``, which is checked, the same on every rank. A collective.

    Raises:
        ConfigError: on every rank: ranks built different models, or the layout or the mode does not go with a module.
    """
    names_of = names_by_parameter(model)
    _check_filled(model)
    _check_embeddings(model, context)
    _check_scripted(model, context)
    _check_shardable(names_of, context)
    is_split = context.tensor_axis.size > 1 or context.stage_axis.size > 1
    _check_same_model(model, context, with_hooks=is_split)
    return names_of


def _check_same_model(model: nn.Module, context: ParallelContext, *, with_hooks: bool) -> None:
    """Check that every rank built the same parameters and buffers; else raise on every rank, with the first difference.

    They have to agree, because values of one rank are broadcast into the memory of others. ``with_hooks``: compare the
    numbers of hooks too, because hooks of a sharded parameter communicate.
    """
    first_names: dict[torch.Tensor, str] = {}
    local: list[tuple[Any, ...]] = [
        (
            *(name, tuple(value.shape), value.dtype, value.requires_grad, *(["meta"] if value.is_meta else [])),
            *([f"{count} hooks"] if with_hooks and count else []),
            *([f"tied to {first}"] if (first := first_names.setdefault(value, name)) != name else []),
        )
        for name, value in named_tensors(model, remove_duplicate=False)
        for count in [num_hooks(value)]
    ]
    if found := first_difference_over_ranks(local, context.device):
        rank, first, other = found
        raise ConfigError(f"model: rank 0 has {first}, but rank {rank} has {other}; build the same on every rank")


def _check_filled(model: nn.Module) -> None:
    """Raise a ConfigError for one of torch's lazy layers, whose parameters have no shapes before its first forward."""
    for name, module in model.named_modules():
        if any(map(nn.parameter.is_lazy, (*module._parameters.values(), *module._buffers.values()))):
            raise ConfigError(
                f"model: {name!r} is a {type(module).__name__}, whose parameters have no shapes yet; call the model "
                "with an input once, before the optimizer is made and initialize is called"
            )


def _check_embeddings(model: nn.Module, context: ParallelContext) -> None:
    """Raise a ConfigError for a layer whose forward writes to its weight, on each data rank to other rows."""
    size = context.batch_axis.size
    for name, module in model.named_modules() if size > 1 else ():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ConfigError(
                f"model: {name!r} has max_norm={module.max_norm:g}, expected none, because each of {size} data ranks "
                "would shrink the rows of its own batch only; leave it out, and normalise rows after a step"
            )


def _check_scripted(model: nn.Module, context: ParallelContext) -> None:
    """Raise a ConfigError for a module of torch.jit with parameters, where the mode or FSDP2 has to replace them."""
    if context.config.parallel.shard > 1:
        reason = f"parallel.data.shard is {context.config.parallel.shard}"
    elif context.config.precision.weights.itemsize < 4:
        reason = f"{context.config.precision.name!r} stores weights in half precision"
    else:
        return
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise ConfigError(
                f"model: {name or 'the model'!r} is a module of torch.jit, expected a plain one, because {reason}, and "
                "the parameters of its compiled code cannot be replaced; pass the module without torch.jit.script or "
                "torch.jit.trace, and compile it by compile=True"
            )


def _check_shardable(names_of: Mapping[nn.Parameter, Sequence[str]], context: ParallelContext) -> None:
    """Raise a ConfigError for what FSDP2 does not take: trained parameters without dims, complex ones, and hooks."""
    if context.config.parallel.shard == 1:
        return
    for parameter, names in names_of.items():
        if not parameter.ndim and parameter.requires_grad:
            raise ConfigError(
                f"model: {names[0]!r} has no dims, expected at least one, because parallel.data.shard is "
                f"{context.config.parallel.shard}; give it the shape (1,), or freeze it"
            )
        if parameter.is_complex() and parameter.requires_grad:
            raise ConfigError(
                f"model: {names[0]!r} has the dtype {parameter.dtype}, expected a real one, because "
                f"parallel.data.shard is {context.config.parallel.shard}; keep real and imaginary parts in a real "
                "parameter, and compute with torch.view_as_complex of it"
            )
        if num_hooks(parameter):
            raise ConfigError(
                f"model: {names[0]!r} has a hook on its gradient, expected none, because parallel.data.shard is "
                f"{context.config.parallel.shard} and fully_shard calls no hooks of parameters; change the gradient in "
                "engine.before_step instead"
            )


def check_stages(stages: Sequence[nn.Module], context: ParallelContext) -> None:
    """Raise a ConfigError if two of the model's ``stages`` on one rank share a parameter: a unit is in one stage."""
    pipeline = context.config.parallel.pipeline
    for rank in range(pipeline.size if context.config.parallel.shard > 1 else 0):
        held: dict[nn.Parameter, str] = {}
        for index in pipeline.stages_of(rank):
            names = {parameter: name for name, parameter in stages[index].named_parameters()}
            if both := held.keys() & names.keys():
                name, other = min((held[parameter], names[parameter]) for parameter in both)
                raise ConfigError(
                    f"model: {name!r} and {other!r} are one parameter, in two stages of pipeline rank {rank}, expected "
                    f"one stage, because parallel.data.shard is {context.config.parallel.shard}; choose a schedule "
                    "with one stage a rank, or split the model elsewhere (parallel.pipeline.split)"
                )
            held |= names
