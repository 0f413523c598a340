"""Master weights without flat buffers: the optimizer steps, for each weight, its fp32 master or the weight itself.

The model computes with its own parameters, plain or DTensor, in the mode's weight dtype::

    without masters    the optimizer steps the weight
    with masters       it steps an fp32 copy, made before the weight was rounded to half precision

:class:`MasterWeight` is one such pair, the same for :func:`paramp.amp.convert_to_amp` and for Apex's ``amp``. An engine
keeps its weights in flat buffers (:mod:`paramp.optim.flat_weights`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
from torch import nn

from ..base.dtensor import is_dtensor, local
from ..base.module_surgery import cast_parameters, unfrozen
from ..base.scratch_cpu import Scratch
from ..base.torch_internals import expect
from ..precision.policy import Precision
from .changes.replaced_parameters import ModelParameters

expect("torch._foreach_copy_")

NamedParameters: TypeAlias = list[tuple[str, nn.Parameter]]


def cast_weights(
    module: nn.Module, precision: Precision, *, untrained: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Cast the weights of ``module`` to the mode's dtype.

    ``untrained``: another dtype for frozen weights and for buffers.

    Returns:
        If the mode has masters, the local part of each weight before the cast, by name: the masters' initial values.
    """
    named = module.named_parameters() if precision.masters else ()
    originals = {name: local(parameter).detach() for name, parameter in named}
    keep = precision.keep_batchnorm_fp32
    cast_parameters(module, precision.weights, keep_batchnorm_fp32=keep, untrained=untrained)
    return originals


class MasterWeight:
    """A weight of the model, and the tensor that the optimizer steps for it.

    Attributes:
        weight: the model's parameter, plain or DTensor.
        stepped: its fp32 master; without one, the weight itself or its local part, which shares storage with it.
    """

    def __init__(self, weight: torch.Tensor, stepped: torch.Tensor) -> None:
        self.weight = weight
        self.stepped = stepped

    @property
    def has_master(self) -> bool:
        return self.weight.dtype is not self.stepped.dtype

    def hand_over_gradient(self) -> None:
        """Set the gradient of the stepped tensor to the weight's, in its dtype; None if there is none."""
        gradient = self.weight.grad
        if gradient is None:
            self.stepped.grad = None
        elif self.stepped is not self.weight:
            given = gradient if is_dtensor(self.stepped) else local(gradient)
            self.stepped.grad = given.detach().to(self.stepped.dtype)


@torch.no_grad()
def follow_changes(weights: Iterable[MasterWeight]) -> None:
    """Update masters whose weights were changed in place since the last rounding; call it before masters are read."""
    for one in weights:
        if one.has_master:
            follow(local(one.weight).detach(), local(one.stepped).detach())


@torch.no_grad()
def write_back(weights: Iterable[MasterWeight]) -> None:
    """Round the stepped masters to their weights."""
    pairs = [(local(one.weight), local(one.stepped)) for one in weights if one.has_master]
    if pairs:
        rounded, masters = zip(*pairs, strict=True)
        torch._foreach_copy_(list[torch.Tensor](rounded), list[torch.Tensor](masters))


def drop_master_gradients(weights: Iterable[MasterWeight]) -> None:
    """Free the masters' fp32 gradients, which are not read after the step."""
    for one in weights:
        if one.has_master:
            one.stepped.grad = None


class Weights:
    """The trained parameters of one rank, each with a local tensor that the optimizer steps in its place.

    The stepped tensors are plain, so that the optimizer's foreach and fused paths work for any mix of shards and
    replicas.

    Attributes:
        names, parameters: the model's own, with the whole model's names.
        stepped: the tensors that the optimizer steps, in the same order.
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
        self._model_parameters = ModelParameters(module)

    def check_replaced(self) -> None:
        """Put parameters of the model that were replaced back into it, with the values of their replacements.

        Raises:
            RuntimeError: there were some. A forward since then used the replacements.
        """
        if replaced := set(self._model_parameters.put_back()):
            names = [repr(name) for name, own in zip(self.names, self.parameters, strict=True) if own in replaced]
            raise RuntimeError(
                f"{', '.join(names) or 'a frozen parameter'} was replaced after convert_to_amp, as by "
                "load_state_dict(assign=True), so this loss has no gradient for it; its value is in the model's own "
                "parameter now: run the batch again"
            )

    def by_name(self) -> Mapping[str, torch.Tensor]:
        """The tensors that the optimizer steps, by the model's names."""
        return dict(zip(self.names, self.stepped, strict=True))

    def masters(self) -> dict[str, torch.Tensor]:
        """This rank's fp32 masters by the model's names, sharing storage: the state to save."""
        follow_changes(self._weights)
        pairs = zip(self.names, self._weights, strict=True)
        return {name: one.stepped.detach() for name, one in pairs if one.has_master}

    @torch.no_grad()
    def load_masters(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Load ``masters``, as :meth:`masters` returned them, and round them to the weights.

        Raises:
            ValueError: the names or shapes differ from this rank's.
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
        """Set each stepped tensor's gradient to its weight's (in fp32 for a master); return those that exist.

        Raises:
            RuntimeError: a parameter that was frozen when the optimizer was set up has a gradient.
        """
        check_frozen(self._frozen)
        for one in self._weights:
            one.hand_over_gradient()
        return [stepped.grad for stepped in self.stepped if stepped.grad is not None]

    def follow_changes(self) -> None:
        """Update masters whose weights were changed in place; before each step."""
        follow_changes(self._weights)

    def write_back(self) -> None:
        """Round the stepped masters to the weights. Without masters they share storage already."""
        write_back(self._weights)

    def zero_grad(self) -> None:
        """Drop the gradients of weights and masters."""
        for one in self._weights:
            one.weight.grad = one.stepped.grad = None

    def drop_master_gradients(self) -> None:
        """Free the masters' fp32 gradients, which are not read after the step."""
        drop_master_gradients(self._weights)


def _stepped_for(parameter: nn.Parameter, original: torch.Tensor | None) -> nn.Parameter:
    if original is not None and parameter.dtype is not torch.float32:
        return nn.Parameter(original.to(torch.float32))  # an fp32 original has no other user and is not copied
    return nn.Parameter(local(parameter).detach()) if is_dtensor(parameter) else parameter


def follow(weight: torch.Tensor, master: torch.Tensor, scratch: Scratch | None = None) -> None:
    """Give ``master`` (float32) the value of ``weight`` (2 bytes) in each element that does not round to its bits.

    In place, same shapes; 1-dim if ``scratch`` is given, which holds the temporary.
    """
    rounded = scratch.like("rounded", weight, weight.dtype) if scratch else torch.empty_like(weight)
    changed = rounded.copy_(master).view(torch.int16).bitwise_xor_(weight.view(torch.int16))
    # Mostly nothing has changed. On a CPU the check costs less than the write; on a GPU it would synchronise.
    if weight.device.type == "cpu" and not changed.flatten().view(torch.uint8).any():  # any() is fast for bytes only
        return
    torch.where(changed == 0, master, weight, out=master)


def trained_and_frozen(module: nn.Module) -> tuple[NamedParameters, NamedParameters]:
    """The parameters of ``module`` that require gradients, and those that do not."""
    named = list(module.named_parameters())
    return [pair for pair in named if pair[1].requires_grad], [pair for pair in named if not pair[1].requires_grad]


def check_frozen(frozen: NamedParameters) -> None:
    """Raise a RuntimeError for gradients of frozen parameters, which no optimizer steps."""
    for name, parameter in frozen:
        if parameter.grad is not None:
            raise RuntimeError(unfrozen(name, "has a gradient"))
