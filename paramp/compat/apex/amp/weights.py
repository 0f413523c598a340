"""A weight of a model under amp, its master, and where its gradient is between a backward and the step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....base.dtensor import local
from ....optim.grad_norm import complete_and_check, dense_gradients, unscale_and_check_
from ....optim.master_weights import MasterWeight
from .errors import AmpError


def is_low(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` holds floating-point numbers of less than 32 bits."""
    return tensor.is_floating_point() and tensor.dtype.itemsize < 4


class AmpWeight(MasterWeight):
    """A weight with its master, and the state of its gradient."""

    def __init__(self, weight: torch.Tensor, stepped: torch.Tensor, *, of_model: bool) -> None:
        super().__init__(weight, stepped)
        self.scale: float | None = None  # of the gradient in the weight, until that is handed to ``stepped``
        self.of_model = of_model  # whether the weight was a parameter of one of the models in ``initialize``
        self.checked = False  # before the first backward
        self._stash: torch.Tensor | None = None  # what earlier losses left, unscaled, during a backward
        self._spent: int | None = None  # the version of the weight's gradient that the master has had
        self.note_version()

    def note_version(self) -> None:
        """Weight and master belong together as they are now."""
        self._version, self._master_version = self.weight._version, self.stepped._version

    @property
    def has_changed_master(self) -> bool:
        """A script changed the master itself, as ``amp.master_params`` lets it: the weight is to follow at the step."""
        return self.stepped._version != self._master_version

    def full_precision(self) -> torch.Tensor:
        """The weight in fp32 at least; shares storage with the master."""
        return self.stepped.detach() if self.has_master else self.stepped.detach().float()

    def check(self, current: set[int]) -> None:
        """Before the first backward: that the weight is still the model's, and in the same place as its master."""
        self.checked = True
        if self.of_model and id(self.weight) not in current:
            raise AmpError(
                f"a parameter of shape {tuple(self.weight.shape)} is no longer in its model: something has replaced it "
                "after amp.initialize; apply tensor parallelism (and make the optimizer) before amp.initialize"
            )
        if self.weight.device != self.stepped.device:
            raise AmpError(
                f"a weight is on {self.weight.device} and its master on {self.stepped.device}; "
                "move the model before amp.initialize, not after"
            )

    def adopt(self) -> None:
        """Take the weight's values for the master's, if they were changed since these were made.

        DistributedDataParallel broadcasts rank 0's weights. Every rank has to round its masters to them then, rank 0
        too, so a write counts even where it wrote what was there.
        """
        weight, master = local(self.weight).detach(), local(self.stepped).detach()
        if self.has_master and (
            self.weight._version != self._version or not torch.equal(weight, master.to(weight.dtype))
        ):
            master.copy_(weight)

    def begin(self, scale: float) -> None:
        """Before a backward whose loss is multiplied by ``scale``: stash the gradients that are there, unscaled."""
        self.scale = scale
        self._stash = self.stepped.grad
        self.weight.grad = self.stepped.grad = None

    def hand_over_gradient(self) -> None:
        super().hand_over_gradient()
        self._spent = None if self.weight.grad is None else self.weight.grad._version

    @property
    def is_bypassed(self) -> bool:
        """Whether the weight has a gradient, of a backward without ``scale_loss``, that the master was not given."""
        gradient = self.weight.grad
        return self.has_master and gradient is not None and gradient._version != self._spent

    def add_stash(self) -> None:
        """Add what :meth:`begin` has stashed to the gradient, which is unscaled now as well."""
        gradient, stash = self.stepped.grad, self._stash
        self.scale = self._stash = None
        if gradient is None or stash is None:
            self.stepped.grad = stash if gradient is None else gradient
        elif gradient.is_sparse or stash.is_sparse:
            self.stepped.grad = gradient + stash
        else:
            gradient.add_(stash)

    def give_up(self) -> None:
        """After a backward that failed: be as before it."""
        self.weight.grad, self.stepped.grad = None, self._stash
        self.scale = self._stash = None

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop or zero the weight's gradient; drop the master's."""
        self.scale = self._stash = None
        if self.has_master:
            self.stepped.grad = self._spent = None
            if set_to_none or self.weight.grad is None:
                self.weight.grad = None
            else:
                self.weight.grad.detach_().zero_()
                self._spent = self.weight.grad._version


@torch.no_grad()
def unscale_(weights: Sequence[AmpWeight], scale: float, found_inf: torch.Tensor) -> None:
    """Bring the gradients of a backward to what is stepped, divided by ``scale``.

    Args:
        found_inf: 0-dim float32; set to 1 if an element is not finite.
    """
    complete_and_check([weight.weight for weight in weights], found_inf)
    for weight in weights:
        weight.hand_over_gradient()
    gradients = dense_gradients([weight.stepped for weight in weights])
    unscale_and_check_(gradients, torch.full_like(found_inf, 1.0 / scale), found_inf)
    for weight in weights:
        weight.add_stash()


def take_up_changes(weights: Sequence[AmpWeight], current: set[int]) -> None:
    """Before the first backward: check each weight, and take up what was done to it since ``initialize``.

    ``current`` has the ``id`` of every parameter that the models have now.
    """
    for weight in weights:
        if not weight.checked:
            weight.check(current)
            weight.adopt()
