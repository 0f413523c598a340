"""Gradients of parameters that FSDP2 shards: shards of their sums over data ranks, in the flat buffers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..base.module_surgery import num_hooks
from ..scaling.grad_reduce import sum_tied_gradients
from .flat_gradients import FlatGradients

HOOKS = operator.attrgetter("_backward_hooks"), operator.attrgetter("_post_accumulate_grad_hooks")


class Units(Protocol):
    """What is needed of :class:`paramp.parallel.fsdp.units.ShardedUnits`."""

    def padded_sizes(self) -> Mapping[nn.Parameter, int]: ...

    def use_memory(self, memory: Mapping[nn.Parameter, torch.Tensor]) -> None: ...

    def put_back(self, memory: Mapping[nn.Parameter, torch.Tensor]) -> None: ...

    def on_gradient(self, call: Callable[[torch.Tensor], None]) -> Callable[[], None]: ...

    def take_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None: ...


class UnitGradients(FlatGradients):
    """As :class:`~paramp.optim.flat_gradients.FlatGradients`, of parameters that ``units`` gather in a batch."""

    def __init__(self, *given: Any, units: Units) -> None:
        super().__init__(*given)
        self._units = units
        for hook in self._hooks:  # the gradients of gathered parameters are brought to their placements by the units
            hook.remove()
        self._hooks = []

    def begin_window(self) -> None:
        """As in the base class.

        Raises:
            RuntimeError: a parameter has a hook, which FSDP2 would not call.
        """
        if any(chain(*(map(hooks, self._parameters) for hooks in HOOKS))):
            name = next(param.name for param in self._params if num_hooks(param.parameter))
            raise RuntimeError(
                f"{name!r} has a hook on its gradient, which fully_shard does not call (parallel.data.shard); remove "
                "it, and change the gradient in engine.before_step instead"
            )
        super().begin_window()

    def on_accumulation(self, call: Callable[[torch.Tensor], None]) -> list[RemovableHandle]:
        """As in the base class."""
        return [_Handle(self._units.on_gradient(call))]  # type: ignore[list-item]


class ShardedGradients(UnitGradients):
    """The gradients of parameters that units gather, which have reduced each over data ranks."""

    def __init__(self, *given: Any, units: Units) -> None:
        super().__init__(*given, units=units)
        # A reduction gives zeros to a parameter that got no gradient on any rank, so versions do not show its absence.
        self._arrived: set[torch.Tensor] = set()  # what a backward of this rank, or the user, gave a gradient
        self._reduced = [0] * len(self._params)  # versions after the last backward
        self._in_backward = False
        units.on_gradient(self._arrived.add)

    def begin_window(self) -> None:
        """As in the base class."""
        super().begin_window()
        self._note_changes()
        self._in_backward = True

    def _note_changes(self) -> None:
        """Record which gradients the user has changed since the last backward, or dropped."""
        versions = self._versions()
        if versions == self._reduced:
            return
        for param, version, reduced in zip(self._params, versions, self._reduced, strict=True):
            if version == self._zeros[param]:
                self._arrived.discard(param.parameter)
            elif version != reduced:
                self._arrived.add(param.parameter)

    def end_last_backward(self) -> None:
        """As in the base class."""
        super().end_last_backward()
        if self._in_backward:
            self._in_backward = False
            self._reduced = self._versions()

    def zero_grad(self) -> None:
        """As in the base class."""
        super().zero_grad()
        self._arrived.clear()
        self._reduced = [*self._zeros.values()]

    @torch.no_grad()
    def collect(self, found_inf: torch.Tensor) -> None:
        """As in the base class."""
        super().collect(found_inf)
        self._note_changes()
        self._absent = [param for param in self._params if param.parameter not in self._arrived]

    def before_reduction(self) -> Iterator[tuple[torch.Tensor, float]]:
        """As in the base class, but reduced over data ranks."""
        self._note_changes()
        for param in self._params:
            if param.parameter not in self._arrived and not bool(self._own_gradient(param).any()):
                self._zeros[param] = param.version  # not counted
        return super().before_reduction()

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients of tied parameters over the stages that hold a copy."""
        sum_tied_gradients(self._context, self._parameters, self._reduce_dtypes.pp, complete=True)


class _Handle:
    """As torch's handle of a hook."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self.remove = remove
