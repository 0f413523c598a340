"""Mixed precision for a loop of one's own: a model, an optimizer and a criterion, each wrapped for one mode.

    model, optimizer, criterion = convert_to_amp(model, optimizer, criterion, AMP_TYPE.TORCH)
    loss = criterion(model(x), y)
    optimizer.backward(loss)
    optimizer.clip_grad_norm(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()

There is one wrapper for all modes: what differs is the :class:`~paramp.precision.policy.Precision` that it reads. It needs no
launch and no engine. Where processes are set up, the ranks agree on every overflow: plain parameters, DTensors, and the
stages of a pipeline of one's own.

Data parallelism stays the caller's: wrap the converted model in ``DistributedDataParallel``, or average the gradients
before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ....base.errors import ConfigError
from ....distributed.context import current_context
from ....engine.step_result import StepResult
from ....optim.grad_norm import clip_coefficient, count_zeros, norm_weight, total_norm, unscale_and_check_
from ....optim.grad_reduce import align_gradients
from ....optim.loss_scaler import DistributedGradScaler
from ....optim.master_weights import Weights
from ....optim.user_optimizer import check_elementwise, check_optimizer, names_by_parameter, repoint, warn_of_eps
from ....parallel.loss import vocab_parallel_loss
from ....parallel.stage import Stage
from ....precision.autocast import computing, widening
from ....precision.capabilities import has_native_fp16
from ....precision.fp16_emulation import emulate_fp16
from ....precision.policy import AMP_TYPE, LossScaling, Precision

__all__ = [
    "AmpCriterion",
    "AmpModel",
    "AmpOptimizer",
    "convert_to_amp",
    "convert_to_apex_amp",
    "convert_to_naive_amp",
    "convert_to_torch_amp",
]

Options = Mapping[str, Any]
Mode = AMP_TYPE | str | int | Precision | Options


@dataclass(frozen=True)
class _Surroundings:
    """What forward, criterion and backward of one model run in."""

    precision: Precision
    device: torch.device
    emulate: bool
    """fp16 products are computed in fp32 and rounded."""
    sharded: bool
    """The model has DTensors, whose cross-entropy may be over a sharded vocabulary."""

    @staticmethod
    def of(model: nn.Module, precision: Precision) -> _Surroundings:
        context = current_context()
        first = next(model.parameters(), None)
        device = first.device if first is not None else context.device if context else torch.device("cpu")
        wanted = context.config.emulate_fp16 if context else "auto"
        emulate = not has_native_fp16(device) if wanted == "auto" else wanted
        return _Surroundings(
            precision,
            device,
            emulate=emulate and precision.compute is torch.float16,
            sharded=any(isinstance(parameter, DTensor) for parameter in model.parameters()),
        )

    @contextmanager
    def enter(self) -> Iterator[None]:
        with (
            emulate_fp16(self.emulate),
            widening(self.precision, self.device.type),
            vocab_parallel_loss(self.sharded),
        ):
            yield


class AmpModel(Stage):
    """A model that computes in a mode: inputs are cast, floating-point outputs come back in fp32 at the least.

    :attr:`module` is the model that was given. On the earlier stages of the current context's pipeline, outputs stay
    in the compute dtype.
    """

    def __init__(self, model: nn.Module, surroundings: _Surroundings) -> None:
        context = current_context()
        super().__init__(
            model,
            surroundings.precision,
            surroundings.device,
            is_first=True,
            is_last=context is None or context.is_last_stage,
        )
        self._surroundings = surroundings

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        with self._surroundings.enter():
            return super().forward(*args, **kwargs)


class AmpCriterion(nn.Module):
    """A criterion that computes as the model does: under autocast, where the mode has one. :attr:`loss` is it."""

    def __init__(self, loss: Callable[..., Any], surroundings: _Surroundings) -> None:
        super().__init__()
        self.loss = loss
        self._surroundings = surroundings

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The criterion's loss."""
        precision, device = self._surroundings.precision, self._surroundings.device
        with self._surroundings.enter():
            if not precision.autocast:
                return self.loss(*args, **kwargs)
            with computing(precision, device.type):
                return self.loss(*args, **kwargs)


