"""What an optimizer steps where every weight is a tensor of its own: for each, its fp32 master or the weight itself.

The model computes with its own parameters, plain or DTensor, in the mode's weight dtype::

    without masters    the optimizer steps the weight
    with masters       it steps an fp32 copy, made before the weight was rounded to half

:class:`MasterWeight` is one such pair, the same for :func:`paramp.amp.convert_to_amp` and for Apex's ``amp``. An engine
keeps its weights in flat buffers (:mod:`paramp.optim.flat_params`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
from torch import nn

from ..base.dtensor import is_dtensor, local
from ..base.module_surgery import cast_parameters, unfrozen
from ..precision.policy import Precision

NamedParameters: TypeAlias = list[tuple[str, nn.Parameter]]


def cast_weights(module: nn.Module, precision: Precision) -> dict[str, torch.Tensor]:
    """Cast the weights of ``module`` to the mode's dtype.

    Returns:
        Where the mode has masters, the local part of each weight as it was, by name: what masters are made from.
    """
    named = module.named_parameters() if precision.masters else ()
    originals = {name: local(parameter).detach() for name, parameter in named}
    cast_parameters(module, precision.weights, keep_batchnorm_fp32=precision.keep_batchnorm_fp32)
    return originals


class MasterWeight:
    """A weight of the model, and the tensor that the optimizer steps for it.

    Attributes:
        weight: the model's parameter, plain or DTensor.
        stepped: its fp32 master; where it has none, the weight itself or its local part, which shares storage with it.
    """

    def __init__(self, weight: torch.Tensor, stepped: torch.Tensor) -> None:
        self.weight = weight
        self.stepped = stepped

    @property
    def has_master(self) -> bool:
        return self.weight.dtype is not self.stepped.dtype

    def hand_over_gradient(self) -> None:
        """Give the weight's gradient to what is stepped, in its dtype; None if there is none."""
        gradient = self.weight.grad
        if gradient is None:
            self.stepped.grad = None
        elif self.stepped is not self.weight:
            given = gradient if is_dtensor(self.stepped) else local(gradient)
            self.stepped.grad = given.detach().to(self.stepped.dtype)


@torch.no_grad()
def follow_changes(weights: Iterable[MasterWeight]) -> None:
    """Let masters follow weights that were changed in place since they were rounded; before masters are read."""
    for one in weights:
        if one.has_master:
            follow(local(one.weight).detach(), local(one.stepped).detach())


@torch.no_grad()
def write_back(weights: Iterable[MasterWeight]) -> None:
    """Round stepped masters to their weights."""
    pairs = [(local(one.weight), local(one.stepped)) for one in weights if one.has_master]
    if pairs:
        rounded, masters = zip(*pairs, strict=True)
        torch._foreach_copy_(list[torch.Tensor](rounded), list[torch.Tensor](masters))


def drop_master_gradients(weights: Iterable[MasterWeight]) -> None:
    """Free the masters' fp32 gradients, which nobody reads after the step."""
    for one in weights:
        if one.has_master:
            one.stepped.grad = None


