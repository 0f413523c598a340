"""A weight of a model under amp, its master, and the state of its gradient between a backward and the step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....base.dtensor import local
from ....scaling.complete_and_unscale_gradients import complete_and_check, dense_gradients, unscale_and_check_
from ...masters_that_users_change import ChangeableMasters
from .errors import AmpError


def is_low(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` holds floating-point numbers of less than 32 bits."""
    return tensor.is_floating_point() and tensor.dtype.itemsize < 4


class AmpWeight(ChangeableMasters):
    """A weight with its master, and the state of its gradient."""

    def __init__(self, weight: torch.Tensor, stepped: torch.Tensor, *, of_model: bool) -> None:
        super().__init__(weight, stepped)
        self.scale: float | None = None  # of the gradient in the weight, until it is moved to ``stepped``
        self.of_model = of_model  # whether it was a parameter of one of the models when it was recorded
        self.checked = False  # set before the first backward
        self.is_incomplete = False  # a failed backward has lost delayed gradients, until zero_grad()
        self._accumulates = False  # during a backward, whether the weight has a delayed gradient of an earlier one
        self._stash: torch.Tensor | None = None  # during a backward, the unscaled gradient of earlier losses
        self.used_by: object = None  # the optimizer whose step, or skipped step, has used that gradient

    def note_version(self) -> None:
        """Record the current versions of weight and master as consistent."""
        super().note_version()
        self._master_version = self.stepped._version

    @property
    def has_changed_master(self) -> bool:
        """Whether the script changed the master (``amp.master_params``): then the step updates the weight from it."""
        return self.stepped._version != self._master_version

    def full_precision(self) -> torch.Tensor:
        """The weight in fp32 at least; shares storage with the master."""
        return self.stepped.detach() if self.has_master else self.stepped.detach().float()

    def check(self, current: set[int]) -> None:
        """Check, before the first backward, that the weight is still the model's, and on the device of its master."""
        self.checked = True
        if self.of_model and id(self.weight) not in current:
            raise AmpError(
                f"a parameter of shape {tuple(self.weight.shape)} is no longer in its model: it was replaced "
                "after amp.initialize; apply tensor parallelism (and make the optimizer) before amp.initialize"
            )
        if self.weight.device != self.stepped.device:
            raise AmpError(
                f"a weight is on {self.weight.device} and its master on {self.stepped.device}; "
                "move the model before amp.initialize, not after"
            )

    def check_gradient(self) -> None:
        """Raise an AmpError if the master has a gradient, and that of the weight was changed since."""
        if self.stepped.grad is not None and self.has_other_gradient and not self._is_cleared():
            raise self.changed_gradient("amp.scale_loss")

    @property
    def has_taken_gradient(self) -> bool:
        """Whether the master has the gradient that the weight has now."""
        return self.stepped.grad is not None and self.weight.grad is not None and not self.has_other_gradient

    def changed_gradient(self, what: str) -> AmpError:
        """The error of ``what`` would lose a change of the weight's gradient."""
        return AmpError(
            f"{what}: the gradient of a parameter of shape {tuple(self.weight.shape)} was changed after "
            "amp.scale_loss had moved it to its fp32 master, which the step uses; change those of "
            "amp.master_params(optimizer)"
        )

    def begin(self, scale: float) -> None:
        """Before a backward whose loss is multiplied by ``scale``: stash the existing, unscaled gradients.

        A delayed gradient, which has this scale, stays in the weight: the backward accumulates into it.
        """
        self._accumulates = self.scale is not None
        if not self._accumulates:
            self.scale = scale
            self._stash = None if self._is_cleared() else self.stepped.grad
            self.weight.grad = self.stepped.grad = None

    def _is_cleared(self) -> bool:
        """Whether ``model.zero_grad()``, or the script itself, has dropped a gradient that was moved to the master."""
        if not self.has_master or self._taken is None:
            return False
        gradient = self.weight.grad
        is_written = gradient is not None and self.has_other_gradient and not gradient.is_sparse
        return gradient is None or (is_written and not bool(local(gradient).any()))

    def take_gradient(self) -> None:
        super().take_gradient()
        self.used_by = None

    @property
    def was_used(self) -> bool:
        """Whether :attr:`used_by` has stepped with the gradient that the weight has, and dropped the master's."""
        return self.used_by is not None and self.weight.grad is not None

    def add_stash(self) -> None:
        """Add the gradient that :meth:`begin` has stashed to the new one, which is unscaled now too."""
        gradient, stash = self.stepped.grad, self._stash
        self.scale = self._stash = None
        if gradient is None or stash is None:
            self.stepped.grad = stash if gradient is None else gradient
        elif gradient.is_sparse or stash.is_sparse:
            self.stepped.grad = gradient + stash
        else:
            gradient.add_(stash)

    def give_up(self) -> None:
        """After a backward that failed: restore the unscaled gradient from before it.

        A delayed gradient is dropped, because a part of the backward may have been accumulated into it.
        """
        self.is_incomplete |= self._accumulates
        self.weight.grad, self.stepped.grad = None, self._stash
        self.scale = self._stash = self._taken = None

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop or zero the weight's gradient; drop the master's."""
        self.scale = self._stash = None
        self.is_incomplete = False
        if self.has_master:
            self.stepped.grad = self._taken = self.used_by = None
            if set_to_none or self.weight.grad is None:
                self.weight.grad = None
            else:
                self.weight.grad.detach_().zero_()
                self.note_gradient()


@torch.no_grad()
def unscale_(weights: Sequence[AmpWeight], scale: float, found_inf: torch.Tensor) -> None:
    """Move the gradients of a backward to the stepped tensors, divided by ``scale``.

    Args:
        found_inf: 0-dim float32; set to 1 if an element is not finite.
    """
    complete_and_check([weight.weight for weight in weights], found_inf)
    for weight in weights:
        weight.take_gradient()
    gradients = dense_gradients([weight.stepped for weight in weights])
    unscale_and_check_(gradients, torch.full_like(found_inf, 1.0 / scale), found_inf)
    for weight in weights:
        weight.add_stash()


def take_up_changes(weights: Sequence[AmpWeight], current: set[int], *, has_new: bool) -> None:
    """Before a backward: check each weight; before its first one also update its master if the weight was changed.

    Args:
        current: the ``id`` of every current parameter of the models.
        has_new: one of them was put into its model later, and no optimizer steps it.
    """
    for weight in weights:
        if not weight.checked:
            weight.check(current)
            weight.take_up_broadcast()
        elif has_new and weight.of_model and id(weight.weight) not in current:
            raise AmpError(
                f"a parameter of shape {tuple(weight.weight.shape)} was replaced in its model by one that no optimizer "
                "steps; change its values in place, or pass the new one to optimizer.add_param_group"
            )
