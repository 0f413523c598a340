"""One loss scale for several models and optimizers, in a training loop of another library."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import OptState

from ..scaling.complete_and_unscale_gradients import dense_gradients
from ..scaling.loss_scaler import DistributedGradScaler
from ..scaling.loss_scaling_options import LossScaling, resumed_state


class SharedGradScaler(DistributedGradScaler):
    """The loss scale of ``models``, which changes when the first backward after their steps begins.

    So all optimizers are unscaled with the scale of their backward, whatever the order of their steps, and also if the
    scale is read between these: what :meth:`settle` commits is undone by the next step. A step for
    which no loss was scaled does not count, such as those with which torch's ``get_optimizer_state_dict`` creates the
    state of an optimizer.

    Args:
        scaling: None: losses are not scaled; a gradient that is not finite skips the step all the same.
        models: those that the loss depends on; may grow after construction. Their gradients follow the scale.
        group: the ranks that decide together whether to step. None: the whole world.
        device: of the scale. None: that of the models, as soon as there are any.
    """

    def __init__(
        self,
        scaling: LossScaling | None,
        models: Collection[nn.Module],
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._scales = scaling is not None and scaling.enabled
        super().__init__(
            device or "cpu", **asdict(scaling if scaling and self._scales else LossScaling.static(1.0)), group=group
        )
        self.models = models
        self._is_placed = device is not None
        self._scaled = False  # whether a loss was, since the last change of the scale was made final
        self._stepped: dict[int, torch.optim.Optimizer] = {}  # since then
        self._before: list[torch.Tensor] | None = None  # the state before a change that may be undone
        self._unscaled: dict[int, torch.optim.Optimizer] = {}  # since the last backward; also those not stepped yet
        self._skipped: dict[int, bool] = {}  # of the steps since the last backward
        self.num_skipped = 0
        """The number of skipped steps."""

    def is_enabled(self) -> bool:
        """Whether losses are scaled."""
        return self._scales

    def place(self, device: torch.device | None = None) -> None:
        """Move the state to ``device``, or to the device of the models, unless its device is known."""
        if self._is_placed or (device is None and not self.models):
            return
        self._is_placed = True
        self._home = device or torch.device(device_types(self.models)[0])
        self._device = self._home.type
        for name in ("_scale", "_growth_tracker", "_overflow_tracker", "_one"):
            setattr(self, name, getattr(self, name).to(self._home))

    def scale(self, outputs: Any) -> Any:
        """``outputs``, a tensor or an iterable of tensors, times the scale, to which all gradients are brought first.

        Gradients may be there if an optimizer steps less often than others, or was unscaled without a step.
        """
        self.place(outputs.device if not self.models and isinstance(outputs, torch.Tensor) else None)
        self.begin()
        if self._scales:
            _multiply(self._gradients(scaled=False), self.scale_tensor())
        self._per_optimizer_states.clear()
        self._skipped.clear()
        self._unscaled.clear()
        self._scaled = True
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the loss scale, unless that was done since the last backward."""
        optimizer = plain_optimizer(optimizer)
        if not self.has_unscaled(optimizer):
            self._unscale(optimizer)

    def _unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self.place()
        self.undo()
        super().unscale_(optimizer)
        self._unscaled[id(optimizer)] = optimizer

    def has_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the gradients of ``optimizer`` were unscaled since the last backward."""
        return id(optimizer) in self._unscaled

    def unscaled_of(self, optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
        """Those parameters of ``optimizer`` that were unscaled since the last backward, also with another optimizer."""
        unscaled = self._unscaled_parameters()
        return unscaled and unscaled.intersection(_parameters([optimizer]))

    def _unscale_grads_(self, *args: Any) -> dict[torch.device, torch.Tensor]:
        optimizer, _, found_inf, *_ = args
        # Those of another optimizer too, or of a step before, must not be divided twice.
        done = dense_gradients(self.unscaled_of(optimizer))
        values = [gradient.clone() for gradient in done]
        flags = super()._unscale_grads_(*args)
        for gradient, value in zip(done, values, strict=True):
            gradient.copy_(value)
        # Without loss scaling stock Fabric also steps an optimizer without gradients.
        return flags or ({} if self._scales else {found_inf.device: found_inf})

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step ``optimizer``, on every rank or on none; returns the result of its ``step``."""
        optimizer = plain_optimizer(optimizer)
        key = id(optimizer)
        if key in self._stepped:
            self.begin()
        self.place()
        self.undo()
        if self._per_optimizer_states[key]["stage"] is OptState.STEPPED:
            del self._per_optimizer_states[key]
        if self._per_optimizer_states[key]["stage"] is OptState.READY:
            if self.unscaled_of(optimizer):
                self._unscale(optimizer)  # a fused step would divide all gradients
            else:
                self._unscaled.pop(key, None)
        result = super().step(optimizer, *args, **kwargs)
        if self._scaled or not self._scales:
            self._stepped[key] = optimizer
        self._unscaled[key] = optimizer
        self._skipped[key] = skipped = self.has_overflowed(optimizer)
        self.num_skipped += skipped
        return result

    def skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the last step of ``optimizer`` was skipped; to be asked before the next backward."""
        return self._skipped.get(id(optimizer), False)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Set the scale to ``new_scale``. Without it no effect: the scale is updated when the next backward begins."""
        if new_scale is not None:
            self.begin()
            super().update(new_scale)

    def settle(self) -> None:
        """Bring the scale to its value after the steps so far; another step of this backward undoes that."""
        if self._stepped and self._before is None:
            states = [self._per_optimizer_states[key] for key in self._stepped]
            flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
            self._before = [tensor.clone() for tensor in self.tensors()]
            self.commit(torch.stack(flags).amax())

    def undo(self) -> None:
        """Bring the scale back to its value in the steps since the last backward."""
        for tensor, value in zip(self.tensors(), self._before or [], strict=False):
            tensor.copy_(value)
        self._before = None

    def begin(self) -> None:
        """Make the change of the scale after the steps since the last backward final, if there were any."""
        self.settle()
        if self._before is None:
            return
        for key in {*self._per_optimizer_states} - (self._unscaled.keys() - self._stepped.keys()):  # those step later
            del self._per_optimizer_states[key]
        if self._scales:
            _multiply(self._gradients(scaled=True), self.scale_tensor() / self._before[0])
        self._scaled = False
        self._before = None
        self._stepped.clear()

    def forget(self) -> None:
        """Release the optimizers and what is known of their gradients, after an update; the scale stays."""
        self.begin()
        for known in (self._skipped, self._stepped, self._unscaled, self._per_optimizer_states):
            known.clear()

    def _gradients(self, *, scaled: bool) -> list[torch.Tensor]:
        """The gradients, plain and local, that were unscaled since the last backward, or the others of the models."""
        unscaled = self._unscaled_parameters()
        if not scaled:
            return dense_gradients(unscaled)
        return dense_gradients({parameter for model in self.models for parameter in model.parameters()} - unscaled)

    def _unscaled_parameters(self) -> set[torch.Tensor]:
        return set(_parameters(self._unscaled.values()))

    def get_scale(self) -> float:
        """The factor for the next loss; reading it synchronises with the device."""
        self.place()
        self.settle()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """The state after the last step; empty without loss scaling."""
        self.settle()
        return super().state_dict() if self._scales else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from :meth:`state_dict`, or from the ``state_dict`` of torch's ``GradScaler``; settings stay.

        An empty one, of a run without loss scaling, leaves the scale as it is. So does one of a scale that was fixed,
        if this one changes, and the other way round.
        """
        if self._scales and state_dict:
            state = resumed_state(self.state_dict(), state_dict)
            self._scaled = False
            self._before = None
            for known in (self._stepped, self._unscaled, self._per_optimizer_states):
                known.clear()
            super().load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        self.begin()
        return super().__getstate__() | {"models": set(), "_stepped": {}, "_unscaled": {}}

    def _lazy_init_scale_growth_tracker(self, device: torch.device) -> None:
        """Accelerate calls it after it has loaded a state, which exists from the start here."""


def plain_optimizer(optimizer: Any) -> Any:
    """The optimizer inside those wrappers that hold a :class:`SharedGradScaler`."""
    while isinstance(getattr(optimizer, "scaler", None), SharedGradScaler):
        optimizer = optimizer.optimizer
    return optimizer


def _parameters(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    return (parameter for one in optimizers for group in one.param_groups for parameter in group["params"])


def device_types(models: Collection[nn.Module]) -> list[str]:
    """The device types of ``models``; if these are not known yet, all that they may be moved to."""
    first = (next(model.parameters(), None) for model in models)
    present = {parameter.device.type for parameter in first if parameter is not None} - {"meta"}
    return sorted(present or {"cpu", *(["cuda"] if torch.cuda.is_available() else [])}, reverse=True)


def _multiply(gradients: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply ``gradients`` by ``factor``, 0-dim, in place and without a synchronisation of the host."""
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))
