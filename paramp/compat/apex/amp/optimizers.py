"""Optimizers under amp: the tensor that is stepped for each weight, and the optimizer methods that amp replaces.

The optimizer stays the user's object. If the level has masters, it still steps the fp32 parameters that it was made
with, which the model no longer uses; the model has half-precision copies of them. So its groups, its state, and its
schedulers do not change, and the masters are the weights before rounding.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ....base.dtensor import is_dtensor, refusing_changes
from ....optim.masters_outside_buffers import drop_gradients
from ....optim.user_changes.refused_changes import changed_in_step
from ....optim.user_optimizer import warn_of_eps
from ...masters_that_users_change import follow_changed_weights, round_to_weights
from .errors import AmpError
from .session import Session, print_on_main
from .weight_and_gradient import AmpWeight, is_low


def check_optimizers(optimizers: Sequence[object]) -> None:
    """Raise an AmpError for an object that is not a torch optimizer, or was passed to ``initialize`` before."""
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer) or type(optimizer).__name__ == "FP16_Optimizer":
            raise AmpError(
                f"optimizers: got {type(optimizer).__name__}, expected a bare torch.optim.Optimizer or a list of them "
                "(Apex's fused ones are; wrappers such as FP16_Optimizer and LARC are not)"
            )
        if isinstance(getattr(optimizer, "_amp_stash", None), ApexOptimizer):
            raise AmpError("optimizers: one of them was passed to amp.initialize before; make a new one")
        for group in optimizer.param_groups:
            _check_kernels(optimizer, group)


def _check_kernels(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    """Raise an AmpError for kernels over many tensors at once, if the tensors' kinds or meshes differ."""
    tensors = [parameter for parameter in group["params"] if isinstance(parameter, torch.Tensor)]
    kinds = {tensor.device_mesh if is_dtensor(tensor) else None for tensor in tensors}
    if type(optimizer).__module__.startswith("apex.") and kinds - {None}:
        raise AmpError(
            f"optimizers: Apex's {type(optimizer).__name__} needs plain tensors, but got DTensors; use torch.optim's"
        )
    chosen = next((option for option in ("fused", "foreach") if group.get(option)), None)
    if chosen and len(kinds) > 1:
        raise AmpError(
            f"optimizers: {type(optimizer).__name__}({chosen}=True) has plain parameters and DTensors, or several "
            f"meshes, in one group, which torch cannot step at once; leave {chosen} out, or make one group of each"
        )


