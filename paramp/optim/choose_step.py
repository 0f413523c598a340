"""The step of an optimizer: fused where torch has kernels for it, else its own, after a flag is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from ..base.dtensor import refusing_changes
from ..base.errors import ConfigError
from .flat_buffer import FlatParam
from .flat_weights import OptimizerWeights
from .fused_step import KERNELS, FusedStep, num_step_hooks
from .matrices.matrix_step import MatrixStep
from .user_changes.refused_changes import changed_in_step, check_stepped, is_step_replaced
from .user_optimizer import ONLY_THE_ENGINE_STEPS, NarrowState, StepGuard, SteppedInPlace, check_narrow_state

COMPLEX = "it has complex parameters"


def why_not_fused(optimizer: torch.optim.Optimizer) -> str | None:
    """Why ``optimizer`` cannot step in fused kernels over flat buffers; None if it can."""
    if type(optimizer) not in KERNELS:
        return f"{type(optimizer).__name__} is not one of {', '.join(kind.__name__ for kind in KERNELS)}"
    if num_step_hooks(optimizer):
        return "it has step hooks"
    if is_step_replaced(optimizer):
        return "its step() is replaced"
    for group in optimizer.param_groups:
        if any(tensor.is_complex() for tensor in group["params"]):
            return COMPLEX
        if group.get("differentiable") or group.get("capturable"):
            return "it is differentiable or capturable"
        if group.get("fused") is False or group.get("foreach"):
            return "fused=False or foreach=True is set"
        if group.get("dampening"):
            return "its first step differs from the others, because of its dampening"
    return None


def choose_step(
    weights: OptimizerWeights,
    fused: Callable[[torch.optim.Optimizer, OptimizerWeights], FusedStep] | None = None,
) -> Step:
    """The step of an optimizer, whose groups hold the stepped tensors of ``weights``.

    ``fused`` makes the step of an optimizer that has fused kernels; None: :class:`FusedStep`.

    Raises:
        ConfigError: it cannot use fused kernels, but the masters are remainders, or weights are rounded
            stochastically, or its state cannot be stored in bfloat16, or its own step would miss its weights.
    """
    optimizer = weights.optimizer
    reason = why_not_fused(optimizer)
    if any(param.parameter.is_complex() for param in weights.params):  # of which some ranks have no part under ZeRO
        reason = reason or COMPLEX
    if reason is None:
        return (fused or FusedStep)(optimizer, weights)
    for setting in (buffer.masters.needs_fused_step for buffer in weights.buffers):
        if setting is not None:
            raise ConfigError(
                f"{setting}, which needs torch's AdamW, Adam or SGD in fused kernels, but for the optimizer {reason}; "
                "leave it out"
            )
    if weights.why_missed is not None:
        raise ConfigError(weights.why_missed)
    state: AbstractContextManager[None] = nullcontext()
    if weights.precision.optimizer_state == "bf16":
        check_narrow_state(optimizer, weights.precision, weights.device, reason)
        state = NarrowState(optimizer, weights.random_bits())
    return PlainStep(optimizer, weights, state) if weights.exchange is None else MatrixStep(weights, state)


class PlainStep:
    """Any other optimizer, by its own ``step()``, within ``state``. The host reads whether to skip it, and so waits."""

    calls_optimizer = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, weights: OptimizerWeights, state: AbstractContextManager[None]
    ) -> None:
        self._optimizer = optimizer
        self._weights = weights
        self._state = state
        self._in_place = SteppedInPlace(optimizer, weights.by_name())
        self._stepped = weights.stepped()

    def __call__(self, divisor: torch.Tensor, skip: torch.Tensor, absent: Sequence[FlatParam]) -> None:
        """As :meth:`FusedStep.__call__`."""
        check_stepped(self._optimizer, self._stepped)
        if bool(skip):
            self._weights.changes.postpone()
            return
        for param, stepped in self._weights.pairs():
            gradient = param.stepped_gradient.view(stepped.shape)
            if gradient.dtype is stepped.dtype and gradient.dtype.itemsize >= 4:
                gradient.div_(divisor)
            else:  # in half precision the scale may overflow
                exact = gradient.float().div(divisor)
                gradient = gradient.copy_(exact) if gradient.dtype is stepped.dtype else exact.to(stepped.dtype)
            if param in absent:
                stepped.grad = None
            elif stepped is not param.parameter:
                stepped.grad = gradient
        if self._weights.changes.due:
            self._weights.follow_changes()
        with self._state, refusing_changes(self._weights.followed, changed_in_step):
            self._optimizer.step()
        for param, stepped in self._weights.pairs():
            if stepped is not param.parameter:
                stepped.grad = None
        self._in_place.check()
        self._weights.write_back()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A context in which the optimizer changes outside of a step what it steps; then the weights follow.

        Under ZeRO every data rank has to enter it.
        """
        self._weights.follow_changes()
        with self._state:
            yield
        self._in_place.check()
        self._weights.write_back()

    def state_loaded(self) -> None:
        """No action: nothing here depends on the optimizer's state."""


Step = FusedStep | PlainStep | MatrixStep
"""The step of one of an engine's optimizers."""


def guarding(optimizer: torch.optim.Optimizer, update: Step) -> AbstractContextManager[None]:
    """A context for ``update``, outside of which the own step of ``optimizer`` is an error.

    To be called after :func:`choose_step`, which looks for the user's hooks.
    """
    changing = nullcontext if isinstance(update, FusedStep) else update.changing
    guard = StepGuard(optimizer, ONLY_THE_ENGINE_STEPS, changing)
    return guard if update.calls_optimizer else nullcontext()
