"""The stages of one rank, or the whole model without a pipeline, and parameters that are tied between stages.

A stage computes in the mode's precision and exchanges hidden states with its neighbours in the compute dtype::

    inputs ─► to the compute dtype ─► [ autocast: the stage's modules ] ─► compute dtype ─► next stage
                                                                        └─► fp32 ─► loss     (last stage)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ..base.collectives import broadcast_, gather_objects
from ..base.dtensor import local
from ..base.errors import ConfigError
from ..base.module_surgery import PassThrough, num_hooks, shallow_copy
from ..base.trees import map_tensors
from ..distributed.axes import ranks_along
from ..distributed.context import ParallelContext
from ..precision.autocast import computing, to_compute, to_outputs
from ..precision.policy import Precision
from ..scaling.replicas import TiedParameter
from .fsdp.units import ShardedUnits
from .shape_errors import explanation
from .stage_io import StageOutput


class Stage(nn.Module):
    """The modules of one pipeline stage, computing in a mode's precision; the whole model without a pipeline."""

    def __init__(
        self,
        module: nn.Module,
        precision: Precision,
        device: torch.device,
        *,
        is_first: bool,
        is_last: bool,
        random: AbstractContextManager[Any] | None = None,
        keeps_dtypes: bool = False,
    ) -> None:
        """``keeps_dtypes``: hidden states are exchanged as they are, not in the mode's compute dtype."""
        super().__init__()
        self.module = module
        self.precision = precision
        self.device = device
        self.is_first = is_first
        self.is_last = is_last
        self.link_device = device
        """The device of tensors that are sent and received: the CPU if the backend cannot send from ``device``."""

        self.keeps_dtypes = keeps_dtypes
        self._keywords = None if is_first else _keywords_of(module)
        self.random = random or nullcontext()
        """The random stream for dropout, entered for the forward."""
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output for the model's inputs, on a later stage for what it received and the model's keyword inputs.

        A later stage ignores keywords that its module does not take.

        Raises:
            ConfigError: an error about shapes in a module with sharded layers, explained.
        """
        try:
            return self._output(args, kwargs)
        except (RuntimeError, ValueError) as error:
            if (text := explanation(error, self.module)) is None:
                raise
            raise ConfigError(text) from error

    def _output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        enter = partial(to_compute, precision=self.precision, device=self.device)
        if self.is_first:
            args = map_tensors(enter, args)
        elif self._keywords is not None:
            kwargs = {name: value for name, value in kwargs.items() if name in self._keywords}
        kwargs = map_tensors(enter, kwargs)
        with self.random, computing(self.precision, self.device.type):
            output = self.module(*args, **kwargs)
        return map_tensors(partial(to_outputs, precision=self.precision), output) if self.is_last else output

    def receive(self, stage_output: StageOutput, tensors: tuple[torch.Tensor, ...]) -> Any:
        """The input of this stage, from the ``tensors`` that the stage before sent."""
        return stage_output.unpack(tensors, self.device, None if self.keeps_dtypes else self.precision.weights)

    def describe(self, output: Any) -> StageOutput:
        """The description of ``output``, that of this stage, for the next one."""
        return StageOutput.describe(output, None if self.keeps_dtypes else self.precision.compute)


def _keywords_of(module: nn.Module) -> frozenset[str] | None:
    """The keywords that the forward of ``module`` takes beside its first argument; None: all."""
    _, *parameters = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


class Stages(nn.Module):
    """The stages of one rank, in the model's order, with one mode of training or evaluation."""

    def __init__(self, joined: Joined, stages: Sequence[Stage], units: ShardedUnits | None = None) -> None:
        """``units``: those into which FSDP2 has sharded the stages; None if it has not."""
        super().__init__()
        self.module = joined.module
        """A module with all modules of the stages, under the whole model's names."""
        self.stages = nn.ModuleList(stages)
        self.training = self.module.training
        self._joined = joined
        self._units = units

    def running(self, *, backward: bool) -> AbstractContextManager[None]:
        """A context for the forwards of a batch, and their backwards if ``backward``."""
        return nullcontext() if self._units is None else self._units.running(backward=backward)

    def resetting(self) -> AbstractContextManager[None]:
        """A context for a backward outside of :meth:`running`, after whose failure another batch can follow."""
        return nullcontext() if self._units is None else self._units.resetting()

    def used_for(self, parameter: nn.Parameter) -> torch.Tensor:
        """The tensor that modules compute with in a batch in place of ``parameter``, of which this rank has a shard."""
        return parameter if self._units is None else self._units.gathered(parameter)

    @property
    def sum_for_loss_(self) -> Callable[[torch.Tensor], None] | None:
        """Sums over data ranks between a forward and its backward, in the order of FSDP2's units; None without them."""
        return None if self._units is None else self._units.sum_for_loss_

    def __iter__(self) -> Iterator[Stage]:
        return (cast(Stage, stage) for stage in self.stages)

    def align_modes(self) -> None:
        """Set the training mode of every stage's modules to that of the modules of :attr:`module`."""
        self._joined.align_modes()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the only stage, the whole model."""
        (stage,) = self.stages
        return stage(*args, **kwargs)


class Joined:
    """One module that joins several stages (parts) of a model.

    :attr:`module` has the modules, parameters and buffers of all parts, once, under the names that they have in the
    model. They are shared: a parameter that is replaced in it is replaced in the parts. A module with children on
    several parts has one copy in each part and one in :attr:`module`; the copies share their parameters, buffers and
    hooks. :attr:`module` cannot be called; the parts, made by :func:`~paramp.base.module_surgery.keep_only`, can.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self.parts = list(parts)
        # (a part's copy of a module, the joint copy, the names of the children that both share)
        self._copies: list[tuple[nn.Module, nn.Module, list[str]]] = []
        self.module = self._join(self.parts)
        if len(self.parts) > 1:
            self.module.__dict__["forward"] = _refuse_to_run

    def _join(self, found: list[nn.Module]) -> nn.Module:
        """One module for those of the same name in the parts."""
        real = [module for module in found if not isinstance(module, PassThrough)] or found
        different = list({id(module): module for module in real}.values())
        if len(different) == 1 or isinstance(different[0], PassThrough):
            return different[0]
        joint = shallow_copy(different[0])
        joint._parameters = {name: value for copy in different for name, value in copy._parameters.items()}
        joint._buffers = {name: value for copy in different for name, value in copy._buffers.items()}
        joint._modules = {}
        for name in dict.fromkeys(name for copy in different for name in copy._modules):
            children = [child for copy in different if (child := copy._modules.get(name)) is not None]
            joint._modules[name] = self._join(children) if children else None
        for copy in different:
            copy._parameters, copy._buffers = joint._parameters, joint._buffers
            shared = [name for name, child in copy._modules.items() if child is joint._modules[name]]
            self._copies.append((copy, joint, shared))
        return joint

    def take_over(self, module: nn.Module) -> None:
        """Replace :attr:`module` by ``module``, and the parts' modules by those of ``module``."""
        if len(self.parts) == 1:
            self.parts = [module]
        self.module = module
        for copy, joint, shared in self._copies:
            for name in shared:
                copy._modules[name] = joint._modules[name]

    def align_modes(self) -> None:
        """Set the parts' copies to training or evaluation mode, as in :attr:`module`."""
        for copy, joint, _ in self._copies:
            copy.training = joint.training


