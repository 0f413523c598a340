"""Colossal-AI's learning-rate schedules, whose first argument after the optimizer is the total number of steps.

A step is one call of ``step()``: an epoch, or a batch. They are ordinary torch schedulers for any optimizer, also
one that is passed to ``paramp.initialize`` or ``convert_to_amp``. If the scheduler is passed to ``initialize`` too, it
does not advance when a step is skipped; otherwise each ``step()`` counts.

:class:`CosineAnnealingLR` and :class:`MultiStepLR` are torch's. The others are in closed form: the rate depends only on
the number of steps, even if it was changed in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedules

from ....base.errors import ConfigError


class CosineAnnealingLR(schedules.CosineAnnealingLR):
    """Half a cosine over ``total_steps``, from the optimizer's rate down to ``eta_min``."""

    def __init__(self, optimizer: Optimizer, total_steps: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_steps, eta_min=eta_min, last_epoch=last_epoch)


class MultiStepLR(schedules.MultiStepLR):
    """The rate is multiplied by ``gamma`` at each of ``milestones``. ``total_steps`` has no effect."""

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
    """A linear warm-up over ``warmup_steps``, then :meth:`after`."""

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1) -> None:
        if not 0 <= warmup_steps < total_steps:
            raise ConfigError(f"warmup_steps: got {warmup_steps}, expected 0 to {total_steps - 1}, below total_steps")
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
    """A warm-up, then half a cosine down to ``eta_min`` over the remaining steps."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        self.eta_min = eta_min
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def after(self, step: int, total: int, base: float) -> float:
        return self.cosine(step / total, base)

    def cosine(self, part: float, base: float) -> float:
        """The rate after the fraction ``part`` of the half cosine."""
        return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * min(part, 1.0))) / 2


class FlatAnnealingWarmupLR(CosineAnnealingWarmupLR):
    """A warm-up, the full rate for the fraction ``pct_start`` of the rest, then half a cosine to ``eta_min``."""

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
    """The full rate for the fraction ``pct_start`` of all steps, then half a cosine down to 0."""

    def __init__(self, optimizer: Optimizer, total_steps: int, pct_start: float = 0.72, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_steps, 0, pct_start, 0.0, last_epoch)


class LinearWarmupLR(_Warmup):
    """A warm-up, then a linear decay to 0 at ``total_steps``."""

    def rise(self, step: int) -> float:
        return (step + 1) / (self.warmup_steps + 1)

    def after(self, step: int, total: int, base: float) -> float:
        return max(1 - step / total, 0.0) * base


class MultiStepWarmupLR(_Warmup):
    """A warm-up; then the rate is multiplied by ``gamma`` at each of ``milestones``, counted from the first step."""

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
            raise ConfigError("milestones: got none, expected the steps at which the rate changes")
        self.milestones = tuple(milestones)
        self.gamma = gamma
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def after(self, step: int, total: int, base: float) -> float:
        made = step + self.warmup_steps
        return base * self.gamma ** sum(self.warmup_steps <= milestone <= made for milestone in self.milestones)


class PolynomialWarmupLR(_Warmup):
    """A warm-up, then ``end_lr + (rate - end_lr) * (1 - part) ** power`` over the remaining steps."""

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
