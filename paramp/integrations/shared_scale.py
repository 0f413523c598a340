"""One loss scale for several models and optimizers, in a training loop of another library."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import OptState

from ..base.dtensor import local
from ..optim.loss_scaler import DistributedGradScaler
from ..precision.policy import LossScaling, Precision


def device_types(models: Collection[nn.Module]) -> list[str]:
    """The device types of ``models``; if these are not known yet, all that they may be moved to."""
    first = (next(model.parameters(), None) for model in models)
    found = {parameter.device.type for parameter in first if parameter is not None} - {"meta"}
    return sorted(found or {"cpu", *(["cuda"] if torch.cuda.is_available() else [])}, reverse=True)


class _FiniteCheck(DistributedGradScaler):
    """For modes without loss scaling, in which stock Fabric also steps an optimizer without gradients."""

    def _unscale_grads_(self, *args: Any) -> dict[torch.device, torch.Tensor]:
        found_inf = args[2]
        return super()._unscale_grads_(*args) or {found_inf.device: found_inf}


Unscaling: TypeAlias = Callable[[torch.optim.Optimizer], AbstractContextManager[Any]]


class SharedScale:
    """The loss scale of ``models``, which is updated when the first backward after their steps begins.

    So all optimizers are unscaled with the scale of their backward, whatever the order of their steps.

    Args:
        models: those that the loss depends on; may grow after construction.
        group: the ranks that decide together whether to step.
        unscaling: makes the context in which the gradients of an optimizer are unscaled.
    """

    def __init__(
        self,
        mode: Precision,
        models: Collection[nn.Module],
        group: dist.ProcessGroup | None,
        unscaling: Unscaling = nullcontext,
    ) -> None:
        self._mode = mode
        self._models = models
        self._group = group
        self._unscaling = unscaling
        self._scaler: DistributedGradScaler | None = None
        self._stepped: dict[int, torch.optim.Optimizer] = {}  # since the last update of the scale
        self._unscaled: dict[int, torch.optim.Optimizer] = {}  # also those not stepped yet
        self.num_skipped = 0
        """The number of skipped steps."""

    @property
    def scaler(self) -> DistributedGradScaler:
        """The scaler, made at the first use, when the models' device is known. Without loss scaling its scale is 1."""
        if self._scaler is None:
            kind = _FiniteCheck if self._mode.scaling is None else DistributedGradScaler
            scaling = self._mode.scaling or LossScaling.static(1.0)
            device = torch.device(device_types(self._models)[0])
            self._scaler = kind(device, **asdict(scaling), group=self._group)
        return self._scaler

    def step(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> Any:
        """Step ``optimizer`` with ``kwargs``, on every rank or on none; returns the result of its ``step``."""
        if id(optimizer) in self._stepped:
            self.update()
        result = self.scaler.step(optimizer, **kwargs)
        self._stepped[id(optimizer)] = self._unscaled[id(optimizer)] = optimizer
        self.num_skipped += self.scaler.has_overflowed(optimizer)
        return result

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the loss scale, unless that was done since the last step."""
        if id(optimizer) in self._stepped:
            self.update()
        if self.scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            with self._unscaling(optimizer):
                self.scaler.unscale_(optimizer)
        self._unscaled[id(optimizer)] = optimizer

    def begin_backward(self) -> None:
        """Before a backward: update the scale after the steps since the last one.

        Raises:
            RuntimeError: an optimizer has unscaled gradients, to which the backward would add scaled ones.
        """
        for key in self._unscaled.keys() - self._stepped.keys():
            groups = self._unscaled.pop(key).param_groups
            gradients = (local(one.grad) for group in groups for one in group["params"] if one.grad is not None)
            if self._mode.scaling is not None and any(map(torch.any, gradients)):
                raise RuntimeError(
                    "backward: the gradients of an optimizer are unscaled already, as for clipping, so that scaled "
                    "ones cannot be added; call its step() or zero_grad() before the next backward"
                )
            self.scaler._per_optimizer_states.pop(key)  # they were set to zero, or are not scaled
        self.update()

    def update(self) -> None:
        """Update the scale after the steps since the last backward, if there were any.

        Gradients that are still accumulating, for an optimizer that steps less often, are rescaled to the new scale.
        """
        if not self._stepped:
            return
        before = self.scaler.scale_tensor()
        self.scaler.update()
        if self._mode.scaling is not None:
            ratio = self.scaler.scale_tensor() / before
            for gradient in self._scaled_gradients():
                gradient.mul_(ratio.to(gradient.device))
        self._stepped.clear()
        self._unscaled.clear()

    def _scaled_gradients(self) -> list[torch.Tensor]:
        """The gradients, plain and local, that no optimizer has unscaled since the last update of the scale."""
        groups = (group for optimizer in self._unscaled.values() for group in optimizer.param_groups)
        unscaled = {id(parameter) for group in groups for parameter in group["params"]}
        parameters = {parameter for model in self._models for parameter in model.parameters()}
        return [local(one.grad) for one in parameters if one.grad is not None and id(one) not in unscaled]

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state; empty in modes that do not scale."""
        self.update()
        return self.scaler.state_dict() if self._mode.scaling is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from :meth:`state_dict`, or from the ``state_dict`` of torch's ``GradScaler``."""
        if self._mode.scaling is not None:
            self._stepped.clear()
            self._unscaled.clear()
            self.scaler.load_state_dict(state_dict)
