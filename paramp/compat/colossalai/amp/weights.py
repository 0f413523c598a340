"""The weights of a converted model, and what its optimizer steps: fp32 masters, or the weights themselves."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ....base.collectives import is_distributed
from ....base.dtensor import is_dtensor, local, version
from ....base.module_surgery import check_frozen, moved, stored_dtype, trained_and_frozen
from ....optim.flat_gradients import STORAGE
from ....optim.flat_weights import cast_weights
from ....optim.masters_outside_buffers import drop_gradients
from ....optim.user_changes.replaced_parameters import ModelParameters
from ....precision.modes import Precision
from ...masters_that_users_change import ChangeableMasters, follow_changed_weights, round_to_weights


class Weights:
    """The trained parameters of one rank, each with a local tensor that the optimizer steps in its place.

    The stepped tensors are plain, so that the optimizer's foreach and fused paths work for any mix of shards and
    replicas.

    Attributes:
        names, parameters: the model's own, with the whole model's names.
        stepped: the tensors that the optimizer steps, in the same order.
        with_masters: the parameters that have masters, and what errors call them.
        of_dtensors: the stepped tensors that share the memory of DTensors, by name.
        is_new: whether the masters were not stepped nor loaded yet.
    """

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        """``module`` holds full-precision weights on their device; it is cast to the mode's dtype here."""
        originals = cast_weights(module, precision)
        trained, self._frozen = trained_and_frozen(module)
        self.names = [name for name, _ in trained]
        self.parameters = [parameter for _, parameter in trained]
        self._weights = [
            ChangeableMasters(parameter, _stepped_for(parameter, originals.pop(name, None)))
            for name, parameter in trained
        ]
        self.stepped = [one.stepped for one in self._weights]
        pairs = list(zip(self.names, self._weights, strict=True))
        self._apart = {name: one for name, one in pairs if one.stepped is not one.weight}
        self.with_masters = [(repr(name), one.weight) for name, one in pairs if one.has_master]
        of_dtensors = ((name, one) for name, one in pairs if is_dtensor(one.weight) and not one.has_master)
        self.of_dtensors = {name: one.stepped for name, one in of_dtensors}
        self._memory = self._current_memory()
        self.is_new = True
        self._model_parameters = ModelParameters(module)

    def _current_memory(self) -> dict[str, tuple[int, int]]:
        """Where DTensors are, and local tensors that are stepped; ``.data = ...`` replaces the former alone."""
        pairs = zip(self.names, self.parameters, strict=True)
        return {
            name: (STORAGE(one), local(one).data_ptr() if name in self.of_dtensors else 0)
            for name, one in pairs
            if is_dtensor(one)
        }

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
        self.follow_changes()
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
            RuntimeError: a parameter that was frozen when the optimizer was set up has a gradient; or a DTensor was
                given other memory, which the step would not change.
        """
        check_frozen(self._frozen)
        for name, at in self._current_memory().items():
            if at != self._memory[name]:
                raise RuntimeError(moved(name, "convert_to_amp"))
        for one in self._apart.values():
            one.take_gradient()
        return [stepped.grad for stepped in self.stepped if stepped.grad is not None]

    def versions(self) -> list[int | None]:
        """Counters of changes of each gradient; None if there is none."""
        return [None if one.grad is None else version(one.grad) for one in self.parameters]

    def follow_gradients(self) -> None:
        """After :meth:`load_gradients`: follow gradients that were dropped, and without masters also replaced ones.

        Raises:
            RuntimeError: one of a weight with a master was changed.
        """
        for name, one in self._apart.items():
            if one.has_other_gradient:
                raise RuntimeError(
                    f"the gradient of {name!r} was changed after clip_grad_norm had copied it to the fp32 master, "
                    "which the step uses; change it before clip_grad_norm, where it carries the loss scale, or change "
                    "those of optimizer.param_groups, which hold the masters"
                )
            one.follow_replaced_gradient()

    def follow_changes(self) -> None:
        """Update masters whose weights were changed in place; before each step."""
        if self.is_new and is_distributed():
            for one in self._weights:
                one.take_up_broadcast()
        follow_changed_weights(self._apart.values())

    def write_back(self) -> None:
        """Round the stepped masters to the weights. Without masters they share storage already."""
        round_to_weights(list(self._apart.values()))
        self.is_new = False

    def zero_grad(self) -> None:
        """Drop the gradients of weights and masters."""
        for one in self._weights:
            one.weight.grad = one.stepped.grad = None

    def drop_master_gradients(self) -> None:
        """Free the masters' fp32 gradients, which are not read after the step."""
        drop_gradients(self._apart.values())


def to_be_stepped(module: nn.Module, precision: Precision) -> dict[str, torch.Tensor]:
    """What :class:`Weights` would step for each trained parameter, by name: itself, or else another, without values."""
    stepped: dict[str, torch.Tensor] = {}
    for path, child in module.named_modules():
        for name, parameter in child.named_parameters(path, recurse=False):
            keep = precision.keep_batchnorm_fp32
            dtype = stored_dtype(child, name, parameter, precision.weights, keep_batchnorm_fp32=keep)
            if parameter.requires_grad:
                original = local(parameter).detach().to("meta")
                casts = precision.masters and parameter.dtype is not dtype
                stored = nn.Parameter(original.to(dtype)) if casts else parameter
                stepped[name] = _stepped_for(stored, original if precision.masters else None)
    return stepped


def _stepped_for(parameter: nn.Parameter, original: torch.Tensor | None) -> nn.Parameter:
    """What is stepped for ``parameter``, in its dtype of the mode; ``original``: its value before the cast to that."""
    if original is not None and parameter.dtype.itemsize < 4:
        return nn.Parameter(original.to(torch.float32))  # an fp32 original has no other user and is not copied
    return nn.Parameter(local(parameter).detach()) if is_dtensor(parameter) else parameter
