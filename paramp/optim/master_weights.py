"""What the optimizer steps: for each weight a local tensor, its fp32 master where the mode has masters.

The model computes with its own parameters, plain or DTensor, in the mode's weight dtype. The optimizer holds one
plain local tensor for each of them:

    without masters    a view of the weight's local shard: stepping it is stepping the weight
    with masters       an fp32 copy of it, made before the weight was rounded to half

so optimizers never see DTensors, and their foreach and fused paths work for any mix of shards and replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..base.dtensor import local, wrap
from ..base.module_surgery import cast_parameters
from ..precision.policy import Precision

__all__ = ["Weights", "check_frozen", "check_masters", "follow", "install_follower", "trained_and_frozen"]


class Weights:
    """The trained parameters of one rank, and the tensors that the optimizer steps in their place.

    Attributes:
        names, parameters: the model's own, under the whole model's names.
        stepped: what the optimizer steps, in the same order; plain and local.
    """

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        """``module`` holds full-precision weights on their device; it is cast to the mode's dtype here."""
        originals = {
            name: local(parameter).detach() for name, parameter in module.named_parameters() if precision.masters
        }
        cast_parameters(module, precision.weights, keep_batchnorm_fp32=precision.keep_batchnorm_fp32)
        trained, self._frozen = trained_and_frozen(module)
        self.names = [name for name, _ in trained]
        self.parameters = [parameter for _, parameter in trained]
        self.stepped = [
            self._stepped(parameter, originals.pop(name, None))
            for name, parameter in zip(self.names, self.parameters, strict=True)
        ]

        self._with_masters = [
            (parameter, stepped)
            for parameter, stepped in zip(self.parameters, self.stepped, strict=True)
            if parameter.dtype is not stepped.dtype
        ]
        self._master_of = dict(self._with_masters)

    def _stepped(self, parameter: nn.Parameter, original: torch.Tensor | None) -> nn.Parameter:
        if original is not None and parameter.dtype is not torch.float32:
            return nn.Parameter(original.to(torch.float32))  # nobody else has it any more, if it was fp32
        return nn.Parameter(local(parameter).detach()) if isinstance(parameter, DTensor) else parameter

    def by_name(self) -> Mapping[str, nn.Parameter]:
        return dict(zip(self.names, self.stepped, strict=True))

    def masters(self) -> dict[str, torch.Tensor]:
        """The fp32 masters by the whole model's names, sharing storage: this rank's part of the state to save."""
        pairs = zip(self.names, self.parameters, self.stepped, strict=True)
        return {name: stepped.detach() for name, parameter, stepped in pairs if parameter.dtype is not stepped.dtype}

    @torch.no_grad()
    def load_masters(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Take up what :meth:`masters` returned, and round it to the weights.

        Raises:
            ValueError: other names or shapes than this rank's.
        """
        own = self.masters()
        check_masters(masters, own)
        for name, master in own.items():
            master.copy_(masters[name])
        self.write_back()

    def follow_loads(self, model: nn.Module) -> None:
        """Let masters follow weights that are loaded into ``model`` or into any module in it."""
        if self._with_masters:
            install_follower(model, self)

    @torch.no_grad()
    def follow_weights(self, weights: Iterable[nn.Parameter]) -> None:
        """Give the masters of those ``weights`` that were changed from outside, by loading them, their values.

        A master that rounds to its weight stays as it is, so that weights and masters may be loaded in any order.
        """
        for weight in weights:
            master = self._master_of.get(weight)
            if master is not None:
                follow(local(weight), master)

    @torch.no_grad()
    def load_gradients(self) -> list[torch.Tensor]:
        """Hand each weight's gradient to its stepped tensor (in fp32 for a master); those that there are.

        Raises:
            RuntimeError: a parameter that was frozen when the optimizer was taken over has a gradient.
        """
        check_frozen(self._frozen)
        for parameter, stepped in zip(self.parameters, self.stepped, strict=True):
            if parameter.grad is None:
                stepped.grad = None
            elif stepped is not parameter:
                stepped.grad = local(parameter.grad).to(stepped.dtype)
        return [stepped.grad for stepped in self.stepped if stepped.grad is not None]

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the stepped masters to the weights. Without masters they share storage already."""
        if self._with_masters:
            weights, masters = zip(*self._with_masters, strict=True)
            torch._foreach_copy_([local(weight) for weight in weights], list[torch.Tensor](masters))

    def zero_grad(self) -> None:
        """Drop the gradients of weights and masters alike."""
        for parameter, stepped in zip(self.parameters, self.stepped, strict=True):
            parameter.grad = None
            stepped.grad = None

    def drop_stepped_gradients(self) -> None:
        """Free the masters' fp32 gradients, which nobody reads after the step."""
        for _, master in self._with_masters:
            master.grad = None

    def full_precision(self) -> dict[str, torch.Tensor]:
        """Each trained weight as the optimizer knows it, a DTensor where the weight is one."""
        full: dict[str, torch.Tensor] = {}
        for name, parameter, stepped in zip(self.names, self.parameters, self.stepped, strict=True):
            value = stepped.detach()
            full[name] = wrap(value, parameter) if isinstance(parameter, DTensor) else value
        return full


class _Follower(Protocol):
    def follow_weights(self, weights: Iterable[nn.Parameter]) -> None: ...


def install_follower(model: nn.Module, weights: _Follower) -> None:
    """Let ``weights.follow_weights`` see every parameter that is loaded into ``model`` or into any module in it."""
    hook = _FollowLoads(weights)
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_load_state_dict_post_hook(hook)


class _FollowLoads:
    """The hook of :func:`install_follower`. A copied model has no masters, and its hook does nothing."""

    def __init__(self, weights: _Follower | None = None) -> None:
        self._weights = weights

    def __call__(self, module: nn.Module, _incompatible: Any) -> None:
        if self._weights is not None:
            self._weights.follow_weights(module.parameters(recurse=False))

    def __reduce__(self) -> Any:
        return _FollowLoads, ()


def follow(weight: torch.Tensor, master: torch.Tensor) -> None:
    """Give ``master`` the value of ``weight`` in each element that does not round to it."""
    master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight.to(master.dtype)))


NamedParameters: TypeAlias = list[tuple[str, nn.Parameter]]


def trained_and_frozen(module: nn.Module) -> tuple[NamedParameters, NamedParameters]:
    """The parameters of ``module`` that are trained, and those that are not."""
    named = list(module.named_parameters())
    return [pair for pair in named if pair[1].requires_grad], [pair for pair in named if not pair[1].requires_grad]


def check_frozen(frozen: NamedParameters) -> None:
    """Refuse gradients of parameters that nobody steps.

    Raises:
        RuntimeError: naming one.
    """
    for name, parameter in frozen:
        if parameter.grad is not None:
            raise RuntimeError(
                f"{name!r} was frozen when the optimizer was taken over, so nothing steps it, but it has a "
                "gradient now; unfreeze parameters before that, and freeze them again until they are to move"
            )


def check_masters(masters: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
    """Refuse to load ``masters`` where this rank has ``own``.

    Raises:
        ValueError: they have other names or shapes.
    """
    problems = [name for name in own if name not in masters or masters[name].shape != own[name].shape]
    problems += [name for name in masters if name not in own]
    if problems:
        raise ValueError(
            f"masters: {problems[0]!r} is missing, unknown or of another shape; load what the same rank saved "
            "in the same layout and mode"
        )