class ApexOptimizer:
    """amp's record of one optimizer, and the methods that replace the optimizer's own.

    ``replaced`` has the model's new parameter for each old one, by ``id``; ``known`` the ``id`` of every parameter.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, session: Session, replaced: Mapping[int, nn.Parameter], known: set[int]
    ) -> None:
        self.optimizer = optimizer
        self.session = session
        self.weights: list[AmpWeight] = []
        self.overflows: dict[int, str] = {}  # since the last step, by loss: the change of the scale, for the message
        self._masters = session.precision.masters
        self._adopt_parameters(replaced, known)
        warn_of_eps(self.optimizer)
        optimizer._amp_stash = self  # type: ignore[attr-defined]
        self._patch("step", self._step)
        self._patch("zero_grad", self._zero_grad)
        self._patch("add_param_group", self._add_param_group)

    @staticmethod
    def of(optimizer: object, session: Session) -> ApexOptimizer:
        """The record of ``optimizer``; an AmpError if it was not passed to this session's ``initialize``."""
        found = getattr(optimizer, "_amp_stash", None)
        if not isinstance(found, ApexOptimizer) or found.session is not session:
            raise AmpError(
                f"amp.scale_loss: got {type(optimizer).__name__}, which amp.initialize did not return; pass the "
                "optimizers that it returned"
            )
        return found

    def _adopt_parameters(self, replaced: Mapping[int, nn.Parameter], known: set[int]) -> None:
        """Record every parameter; without masters, step the model's new parameters instead of the old ones."""
        optimizer = self.optimizer
        saved = optimizer.state_dict() if optimizer.state and not self._masters else None
        for group in optimizer.param_groups:
            for index, old in enumerate(group["params"]):
                weight = replaced.get(id(old), old)
                master = old if self._masters and weight is not old else None
                group["params"][index] = self._stepped_for(weight, master, of_model=id(weight) in known)
        if saved is not None:
            optimizer.state.clear()
            optimizer.load_state_dict(saved)  # casts the state to the dtype of the parameters

    def _stepped_for(
        self, weight: torch.Tensor, master: torch.Tensor | None = None, *, of_model: bool = False
    ) -> torch.Tensor:
        """The tensor stepped for ``weight``: ``master``, else a new one of its value, or itself if it needs none."""
        known = self.session.weights.get(id(weight))
        if known is None:
            if master is None and self._masters and is_low(weight):
                master = nn.Parameter(weight.detach().float(), weight.requires_grad)
            stepped = weight if master is None else master
            known = self.session.weights[id(weight)] = AmpWeight(weight, stepped, of_model=of_model)
        self.weights.append(known)
        return known.stepped

    def _patch(self, name: str, method: Any) -> None:
        original = getattr(self.optimizer, name)

        # A method, not a plain function, because torch's schedulers unwrap `step.__func__`.
        @functools.wraps(original)
        def patched(_optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return method(original, *args, **kwargs)

        setattr(self.optimizer, name, types.MethodType(patched, self.optimizer))

    def _step(self, original: Any, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        for scaler in self.session.loss_scalers:
            if scaler.awaits(self):
                scaler.decide()
        if any(weight.is_incomplete for weight in self.weights):
            raise AmpError(
                "optimizer.step(): a backward failed, and the delayed gradients before it are lost with it; call "
                "optimizer.zero_grad(), and accumulate again"
            )
        if any(weight.scale is not None for weight in self.weights):
            raise AmpError(
                "optimizer.step(): the gradients are still scaled, because the last amp.scale_loss had "
                "delay_unscale=True; leave it out for the last backward before a step"
            )
        without = all(weight.stepped.grad is None for weight in self.weights)
        if without and any(weight.has_other_gradient for weight in self.weights):
            raise AmpError(
                "optimizer.step(): the model's weights have gradients, but their fp32 masters have none; run the "
                "backward of each loss as `with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
            )
        if closure is not None and (self._masters or self.session.properties.loss_scale != 1.0):
            raise AmpError("optimizer.step(): got a closure, but amp unscales gradients before the step; leave it out")
        if self.overflows:
            self._skip()
            return None
        masters = [weight for weight in self.weights if weight.has_master]
        used = [weight for weight in masters if weight.was_used]
        if others := [weight for weight in used if weight.used_by is not self]:
            raise AmpError(
                f"optimizer.step(): a parameter of shape {tuple(others[0].weight.shape)} is in another optimizer too, "
                "whose step() has used the gradient of its fp32 master; run a backward for this optimizer, or keep "
                "each parameter in one"
            )
        if used and all(weight.stepped.grad is None for weight in masters):
            raise AmpError(
                "optimizer.step(): no backward since the last step, which has used the gradients of the fp32 masters; "
                "run `with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()` before each step"
            )
        for weight in masters:
            if weight.has_other_gradient:
                raise weight.changed_gradient("optimizer.step()")
            weight.follow_replaced_gradient()
        follow_changed_weights(weight for weight in self.weights if not weight.has_changed_master)
        with_masters = [(f"a parameter of shape {tuple(one.weight.shape)}", one.weight) for one in masters]
        with refusing_changes(with_masters, changed_in_step):
            result = original(*args, **kwargs) if closure is None else original(closure, *args, **kwargs)
        round_to_weights(self.weights)
        for weight in masters:
            weight.note_version()
        self._drop_gradients()
        return result

    def _drop_gradients(self) -> None:
        """Free the masters' gradients: model.zero_grad(), which scripts may call, does not drop them."""
        drop_gradients(self.weights)
        for weight in self.weights:
            weight.used_by = self

    def _skip(self) -> None:
        for loss_id, what in self.overflows.items():
            print_on_main(f"Gradient overflow.  Skipping step, loss scaler {loss_id} {what}")
        self.overflows.clear()
        self._drop_gradients()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else a scheduler's first step warns

    def _zero_grad(self, original: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        self.overflows.clear()  # they were those of the gradients that are dropped
        for weight in self.weights:
            weight.zero_grad(set_to_none=bool(args[0]) if args else kwargs.get("set_to_none", True))

    def _add_param_group(self, original: Any, param_group: dict[str, Any]) -> None:
        """Add parameters of a model after ``initialize``; their masters are made from the current values."""
        given, current = param_group["params"], self.session.current_ids()

        def stepped_for(weight: torch.Tensor) -> torch.Tensor:
            return self._stepped_for(weight, of_model=id(weight) in current)

        param_group["params"] = [
            (item[0], stepped_for(item[1])) if isinstance(item, tuple) else stepped_for(item)
            for item in ([given] if isinstance(given, torch.Tensor) else given)
        ]
        original(param_group)
        _check_kernels(self.optimizer, param_group)