class Weights:
    """The trained parameters of one rank, each with a local tensor that the optimizer steps in its place.

    The stepped tensors are plain, so that the optimizer never sees DTensors, and its foreach and fused paths work for
    any mix of shards and replicas.

    Attributes:
        names, parameters: the model's own, under the whole model's names.
        stepped: what the optimizer steps, in the same order.
    """

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        """``module`` holds full-precision weights on their device; it is cast to the mode's dtype here."""
        originals = cast_weights(module, precision)
        trained, self._frozen = trained_and_frozen(module)
        self.names = [name for name, _ in trained]
        self.parameters = [parameter for _, parameter in trained]
        self._weights = [
            MasterWeight(parameter, _stepped_for(parameter, originals.pop(name, None))) for name, parameter in trained
        ]
        self.stepped = [one.stepped for one in self._weights]

    def by_name(self) -> Mapping[str, torch.Tensor]:
        """What the optimizer steps, by the model's names."""
        return dict(zip(self.names, self.stepped, strict=True))

    def masters(self) -> dict[str, torch.Tensor]:
        """The fp32 masters by the model's names, sharing storage: this rank's part of the state to save."""
        follow_changes(self._weights)
        pairs = zip(self.names, self._weights, strict=True)
        return {name: one.stepped.detach() for name, one in pairs if one.has_master}

    @torch.no_grad()
    def load_masters(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Take up what :meth:`masters` returned, and round it to the weights.

        Raises:
            ValueError: other names or shapes than this rank's.
        """
        own = self.masters()
        problems = [name for name in own if name not in masters or masters[name].shape != own[name].shape]
        problems += [name for name in masters if name not in own]
        if problems:
            raise ValueError(
                f"masters: {problems[0]!r} is missing, unknown or of another shape; load what the same rank saved "
                "in the same layout and mode"
            )
        for name, master in own.items():
            master.copy_(masters[name])
        self.write_back()

    @torch.no_grad()
    def load_gradients(self) -> list[torch.Tensor]:
        """Hand each weight's gradient to its stepped tensor (in fp32 for a master); those that there are.

        Raises:
            RuntimeError: a parameter that was frozen when the optimizer was taken over has a gradient.
        """
        check_frozen(self._frozen)
        for one in self._weights:
            one.hand_over_gradient()
        return [stepped.grad for stepped in self.stepped if stepped.grad is not None]

    def follow_changes(self) -> None:
        """Let masters follow weights that were changed in place; before each step."""
        follow_changes(self._weights)

    def write_back(self) -> None:
        """Round the stepped masters to the weights. Without masters they share storage already."""
        write_back(self._weights)

    def zero_grad(self) -> None:
        """Drop the gradients of weights and masters alike."""
        for one in self._weights:
            one.weight.grad = one.stepped.grad = None

    def drop_master_gradients(self) -> None:
        """Free the masters' fp32 gradients, which nobody reads after the step."""
        drop_master_gradients(self._weights)


def _stepped_for(parameter: nn.Parameter, original: torch.Tensor | None) -> nn.Parameter:
    if original is not None and parameter.dtype is not torch.float32:
        return nn.Parameter(original.to(torch.float32))  # nobody else has it any more, if it was fp32
    return nn.Parameter(local(parameter).detach()) if is_dtensor(parameter) else parameter


def follow(weight: torch.Tensor, master: torch.Tensor) -> None:
    """Give ``master`` (float32) the value of ``weight`` (2 bytes) in each element that does not round to its bits.

    In place, same shapes.
    """
    rounded, bits = master.to(weight.dtype).view(torch.int16), weight.view(torch.int16)
    # Nearly always nothing was changed. On a CPU finding out costs less than the write; on a GPU the host would wait.
    if weight.device.type == "cpu" and torch.equal(_in_words(rounded), _in_words(bits)):
        return
    torch.where(rounded == bits, master, weight, out=master)


def _in_words(bits: torch.Tensor) -> torch.Tensor:
    """``bits`` (int16) as int64, where they are 1-dim and divide so: fewer numbers to compare."""
    divides = bits.ndim == 1 and bits.numel() % 4 == 0 and bits.storage_offset() % 4 == 0
    return bits.view(torch.int64) if divides else bits


def trained_and_frozen(module: nn.Module) -> tuple[NamedParameters, NamedParameters]:
    """The parameters of ``module`` that are trained, and those that are not."""
    named = list(module.named_parameters())
    return [pair for pair in named if pair[1].requires_grad], [pair for pair in named if not pair[1].requires_grad]


def check_frozen(frozen: NamedParameters) -> None:
    """Raise a RuntimeError for gradients of parameters that nobody steps."""
    for name, parameter in frozen:
        if parameter.grad is not None:
            raise RuntimeError(unfrozen(name, "has a gradient"))
