"""The stages of one rank, or the whole model without a pipeline.

A stage computes in the mode's precision and exchanges hidden states with its neighbours in the compute dtype::

    inputs ─► to the compute dtype ─► [ autocast: the stage's modules ] ─► compute dtype ─► next stage
                                                                        └─► fp32 ─► loss     (last stage)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ..base.errors import ConfigError
from ..base.trees import map_tensors
from ..distributed.rng import RandomStream
from ..parallel.fsdp.units import ShardedUnits
from ..parallel.shape_errors import explanation
from ..precision.compute_context import computing, to_compute, to_outputs
from ..precision.modes import Precision
from .joined_stages import Joined
from .stage_output import StageOutput


class Stage(nn.Module):
    """The modules of one pipeline stage, computing in a mode's precision; the whole model without a pipeline."""

    def __init__(
        self,
        module: nn.Module,
        precision: Precision,
        device: torch.device,
        *,
        is_first: bool = True,
        is_last: bool = True,
        random: AbstractContextManager[Any] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.precision = precision
        self.device = device
        self.is_first = is_first
        self.is_last = is_last
        self.link_device = device
        """The device of tensors that are sent and received: the CPU if the backend cannot send from ``device``."""

        self.keeps_dtypes = False
        """Whether hidden states are exchanged as they are, not in the mode's compute dtype."""
        self.shared_buffers: frozenset[str] = frozenset()  # names of buffers that other stages have too
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

    def describe(self, output: Any, overlapping: Sequence[torch.Tensor]) -> StageOutput:
        """The description of ``output``, that of this stage, for the next one; :meth:`StageOutput.describe`."""
        return StageOutput.describe(output, None if self.keeps_dtypes else self.precision.compute, overlapping)


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
        self.units = units
        self.elsewhere: Sequence[tuple[str, Callable[[], nn.Parameter | None]]] = ()
        """References to the trained parameters of the model that other ranks have, by name."""
        self.streams = [one.random for one in stages if isinstance(one.random, RandomStream)]
        """The random streams of the stages."""

    def running(self, *, backward: bool) -> AbstractContextManager[None]:
        """A context for the forwards of a batch, and their backwards if ``backward``."""
        return nullcontext() if self.units is None else self.units.running(backward=backward)

    def resetting(self) -> AbstractContextManager[None]:
        """A context for a backward outside of :meth:`running`, after whose failure another batch can follow."""
        return nullcontext() if self.units is None else self.units.resetting()

    def used_for(self, parameter: nn.Parameter) -> torch.Tensor:
        """The tensor that modules compute with in a batch in place of ``parameter``, of which this rank has a shard."""
        return parameter if self.units is None else self.units.gathered(parameter)

    @property
    def sum_for_loss_(self) -> Callable[[torch.Tensor], None] | None:
        """Sums over data ranks between a forward and its backward, in the order of FSDP2's units; None without them."""
        return None if self.units is None else self.units.sum_for_loss_

    def __iter__(self) -> Iterator[Stage]:
        return (cast(Stage, stage) for stage in self.stages)

    def align_modes(self) -> None:
        """Set the training mode of every stage's modules to that of the modules of :attr:`module`."""
        self._joined.align_modes()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the only stage, the whole model."""
        (stage,) = self.stages
        return stage(*args, **kwargs)
