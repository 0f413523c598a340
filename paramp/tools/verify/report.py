"""The report of ``paramp verify``: the distances of each layer, and whether they are within the tolerances."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .options import RUNS

WHAT = ("forward", "gradient", "step", "weights")
"""The distances of a layer."""


@dataclass
class Layer:
    """The distances of one module, in rounding errors; None if there is nothing to compare."""

    name: str
    forward: float | None = None
    gradient: float | None = None
    step: float | None = None
    weights: float | None = None
    not_finite: list[str] = field(default_factory=list)
    """Names of the distances that are None because the values of both runs are not finite."""
    microbatch: int = 0
    """The first microbatch whose output exceeds the tolerance, else the one with the largest distance."""
    problem: str | None = None
    """The reason why its output could not be compared."""

    def exceeds(self, what: str, tolerance: float) -> bool:
        """Whether the distance ``what``, one of :data:`WHAT`, is larger than ``tolerance``, or NaN."""
        value: float | None = getattr(self, what)
        return value is not None and not value <= tolerance


@dataclass
class Report:
    """The comparison of two runs."""

    layout: str
    precision: str
    unit: float
    """One rounding error, as a relative distance. The tolerances are multiples of it."""
    tolerance: float
    loss_tolerance: float
    later_tolerance: float
    """For weights, losses and norms after the first step."""
    steps: int
    layers: list[Layer] = field(default_factory=list)
    """In the order in which their forward ends."""
    losses: dict[str, list[float]] = field(default_factory=dict)
    """By run, the value of each step; the same for the next two."""
    grad_norms: dict[str, list[float]] = field(default_factory=dict)
    skipped: dict[str, list[bool]] = field(default_factory=dict)
    random_in: str | None = None
    """The first layer that draws random numbers in its forward."""

    def allowed(self, what: str) -> float:
        """The tolerance of the distance ``what``."""
        return self.later_tolerance if what == "weights" else self.tolerance

    @property
    def first(self) -> tuple[Layer, str] | None:
        """The first layer that diverges, and the name of the distance; gradients in the order of the backward."""
        return next((at for at in self._in_order() if at[0].exceeds(at[1], self.allowed(at[1]))), None)

    @property
    def first_not_finite(self) -> tuple[Layer, str] | None:
        """The first layer whose values are not finite in both runs, and the name of the distance; in the same order."""
        return next((at for at in self._in_order() if at[1] in at[0].not_finite), None)

    def _in_order(self) -> Iterator[tuple[Layer, str]]:
        for what in WHAT:
            for layer in self.layers[::-1] if what == "gradient" else self.layers:
                yield layer, what

    @property
    def overflows(self) -> list[str]:
        """The runs that skipped the first step, the one that is compared strictly."""
        return [run for run in RUNS if self.skipped[run][0]]

    @property
    def loss_distance(self) -> float:
        """The largest distance of a loss."""
        return max(_distances(self.losses)) / self._loss_unit

    @property
    def norm_distance(self) -> float:
        """The largest distance of a gradient norm, without steps that both runs skipped."""
        return max(self._norm_distances()) / self.unit

    @property
    def ok(self) -> bool:
        """Whether everything is finite and within the tolerances."""
        if self.first or self.first_not_finite or self.overflows:
            return False
        losses = self._within(_distances(self.losses), self.loss_tolerance * self._loss_unit)
        norms = self._within(self._norm_distances(), self.tolerance * self.unit)
        return losses and norms and self.skipped["single"] == self.skipped["sharded"]

    @property
    def _loss_unit(self) -> float:
        return max(self.unit, torch.finfo(torch.float32).eps / 2)  # losses are fp32

    def _norm_distances(self) -> list[float]:
        skipped = zip(*self.skipped.values(), strict=True)
        distances = _distances(self.grad_norms)
        return [0.0 if all(both) else value for value, both in zip(distances, skipped, strict=True)]

    def _within(self, distances: Sequence[float], first: float) -> bool:
        """Whether the relative distances are at most ``first`` in step 1, and at most the later tolerance after it."""
        return distances[0] <= first and all(value <= self.later_tolerance * self.unit for value in distances[1:])

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON; a distance that is not finite is the string ``"inf"``."""
        first = None if self.first is None else {"layer": self.first[0].name, "what": self.first[1]}
        derived = {name: getattr(self, name) for name in ("overflows", "loss_distance", "norm_distance")}
        plain: dict[str, Any] = _finite({"ok": self.ok, "first": first} | asdict(self) | derived)
        return plain

    def lines(self) -> Iterator[str]:
        """The report as a table and a conclusion."""
        width = max(len(name) for name in ["layer", *(layer.name for layer in self.layers)])
        heads = {what: f"{what:>8}" for what in WHAT} | {"weights": f"weights after {self.steps} steps"}
        yield f"{'layer':<{width}}  {'  '.join(heads.values())}"
        for layer in self.layers:
            cells = [f"{_short(getattr(layer, what)):>{len(head)}}" for what, head in heads.items()]
            yield f"{layer.name:<{width}}  {'  '.join(cells)}  {self._mark(layer)}"
        allowed = f"{self.tolerance:g}, of a loss {self.loss_tolerance:g}, after step 1 {self.later_tolerance:g}"
        yield f"in rounding errors of {self.precision}, 2**{math.log2(self.unit):g}; allowed {allowed}"
        yield _numbers("losses", self.losses, self.loss_distance)
        yield _numbers("gradient norms", self.grad_norms, self.norm_distance)
        if any(self.skipped["single"]) or any(self.skipped["sharded"]):
            steps = {run: [step for step, skipped in enumerate(self.skipped[run], 1) if skipped] for run in RUNS}
            yield f"steps skipped for an overflow: {steps['single']} single, {steps['sharded']} sharded"
        if self.random_in is not None:
            fix = "which differ between layouts; disable that in the model"
            yield f"note: the forward draws random numbers ({self.random_in}), {fix}"
        yield self._conclusion()

    def _mark(self, layer: Layer) -> str:
        if any(layer.exceeds(what, self.allowed(what)) for what in WHAT):
            return "DIVERGES"
        if layer.not_finite:
            return "not finite in both runs"
        return "ok" if layer.problem is None else f"not compared: {layer.problem}"

    def _conclusion(self) -> str:
        if self.first is not None:
            layer, what = self.first
            value = f"{_short(getattr(layer, what))} units, allowed {self.allowed(what):g}"
            return f"the first layer that diverges: {layer.name} ({self._where(layer, what)}: {value})"
        found = []
        if self.overflows:
            runs = "both runs" if len(self.overflows) > 1 else f"the {self.overflows[0]} run"
            found.append(f"the first step overflows in {runs}")
        if self.first_not_finite is not None:
            layer, what = self.first_not_finite
            found.append(f"the values are not finite in both runs, first in {layer.name} ({self._where(layer, what)})")
        if found:
            later = self.first_not_finite is not None and self.first_not_finite[1] == "weights"
            start, end = ("", "lower lr") if later else ("nothing was compared: ", "correct the model")
            return f"{start}{', '.join(found)}; {'lower init_scale or ' if self.overflows else ''}{end}"
        return f"{self.layout} {'follows' if self.ok else 'does not follow'} the single process"

    def _where(self, layer: Layer, what: str) -> str:
        places = {
            "forward": f"forward, microbatch {layer.microbatch} of step 1",
            "gradient": "gradient of step 1",
            "step": "weights after step 1",
            "weights": f"weights after {self.steps} steps",
        }
        return places[what]


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 1e5 else f"{value:.1e}"


def _numbers(what: str, values: Mapping[str, Sequence[float]], distance: float) -> str:
    rows = [f"{' '.join(f'{value:.5g}' for value in values[run])} {run}" for run in RUNS]
    return f"{what}: {', '.join(rows)}; {_short(distance)} apart"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _distances(values: Mapping[str, Sequence[float]]) -> list[float]:
    """The relative distance of the two runs' numbers in each step."""
    return [_relative(*pair) for pair in zip(values["sharded"], values["single"], strict=True)]


def _relative(actual: float, expected: float) -> float:
    """``| actual - expected | / | expected |``; infinite where one of them is not finite."""
    if not math.isfinite(actual) or not math.isfinite(expected):
        return math.inf
    return abs(actual - expected) / abs(expected) if expected else math.inf if actual else 0.0
