"""The optimizer of ``convert_to_amp``: it scales losses, and skips a step on every rank or on none."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ....base.collectives import is_distributed
from ....base.dtensor import is_dtensor, refusing_changes
from ....base.torch_internals import expect
from ....distributed.context import current_context
from ....engine.step import StepResult
from ....engine.unstepped_batches import depth_of_user
from ....optim.user_changes.refused_changes import changed_in_step
from ....optim.user_optimizer import StepGuard, SteppedInPlace
from ....precision.compute_context import ComputeContext, default_dtype_of
from ....scaling.complete_and_unscale_gradients import complete_and_check, unscale_and_check_
from ....scaling.grad_norm import count_zeros, norm_weights_of, positive, total_norm
from ....scaling.loss_scaler import DistributedGradScaler
from ....scaling.loss_scaling_options import LossScaling
from ....scaling.step_decision import clip_coefficient
from .weights import Weights

expect("torch._foreach_mul_")

CHANGED = (
    "optimizer: all gradients were changed since the backward, when they carry the loss scale ({:g}): clipping or "
    "adding a number there makes the step wrong, or too small to see; call optimizer.clip_grad_norm(model, max_norm), "
    "which first unscales them. Factors, and sums over ranks, are right there"
)


class AmpOptimizer(torch.optim.Optimizer):
    """An optimizer that scales losses, checks gradients with all ranks, and steps fp32 masters if the mode has them.

    Its attributes are those of the original optimizer, :attr:`optim`, so that schedulers accept either. Every rank
    calls its methods in the same order.

    Attributes:
        optim: steps this rank's weights or masters.
        scaler: the :class:`~paramp.DistributedGradScaler`, disabled in modes without loss scaling.
        precision: the mode.
        num_steps, num_skipped: the numbers of completed steps, and of steps skipped because of an overflow.
    """

    def __init__(self, optim: torch.optim.Optimizer, weights: Weights, compute: ComputeContext) -> None:
        # Not torch's constructor: groups, state and hooks are those of ``optim`` (see __getattr__).
        self.optim = optim
        self.precision = compute.precision
        scaling = self.precision.scaling or LossScaling(enabled=False)
        self.scaler = DistributedGradScaler(compute.device, **asdict(scaling))
        self.num_steps = self.num_skipped = 0
        self._weights = weights
        self._compute = compute
        self._spent = False  # whether the gradients have been used in a step
        # When the gradients are unscaled: whether one is not finite, there are any, a loss was scaled; on any rank.
        self._flags: torch.Tensor | None = None
        self._norm: float | None = None
        self._after_backward: list[int | None] = []  # the gradients' versions, if losses are scaled
        self._warned = False
        self._in_place = SteppedInPlace(optim, weights.of_dtensors)
        self._guard = StepGuard(
            optim,
            "optimizer.step(): the optimizer was converted; call step() of the one that convert_to_amp returned, which "
            "first unscales and checks the gradients",
            self._changing,
        )

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # not set yet
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise a TypeError: to restore a copy or pickle, torch's optimizers change ``step`` of the whole class."""
        raise TypeError(
            "AmpOptimizer: it cannot be copied or pickled, because it is tied to its model's weights and hooks; save "
            "its state_dict(), and load that into a new optimizer from convert_to_amp"
        )

    @property
    def loss_scale(self) -> float:
        """The factor for the next loss; 1 in modes without loss scaling."""
        return self.scaler.get_scale()

    def backward(self, loss: torch.Tensor, retain_graph: bool | None = None) -> None:
        """Scale ``loss``, of one element, and run its backward. Gradients accumulate until :meth:`step`.

        After a step the old gradients are dropped first; :meth:`zero_grad` drops them earlier.

        Raises:
            ValueError: ``loss`` has not exactly one element.
            RuntimeError: :meth:`clip_grad_norm` has unscaled the gradients, and :meth:`step` was not called since; or a
                parameter was replaced before the forward.
        """
        if loss.numel() != 1:
            raise ValueError(f"loss: got a tensor of shape {tuple(loss.shape)}, expected one element; take its mean")
        self._begin()
        with self._compute.enter(), default_dtype_of(self.precision):
            plain = (loss.full_tensor() if is_dtensor(loss) else loss).reshape(())
            wide = plain.to(torch.promote_types(plain.dtype, torch.float32))
            self.scaler.scale(wide).backward(retain_graph=retain_graph)
        self._end()

    def backward_by_grad(self, tensor: Any, grad: Any) -> None:
        """The backward of an earlier pipeline stage, from its output and the gradient that the next stage sent.

        That gradient is already scaled; the scale is the same on every rank.
        """
        self._begin()
        self.scaler._has_scaled = True  # by the rank of the loss
        with self._compute.enter(), default_dtype_of(self.precision):
            torch.autograd.backward(tensor, grad)
        self._end()

    def _begin(self) -> None:
        self._weights.check_replaced()
        if self._spent:
            self.zero_grad()
        if self._flags is not None:
            raise RuntimeError(
                "backward: the gradients are unscaled already, so scaled ones cannot be added; call step() or "
                "zero_grad() after clip_grad_norm, before the next backward"
            )

    def _end(self) -> None:
        if self.scaler.is_enabled() and not self._warned:
            self._after_backward = self._weights.versions()

    def _check_scaled(self) -> None:
        """Warn, once, if several gradients, all of the last backward, were changed since."""
        pairs = zip(self._weights.versions(), self._after_backward, strict=True)
        changed = [now != then for now, then in pairs if then is not None]
        self._after_backward = []
        if len(changed) > 1 and all(changed):
            self._warned = True
            if not (is_distributed() and dist.get_rank()):
                warnings.warn(CHANGED.format(self.scaler.get_scale()), stacklevel=depth_of_user())

    @torch.no_grad()
    def clip_grad_norm(self, model: nn.Module | None, max_norm: float, norm_type: float | str = 2.0) -> torch.Tensor:
        """Unscale the gradients and clip them to ``max_norm``, by the norm of the logical model, in fp32.

        Args:
            model: ignored; the norm is over all trained parameters of the converted model.
            max_norm: above 0.
            norm_type: p of the p-norm, above 0; ``math.inf`` for the largest magnitude.

        Returns:
            The norm before clipping, 0-dim float32, equal on every rank; not finite on an overflow.

        Raises:
            ValueError: ``max_norm`` or ``norm_type`` is not above 0; or there are plain parameters in a world of
                several ranks and no context, so that it is not known which ranks hold copies.
        """
        max_norm = positive("max_norm", max_norm, "a number above 0; leave out the call to skip clipping")
        norm_type = positive("norm_type", norm_type, "a number above 0, or math.inf")
        norm_weights = self._norm_weights()
        gradients = self._unscaled()
        norm = total_norm(gradients, self._present(norm_weights), norm_type, self._compute.device).float()
        self._norm = float(norm)
        if gradients:
            torch._foreach_mul_(gradients, clip_coefficient(norm, max_norm))
        return norm

    clip_grad_norm_ = clip_grad_norm

    @torch.no_grad()
    def step(self, closure: None = None) -> StepResult:  # type: ignore[override]
        """Step, or skip the step on every rank if a gradient of any rank is not finite; then update the scale.

        Raises:
            RuntimeError: a closure, no backward since the last step, gradients that this optimizer's loss scale is not
                in, in one process no gradient at all, or a change that would be lost: by a step hook, of a weight with
                a master, or by ``p.data = ...``, of a DTensor.
        """
        if closure is not None:
            raise RuntimeError("step: got a closure, whose backwards would not be scaled; leave it out")
        if self._spent:
            raise RuntimeError(
                "step: no backward since the last step; call backward(loss), or zero_grad() before your own backward"
            )
        if not (self._has_gradient() or self.scaler.in_group()):
            raise RuntimeError("step: no parameter has a gradient; call backward(loss) with the converted model's loss")
        scale = self.scaler.get_scale()
        norm_weights = self._norm_weights() if self.precision.log_num_zeros else None
        gradients = self._unscaled()
        assert self._flags is not None
        found_inf, zeros = self._flags[0], None
        overflow, has_gradient, has_scaled = map(bool, self._flags.tolist())
        if self.scaler.is_enabled() and has_gradient and not has_scaled:
            raise RuntimeError(
                "step: the gradients are of no backward of this optimizer, and may lack its loss scale, by which it "
                "divides them; call its backward(loss), or run your own backward of optimizer.scaler.scale(loss); "
                "if one loss trains several models, convert one module whose forward calls them, with one optimizer"
            )
        if norm_weights is not None:
            part = count_zeros(gradients, self._present(norm_weights), found_inf.device)
            if is_distributed():
                dist.all_reduce(part)
            zeros = round(float(part))
        if not overflow:
            self._weights.follow_changes()
            with self._guard, refusing_changes(self._weights.with_masters, changed_in_step):
                self.optim.step()
            self._in_place.check()
            self._weights.write_back()
        self.optim._opt_called = True  # type: ignore[attr-defined]  # else a scheduler warns after a skipped step
        self._weights.drop_master_gradients()
        self.scaler.commit(found_inf)
        self.num_steps += not overflow
        self.num_skipped += overflow
        result = StepResult([scale, float(overflow), self._norm, zeros, None], with_zeros=zeros is not None)
        self._spent, self._flags, self._norm = True, None, None
        self.scaler._has_scaled = False
        if self.precision.verbose and self.scaler.get_scale() != scale and not (is_distributed() and dist.get_rank()):
            print(f"paramp: loss scale changes from {scale:g} to {self.scaler.get_scale():g}", flush=True)
        return result

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """A context in which :attr:`optim` changes outside of a step what it steps; then the weights follow."""
        if self._weights.is_new:  # nothing to change yet, and a broadcast may follow
            yield
            return
        self._weights.follow_changes()
        yield
        self._in_place.check()
        self._weights.write_back()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of weights and masters; with ``set_to_none=False`` the weights' become zeros."""
        gradients = [parameter.grad for parameter in self._weights.parameters]
        self._weights.zero_grad()
        if not set_to_none:
            for parameter, gradient in zip(self._weights.parameters, gradients, strict=True):
                parameter.grad = None if gradient is None else torch.zeros_like(gradient)
        if not self._spent and any(gradient is not None for gradient in gradients):
            self.scaler._has_scaled = False  # of a backward without a step
        self._spent, self._flags, self._norm, self._after_backward = False, None, None, []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported: raises a RuntimeError, because the groups are fixed when the optimizer is converted."""
        raise RuntimeError("add_param_group: make all groups, with frozen parameters, before convert_to_amp")

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: ``optimizer``, ``scaler``, ``masters`` by the model's names. Resuming is exact."""
        scaler = self.scaler.state_dict()
        return {"optimizer": self.optim.state_dict(), "scaler": scaler, "masters": self._weights.masters()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned on the same rank of the same layout and mode.

        Raises:
            ValueError: a part is missing, or belongs to another rank, layout or mode.
        """
        if missing := sorted({"optimizer", "scaler", "masters"} - state_dict.keys()):
            raise ValueError(f"state_dict: no {missing[0]!r} in it; pass a state of AmpOptimizer.state_dict()")
        self._weights.load_masters(state_dict["masters"])
        self.optim.load_state_dict(state_dict["optimizer"])
        self.scaler.load_state_dict(state_dict["scaler"])
        self.zero_grad()

    def _unscaled(self) -> list[torch.Tensor]:
        """The stepped tensors' gradients, plain and unscaled; in the first call the ranks agree on the flags."""
        if self._flags is None:
            if self._after_backward:
                self._check_scaled()
            parameters = self._weights.parameters
            for parameter in parameters:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
            has_scaled = self.scaler._has_scaled  # in a pipeline on the last rank only
            flags = torch.tensor([0.0, float(self._has_gradient()), float(has_scaled)], device=self._compute.device)
            found_inf = flags[0]
            complete_and_check(parameters, found_inf)
            gradients = self._weights.load_gradients()
            unscale_and_check_(gradients, torch.full_like(found_inf, 1.0 / self.scaler.get_scale()), found_inf)
            self.scaler.agree(flags)
            self._flags = flags
        else:
            self._weights.follow_gradients()
        return self._present([stepped.grad for stepped in self._weights.stepped])

    def _has_gradient(self) -> bool:
        return any(parameter.grad is not None for parameter in self._weights.parameters)

    def _present(self, values: Sequence[Any]) -> list[Any]:
        """Those of ``values``, one for each stepped tensor, whose tensor has a gradient."""
        pairs = zip(values, self._weights.stepped, strict=True)
        return [value for value, stepped in pairs if stepped.grad is not None]

    def _norm_weights(self) -> list[float]:
        context = current_context()
        return norm_weights_of(self._weights.parameters, context)
