"""Colossal-AI's learning-rate schedules, which take the number of all steps first.

A step is one call of ``step()``: an epoch, or a batch. They are ordinary schedulers of torch, over any optimizer, also
the one that ``paramp.initialize`` or ``convert_to_amp`` is given. Given to ``initialize`` too, they stand still while
steps are skipped; else each ``step()`` counts.

:class:`CosineAnnealingLR` and :class:`MultiStepLR` are torch's own. The others are written in closed form: the rate
follows from the number of steps made, whatever set it in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedules

from ....base.errors import ConfigError


class CosineAnnealingLR(schedules.CosineAnnealingLR):
    """From the optimizer's rate down to ``eta_min`` along half a cosine of ``total_steps``."""

    def __init__(self, optimizer: Optimizer, total_steps: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_steps, eta_min=eta_min, last_epoch=last_epoch)


class MultiStepLR(schedules.MultiStepLR):
    """The rate times ``gamma`` at each of ``milestones``. ``total_steps`` is for a common signature only."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        milestones: Sequence[int],
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, milestones, gamma=gamma, last_epoch=last_epoch)


class _Warmup(schedules.LRScheduler):
    """Rises in a line for ``warmup_steps``, then follows :meth:`after`."""

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1) -> None:
        if not 0 <= warmup_steps < total_steps:
            raise ConfigError(f"warmup_steps: got {warmup_steps}, expected 0 to {total_steps - 1}, fewer than all")
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        step = self.last_epoch
        if step < self.warmup_steps:
            return [self.rise(step) * base for base in self.base_lrs]
        total = self.total_steps - self.warmup_steps
        return [self.after(step - self.warmup_steps, total, float(base)) for base in self.base_lrs]

    def rise(self, step: int) -> float:
        return (step + 1) / self.warmup_steps

    def after(self, step: int, total: int, base: float) -> float:
        """The rate at ``step`` of the ``total`` steps after the warm-up."""
        raise NotImplementedError


class CosineAnnealingWarmupLR(_Warmup):
    """A warm-up, then half a cosine down to ``eta_min`` over the steps that remain."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        self.eta_min = eta_min
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def after(self, step: int, total: int, base: float) -> float:
        return self.cosine(step / total, base)

    def cosine(self, part: float, base: float) -> float:
        """The rate after ``part`` of the half cosine."""
        return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * min(part, 1.0))) / 2


class FlatAnnealingWarmupLR(CosineAnnealingWarmupLR):
    """A warm-up, the full rate for the part ``pct_start`` of what remains, then half a cosine to ``eta_min``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        if not 0 <= pct_start <= 1:
            raise ConfigError(f"pct_start: got {pct_start}, expected a number from 0 to 1")
        self.pct_start = pct_start
        super().__init__(optimizer, total_steps, warmup_steps, eta_min, last_epoch)

    def after(self, step: int, total: int, base: float) -> float:
        flat = int(total * self.pct_start)
        return base if step < flat else self.cosine((step - flat) / max(total - flat, 1), base)


class FlatAnnealingLR(FlatAnnealingWarmupLR):
    """The full rate for the part ``pct_start`` of all steps, then half a cosine down to 0."""

    def __init__(self, optimizer: Optimizer, total_steps: int, pct_start: float = 0.72, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_steps, 0, pct_start, 0.0, last_epoch)


class LinearWarmupLR(_Warmup):
    """A warm-up, then a line down to 0 at ``total_steps``."""

    def rise(self, step: int) -> float:
        return (step + 1) / (self.warmup_steps + 1)

    def after(self, step: int, total: int, base: float) -> float:
        return max(1 - step / total, 0.0) * base


class MultiStepWarmupLR(_Warmup):
    """A warm-up, then the rate times ``gamma`` at each of ``milestones``, which count all steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Sequence[int] = (),
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        if not milestones:
            raise ConfigError("milestones: got none, expected the steps at which the rate falls")
        self.milestones = tuple(milestones)
        self.gamma = gamma
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def after(self, step: int, total: int, base: float) -> float:
        made = step + self.warmup_steps
        return base * self.gamma ** sum(self.warmup_steps <= milestone <= made for milestone in self.milestones)


class PolynomialWarmupLR(_Warmup):
    """A warm-up, then ``end_lr + (rate - end_lr) * (1 - part) ** power`` over the steps that remain."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        self.end_lr = end_lr
        self.power = power
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def after(self, step: int, total: int, base: float) -> float:
        return float((base - self.end_lr) * (1 - min(step / total, 1.0)) ** self.power + self.end_lr)


class PolynomialLR(PolynomialWarmupLR):
    """As :class:`PolynomialWarmupLR`, without a warm-up."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, end_lr: float = 0.0001, power: float = 1.0, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, total_steps, 0, end_lr, power, last_epoch)
