"""fp32 masters that scripts may change themselves: those of Apex and of ``convert_to_amp``, in the optimizer's groups.

A master that does not round to its weight was changed, or its weight was. Version counters do not tell, since an edit
through ``.data`` moves none. So the weight's bits are hashed when it is rounded: if they are still the same before a
step, its master stays as it is.

The step takes the gradient of the master, an unscaled copy of the weight's. What a script changes in the weight's own
after that, which has another scale, would be lost: it is an error, but for a gradient that is dropped.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from ..base.dtensor import local, version
from ..observe.bit_hash import hash_bits
from ..optim.masters_outside_buffers import ParameterMasters, follow_changes, write_back


class ChangeableMasters(ParameterMasters):
    """A parameter and its master, of which a script may change either. The weight is the master's rounding at first."""

    def __init__(self, weight: torch.Tensor, stepped: torch.Tensor) -> None:
        super().__init__(weight, stepped)
        self._taken: weakref.ref[torch.Tensor] | None = None  # the gradient that take_gradient() took, and its version
        self._taken_version = 0
        self._made: weakref.ref[torch.Tensor] | None = None  # the gradient that take_gradient() gave the master
        self.note_rounding()
        self.note_version()

    def note_version(self) -> None:
        """Record that the master has what was written to the weight so far."""
        self._version = version(self.weight)

    def take_gradient(self) -> None:
        super().take_gradient()
        self._made = None if self.stepped.grad is None else weakref.ref(self.stepped.grad)
        self.note_gradient()

    def note_gradient(self) -> None:
        """Record that the step follows the weight's gradient as it is."""
        gradient = self.weight.grad
        self._taken, self._taken_version = (None, 0) if gradient is None else (weakref.ref(gradient), version(gradient))

    @property
    def has_other_gradient(self) -> bool:
        """Whether the weight has a gradient that its master has not: a new one, or one that was changed in place."""
        gradient = self.weight.grad
        if gradient is None or not self.has_master:
            return False
        is_copied = gradient.dtype is not self.stepped.dtype  # else, by a weight's grad_dtype, its changes count
        return self._is_gradient_replaced() or (is_copied and version(gradient) != self._taken_version)

    def follow_replaced_gradient(self) -> None:
        """Step with what a script has put in the place of the gradient that was taken; if it was dropped, with none.

        A gradient that a script has given the master itself stays.
        """
        made, own = self._made and self._made(), self.stepped.grad
        if self._is_gradient_replaced() and (self.weight.grad is not None or own is made):
            self.take_gradient()

    def _is_gradient_replaced(self) -> bool:
        gradient = self.weight.grad
        if gradient is None or self._taken is None:
            return gradient is not None or self._taken is not None
        return self._taken() is not gradient

    @torch.no_grad()
    def take_up_broadcast(self) -> None:
        """Before the first step: set the master to the weight's values, if the weight was written to.

        DistributedDataParallel broadcasts rank 0's rounded weights. Every rank, including rank 0, then has to set its
        masters to them, so a write counts even if it did not change the values.
        """
        if self.has_master and (version(self.weight) != self._version or self.weight_has_changed()):
            local(self.stepped).copy_(local(self.weight))
            self.note_rounding()
            self.note_version()

    def note_rounding(self) -> None:
        """Record that the weight is its master's rounding now."""
        self.rounding = hash_bits(local(self.weight)) if self.has_master else None

    def weight_has_changed(self) -> torch.Tensor:
        """Whether the weight of a master was changed since the last rounding; 0-dim."""
        assert self.rounding is not None
        return hash_bits(local(self.weight)).to(self.rounding.device).ne(self.rounding)

    def one_has_changed(self) -> torch.Tensor:
        """Whether the weight or its master was, because this does not round to that; 0-dim."""
        weight = local(self.weight).detach()
        rounded = local(self.stepped).detach().to(weight)
        return rounded.view(torch.int16).ne(weight.view(torch.int16)).any()


def follow_changed_weights(parameters: Iterable[ChangeableMasters]) -> None:
    """Update masters whose weights were changed in place since the last rounding; call it before masters are read.

    It waits for the device, as a step has just done for its overflow flag. Where both were changed the weight counts.
    """
    either = _where(ChangeableMasters.one_has_changed, [one for one in parameters if one.rounding is not None])
    changed = _where(ChangeableMasters.weight_has_changed, either)
    follow_changes(changed)
    for one in changed:
        one.note_rounding()


def _where(
    flag: Callable[[ChangeableMasters], torch.Tensor], parameters: Sequence[ChangeableMasters]
) -> list[ChangeableMasters]:
    """Those of ``parameters`` whose ``flag`` is set; the host waits once for all."""
    flags = [flag(one) for one in parameters]
    if not flags:
        return []
    return list(itertools.compress(parameters, torch.stack([one.to(flags[0].device) for one in flags]).tolist()))


def round_to_weights(parameters: Sequence[ChangeableMasters]) -> None:
    """Round the stepped masters to their weights. Without masters they share storage already."""
    write_back(parameters)
    for one in parameters:
        one.note_rounding()