def _refuse_to_run(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "engine.module has several pipeline stages that are not consecutive, so it cannot be called; use engine.eval() "
        "and engine(x), or engine.forward_backward(x, y)"
    )


def tie_stages(
    names_of: Mapping[nn.Parameter, list[str]], stages: Sequence[nn.Module], module: nn.Module, context: ParallelContext
) -> list[TiedParameter]:
    """Tie the parameters of this rank's ``module`` that other pipeline ranks hold too, with equal values.

    ``names_of`` has all names of each parameter of the whole model, ``stages`` all stages of the model. Returns the
    tied parameters with their groups. A parameter shared only by stages of one rank is one tensor, and is not tied.
    """
    shared = _shared_between_stages(names_of, stages, context)
    if context.pp.size == 1:
        return []
    own: list[tuple[str, nn.Parameter] | None] = []
    for tie in shared:
        name = tie.own_names[context.pp.rank]
        own.append(None if name is None else (name, module.get_parameter(name)))
    _check_same_ties(shared, own, context)
    # Sorted, so that ranks with several ties make the groups that they share in the same order.
    groups = {
        holders: context.make_group(
            f"tie {'-'.join(map(str, holders))}", ranks_along(context, context.axes_of("stage"), holders)
        )
        for holders in sorted({tie.holders for tie in shared})
    }
    ties: list[TiedParameter] = []
    for tie, mine in zip(shared, own, strict=True):
        group = groups[tie.holders]
        if mine is not None and group is not None:
            name, parameter = mine
            broadcast_(local(parameter), group)
            ties.append(TiedParameter(name, parameter, group, owner=context.pp.rank == tie.holders[0]))
    context.ties.extend(ties)
    return ties


