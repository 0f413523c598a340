"""Parameters that stages of several pipeline ranks share: their gradients are summed, their values equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from ..base.collectives import broadcast_, gather_objects
from ..base.dtensor import local
from ..base.errors import ConfigError
from ..base.module_surgery import num_hooks
from ..distributed.context import ParallelContext
from ..scaling.copies_per_element import TiedParameter


class SharedParameter(NamedTuple):
    """A parameter of the whole model that several pipeline ranks hold."""

    names: tuple[str, ...]
    """All its names in the model."""
    local_names: tuple[str | None, ...]
    """Its first name on each pipeline rank; None where there is none."""

    @property
    def holders(self) -> tuple[int, ...]:
        """The pipeline ranks that hold a copy."""
        return tuple(rank for rank, name in enumerate(self.local_names) if name is not None)


def shared_parameters(
    names_of: Mapping[nn.Parameter, list[str]], stages: Sequence[nn.Module], context: ParallelContext
) -> list[SharedParameter]:
    """The parameters that several pipeline ranks hold; a ConfigError if one that several stages share has hooks."""
    stages_of = context.config.parallel.pipeline.stages_of
    held_by_stage = [{name for name, _ in stage.named_parameters(remove_duplicate=False)} for stage in stages]
    held = [set().union(*(held_by_stage[index] for index in stages_of(rank))) for rank in range(context.pp.size)]
    shared: list[SharedParameter] = []
    for original, names in names_of.items():
        if num_hooks(original) and sum(not there.isdisjoint(names) for there in held_by_stage) > 1:
            raise ConfigError(
                f"model: {' and '.join(names)} are one parameter with hooks, which would run on each stage's part of "
                "its gradient; change the gradient in engine.before_step instead, or set parallel.pipeline.size to 1"
            )
        local_names = tuple(next((name for name in names if name in there), None) for there in held)
        if sum(name is not None for name in local_names) > 1:
            shared.append(SharedParameter(tuple(names), local_names))
    return shared


def tie_stages(shared: Sequence[SharedParameter], module: nn.Module, context: ParallelContext) -> list[TiedParameter]:
    """Tie those of the ``shared`` parameters that this rank's ``module`` has to their other copies, with equal values.

    Returns them with their groups. A parameter shared only by stages of one rank is one tensor, and is not tied.
    """
    if context.pp.size == 1:
        return []
    local_names = [tie.local_names[context.pp.rank] for tie in shared]
    parameters = [None if name is None else module.get_parameter(name) for name in local_names]
    _check_placements(shared, parameters, context)
    # Sorted, so that ranks with several ties make the groups that they share in the same order.
    groups = {
        holders: context.make_group(
            f"tie {'-'.join(map(str, holders))}", context.ranks_along(context.axes_of("stage"), holders)
        )
        for holders in sorted({tie.holders for tie in shared})
    }
    ties: list[TiedParameter] = []
    for tie, name, parameter in zip(shared, local_names, parameters, strict=True):
        group = groups[tie.holders]
        if name is not None and parameter is not None and group is not None:
            broadcast_(local(parameter), group)
            ties.append(TiedParameter(name, parameter, group, owner=context.pp.rank == tie.holders[0]))
    context.ties.extend(ties)
    return ties


def _check_placements(
    shared: Sequence[SharedParameter], parameters: Sequence[nn.Parameter | None], context: ParallelContext
) -> None:
    """Check that all pipeline ranks have the same placements of a parameter that they share; else raise on each."""
    layouts = [None if one is None else str(getattr(one, "placements", "whole")) for one in parameters]
    for tie, *placements in zip(shared, *gather_objects(layouts, context.pp.group), strict=True):
        if len({layout for layout in placements if layout is not None}) > 1:
            raise ConfigError(f"plan: {' and '.join(tie.names)} are one parameter, but it shards them differently")
