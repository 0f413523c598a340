"""fp32 masters that scripts may change themselves: those of Apex and of ``convert_to_amp``, in the optimizer's groups.

A master that does not round to its weight may have been changed, or its weight may. Version counters do not tell, since
an edit through ``.data`` moves none. So the weight's bits are hashed when it is rounded: if they are still the same
before a step, its master stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..base.dtensor import local
from ..observe.bit_hash import hash_bits
from ..optim.masters_outside_buffers import ParameterMasters, follow_changes, write_back


class ChangeableMasters(ParameterMasters):
    """A parameter and its master, of which a script may change either. The weight is the master's rounding at first."""

    def __init__(self, weight: torch.Tensor, stepped: torch.Tensor) -> None:
        super().__init__(weight, stepped)
        self.note_rounding()

    def bits(self) -> torch.Tensor:
        """A hash of the weight's bits, 0-dim."""
        return hash_bits(local(self.weight))

    def note_rounding(self) -> None:
        """Record that the weight is its master's rounding now."""
        self.rounding = self.bits() if self.has_master else None

    def weight_has_changed(self) -> bool:
        """Whether the weight of a master was changed since the last rounding; waits for the device."""
        return self.rounding is not None and not torch.equal(self.bits(), self.rounding)


def follow_changed_weights(parameters: Iterable[ChangeableMasters]) -> None:
    """Update masters whose weights were changed in place since the last rounding; call it before masters are read.

    It waits for the device, as a step has just done for its overflow flag. Where both were changed the weight counts.
    """
    pairs = [(one, one.rounding) for one in parameters if one.rounding is not None]
    if not pairs:
        return
    found = [one.bits() for one, _ in pairs]
    device = found[0].device
    before = torch.stack([bits.to(device) for _, bits in pairs])
    is_changed = torch.stack([bits.to(device) for bits in found]).ne(before).tolist()
    for (one, _), bits, changed in zip(pairs, found, is_changed, strict=True):
        if changed:
            follow_changes([one])
            one.rounding = bits


def round_to_weights(parameters: Sequence[ChangeableMasters]) -> None:
    """Round the stepped masters to their weights. Without masters they share storage already."""
    write_back(parameters)
    for one in parameters:
        one.note_rounding()
