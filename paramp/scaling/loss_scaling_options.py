"""How a loss scale begins and changes, and what of a saved one a run takes over."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..base.errors import require

SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""The smallest scale is the floor if ``min_scale`` is None: a scale of 0 could never grow again."""
LARGEST_COUNT = 2**31 - 1
"""Of steps and overflows, which torch's scaler counts in int32."""
SCALES = f"a number from {SMALLEST:.2g} to {LARGEST:.2g}, since the scale is kept in float32"


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """The initial loss scale and how it changes; the arguments of :class:`paramp.DistributedGradScaler`."""

    init_scale: float = 2.0**16
    """The first scale. It adapts within a few steps, so only its order of magnitude matters."""
    growth_factor: float = 2.0
    """The scale is multiplied by this after ``growth_interval`` steps in a row without overflow."""
    backoff_factor: float = 0.5
    """The scale is multiplied by this on an overflow."""
    growth_interval: int = 2000
    hysteresis: int = 1
    """The scale backs off from this overflow on, counted since the last growth; earlier ones only skip the step."""
    min_scale: float | None = None
    max_scale: float | None = None
    enabled: bool = True
    """False: losses are not scaled. Non-finite gradients skip the step all the same."""

    @staticmethod
    def static(scale: float) -> LossScaling:
        """A constant scale: floor and ceiling are the scale itself."""
        return LossScaling(init_scale=scale, min_scale=scale, max_scale=scale)

    def __post_init__(self) -> None:
        floor, ceiling = self.min_scale or 0.0, math.inf if self.max_scale is None else self.max_scale
        for name, condition, allowed in (
            ("init_scale", SMALLEST <= self.init_scale <= LARGEST, SCALES),
            ("growth_factor", 1 < self.growth_factor < math.inf, "a finite number above 1"),
            ("backoff_factor", 0 < self.backoff_factor < 1, "a number between 0 and 1"),
            ("growth_interval", self.growth_interval >= 1, "an integer of 1 or more"),
            ("hysteresis", self.hysteresis >= 1, "an integer of 1 or more"),
            ("min_scale", self.min_scale is None or SMALLEST <= floor <= LARGEST, f"{SCALES}, or None"),
            (
                "max_scale",
                floor <= ceiling <= LARGEST or ceiling == math.inf,
                "a number of at least min_scale, in float32",
            ),
        ):
            require(condition, name, getattr(self, name), allowed)


def resumed_state(own: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """``own``, a scaler's state, with the scale and the counters of ``saved``, whose settings may be another mode's.

    The scale is moved between the limits of ``own``, if those of ``saved`` are others. It is ``own`` itself if one of
    the two scales is fixed, and the other is not, or is fixed elsewhere.
    """
    limits, others = ((state.get("min_scale"), state.get("max_scale")) for state in (own, saved))
    if limits != others and any(floor is not None and floor == ceiling for floor, ceiling in (limits, others)):
        return own
    counters = {"_growth_tracker": saved["_growth_tracker"], "_overflow_tracker": saved.get("_overflow_tracker", 0)}
    if limits == others:  # a script may have set a scale beyond them
        return own | {"scale": saved["scale"]} | counters
    floor, ceiling = limits
    scale = max(saved["scale"], SMALLEST if floor is None else floor)
    return own | {"scale": scale if ceiling is None else min(scale, ceiling)} | counters
