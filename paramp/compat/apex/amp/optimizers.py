"""Optimizers under amp: which tensor is stepped for which weight, and the calls that have to know.

The optimizer object stays the user's. Where the level has masters, it goes on stepping the fp32 parameters that it was
made with, which the cast has left to it alone, and the model has half-precision copies of them. So its groups, its
state, and schedulers over it stay as they are, and the masters are the weights before they were rounded.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ....base.dtensor import local
from ....distributed.context import current_context
from ....optim.grad_norm import dense_gradients, unscale_and_check_
from ....optim.grad_reduce import align_gradients, sum_tied_gradients
from ....optim.user_optimizer import warn_of_eps
from .models import is_low
from .session import AmpError, Session, say

__all__ = ["ApexOptimizer", "OptimizerState", "adopt_changes", "check_optimizers", "unscale_"]


class OptimizerState:
    """A weight of the model, the tensor that is stepped for it, and where its gradients are on their way.

    Attributes:
        weight: the model's parameter.
        stepped: its fp32 master; the weight itself where it has none.
        scale: what the gradient in the weight is scaled by; None once it was handed to ``stepped``.
    """

    def __init__(self, weight: torch.Tensor, stepped: torch.Tensor, *, of_model: bool) -> None:
        self.weight = weight
        self.stepped = stepped
        self.scale: float | None = None
        self.of_model = of_model
        self._stash: torch.Tensor | None = None
        self.checked = False
        self._spent: int | None = None  # the version of the weight's gradient that the master has had
        self.note_version()

    @property
    def has_master(self) -> bool:
        return self.weight is not self.stepped

    def note_version(self) -> None:
        """Weight and master belong together as they are now."""
        self._version = self.weight._version

    def full_precision(self) -> torch.Tensor:
        return self.stepped.detach() if self.has_master else self.stepped.detach().float()

    def check(self, current: set[int]) -> bool:
        """Before the first backward: that the weight is still the model's, and in the same place as its master.

        Returns:
            Whether this was the first time.

        Raises:
            AmpError: it is not.
        """
        first, self.checked = not self.checked, True
        if first and self.of_model and id(self.weight) not in current:
            raise AmpError(
                f"a parameter of shape {tuple(self.weight.shape)} is no longer in its model: something has replaced it "
                "after amp.initialize; apply tensor parallelism (and make the optimizer) before amp.initialize"
            )
        if first and self.weight.device != self.stepped.device:
            raise AmpError(
                f"a weight is on {self.weight.device} and its master on {self.stepped.device}; "
                "move the model before amp.initialize, not after"
            )
        return first

    def adopt(self) -> None:
        """Take the weight's values for the master's, if they were changed since these were made.

        As when DistributedDataParallel hands rank 0's weights out: then every rank has to take them, also rank 0, so a
        write counts even where it wrote what was there.
        """
        if self.has_master and (
            self.weight._version != self._version or not _same(local(self.weight), local(self.stepped))
        ):
            local(self.stepped).detach().copy_(local(self.weight).detach())

    def begin(self, scale: float) -> None:
        """Make room for the gradient of a backward by ``scale``; what is there, unscaled, is put aside."""
        self.scale = scale
        self._stash = self.stepped.grad
        self.weight.grad = self.stepped.grad = None

    def hand_over(self) -> None:
        """Give the weight's gradient to what is stepped, in its dtype."""
        if self.has_master:
            gradient = self.weight.grad
            self.stepped.grad = None if gradient is None else gradient.detach().to(self.stepped.dtype)
            self._note_spent()

    def _note_spent(self) -> None:
        self._spent = None if self.weight.grad is None else self.weight.grad._version

    @property
    def is_bypassed(self) -> bool:
        """Whether a backward left the weight a gradient of which the master knows nothing."""
        gradient = self.weight.grad
        return self.has_master and gradient is not None and gradient._version != self._spent

    def add_stash(self) -> None:
        """Add what :meth:`begin` has put aside to the gradient, which is unscaled now as well."""
        gradient, stash = self.stepped.grad, self._stash
        self.scale = self._stash = None
        if gradient is None or stash is None:
            self.stepped.grad = stash if gradient is None else gradient
        elif gradient.is_sparse or stash.is_sparse:
            self.stepped.grad = gradient + stash
        else:
            gradient.add_(stash)

    def give_up(self) -> None:
        """After a backward that failed: be as before it."""
        self.weight.grad, self.stepped.grad = None, self._stash
        self.scale = self._stash = None

    def zero_grad(self, set_to_none: bool) -> None:
        self.scale = self._stash = None
        if self.has_master:
            self.stepped.grad = None
            if set_to_none or self.weight.grad is None:
                self.weight.grad = None
            else:
                self.weight.grad.detach_().zero_()
            self._note_spent()


