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

from ..precision.policy import Precision
from ..scaling.grad_reduce import dense_gradients
from ..scaling.loss_scaler import DistributedGradScaler
from ..scaling.loss_scaling import LossScaling


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

    So all optimizers are unscaled with the scale of their backward, whatever the order of their steps, and also if the
    scale is read between these: :meth:`update` is undone by the next step. A step for
    which no loss was scaled does not count, such as those with which torch's ``get_optimizer_state_dict`` creates the
    state of an optimizer.

    Args:
        models: those that the loss depends on; may grow after construction.
        group: the ranks that decide together whether to step. None: the whole world.
        unscaling: makes the context in which the gradients of an optimizer are unscaled.
        device: of the scale. None: that of the models.
    """

    def __init__(
        self,
        mode: Precision,
        models: Collection[nn.Module],
        group: dist.ProcessGroup | None = None,
        unscaling: Unscaling = nullcontext,
        device: torch.device | None = None,
    ) -> None:
        self.mode = mode
        self.models = models
        """Their gradients follow the scale."""
        self._group = group
        self._unscaling = unscaling
        self._device = device
        self._scaled = False  # whether a loss was, since the scale was last changed for good
        self._scaler: DistributedGradScaler | None = None
        self._is_placed = False  # whether the scaler was made on the device of the models
        self._stepped: dict[int, torch.optim.Optimizer] = {}  # since then
        self._before: list[torch.Tensor] | None = None  # what ``update`` has changed
        self._unscaled: dict[int, torch.optim.Optimizer] = {}  # also those not stepped yet
        self._skipped: dict[int, bool] = {}  # of the steps since the last backward
        self.num_skipped = 0
        """The number of skipped steps."""

    @property
    def scaler(self) -> DistributedGradScaler:
        """The scaler, on the models' device, or on the CPU until there are any. Without loss scaling its scale is 1."""
        if self._scaler is None or not self._is_placed:
            self._is_placed = self._device is not None or len(self.models) > 0
            device = self._device or torch.device(device_types(self.models)[0] if self._is_placed else "cpu")
            if self._scaler is None:
                self._scaler = self._make_scaler(device)
            elif device.type != self._scaler.scale_tensor().device.type:
                known = self._scaler.state_dict()
                self._scaler = self._make_scaler(device)
                self._scaler.load_state_dict(known)
        return self._scaler

    def _make_scaler(self, device: torch.device) -> DistributedGradScaler:
        kind = _FiniteCheck if self.mode.scaling is None else DistributedGradScaler
        return kind(device, **asdict(self.mode.scaling or LossScaling.static(1.0)), group=self._group)

    def scale(self, losses: Any) -> Any:
        """``losses``, a tensor or an iterable of tensors, times the scale, to which all gradients are brought first.

        Gradients may be there if an optimizer steps less often than others, or was unscaled without a step.
        """
        if not self.models and self._device is None and isinstance(losses, torch.Tensor):
            self._device = losses.device
        self.advance()
        if self.mode.scaling is not None:
            _multiply(self._gradients(scaled=False), self.scaler.scale_tensor())
        self.scaler._per_optimizer_states.clear()
        self._skipped.clear()
        self._unscaled.clear()
        self._scaled = True
        return self.scaler.scale(losses)

    def step(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> Any:
        """Step ``optimizer`` with ``kwargs``, on every rank or on none; returns the result of its ``step``."""
        if id(optimizer) in self._stepped:
            self.advance()
        self._undo_update()
        if self.scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED:
            del self.scaler._per_optimizer_states[id(optimizer)]
        result = self.scaler.step(optimizer, **kwargs)
        if self._scaled or self.mode.scaling is None:
            self._stepped[id(optimizer)] = optimizer
        self._unscaled[id(optimizer)] = optimizer
        self._skipped[id(optimizer)] = skipped = self.scaler.has_overflowed(optimizer)
        self.num_skipped += skipped
        return result

    def skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the last step of ``optimizer`` was skipped; to be asked before the next backward."""
        return self._skipped.get(id(optimizer), False)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the loss scale, unless that was done since the last backward."""
        if id(optimizer) not in self._unscaled:
            self._undo_update()
            with self._unscaling(optimizer):
                self.scaler.unscale_(optimizer)
            self._unscaled[id(optimizer)] = optimizer

    def update(self) -> None:
        """Bring the scale to its value after the steps so far; another step of this backward undoes that."""
        if self._stepped and self._before is None:
            states = [self.scaler._per_optimizer_states[one] for one in self._stepped]
            found = [flag for state in states for flag in state["found_inf_per_device"].values()]
            self._before = [tensor.clone() for tensor in self.scaler.tensors()]
            self.scaler.update_from_flag(torch.stack(found).amax())

    def _undo_update(self) -> None:
        for tensor, value in zip(self.scaler.tensors(), self._before or [], strict=False):
            tensor.copy_(value)
        self._before = None

    def advance(self) -> None:
        """Update the scale for good after the steps since the last backward, if there were any."""
        self.update()
        if self._before is None:
            return
        states = self.scaler._per_optimizer_states
        for one in {*states} - {one for one in self._unscaled if one not in self._stepped}:  # those step later
            del states[one]
        if self.mode.scaling is not None:
            _multiply(self._gradients(scaled=True), self.scaler.scale_tensor() / self._before[0])
        self._scaled = False
        self._before = None
        self._stepped.clear()

    def forget(self) -> None:
        """Release the optimizers and what is known of their gradients, after an update; the scale stays."""
        self.advance()
        self._skipped.clear()
        self._stepped.clear()
        self._unscaled.clear()
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()

    def _gradients(self, *, scaled: bool) -> list[torch.Tensor]:
        """The gradients, plain and local, that were unscaled since the last backward, or the others of the models."""
        groups = (group for optimizer in self._unscaled.values() for group in optimizer.param_groups)
        parameters = {parameter for group in groups for parameter in group["params"]}
        if scaled:
            parameters = {parameter for model in self.models for parameter in model.parameters()} - parameters
        return dense_gradients(parameters)

    def __getstate__(self) -> dict[str, Any]:
        self.advance()
        return vars(self) | {"models": set(), "_group": None, "_stepped": {}, "_unscaled": {}}

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state; empty in modes that do not scale."""
        self.update()
        return self.scaler.state_dict() if self.mode.scaling is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from :meth:`state_dict`, or from the ``state_dict`` of torch's ``GradScaler``."""
        if self.mode.scaling is not None:
            self._scaled = False
            self._before = None
            self._stepped.clear()
            self._unscaled.clear()
            self.scaler._per_optimizer_states.clear()
            self.scaler.load_state_dict(state_dict)


def _multiply(gradients: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply ``gradients`` by ``factor``, 0-dim, in place and without a synchronisation of the host."""
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))
