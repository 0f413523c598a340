"""Parameters that stages of several pipeline ranks share, such as an embedding tied to the output layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn

from ..base.dtensor import local
from ..base.errors import ConfigError
from ..distributed.axes import ranks_along
from ..distributed.collectives import gather_objects
from ..distributed.context import ParallelContext, TiedParameter


def tie_stages(
    names_of: Mapping[nn.Parameter, list[str]], stages: Sequence[nn.Module], module: nn.Module, context: ParallelContext
) -> list[TiedParameter]:
    """Tie the parameters of this rank's ``module`` that other pipeline ranks hold too, with equal values.

    Args:
        names_of: all names of each parameter of the whole model.
        stages: those of all ranks.

    Returns:
        Such parameters, with groups to sum over. What only stages of one rank share is one parameter there anyway.

    Raises:
        ConfigError: the ranks shard such a parameter differently.
    """
    held = _held_names(stages, context)
    ties: list[TiedParameter] = []
    for names in names_of.values():
        own_names = [next((name for name in names if name in there), None) for there in held]
        holders = [rank for rank, name in enumerate(own_names) if name is not None]
        if len(holders) < 2:
            continue
        # Making a group is a collective of the world: every rank takes part, also those that hold no copy.
        group = context.make_group(ranks_along(context, ["pp"], holders).tolist())
        name = own_names[context.pp.rank]
        parameter = None if name is None else module.get_parameter(name)
        layouts = gather_objects(None if parameter is None else str(getattr(parameter, "placements", "whole")))
        if len({layout for layout in layouts if layout is not None}) > 1:
            raise ConfigError(f"plan: {' and '.join(names)} are one parameter, but it shards them differently")
        if name is None or parameter is None or group is None:
            continue
        dist.broadcast(local(parameter).detach(), group=group, group_src=0)
        ties.append(TiedParameter(name, parameter, group, owner=context.pp.rank == holders[0]))
    context.ties.extend(ties)
    return ties


def _held_names(stages: Sequence[nn.Module], context: ParallelContext) -> list[set[str]]:
    """The names of the parameters that each pipeline rank holds."""
    stages_of = context.config.parallel.pipeline.stages_of
    return [
        {name for index in stages_of(rank) for name, _ in stages[index].named_parameters(remove_duplicate=False)}
        for rank in range(context.pp.size)
    ]