def _same(weight: torch.Tensor, master: torch.Tensor) -> bool:
    return torch.equal(weight, master.to(weight.dtype))


@torch.no_grad()
def unscale_(slots: Sequence[OptimizerState], scale: float, found_inf: torch.Tensor) -> None:
    """Bring the gradients of a backward to what is stepped, divided by ``scale``; set ``found_inf`` on an overflow."""
    weights = [slot.weight for slot in slots]
    unscale_and_check_(align_gradients(weights), torch.ones_like(found_inf), found_inf)
    context = current_context()
    if context is not None:
        sum_tied_gradients(context, weights)
    for slot in slots:
        slot.hand_over()
    gradients = dense_gradients([slot.stepped for slot in slots])
    unscale_and_check_(gradients, torch.full_like(found_inf, 1.0 / scale), found_inf)
    for slot in slots:
        slot.add_stash()


def check_optimizers(optimizers: Sequence[object]) -> None:
    """Refuse what is no optimizer of torch's, and one that was given to an earlier ``initialize``.

    Raises:
        AmpError: naming it.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer) or type(optimizer).__name__ == "FP16_Optimizer":
            raise AmpError(
                f"optimizers: got {type(optimizer).__name__}, expected a bare torch.optim.Optimizer or a list of them "
                "(Apex's fused ones are; wrappers such as FP16_Optimizer and LARC are not)"
            )
        if isinstance(getattr(optimizer, "_amp_stash", None), ApexOptimizer):
            raise AmpError("optimizers: one of them has been through amp.initialize before; make a new one")
        for group in optimizer.param_groups:
            _check_kernels(optimizer, group)


def _check_kernels(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    """Refuse kernels over many tensors at once where these are not alike."""
    kinds = {
        parameter.device_mesh if isinstance(parameter, DTensor) else None
        for parameter in group["params"]
        if isinstance(parameter, torch.Tensor)
    }
    if type(optimizer).__module__.startswith("apex.") and kinds - {None}:
        raise AmpError(
            f"optimizers: Apex's {type(optimizer).__name__} takes plain tensors, but got DTensors; use torch.optim's"
        )
    chosen = next((option for option in ("fused", "foreach") if group.get(option)), None)
    if chosen and len(kinds) > 1:
        raise AmpError(
            f"optimizers: {type(optimizer).__name__}({chosen}=True) has plain parameters and DTensors, or several "
            f"meshes, in one group, which torch refuses to step at once; leave {chosen} out, or make a group of each"
        )


class ApexOptimizer:
    """What amp keeps of one optimizer, and the methods that it puts in the place of the optimizer's own.

    Args:
        replaced: the model's new parameter for each old one, by ``id``.
        known: ``id`` of every parameter of the models.

    Attributes:
        overflows: of the losses that overflowed since the last step, what became of the scale.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        session: Session,
        replaced: Mapping[int, nn.Parameter],
        known: set[int],
    ) -> None:
        self.optimizer = optimizer
        self.session = session
        self.slots: list[OptimizerState] = []
        self.overflows: dict[int, str] = {}
        self._masters = session.precision.masters
        self._adopt_parameters(replaced, known)
        warn_of_eps(self.optimizer)
        optimizer._amp_stash = self  # type: ignore[attr-defined]
        self._patch("step", self._step)
        self._patch("zero_grad", self._zero_grad)
        self._patch("add_param_group", self._add_param_group)

    @staticmethod
    def of(optimizer: object, session: Session) -> ApexOptimizer:
        """What amp keeps of ``optimizer``.

        Raises:
            AmpError: it did not come from this session's ``initialize``.
        """
        found = getattr(optimizer, "_amp_stash", None)
        if not isinstance(found, ApexOptimizer) or found.session is not session:
            raise AmpError(
                f"amp.scale_loss: got {type(optimizer).__name__}, which did not come from amp.initialize; pass the "
                "optimizers that it returned"
            )
        return found

    # ------------------------------------------------------------------------------------------------- parameters

    def _adopt_parameters(self, replaced: Mapping[int, nn.Parameter], known: set[int]) -> None:
        """Make a slot of every parameter; without masters, step the model's new parameters instead of the old."""
        optimizer = self.optimizer
        saved = optimizer.state_dict() if optimizer.state and not self._masters else None
        for group in optimizer.param_groups:
            for index, old in enumerate(group["params"]):
                weight = replaced.get(id(old), old)
                master = old if self._masters and weight is not old else None
                group["params"][index] = self._stepped_for(weight, master, of_model=id(weight) in known)
        if saved is not None:
            optimizer.state.clear()
            optimizer.load_state_dict(saved)  # which casts it to the dtype of the parameters

    def _stepped_for(
        self, weight: torch.Tensor, master: torch.Tensor | None = None, *, of_model: bool = False
    ) -> torch.Tensor:
        """What is stepped for ``weight``: ``master``, one made of its present value, or where it needs none, itself."""
        slot = self.session.slots.get(id(weight))
        if slot is None:
            if master is None and self._masters and is_low(weight):
                master = nn.Parameter(weight.detach().float(), weight.requires_grad)
            slot = self.session.slots[id(weight)] = OptimizerState(
                weight, weight if master is None else master, of_model=of_model
            )
        self.slots.append(slot)
        return slot.stepped

    # ------------------------------------------------------------------------------------ the optimizer's methods

    def _patch(self, name: str, method: Any) -> None:
        original = getattr(self.optimizer, name)

        # A method and not a plain function: torch's schedulers unwrap `step.__func__`.
        @functools.wraps(original)
        def patched(_optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return method(original, *args, **kwargs)

        setattr(self.optimizer, name, types.MethodType(patched, self.optimizer))

    def _step(self, original: Any, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        for scaler in self.session.loss_scalers:
            if scaler.awaits(self):
                scaler.judge()
        if any(slot.scale is not None for slot in self.slots):
            raise AmpError(
                "optimizer.step(): the gradients are still scaled, since the last amp.scale_loss had "
                "delay_unscale=True; leave it out at the last backward before a step"
            )
        if all(slot.stepped.grad is None for slot in self.slots) and any(slot.is_bypassed for slot in self.slots):
            raise AmpError(
                "optimizer.step(): the model's weights have gradients, but their fp32 masters have none; run the "
                "backward of each loss as `with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
            )
        if closure is not None and not self._unscaled_level:
            raise AmpError("optimizer.step(): amp unscales gradients before the step, so it cannot take a closure")
        if self.overflows:
            self._skip()
            return None
        result = original(*args, **kwargs) if closure is None else original(closure, *args, **kwargs)
        self._write_back()
        return result

    @property
    def _unscaled_level(self) -> bool:
        """Whether weights are stepped as they are, with gradients that are never scaled."""
        return not self._masters and self.session.properties.loss_scale == 1.0

    def _skip(self) -> None:
        for loss_id, what in self.overflows.items():
            say(f"Gradient overflow.  Skipping step, loss scaler {loss_id} {what}")
        self.overflows.clear()
        self._drop_master_gradients()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # or a scheduler's first step warns

    @torch.no_grad()
    def _write_back(self) -> None:
        pairs = [(local(slot.weight), local(slot.stepped)) for slot in self.slots if slot.has_master]
        if pairs:
            weights, masters = zip(*pairs, strict=True)
            torch._foreach_copy_(list(weights), list(masters))
            for slot in self.slots:
                slot.note_version()
        self._drop_master_gradients()

    def _drop_master_gradients(self) -> None:
        """``model.zero_grad()``, which scripts may call in place of the optimizer's, does not reach them."""
        for slot in self.slots:
            if slot.has_master:
                slot.stepped.grad = None

    def _zero_grad(self, original: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        for slot in self.slots:
            slot.zero_grad(set_to_none=bool(args[0]) if args else kwargs.get("set_to_none", True))

    def _add_param_group(self, original: Any, param_group: dict[str, Any]) -> None:
        """Parameters of a model as ``initialize`` has left it; masters are made of their present values."""
        given = param_group["params"]
        items: Iterable[Any] = [given] if isinstance(given, torch.Tensor) else given
        param_group["params"] = [
            (item[0], self._stepped_for(item[1])) if isinstance(item, tuple) else self._stepped_for(item)
            for item in items
        ]
        original(param_group)
        _check_kernels(self.optimizer, param_group)


def adopt_changes(slots: Sequence[OptimizerState], session: Session) -> None:
    """Before the first backward: check each weight, and take up what was done to it since ``initialize``."""
    if all(slot.checked for slot in slots):
        return
    current = {id(parameter) for model in session.models for parameter in model.parameters()}
    for slot in slots:
        if slot.check(current):
            slot.adopt()
