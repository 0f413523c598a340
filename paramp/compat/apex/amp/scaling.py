"""``scale_loss``: it scales a loss, and unscales the gradients after the backward."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ....base.values_checked_by_type import is_integer
from ....precision.compute_context import ComputeContext
from .errors import AmpError
from .optimizers import ApexOptimizer
from .session import LossScaler, Session, state
from .weight_and_gradient import AmpWeight, take_up_changes, unscale_


def scale_loss(
    loss: torch.Tensor | None,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[Any]:
    """``with scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()``.

    When the block ends, the gradients of its backward are unscaled and added to those of earlier losses, and all ranks
    agree whether any gradient was not finite: if so, the scale of this loss backs off, and the next ``step()`` of each
    of ``optimizers`` is skipped. Every rank has to call it with the same optimizers in the same order.

    Args:
        loss: a floating-point tensor. None on a pipeline stage without a loss; the block then runs the backward of the
            stage's output with the gradient that it received, which has the same scale.
        optimizers: all whose parameters get gradients from this loss; one, or an iterable of them.
        loss_id: the index of the scale, below the ``num_losses`` of ``initialize``.
        model: no effect, as in Apex.
        delay_unscale: leave the gradients scaled, so that another backward can accumulate into them; the last one
            before the step unscales and checks them all. Needed in ``no_sync()`` of DistributedDataParallel, which
            averages only the weights' gradients that exist at its last backward.
        delay_overflow_check: unscale, but agree only when the next ``scale_loss`` of this ``loss_id`` ends, or at the
            step.

    Returns:
        A context that yields the scaled loss, in fp32 at least; None for None. After ``initialize(enabled=False)`` it
        yields ``loss`` itself.

    Raises:
        AmpError: ``initialize`` was not called, an optimizer was not passed to it, or ``loss_id`` is invalid.
    """
    session = state.require("scale_loss")
    if session is None:
        return nullcontext(loss)
    count = len(session.loss_scalers)
    if not is_integer(loss_id) or not 0 <= loss_id < count:
        raise AmpError(
            f"amp.scale_loss: got loss_id {loss_id!r}, expected an integer from 0 to {count - 1}, below the num_losses "
            "of amp.initialize"
        )
    return _scaled(session, session.loss_scalers[loss_id], loss, optimizers, delay_unscale, delay_overflow_check)


@contextmanager
def _scaled(
    session: Session,
    scaler: LossScaler,
    loss: torch.Tensor | None,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    delay_unscale: bool,
    delay_overflow_check: bool,
) -> Iterator[Any]:
    """:func:`scale_loss` in a session."""
    if loss is not None and not (isinstance(loss, torch.Tensor) and loss.is_floating_point()):
        raise AmpError(f"amp.scale_loss: got a loss {loss!r}, expected a floating-point tensor, or None")
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    stepping = [ApexOptimizer.of(optimizer, session) for optimizer in given]
    weights = list(dict.fromkeys(weight for optimizer in stepping for weight in optimizer.weights))
    found_inf = torch.zeros((), device=session.device)
    scale = scaler.loss_scale()
    has_new = session.has_new()
    if has_new or not all(weight.checked for weight in weights):
        take_up_changes(weights, session.current_ids(), has_new=has_new)
    for weight in weights:
        weight.check_gradient()
    others = [one for one in {*session.weights.values()}.difference(weights) if one.has_taken_gradient]
    unscaled_others = _unscale_others(weights, scale, found_inf)
    with _backward(session, weights, scale):
        yield None if loss is None else loss.to(torch.promote_types(loss.dtype, torch.float32)) * scale
    for weight in others:
        weight.note_gradient()  # of another optimizer: its master does not get what this backward has added there
    if not delay_unscale:
        unscale_(weights, scale, found_inf)
    if any(weight.is_incomplete for weight in weights):
        found_inf.fill_(1.0)  # this rank's step will raise, so the others have to skip theirs
    if not delay_unscale or unscaled_others:
        scaler.add_flag(found_inf, stepping)
    if not delay_unscale and not delay_overflow_check:
        scaler.decide()


@contextmanager
def _backward(session: Session, weights: Sequence[AmpWeight], scale: float) -> Iterator[None]:
    """The context of a backward whose loss is multiplied by ``scale``.

    If it fails, the old gradients are restored; delayed ones are lost, and ``step()`` raises until ``zero_grad()``.
    """
    for weight in weights:
        weight.begin(scale)
    try:
        # The backward also needs the forward's contexts: for its fp16 products, and for recomputation in checkpointing.
        with ComputeContext(session.precision, session.device).enter():
            yield
    except BaseException:
        for weight in weights:
            weight.give_up()
        raise


def _unscale_others(weights: Iterable[AmpWeight], scale: float, found_inf: torch.Tensor) -> bool:
    """Unscale delayed gradients with another scale than ``scale``, so that scales do not mix; True if there are any."""
    others: dict[float, list[AmpWeight]] = defaultdict(list)
    for weight in weights:
        if weight.scale is not None and weight.scale != scale:
            others[weight.scale].append(weight)
    for other, delayed in others.items():
        unscale_(delayed, other, found_inf)
    return bool(others)
