"""The user's criterion, or the loss in the model's own output, and checks of what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref

import torch

from ..base.dtensor import full_tensor, is_dtensor
from ..base.trees import map_tensors
from ..parallel.batches import Batch, loss_in
from ..precision.autocast import moved
from .compute_context import ComputeContext
from .count_unit import as_count

Loss = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""The mean over a microbatch, or ``(sum, count)``."""
Criterion = Callable[..., Loss]
OwnLoss = Callable[[Any, Batch], Loss | None]
"""The loss in a model's output for a microbatch; None if it has none."""


class CheckedCriterion:
    """The user's criterion, else the model's own loss, with checks of the losses, in the context ``compute``."""

    def __init__(self, criterion: Criterion | None, own_loss: OwnLoss, compute: ComputeContext) -> None:
        self._criterion = criterion
        self._own_loss = own_loss
        self.compute = compute
        self._found: tuple[ReferenceType[torch.Tensor], torch.Tensor] | None = None

    @property
    def is_given(self) -> bool:
        """Whether ``initialize`` got a criterion."""
        return self._criterion is not None

    def of(self, output: Any, microbatch: Batch) -> Loss:
        """The loss of a microbatch, from the model's output and, if there is one, the target; as :meth:`__call__`."""
        if self._criterion is not None:
            return self(*((output,) if microbatch.target is None else (output, microbatch.target)))
        return _found(self._own_loss(output, microbatch))

    def find_count(self, output: Any, batch: Batch) -> None:
        """Remember the count of the model's own loss in ``output``, for :meth:`counted`; not the loss."""
        loss, self._found = loss_in(output), None
        if self._criterion is None and isinstance(loss, torch.Tensor):
            counted = self._own_loss(output, batch)
            if isinstance(counted, tuple):
                self._found = ref(loss), counted[1]

    def counted(self, loss: Any) -> Any:
        """``loss``; as ``(sum, count)`` if it is the mean in the output that :meth:`find_count` was given last."""
        if self._found is None or not isinstance(loss, torch.Tensor) or self._found[0]() is not loss:
            return loss
        count = self._found[1]
        return loss * count.to(loss.device), count

    def __call__(self, *args: Any, **kwargs: Any) -> Loss:
        """The loss of this rank's output and target, as plain 0-dim tensors; not reduced over ranks.

        Tensors in ``args`` and ``kwargs`` are moved to the device.

        Raises:
            ValueError: there is no criterion, or it returned neither one element nor ``(sum, count)``.
        """
        if self._criterion is None:
            return _found(self.counted(loss_in(args[0] if args else None)))
        args, kwargs = map_tensors(lambda tensor: moved(tensor, self.compute.device), (args, kwargs))
        with self.compute.sharded_loss():
            return _checked(self._criterion(*args, **kwargs))


def _found(loss: Any) -> Loss:
    """The model's own ``loss``, as :func:`_checked` returns it; a ValueError if it is None."""
    if loss is None:
        raise ValueError(
            "criterion: initialize got none, and the model's output has no loss; pass one as its third argument, "
            "or return a mapping or dataclass with a loss"
        )
    return _checked(loss)


def _checked(loss: Any) -> Loss:
    """``loss`` as plain 0-dim tensors, or a ValueError unless it is one element, or ``(sum, count)``.

    A count that is no number stays as it is, for :class:`CountUnit` to raise.
    """
    parts, expected = ([*loss], 2) if isinstance(loss, (tuple, list)) else ([loss], 1)
    if len(parts) != expected or not isinstance(parts[0], torch.Tensor) or parts[0].numel() != 1:
        raise ValueError(
            "criterion: expected a tensor of one element, or (sum, count) of two, got "
            + ", ".join(str(tuple(part.shape)) if isinstance(part, torch.Tensor) else repr(part) for part in parts)
        )
    value = full_tensor(parts[0]).reshape(()) if is_dtensor(parts[0]) or parts[0].ndim else parts[0]
    return (value, as_count(full_tensor(parts[1]))) if expected == 2 else value