class AmpOptimizer(torch.optim.Optimizer):
    """An optimizer that scales losses, judges gradients with all ranks, and steps fp32 masters where the mode has them.

    Its attributes are those of the optimizer that was given, :attr:`optim`, so that schedulers take either. Every rank
    calls its methods in the same order.

    Attributes:
        optim: steps this rank's weights or masters.
        scaler: the :class:`~paramp.DistributedGradScaler`, disabled in modes that do not scale.
        precision: the mode.
        num_steps, num_skipped: steps made, and skipped for an overflow, so far.
    """

    def __init__(self, optim: torch.optim.Optimizer, weights: Weights, surroundings: _Surroundings) -> None:
        # Not torch's constructor: groups, state and hooks are those of ``optim`` (see __getattr__).
        self.optim = optim
        self.precision = surroundings.precision
        scaling = self.precision.scaling or LossScaling(enabled=False)
        self.scaler = DistributedGradScaler(surroundings.device, **asdict(scaling))
        self.num_steps = 0
        self.num_skipped = 0
        self._weights = weights
        self._surroundings = surroundings
        self._stepping = False
        self._spent = False  # the gradients have been stepped with
        self._found_inf: torch.Tensor | None = None  # of the gradients, once they are unscaled
        self._norm: float | None = None
        optim.register_step_pre_hook(self._check_caller)

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # not set yet
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles, which torch's optimizers restore by changing ``step`` of the whole class."""
        raise TypeError(
            "AmpOptimizer: it cannot be copied or pickled, as it belongs to its model's weights and hooks; save its "
            "state_dict(), and load that into what convert_to_amp returns"
        )

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by; 1 where losses are not scaled."""
        return self.scaler.get_scale()

    def backward(self, loss: torch.Tensor, retain_graph: bool | None = None) -> None:
        """Scale ``loss``, of one element, and run its backward. Gradients add up until :meth:`step`.

        The gradients of a step that was made are dropped first; :meth:`zero_grad` does it at another time.

        Raises:
            ValueError: ``loss`` is not of one element.
            RuntimeError: the gradients are unscaled already, by :meth:`clip_grad_norm`, and not stepped with.
        """
        if loss.numel() != 1:
            raise ValueError(f"loss: got a tensor of shape {tuple(loss.shape)}, expected one element; take its mean")
        self._begin()
        with self._surroundings.enter():
            plain = (loss.full_tensor() if isinstance(loss, DTensor) else loss).reshape(())
            wide = plain.to(torch.promote_types(plain.dtype, torch.float32))
            self.scaler.scale(wide).backward(retain_graph=retain_graph)

    def backward_by_grad(self, tensor: Any, grad: Any) -> None:
        """The backward of an earlier pipeline stage: from its output and the gradient that the next stage sent.

        That gradient carries the scale, which is the same on every rank.
        """
        self._begin()
        with self._surroundings.enter():
            torch.autograd.backward(tensor, grad)

    def _begin(self) -> None:
        if self._spent:
            self.zero_grad()
        if self._found_inf is not None:
            raise RuntimeError(
                "backward: the gradients are unscaled already, and a scaled one cannot be added; call step() or "
                "zero_grad() after clip_grad_norm, before the next backward"
            )

    @torch.no_grad()
    def clip_grad_norm(self, model: nn.Module | None, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Unscale the gradients and scale them down to ``max_norm``: the norm of the logical model, in fp32.

        Args:
            model: as in Colossal-AI; the norm is over all trained parameters of the model that was converted.
            max_norm: above 0. Do not call this to leave gradients as they are.
            norm_type: p of the p-norm, above 0; ``math.inf`` for the largest magnitude.

        Returns:
            The norm before clipping, 0-dim float32, equal on every rank; not finite on an overflow.

        Raises:
            ValueError: ``max_norm`` or ``norm_type`` not above 0, or plain parameters in a world of several ranks where
                nothing was launched, so that it is not known who holds copies.
        """
        for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
            if not value > 0:
                raise ValueError(f"{name}: got {value!r}, expected a number above 0; leave the call out not to clip")
        norm_weights = self._shares()
        gradients = self._unscaled()
        norm = total_norm(gradients, self._present(norm_weights), norm_type, self._surroundings.device).float()
        self._norm = float(norm)
        if gradients:
            torch._foreach_mul_(gradients, clip_coefficient(norm, max_norm))
        return norm

    clip_grad_norm_ = clip_grad_norm

    @torch.no_grad()
    def step(self, closure: None = None) -> StepResult:  # type: ignore[override]
        """Step, or skip the step on every rank if a gradient of any rank is not finite; then move the scale.

        Raises:
            RuntimeError: a closure, or nothing to step with since the last step.
        """
        if closure is not None:
            raise RuntimeError("step: a closure would run backwards that are not scaled; leave it out")
        if self._spent:
            raise RuntimeError("step: no backward since the last one; call backward(loss), or zero_grad() before yours")
        scale = self.scaler.get_scale()
        norm_weights = self._shares() if self.precision.log_num_zeros else None
        gradients = self._unscaled()
        assert self._found_inf is not None
        found_inf, zeros = self._found_inf, None
        if norm_weights is not None:
            zeros = round(_summed(count_zeros(gradients, self._present(norm_weights), found_inf.device)))
        overflow = bool(found_inf)
        if not overflow:
            self._stepping = True
            try:
                self.optim.step()
            finally:
                self._stepping = False
            self._weights.write_back()
        self.optim._opt_called = True  # type: ignore[attr-defined]  # skipped or not, schedulers come after it
        self._weights.drop_stepped_gradients()
        self.scaler.update_from_flag(found_inf)
        self.num_steps += not overflow
        self.num_skipped += overflow
        result = StepResult([scale, float(overflow), self._norm, zeros, None], with_zeros=zeros is not None)
        self._spent, self._found_inf, self._norm = True, None, None
        if self.precision.verbose and self.scaler.get_scale() != scale and _is_main():
            print(f"paramp: the loss scale goes from {scale:g} to {self.scaler.get_scale():g}", flush=True)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of weights and masters; with ``set_to_none=False`` those of weights become zeros."""
        gradients = [parameter.grad for parameter in self._weights.parameters]
        self._weights.zero_grad()
        if not set_to_none:
            for parameter, gradient in zip(self._weights.parameters, gradients, strict=True):
                parameter.grad = None if gradient is None else torch.zeros_like(gradient)
        self._spent, self._found_inf, self._norm = False, None, None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the parameters are chosen when the optimizer is converted."""
        raise RuntimeError("add_param_group: make the groups, frozen parameters included, before convert_to_amp")

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: ``optimizer``, ``scaler``, and ``masters`` by the model's names. Resuming is bit-equal."""
        return {
            "optimizer": self.optim.state_dict(),
            "scaler": self.scaler.state_dict(),
            "masters": self._weights.masters(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` returned on the same rank of the same layout and mode.

        Raises:
            ValueError: a part is missing, or belongs to another rank, layout or mode.
        """
        missing = {"optimizer", "scaler", "masters"} - state_dict.keys()
        if missing:
            raise ValueError(
                f"state_dict: no {sorted(missing)[0]!r} in it; pass what AmpOptimizer.state_dict() returned"
            )
        self._weights.load_masters(state_dict["masters"])
        self.optim.load_state_dict(state_dict["optimizer"])
        self.scaler.load_state_dict(state_dict["scaler"])
        self.zero_grad()

    def _check_caller(self, *_: Any) -> None:
        if not self._stepping:
            raise RuntimeError(
                "optimizer.step(): the optimizer was converted; call step() of what convert_to_amp returned, which "
                "first unscales and judges the gradients"
            )

    def _unscaled(self) -> list[torch.Tensor]:
        """The gradients of the stepped tensors, plain and unscaled; the first call agrees on whether all are finite."""
        if self._found_inf is None:
            parameters = self._weights.parameters
            for parameter in parameters:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
            device = self._surroundings.device
            found_inf = torch.zeros((), device=device)
            unscale_and_check_(align_gradients(parameters), torch.ones_like(found_inf), found_inf)
            gradients = self._weights.load_gradients()
            unscale_and_check_(gradients, torch.tensor(1.0 / self.scaler.get_scale(), device=device), found_inf)
            self.scaler.agree_(found_inf)
            self._found_inf = found_inf
        return self._present([stepped.grad for stepped in self._weights.stepped])

    def _present(self, values: Sequence[Any]) -> list[Any]:
        """Of ``values``, one for each stepped tensor, those where there is a gradient."""
        pairs = zip(values, self._weights.stepped, strict=True)
        return [value for value, stepped in pairs if stepped.grad is not None]

    def _shares(self) -> list[float]:
        context = current_context()
        return [norm_weight(parameter, context) for parameter in self._weights.parameters]


def convert_to_amp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Callable[..., Any] | None,
    mode: Mode,
    amp_config: Options | None = None,
) -> tuple[AmpModel, AmpOptimizer, AmpCriterion | None]:
    """Wrap ``model``, ``optimizer`` and ``criterion`` for a mode of precision, for a loop without an engine.

    The model's parameters are cast to the mode's weight dtype, and the optimizer's groups re-pointed at them or at
    their fp32 masters, which are made of the values before the cast. Tensor parallelism is applied before: parameters
    may be DTensors. ``DistributedDataParallel`` is applied after, to the model that is returned.

    Args:
        model: on the device on which it runs.
        optimizer: a fresh one over the model's parameters; it belongs to the :class:`AmpOptimizer` from here on.
        criterion: called with whatever the wrapped one is called with. None stays None.
        mode: an ``AMP_TYPE``, or whatever :meth:`paramp.Precision.parse` takes.
        amp_config: the options of that mode, as in ``fp16=dict(mode=..., ...)``.

    Raises:
        ConfigError: no such mode or option, or the model and the optimizer cannot be converted, or are already.
    """
    precision = _parse(mode, amp_config)
    _check(model, optimizer, criterion, precision)
    names_of = names_by_parameter(model)
    check_optimizer(optimizer, names_of)
    surroundings = _Surroundings.of(model, precision)
    weights = Weights(model, precision)
    check_elementwise(optimizer, weights)
    repoint(optimizer, names_of, weights)
    warn_of_eps(optimizer)
    weights.follow_loads(model)
    return (
        AmpModel(model, surroundings),
        AmpOptimizer(optimizer, weights, surroundings),
        None if criterion is None else AmpCriterion(criterion, surroundings),
    )


def convert_to_torch_amp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Callable[..., Any] | None = None,
    amp_config: Options | None = None,
) -> tuple[AmpModel, AmpOptimizer, AmpCriterion | None]:
    """:func:`convert_to_amp` with ``AMP_TYPE.TORCH``: fp32 weights, autocast to fp16."""
    return convert_to_amp(model, optimizer, criterion, AMP_TYPE.TORCH, amp_config)


def convert_to_naive_amp(
    model: nn.Module, optimizer: torch.optim.Optimizer, amp_config: Options | None = None
) -> tuple[AmpModel, AmpOptimizer]:
    """:func:`convert_to_amp` with ``AMP_TYPE.NAIVE``: all in fp16, fp32 masters. It leaves criteria alone."""
    return convert_to_amp(model, optimizer, None, AMP_TYPE.NAIVE, amp_config)[:2]


def convert_to_apex_amp(
    model: nn.Module, optimizer: torch.optim.Optimizer, amp_config: Options | None = None
) -> tuple[AmpModel, AmpOptimizer]:
    """:func:`convert_to_amp` with ``AMP_TYPE.APEX``, whose ``opt_level`` is O1 by default. It leaves criteria alone."""
    return convert_to_amp(model, optimizer, None, AMP_TYPE.APEX, amp_config)[:2]


def _parse(mode: Mode, amp_config: Options | None) -> Precision:
    if isinstance(mode, (Precision, Mapping)):
        if amp_config:
            raise ConfigError(f"amp_config: got {dict(amp_config)!r} with a mode that has its options; put them there")
        return Precision.parse(mode)
    options = {} if amp_config is None else amp_config
    if not isinstance(options, Mapping):
        raise ConfigError(f"amp_config: got {options!r}, expected a dict of the mode's options, or None")
    if options.get("mode", mode) != mode:
        raise ConfigError(f"amp_config: its mode {options['mode']!r} is not the one given, {mode!r}; leave one out")
    # An AMP_TYPE has options with defaults of its own; the name of a mode is the mode.
    return (
        Precision.parse({**options, "mode": mode}) if options or isinstance(mode, AMP_TYPE) else Precision.parse(mode)
    )


WRAPPERS = (DistributedDataParallel, DataParallel)


def _check(model: Any, optimizer: Any, criterion: Any, precision: Precision) -> None:
    for name, value, kind, what in (
        ("model", model, nn.Module, "an nn.Module"),
        ("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer over the model's parameters"),
    ):
        if not isinstance(value, kind):
            raise ConfigError(f"{name}: got {type(value).__name__}, expected {what}")
        if isinstance(value, (AmpModel, AmpOptimizer)):
            raise ConfigError(f"{name}: it is converted already; convert each model and optimizer once")
    if criterion is not None and not callable(criterion):
        raise ConfigError(f"criterion: got {criterion!r}, expected a function of output and target, or None")
    if precision.float8 is not None:
        raise ConfigError(f"mode: {precision.name!r} replaces layers of the model; use it with paramp.initialize")
    for name, module in model.named_modules():
        if isinstance(module, WRAPPERS):
            raise ConfigError(
                f"model: {name or 'it'} is wrapped in {type(module).__name__}, which would go on with the old "
                "parameters; convert first, and wrap the model that is returned"
            )
        if isinstance(module, FSDPModule) and precision.weights is not torch.float32:
            raise ConfigError(
                f"model: {name or 'it'} is sharded by fully_shard, whose parameters cannot be replaced by "
                f"{precision.weights} ones; use a mode with fp32 weights, such as '16-mixed'"
            )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ConfigError(f"model: {name!r} is on the meta device; give it values first, or use paramp.initialize")


def _summed(part: torch.Tensor) -> float:
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(part)
    return float(part)


def _is_main() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
