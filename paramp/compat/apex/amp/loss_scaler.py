"""The scale of one loss, on top of the scaler that all ranks agree in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Protocol

import torch

from ....optim.loss_scaler import DistributedGradScaler
from ....precision.policy import LossScaling


class _Steps(Protocol):
    """What of an optimizer a loss scaler knows."""

    overflows: dict[int, str]


class LossScaler:
    """The scale of one loss, and what its last backwards found.

    Args:
        loss_id: its number in messages.
        dynamic: whether the scale moves; an overflow skips the step in either case.
    """

    def __init__(self, loss_id: int, scaling: LossScaling, *, dynamic: bool) -> None:
        # Apex begins at the ceiling where that is below the usual first scale.
        first = min(scaling.init_scale, scaling.max_scale or scaling.init_scale)
        # On the CPU: the one value that comes from the device is the flag, and the host has to see that in any case.
        self._scaler = DistributedGradScaler("cpu", **asdict(replace(scaling, init_scale=first)))
        self.loss_id = loss_id
        self.dynamic = dynamic
        self._found_inf: torch.Tensor | None = None  # 0-dim, of the backwards that the ranks have not agreed on yet
        self._optimizers: list[_Steps] = []

    def loss_scale(self) -> float:
        """The scale that the next loss is multiplied by."""
        return self._scaler.get_scale()

    @property
    def unskipped(self) -> int:
        """Backwards without overflow since the last overflow or growth."""
        return self._scaler._get_growth_tracker()

    _loss_scale = property(loss_scale)  # the names under which scripts have read Apex's
    _unskipped = unskipped

    def load(self, loss_scale: float, unskipped: int) -> None:
        """Go on from a saved scale."""
        self._scaler.load_state_dict(
            {**self._scaler.state_dict(), "scale": float(loss_scale), "_growth_tracker": int(unskipped)}
        )

    def add_findings(self, found_inf: torch.Tensor, optimizers: Iterable[_Steps]) -> None:
        """Remember what this rank found in a backward, 0-dim 0 or 1, for the gradients of ``optimizers``."""
        self._found_inf = found_inf if self._found_inf is None else torch.maximum(self._found_inf, found_inf)
        self._optimizers += [optimizer for optimizer in optimizers if optimizer not in self._optimizers]

    def awaits(self, optimizer: _Steps) -> bool:
        """Whether the ranks have not agreed yet on a backward for ``optimizer``."""
        return optimizer in self._optimizers

    def agree(self) -> None:
        """Agree with all ranks on the findings, move the scale, and after an overflow let the optimizers skip."""
        assert self._found_inf is not None
        self._scaler.agree_(self._found_inf)
        overflow = bool(self._found_inf > 0)
        before = self.loss_scale()
        if self.dynamic:
            self._scaler.update_from_flag(torch.tensor(float(overflow)))
        else:
            self.load(before, 0 if overflow else self.unskipped + 1)
        if overflow:
            after = self.loss_scale()
            what = f"reducing loss scale to {after}" if after < before else f"keeping loss scale {after}"
            for optimizer in self._optimizers:
                optimizer.overflows[self.loss_id] = what
        self._found_inf, self._optimizers = None, []
