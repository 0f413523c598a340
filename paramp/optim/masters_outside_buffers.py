"""fp32 masters of single parameters, plain or DTensor, for loops without flat buffers.

They are those of :mod:`paramp.compat` and :mod:`paramp.integrations`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..base.dtensor import is_dtensor, local
from ..base.torch_internals import expect
from .masters import Masters, follow

expect("torch._foreach_copy_")


class ParameterMasters(Masters):
    """A parameter, and what an optimizer steps in its place: its master, another tensor, or the parameter itself."""

    def take_gradient(self) -> None:
        """Set the gradient of the stepped tensor to the weight's, in its dtype; None if there is none."""
        gradient = self.weight.grad
        if gradient is None:
            self.stepped.grad = None
        elif self.stepped is not self.weight:
            given = gradient if is_dtensor(self.stepped) else local(gradient)
            self.stepped.grad = given.detach().to(self.stepped.dtype)


@torch.no_grad()
def follow_changes(parameters: Iterable[ParameterMasters]) -> None:
    """Update masters whose weights were changed in place since the last rounding; call it before masters are read."""
    for one in parameters:
        if one.has_master:
            follow(local(one.weight).detach(), local(one.stepped).detach())


@torch.no_grad()
def write_back(parameters: Iterable[ParameterMasters]) -> None:
    """Round the stepped masters to their weights. Without masters they share storage already."""
    pairs = [(local(one.weight), local(one.stepped)) for one in parameters if one.has_master]
    if pairs:
        rounded, masters = zip(*pairs, strict=True)
        torch._foreach_copy_(list[torch.Tensor](rounded), list[torch.Tensor](masters))


def drop_gradients(parameters: Iterable[ParameterMasters]) -> None:
    """Free the masters' fp32 gradients, which are not read after the step."""
    for one in parameters:
        if one.has_master:
            one.stepped.grad = None