class _Shared(NamedTuple):
    """A parameter of the whole model that several pipeline ranks hold."""

    names: tuple[str, ...]
    """All its names in the model."""
    own_names: tuple[str | None, ...]
    """Its first name on each pipeline rank; None where there is none."""

    @property
    def holders(self) -> tuple[int, ...]:
        """The pipeline ranks that hold a copy."""
        return tuple(rank for rank, name in enumerate(self.own_names) if name is not None)


def _shared_between_stages(
    names_of: Mapping[nn.Parameter, list[str]], stages: Sequence[nn.Module], context: ParallelContext
) -> list[_Shared]:
    """The parameters that several pipeline ranks hold; a ConfigError if one that several stages share has hooks."""
    stages_of = context.config.parallel.pipeline.stages_of
    held_by_stage = [{name for name, _ in stage.named_parameters(remove_duplicate=False)} for stage in stages]
    held = [set().union(*(held_by_stage[index] for index in stages_of(rank))) for rank in range(context.pp.size)]
    shared: list[_Shared] = []
    for original, names in names_of.items():
        if num_hooks(original) and sum(not there.isdisjoint(names) for there in held_by_stage) > 1:
            raise ConfigError(
                f"model: {' and '.join(names)} are one parameter with hooks, which would run on each stage's part of "
                "its gradient; change the gradient in engine.before_step instead, or set parallel.pipeline.size to 1"
            )
        own_names = tuple(next((name for name in names if name in there), None) for there in held)
        if sum(name is not None for name in own_names) > 1:
            shared.append(_Shared(tuple(names), own_names))
    return shared


def _check_same_ties(
    shared: Sequence[_Shared], own: Sequence[tuple[str, nn.Parameter] | None], context: ParallelContext
) -> None:
    """Check that all pipeline ranks found the same ties, with the same placements; else raise on each of them."""
    layouts = [None if mine is None else str(getattr(mine[1], "placements", "whole")) for mine in own]
    everyone = gather_objects((list(shared), layouts), context.pp.group)
    for rank, (theirs, _) in enumerate(everyone):
        if theirs != everyone[0][0]:
            raise ConfigError(
                f"model: pipeline rank 0 ties {[tie.names for tie in everyone[0][0]]}, but pipeline rank {rank} "
                f"{[tie.names for tie in theirs]}; build the same model on every rank"
            )
    for tie, *found in zip(shared, *(layouts for _, layouts in everyone), strict=True):
        if len({layout for layout in found if layout is not None}) > 1:
            raise ConfigError(f"plan: {' and '.join(tie.names)} are one parameter, but it shards them differently")
