"""Gradients that are not in their flat buffers: of other placements than their parameters, or set by the user.

Where a backward gives a gradient other placements than its parameter's, as under sequence parallelism, it accumulates
outside of the buffer until the window ends. Which parameters have such gradients the first window shows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

from ..base.collectives import sum_
from ..base.dtensor import is_dtensor, local, version
from ..base.torch_internals import expect
from ..distributed.context import ParallelContext
from ..scaling.complete_and_unscale_gradients import align_gradients, unscale_and_check_
from .flat_buffer import FlatParam

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

expect("torch._foreach_copy_")


class OutsideGradients:
    """The gradients of a rank that are not in their buffers.

    Attributes:
        mismatched: the parameters whose gradients have other placements than they.
        hooks: those that find them in the first window.
    """

    def __init__(self, params: Sequence[FlatParam], zeros: dict[FlatParam, int]) -> None:
        """``params``: where to look for other placements; ``zeros``: those of the :class:`FlatGradients`."""
        self._params, self._zeros = params, zeros
        self._noted: dict[FlatParam, tuple[torch.Tensor, int]] = {}
        self.mismatched: list[FlatParam] = []
        self.hooks = [
            param.parameter.register_hook(functools.partial(_find_mismatch, param, zeros, self.mismatched))
            for param in params
            if is_dtensor(param.parameter)
        ]

    def stop_watching(self, context: ParallelContext) -> None:
        """Remove the hooks. A collective of the data ranks: what one of them has found holds on all.

        Else a rank whose batches have not used a parameter yet would reduce other buffers in its backward (ZeRO-1).
        """
        while self.hooks:
            self.hooks.pop().remove()
        found = torch.tensor([float(param.placement_mismatch) for param in self._params], device=context.device)
        sum_([found], context.batch_axis.group)
        for param, number in zip(self._params, found.tolist(), strict=True):
            if number:
                _note_mismatch(param, self.mismatched)

    def snapshot(self) -> None:
        """Record the gradients that stay outside until the window ends, for :meth:`is_unchanged`."""
        kept = ((param, param.parameter.grad) for param in self.mismatched)
        self._noted = {param: (grad, version(grad)) for param, grad in kept if grad is not None}

    def is_unchanged(self, param: FlatParam) -> bool:
        """Whether the gradient is in its buffer, or there is none, or it is that of :meth:`snapshot`, unchanged."""
        noted, given = self._noted.get(param, (None, 0)), param.parameter.grad
        return given is None or given is param.gradient or (given is noted[0] and version(given) == noted[1])

    @torch.no_grad()
    def take_back(self, params: Iterable[FlatParam]) -> None:
        """Copy gradients that the user replaced, or set to None, back to their buffers, which ZeRO reduces.

        Those of ``params`` that are in their buffers stay as they are.
        """
        for param in params:
            given = param.parameter.grad
            if given is param.gradient or (param.placement_mismatch and given is not None):
                continue
            if given is None:
                if param.version != self._zeros[param]:  # the buffer has values, but the user has dropped them
                    param.local_gradient.zero_()
                    self._zeros[param] = param.version
                if param.placement_mismatch:
                    continue
            elif is_dtensor(given) and given.placements != cast("DTensor", param.parameter).placements:
                continue  # collect() redistributes it to the parameter's placements, together with others
            else:
                param.local_gradient.copy_(local(given).to_dense())
            param.parameter.grad = param.gradient

    def collect(self, params: Iterable[FlatParam], found_inf: torch.Tensor, reduce_dtype: torch.dtype | None) -> None:
        """Copy the gradients of ``params`` into their buffers, complete over tensor ranks, summed in ``reduce_dtype``.

        ``found_inf``: as of :meth:`FlatGradients.collect`.
        """
        arrived = [param for param in params if param.parameter.grad is not None]
        if arrived:
            whole = align_gradients([param.parameter for param in arrived], reduce_dtype)
            unscale_and_check_(whole, torch.ones_like(found_inf), found_inf)
            buffered = [param.local_gradient for param in arrived]
            torch._foreach_copy_(buffered, [local(cast(torch.Tensor, param.parameter.grad)) for param in arrived])
            # In a dispatch mode, as of a FLOP counter, torch's does not, and the gradients would count as absent.
            torch.autograd.graph.increment_version(buffered)


def _find_mismatch(
    param: FlatParam, zeros: Mapping[FlatParam, int], mismatched: list[FlatParam], gradient: torch.Tensor
) -> None:
    """The hook that detects gradients whose placements differ from their parameter's, before they are accumulated.

    It has no reference to the :class:`FlatGradients`, because the garbage collector does not traverse hooks.
    """
    if is_dtensor(gradient) and gradient.placements != cast("DTensor", param.parameter).placements:
        _note_mismatch(param, mismatched)
        if param.parameter.grad is param.gradient and param.version == zeros[param]:  # nothing was accumulated there
            param.parameter.grad = None


def _note_mismatch(param: FlatParam, mismatched: list[FlatParam]) -> None:
    if not param.placement_mismatch:
        param.placement_mismatch = True
        mismatched.append(param)
