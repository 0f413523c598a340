"""The report of ``paramp verify``: the distances of each layer, and whether they are within the tolerances."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .options import RUNS

WHAT = ("forward", "gradient", "step")
"""What is compared of a layer."""


@dataclass
class Layer:
    """How many times as far apart as by rounding alone a module's values are; None if there is nothing to compare."""

    name: str
    forward: float | None = None
    gradient: float | None = None
    step: float | None = None
    not_finite: list[str] = field(default_factory=list)
    """Those of :data:`WHAT` of which the values of both runs are not finite."""
    where: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By :data:`WHAT`, the step and the microbatch of the first value that exceeds the tolerance, else of the largest,
    or of the first that is not finite."""
    problem: str | None = None
    """The reason why its output could not be compared."""

    def exceeds(self, what: str, tolerance: float) -> bool:
        """Whether ``what``, one of :data:`WHAT`, is larger than ``tolerance``, or NaN."""
        value: float | None = getattr(self, what)
        return value is not None and not value <= tolerance

    def add(self, what: str, value: float | None, where: tuple[int, int], tolerance: float) -> None:
        """Take in a ``value`` of ``what``, in the order of steps; None: it is not finite in both runs."""
        if value is None:
            if what not in self.not_finite:
                self.not_finite.append(what)
                self.where[what] = where
            return
        largest: float | None = getattr(self, what)
        if largest is None or value > largest or value != value:
            if not self.exceeds(what, tolerance) and what not in self.not_finite:
                self.where[what] = where
            setattr(self, what, value)


@dataclass
class Report:
    """The comparison of two runs."""

    layout: str
    precision: str
    tolerance: float
    """How many times as far apart as by rounding alone values may be."""
    steps: int
    layers: list[Layer] = field(default_factory=list)
    """In the order in which their forward ends."""
    losses: dict[str, list[float]] = field(default_factory=dict)
    """By run, the value of each step; the same for the next two."""
    grad_norms: dict[str, list[float]] = field(default_factory=dict)
    skipped: dict[str, list[bool]] = field(default_factory=dict)
    numbers: dict[str, list[float | None]] = field(default_factory=lambda: {"loss": [], "gradient norm": []})
    """How far apart losses and gradient norms are, as layers; None: not finite in both runs."""
    replicas: list[str] = field(default_factory=list)
    """What differed between ranks of the layout that have the same weights."""
    random_in: str | None = None
    """The first layer that draws random numbers in its forward."""
    updated: str | None = None
    """The first buffer that the forward changed."""

    @property
    def first(self) -> tuple[Layer, str] | None:
        """The first layer that diverges, and what of it does; gradients in the order of the backward."""
        return self._first(lambda layer, what: layer.exceeds(what, self.tolerance))

    @property
    def first_not_finite(self) -> tuple[Layer, str] | None:
        """The first layer whose values are not finite in both runs, and which are; in the same order."""
        return self._first(lambda layer, what: what in layer.not_finite)

    def _first(self, holds: Callable[[Layer, str], bool]) -> tuple[Layer, str] | None:
        pairs = [(layer, what) for what in WHAT for layer in self.layers[:: -1 if what == "gradient" else 1]]
        found = [pair for pair in pairs if holds(*pair)]
        return min(found, key=lambda pair: pair[0].where[pair[1]][0]) if found else None

    @property
    def overflows(self) -> list[str]:
        """The runs that skipped a step, which then could not be compared."""
        return [run for run in RUNS if any(self.skipped[run])]

    @property
    def ok(self) -> bool:
        """Whether everything is finite and within the tolerance."""
        near = all(map(self._is_near, itertools.chain(*self.numbers.values())))
        return near and not (self.first or self.first_not_finite or self.overflows or self.replicas)

    def _is_near(self, value: float | None) -> bool:
        return value is not None and value <= self.tolerance

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON; a number that is not finite is a string such as ``"inf"``."""
        first = None if self.first is None else {"layer": self.first[0].name, "what": self.first[1]}
        derived = {"ok": self.ok, "first": first, "overflows": self.overflows}
        plain: dict[str, Any] = _finite(derived | asdict(self))
        return plain

    def lines(self) -> Iterator[str]:
        """The report as a table and a conclusion."""
        width = max(len(name) for name in ["layer", *(layer.name for layer in self.layers)])
        yield f"{'layer':<{width}}  {'  '.join(f'{what:>8}' for what in WHAT)}"
        for layer in self.layers:
            cells = [f"{_short(getattr(layer, what)):>8}" for what in WHAT]
            yield f"{layer.name:<{width}}  {'  '.join(cells)}  {self._mark(layer)}"
        allowed = f"over {self.steps} steps; allowed {self.tolerance:g}"
        yield f"in multiples of what rounding does in {self.precision}, {allowed}"
        yield _numbers("losses", self.losses, self.numbers["loss"])
        yield _numbers("gradient norms", self.grad_norms, self.numbers["gradient norm"])
        if self.overflows:
            steps = {run: [step for step, skipped in enumerate(self.skipped[run], 1) if skipped] for run in RUNS}
            yield f"steps skipped for an overflow: {steps['single']} single, {steps['sharded']} sharded"
        yield from self.replicas[:1]
        if self.random_in is not None:
            fix = "which differ between layouts; disable that in the model"
            yield f"note: the forward draws random numbers ({self.random_in}), {fix}"
        if self.updated is not None:
            fix = "which each data rank and microbatch does with its own samples; a difference may be of that"
            yield f"note: the forward changes the buffer {self.updated}, {fix}"
        yield self._conclusion()

    def _mark(self, layer: Layer) -> str:
        if any(layer.exceeds(what, self.tolerance) for what in WHAT):
            return "DIVERGES"
        if layer.not_finite:
            return "not finite in both runs"
        return "ok" if layer.problem is None else f"not compared: {layer.problem}"

    def _conclusion(self) -> str:
        if self.first is not None:
            layer, what = self.first
            value = f"{_short(getattr(layer, what))} times rounding, allowed {self.tolerance:g}"
            return f"the first layer that diverges: {layer.name} ({_where(layer, what)}: {value})"
        found = []
        if self.overflows:
            step = min(self.skipped[run].index(True) for run in self.overflows) + 1
            found.append(f"step {step} overflows in {' and '.join(self.overflows)}")
        if self.first_not_finite is not None:
            layer, what = self.first_not_finite
            found.append(f"the values are not finite in both runs, first in {layer.name} ({_where(layer, what)})")
        if found:
            fix = "lower init_scale or correct the model" if self.overflows else "correct the model"
            return f"not everything was compared: {', '.join(found)}; {fix}"
        wrong = [f"the {name} diverges" for name, values in self.numbers.items() if not all(map(self._is_near, values))]
        wrong += ["replicas differ"] if self.replicas else []
        if wrong:
            return f"{self.layout} does not follow the single process: {' and '.join(wrong)}"
        return f"{self.layout} follows the single process"


def _where(layer: Layer, what: str) -> str:
    step, microbatch = layer.where[what]
    places = {"forward": f"forward, microbatch {microbatch} of", "gradient": "gradient of", "step": "weights after"}
    return f"{places[what]} step {step}"


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 1e5 else f"{value:.1e}"


def _numbers(what: str, values: Mapping[str, Sequence[float]], units: Sequence[float | None]) -> str:
    rows = [f"{' '.join(f'{value:.5g}' for value in values[run])} {run}" for run in RUNS]
    return f"{what}: {', '.join(rows)}; {' '.join(map(_short, units))} apart"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
