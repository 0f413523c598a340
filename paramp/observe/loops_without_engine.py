"""Diagnosis in a loop of the user's own: what the public functions need to know of a model without an engine.

Each of them takes a model, plain, in DDP, sharded by ``fully_shard`` or of DTensors, and a context. Their arguments are
checked and compared over the ranks through the store before the first collective, so that a mistake, or a call on some
ranks only, raises on every rank that calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..base.collectives import sum_
from ..base.dtensor import local
from ..base.errors import require
from ..base.wrapped_models import is_compiled, is_ddp, is_unit, unwrapped
from ..config.schema import Config
from ..distributed.agreed_arguments import Call, agreed_call
from ..distributed.context import ParallelContext, required_context
from ..parallel.fsdp.fsdp2_internals import drop_gradients, gathered, groups, held, reset
from ..pipeline.joined_stages import Joined
from ..pipeline.stage import Stage, Stages
from ..scaling.complete_and_unscale_gradients import align_gradients


def agreed_context(
    function: str,
    context: ParallelContext | None,
    check: Callable[[ParallelContext | None], tuple[nn.Module, Mapping[str, Any]]],
) -> ParallelContext | None:
    """The context of a call of the public ``function``, after all ranks have compared their arguments.

    Args:
        context: the user's.
        check: raises a ValueError for wrong arguments; returns the model, and settings that all ranks have equal.

    Raises:
        ValueError: on every rank: a rank has wrong arguments, or others than another rank.
        LaunchError: a rank did not call in time.
    """

    def checked() -> tuple[tuple[nn.Module, ParallelContext | None], Call]:
        known = required_context(function, context)
        module, settings = check(known)
        names = () if known is None else (*known.axes_of("stage"), *known.axes_of("expert"))
        place = None if known is None else [known.coordinates[name] for name in names]
        return (module, known), Call(settings, place, _description(module))

    module, context = agreed_call(function, checked)
    for unit in filter(is_unit, module.modules()):
        unit.reshard()  # type: ignore[operator]  # after an evaluation, units may have their gathered copies still
    return context


def checked_scale(scale: float) -> float:
    """``scale`` as a float; a ConfigError unless it is a finite number above 0."""
    is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    require(is_number and 0 < scale < float("inf"), "scale", scale, "the loss scale, a number above 0")
    return float(scale)


def _description(module: nn.Module) -> str:
    """The number of parameters, and a hash of their names, shapes and dtypes."""
    every = [f"{name} {tuple(one.shape)} {one.dtype}" for name, one in unwrapped(module).named_parameters()]
    return f"{len(every)}, hash {hashlib.sha256(repr(every).encode()).hexdigest()[:8]}"


class OwnModel(Stages):
    """A model that others made and run, as the only stage, with its gradients."""

    def __init__(self, model: nn.Module, context: ParallelContext | None) -> None:
        plain = unwrapped(model)
        first = next(plain.parameters(), torch.empty(0))
        device = first.device if context is None else context.device
        precision = (Config() if context is None else context.config).precision
        super().__init__(Joined([plain]), [Stage(plain, precision, device)])
        self.device = device
        self._ddp = [module for module in model.modules() if is_ddp(module)]
        self._fully_sharded: list[Any] = [module for module in model.modules() if is_unit(module)]
        self.is_compiled = any(map(is_compiled, model.modules()))
        self._context = context

    def used_for(self, parameter: nn.Parameter) -> torch.Tensor:
        """As in the base class, of FSDP2's units that the user made."""
        return gathered(self._records(), parameter)

    def _records(self) -> list[Any]:
        return [one for unit in self._fully_sharded for group in groups(unit) for one in group.fsdp_params]

    @contextmanager
    def running(self, *, backward: bool) -> Any:
        """A context for forward and backward: without compilation, and without the reduction of DDP."""
        with ExitStack() as stack:
            if self.is_compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))  # with their hooks
            for one in self._ddp:
                stack.callback(setattr, one, "require_forward_param_sync", one.require_forward_param_sync)
                stack.enter_context(one.no_sync())  # type: ignore[operator]
            try:
                yield
            except Exception:
                self._reset()
                raise

    def _reset(self) -> None:
        """Drop what a failed batch left in FSDP2's units."""
        for unit in self._fully_sharded:
            if unit._get_fsdp_state()._is_root:
                reset(unit)
        drop_gradients(self._records())
        for unit in self._fully_sharded:
            unit.reshard()

    def drop(self) -> None:
        """Set all gradients to None."""
        for parameter in self.module.parameters():
            parameter.grad = None

    @torch.no_grad()
    def complete(self) -> None:
        """Reduce gradients over data ranks: their mean with DDP, else their sum; FSDP2 has reduced its own."""
        if self._context is None:
            return
        group: Any = self._ddp[0].process_group if self._ddp else self._context.batch_axis.group
        done = set(map(held, self._records()))
        trained = [one for one in self.module.parameters() if one.requires_grad and one not in done]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.layout is not torch.strided:
                parameter.grad = parameter.grad.to_dense()
        align_gradients(trained)  # sums that are pending over tensor ranks may overflow too
        for gradient in [one.grad for one in trained if one.grad is not None] if self._ddp else []:
            gradient /= dist.get_world_size(group)
        sum_([local(parameter.grad) for parameter in trained if parameter.grad is not None], group)
