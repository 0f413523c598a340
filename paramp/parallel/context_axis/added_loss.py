"""Losses of the tokens that each rank of a context axis has, added up over its ranks."""

from __future__ import annotations

from typing import Any, cast

import torch

from .sequence_axis import SequenceAxis


def added(loss: torch.Tensor, axis: SequenceAxis) -> torch.Tensor:
    """The sum of ``loss`` over the ranks, differentiable; as for :meth:`SequenceAxis.join`, gradients are averaged
    later."""
    return cast(torch.Tensor, _AddedLoss.apply(loss, axis))


class _AddedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, axis: SequenceAxis) -> torch.Tensor:
        ctx.axis = axis
        return axis.summed(loss)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient * ctx.axis.num_averaged, None
