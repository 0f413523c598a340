"""What the optimizer steps: for each weight a local tensor, its fp32 master where the mode has masters.

The model computes with its own parameters, plain or DTensor, in the mode's weight dtype. The optimizer holds one
plain local tensor for each of them:

    without masters    a view of the weight's local shard: stepping it is stepping the weight
    with masters       an fp32 copy of it, made before the weight was rounded to half

so optimizers never see DTensors, and their foreach and fused paths work for any mix of shards and replicas.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .precision import Precision
from .shards import local, wrap
from .surgery import cast_parameters

__all__ = ["Weights"]


class Weights:
    """The trained parameters of one rank, and the tensors that the optimizer steps in their place.

    Attributes:
        names, parameters: the model's own, under the whole model's names.
        stepped: what the optimizer steps, in the same order; plain and local.
    """

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        """``module`` holds full-precision weights on their device; it is cast to the mode's dtype here."""
        self.masters = precision.masters
        originals = {name: local(parameter).detach() for name, parameter in module.named_parameters()}
        cast_parameters(module, precision.weights)
        trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self.names = [name for name, _ in trained]
        self.parameters = [parameter for _, parameter in trained]
        self.stepped = [
            self._stepped(parameter, originals[name])
            for name, parameter in zip(self.names, self.parameters, strict=True)
        ]

    def _stepped(self, parameter: nn.Parameter, original: torch.Tensor) -> nn.Parameter:
        if self.masters:
            return nn.Parameter(original.to(torch.float32, copy=True))
        return nn.Parameter(local(parameter).detach()) if isinstance(parameter, DTensor) else parameter

    def by_name(self) -> Mapping[str, nn.Parameter]:
        return dict(zip(self.names, self.stepped, strict=True))

    @torch.no_grad()
    def load_gradients(self) -> list[torch.Tensor]:
        """Hand each weight's gradient to its stepped tensor (in fp32 for a master); those that there are."""
        for parameter, stepped in zip(self.parameters, self.stepped, strict=True):
            if parameter.grad is None:
                stepped.grad = None
            elif stepped is not parameter:
                stepped.grad = local(parameter.grad).to(stepped.dtype)
        return [stepped.grad for stepped in self.stepped if stepped.grad is not None]

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the stepped masters to the weights. Without masters they share storage already."""
        if self.masters and self.stepped:
            torch._foreach_copy_([local(parameter) for parameter in self.parameters], list[torch.Tensor](self.stepped))

    def zero_grad(self) -> None:
        """Drop the gradients of weights and masters alike."""
        for parameter, stepped in zip(self.parameters, self.stepped, strict=True):
            parameter.grad = None
            stepped.grad = None

    def drop_stepped_gradients(self) -> None:
        """Free the masters' fp32 gradients, which nobody reads after the step."""
        if self.masters:
            for stepped in self.stepped:
                stepped.grad = None

    def full_precision(self) -> dict[str, torch.Tensor]:
        """Each trained weight as the optimizer knows it, a DTensor where the weight is one."""
        full: dict[str, torch.Tensor] = {}
        for name, parameter, stepped in zip(self.names, self.parameters, self.stepped, strict=True):
            value = stepped.detach()
            full[name] = wrap(value, parameter) if isinstance(parameter, DTensor) else value
        return full
