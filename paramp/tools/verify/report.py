"""Does a model compute on a layout what it computes in one process? Layer by layer: ``python -m paramp verify``.

Two runs of the same mode from the same weights on the same batches, one in one process and one sharded, write what they
saw (:mod:`paramp.tools.verify.run`); here it is compared. Both round to the mode's dtype, at other places and in another
order, so each value may differ by a few of its rounding errors. All distances are relative L2 norms, counted in these::

    forward     || sharded - single || / || single ||                               of each output of a layer
    gradient    || sharded - single || / max(|| single ||, rms of the layer's)      of each parameter, in the first step
    step        the same of the way that it goes in the first step, which may also lose what rounding the weight takes
    weights     the same of the way from the start to the end

The first step judges. In later ones the weights differ already, and where a layer has a kink, as ReLU has, rounding
decides on which side of it a value near 0 comes to lie: that changes a gradient by a sample's whole share, however
fine the rounding is. So later steps fail only where the runs are :data:`LATER` apart, or not finite.

The gradient's floor is for parameters whose true gradient is zero, such as the bias of keys in attention: what is left
of it is the rounding of what cancelled out. The optimizer is SGD with momentum, because Adam divides a gradient of half
its size by its own size, and so hides the mistake.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...base.errors import ConfigError
from ...config.schema import Config
from ...distributed.local_launcher import start_processes
from ...precision.policy import Precision
from .run import RUNS, Options, Seen, configure

__all__ = [
    "FLOAT8_ROUNDING",
    "LATER",
    "UNITS",
    "UNITS_FLOAT8",
    "UNITS_LOSS",
    "Layer",
    "Report",
    "compare",
    "rounding",
    "verify",
]

UNITS = 32.0
"""Rounding errors that a layer may be apart."""
UNITS_FLOAT8 = 6.0
"""The same where linear layers multiply in float8."""
UNITS_LOSS = 4.0
"""The same of a loss in reduced precision, which is an average; in fp32 and fp64 it is :data:`UNITS`."""
FLOAT8_ROUNDING = 2.0**-4
"""Of e4m3."""
LATER = 0.5
"""Relative distance that steps after the first may be apart; no multiple of the rounding error, as it is not rounding
that grows there."""
WHAT = ("forward", "gradient", "step", "weights")
"""What of a layer is compared."""


def rounding(precision: Precision) -> float:
    """The rounding error of the lowest dtype in a mode's matrix products."""
    return FLOAT8_ROUNDING if precision.float8 is not None else torch.finfo(precision.compute).eps / 2


@dataclass
class Layer:
    """What was found of one module. Distances in rounding errors, None where there is nothing to compare."""

    name: str
    forward: float | None = None
    gradient: float | None = None
    step: float | None = None
    weights: float | None = None
    not_finite: list[str] = field(default_factory=list)
    """Which of these are None because the values of both runs are not finite."""
    microbatch: int = 0
    """The first one in which its output was not within the tolerance, else the one in which it was farthest."""
    problem: str | None = None
    """Why its output could not be compared."""

    def distance(self, what: str) -> float | None:
        """The one called ``what``."""
        value: float | None = getattr(self, what)
        return value

    def exceeds(self, what: str, tolerance: float) -> bool:
        """Whether the distance called ``what`` is beyond ``tolerance``."""
        value = self.distance(what)
        return value is not None and not value <= tolerance


@dataclass
class Report:
    """The comparison of two runs."""

    layout: str
    precision: str
    unit: float
    """One rounding error."""
    tolerance: float
    loss_tolerance: float
    later_tolerance: float
    """Of weights, losses and norms after the first step."""
    steps: int
    layers: list[Layer] = field(default_factory=list)
    """In the order in which their forward ends."""
    losses: dict[str, list[float]] = field(default_factory=dict)
    """By run."""
    grad_norms: dict[str, list[float]] = field(default_factory=dict)
    skipped: dict[str, list[bool]] = field(default_factory=dict)
    random_in: str | None = None
    """A layer that draws random numbers in its forward."""

    def allowed(self, what: str) -> float:
        """Rounding errors that layers may be apart in ``what``."""
        return self.later_tolerance if what == "weights" else self.tolerance

    @property
    def first(self) -> tuple[Layer, str] | None:
        """The first layer that diverges, and in what: the forward, else the gradient in the order of the backward."""
        return next((at for at in self._in_order() if at[0].exceeds(at[1], self.allowed(at[1]))), None)

    @property
    def first_not_finite(self) -> tuple[Layer, str] | None:
        """The first layer whose values are not finite in both runs, and which values, in the same order."""
        return next((at for at in self._in_order() if at[1] in at[0].not_finite), None)

    def _in_order(self) -> Iterator[tuple[Layer, str]]:
        for what in WHAT:
            for layer in self.layers[::-1] if what == "gradient" else self.layers:
                yield layer, what

    @property
    def overflows(self) -> list[str]:
        """The runs that skipped the first step, so that there is nothing to judge by."""
        return [run for run in RUNS if self.skipped[run][0]]

    @property
    def loss_distance(self) -> float:
        """The largest distance of a loss."""
        return max(_apart_in_each(self.losses)) / self._loss_unit

    @property
    def norm_distance(self) -> float:
        """The largest distance of a norm of the gradient, without steps that both runs skipped."""
        return max(self._norms_apart()) / self.unit

    @property
    def ok(self) -> bool:
        """Whether all is finite and within the tolerances."""
        if self.first is not None or self.first_not_finite is not None or self.overflows:
            return False
        losses = self._within(_apart_in_each(self.losses), self.loss_tolerance * self._loss_unit)
        norms = self._within(self._norms_apart(), self.tolerance * self.unit)
        return losses and norms and self.skipped["single"] == self.skipped["sharded"]

    @property
    def _loss_unit(self) -> float:
        return max(self.unit, torch.finfo(torch.float32).eps / 2)  # in which losses are reported

    def _norms_apart(self) -> list[float]:
        skipped = zip(*self.skipped.values(), strict=True)
        apart = _apart_in_each(self.grad_norms)
        return [0.0 if all(both) else value for value, both in zip(apart, skipped, strict=True)]

    def _within(self, apart: Sequence[float], first: float) -> bool:
        """Whether the relative distances of each step are at most ``first`` in the first one, and in later ones what is
        allowed there."""
        return apart[0] <= first and all(value <= self.later_tolerance * self.unit for value in apart[1:])

    def as_json(self) -> dict[str, Any]:
        """Plain values; a distance that is not finite is the string ``"inf"``."""
        first = None if self.first is None else {"layer": self.first[0].name, "what": self.first[1]}
        own = asdict(self) | {
            "overflows": self.overflows,
            "loss_distance": self.loss_distance,
            "norm_distance": self.norm_distance,
        }
        plain: dict[str, Any] = _finite({"ok": self.ok, "first": first} | own)
        return plain

    def lines(self) -> Iterator[str]:
        """The report for a reader."""
        width = max(len(name) for name in ["layer", *(layer.name for layer in self.layers)])
        heads = {what: f"{what:>8}" for what in WHAT} | {"weights": f"weights after {self.steps} steps"}
        yield f"{'layer':<{width}}  {'  '.join(heads.values())}"
        for layer in self.layers:
            cells = [f"{_words(layer.distance(what)):>{len(head)}}" for what, head in heads.items()]
            yield f"{layer.name:<{width}}  {'  '.join(cells)}  {self._mark(layer)}"
        allowed = (
            f"allowed {self.tolerance:g}, of a loss {self.loss_tolerance:g}, after step 1 {self.later_tolerance:g}"
        )
        yield f"in rounding errors of {self.precision}, 2**{math.log2(self.unit):g}; {allowed}"
        yield _numbers("losses", self.losses, self.loss_distance)
        yield _numbers("gradient norms", self.grad_norms, self.norm_distance)
        if any(self.skipped["single"]) or any(self.skipped["sharded"]):
            steps = {run: [step for step, skipped in enumerate(self.skipped[run], 1) if skipped] for run in RUNS}
            yield f"steps skipped for an overflow: {steps['single']} single, {steps['sharded']} sharded"
        if self.random_in is not None:
            yield (
                f"note: the forward draws random numbers ({self.random_in}), which are others in each layout; switch "
                "that off in the model that is built"
            )
        yield self._verdict()

    def _mark(self, layer: Layer) -> str:
        if any(layer.exceeds(what, self.allowed(what)) for what in WHAT):
            return "DIVERGES"
        if layer.not_finite:
            return "not finite in both runs"
        return "ok" if layer.problem is None else f"not compared: {layer.problem}"

    def _verdict(self) -> str:
        if self.first is not None:
            layer, what = self.first
            value = f"{_words(layer.distance(what))} units, allowed {self.allowed(what):g}"
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
            start, end = ("", "lower lr") if later else ("nothing was compared: ", "mend the model")
            return f"{start}{', '.join(found)}; {'lower init_scale or ' if self.overflows else ''}{end}"
        return f"{self.layout} {'follows' if self.ok else 'does not follow'} the single process"

    def _where(self, layer: Layer, what: str) -> str:
        return {
            "forward": f"forward, microbatch {layer.microbatch} of step 1",
            "gradient": "gradient of step 1",
            "step": "weights after step 1",
            "weights": f"weights after {self.steps} steps",
        }[what]


def _words(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 1e5 else f"{value:.1e}"


def _numbers(what: str, values: Mapping[str, Sequence[float]], apart: float) -> str:
    rows = [f"{' '.join(f'{value:.5g}' for value in values[run])} {run}" for run in RUNS]
    return f"{what}: {', '.join(rows)}; {_words(apart)} apart"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _apart_in_each(values: Mapping[str, Sequence[float]]) -> list[float]:
    """The relative distance of the two runs' numbers in each step; infinite where one of them is not finite."""
    return [_number_apart(*pair) for pair in zip(values["sharded"], values["single"], strict=True)]


def _number_apart(actual: float, expected: float) -> float:
    if not math.isfinite(actual) or not math.isfinite(expected):
        return math.inf
    return abs(actual - expected) / abs(expected) if expected else math.inf if actual else 0.0


# ---------------------------------------------------------------------------------------------------- the comparison


def compare(single: Seen, sharded: Sequence[Seen], config: Config, tolerance: float | None = None) -> Report:
    """What the ranks of the sharded run, which ``config`` is of, saw against what the single process saw.

    Args:
        tolerance: rounding errors that a layer may be apart in the first step. None: as the mode has it.

    Raises:
        ConfigError: the runs did not start from the same weights or did not see the same batches.
    """
    precision, parallel = config.precision, config.parallel
    usual = UNITS if precision.float8 is None else UNITS_FLOAT8
    tolerance = usual if tolerance is None else tolerance
    unit = rounding(precision)
    low = unit > torch.finfo(torch.float32).eps / 2
    sizes = (("pp", parallel.pipeline.size), ("dp", parallel.data), ("tp", parallel.tensor.size))
    layout = "·".join(f"{name}{size}" for name, size in sizes if size != 1) or "1"
    limits = tolerance, UNITS_LOSS if low else tolerance, max(LATER / unit, tolerance)
    report = Report(layout, precision.name, unit, *limits, len(single.losses))
    _check_same_start(single, sharded)
    runs = dict(zip(RUNS, (single, sharded[0]), strict=True))
    report.losses = {run: seen.losses for run, seen in runs.items()}
    report.grad_norms = {run: seen.grad_norms for run, seen in runs.items()}
    report.skipped = {run: seen.skipped for run, seen in runs.items()}
    report.random_in = single.random_in
    layers = _forwards(single, sharded, parallel.pipeline.num_microbatches, report)
    order = [*layers]
    for name, what, value in () if report.overflows else _parameters(single, sharded, precision, unit):
        layer = layers.setdefault(_owner(name), Layer(_owner(name) or "(model)"))
        _add_distance(layer, what, value)
    for name in (name for name in layers if name not in order):  # not called itself: before the module that uses it
        users = (index for index, other in enumerate(order) if f"{name}.".startswith(f"{other}." if other else ""))
        order.insert(next(users, len(order)), name)
    report.layers = [layers[name] for name in order]
    return report


def _add_distance(layer: Layer, what: str, value: float | None) -> None:
    """Keep the largest in ``layer``; None is for values that are not finite in both runs."""
    if value is not None:
        setattr(layer, what, max(value, layer.distance(what) or 0.0))
    elif what not in layer.not_finite:
        layer.not_finite.append(what)


def _check_same_start(single: Seen, sharded: Sequence[Seen]) -> None:
    if sharded[0].batches != single.batches:
        step = next(
            index
            for index, pair in enumerate(zip(sharded[0].batches, single.batches, strict=True), 1)
            if len(set(pair)) > 1
        )
        raise ConfigError(
            f"batches: those of step {step} are not the same in both runs; make them depend on the step alone"
        )
    first = sharded[0].start
    names = [name for name in single.start if name not in first or not torch.equal(single.start[name], first[name])]
    if names:
        raise ConfigError(
            f"model: {names[0]!r} does not start with the same values in both runs; let it depend on torch's seed only"
        )


def _forwards(single: Seen, sharded: Sequence[Seen], num_microbatches: int, report: Report) -> dict[str, Layer]:
    """The layers that were called, in the order in which that ended, with the distances of their outputs."""
    calls: dict[tuple[str, int, int], list[tuple[Seen, list[torch.Tensor]]]] = defaultdict(list)
    for seen in sorted(sharded, key=lambda seen: seen.place["tp"]):
        for note in seen.notes:
            chunk = seen.place["dp"] * num_microbatches + note["microbatch"]
            calls[note["module"], chunk, note["call"]].append((seen, note["tensors"]))
    layers: dict[str, Layer] = {}
    names = dict.fromkeys(note["module"] for note in single.notes)
    holders_of = {name: [seen for seen in sharded if _has_all(seen, name, single)] for name in names}
    for note in single.notes:
        name, wholes = note["module"], note["tensors"]
        holders = holders_of[name]
        if not wholes or not holders:  # a module that is cut into stages returns something else in each
            continue
        layer = layers.setdefault(name, Layer(name or "(model)"))
        found = [tensors for seen, tensors in calls[name, note["microbatch"], note["call"]] if seen in holders]
        if {len(tensors) for tensors in found} != {len(wholes)}:
            layer.problem = "its calls in the sharded run are others"
            continue
        for whole, *parts in zip(wholes, *found, strict=True):
            _add_output(layer, parts, whole, note["microbatch"], holders[0], report)
    return layers


def _has_all(seen: Seen, name: str, single: Seen) -> bool:
    """Whether the rank has the module ``name`` and all that it contains."""
    inside = {other for other in single.modules if f"{other}.".startswith(f"{name}." if name else "")}
    return inside <= set(seen.modules)


def _add_output(
    layer: Layer, parts: Sequence[torch.Tensor], whole: torch.Tensor, microbatch: int, holder: Seen, report: Report
) -> None:
    """ActivationRecord in ``layer`` how far an output of it is from ``whole``."""
    if _not_a_number(whole) and any(_not_a_number(part) for part in parts):
        layer.microbatch = layer.microbatch if "forward" in layer.not_finite else microbatch
        _add_distance(layer, "forward", None)
        return
    samples = holder.microbatch_size
    apart = _apart(parts, whole, {*holder.packed, samples} - {0, 1})
    if apart is None:
        layer.problem = f"shapes {[tuple(part.shape) for part in parts]} and {tuple(whole.shape)}"
    elif layer.forward is None or (
        apart / report.unit > layer.forward and not layer.exceeds("forward", report.tolerance)
    ):
        layer.forward, layer.microbatch = apart / report.unit, microbatch


def _apart(parts: Sequence[torch.Tensor], whole: torch.Tensor, packed: Iterable[int]) -> float | None:
    """The relative distance of what tensor ranks have from ``whole``, all of it or a share; None if they do not fit."""
    if all(part.shape == whole.shape for part in parts):
        return max(_relative(part, whole) for part in parts)
    return min((_relative(joined, whole) for joined in _joined(parts, whole, packed)), default=None)


def _joined(parts: Sequence[torch.Tensor], whole: torch.Tensor, packed: Iterable[int]) -> Iterator[torch.Tensor]:
    """The shares of ``whole`` put together in each way in which it may have been shared out.

    Args:
        packed: how many things may lie side by side in it, each of which is shared out: query, key and value in
            features, samples in what counts samples and heads together.
    """
    if any(part.ndim != whole.ndim for part in parts):
        return
    dims = [dim for dim in range(whole.ndim) if any(part.shape[dim] != whole.shape[dim] for part in parts)]
    if len(dims) != 1 or sum(part.shape[dims[0]] for part in parts) != whole.shape[dims[0]]:
        return
    (dim,) = dims
    yield torch.cat(list(parts), dim)
    sizes = {part.shape[dim] for part in parts}
    for count in packed:
        if len(sizes) == 1 and not min(sizes) % count:
            yield torch.cat([part.unflatten(dim, (count, -1)) for part in parts], dim + 1).flatten(dim, dim + 1)


def _relative(actual: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """``|| actual - expected || / max(|| expected ||, least)``, without what both have at the end of the dtype's range,
    as masks do; infinite where one has something that is not finite and the other has not."""
    limit = torch.finfo(expected.dtype).max
    masked = (actual == expected) & (expected.abs() >= limit)
    actual, expected = (tensor.double().masked_fill(masked, 0.0) for tensor in (actual, expected))
    difference, norm = float((actual - expected).norm()), max(float(expected.norm()), least)
    if difference == 0.0:
        return 0.0
    return difference / norm if norm and math.isfinite(difference) else math.inf


def _not_a_number(tensor: torch.Tensor) -> bool:
    """Whether something in it is NaN or above the range, as minus infinity alone may be a mask."""
    return bool((tensor.isnan() | tensor.isposinf()).any())


def _parameters(
    single: Seen, sharded: Sequence[Seen], precision: Precision, unit: float
) -> Iterator[tuple[str, str, float | None]]:
    """Each parameter's name, and the distances of its gradient and of its ways, by what they are called.

    That of the rank that is farthest, among those that have the whole model; None where neither run's are finite.
    """
    stored = torch.finfo(torch.float32 if precision.masters else precision.weights).eps / 2
    ways: dict[str, tuple[int, Callable[[Seen], dict[str, torch.Tensor]]]] = {
        "gradient": (0, lambda seen: seen.gradient),
        "step": (1, lambda seen: _way(seen.start, seen.after_first)),
        "weights": (len(single.losses), lambda seen: _way(seen.start, seen.end)),
    }
    for what, (num_steps, values) in ways.items():
        lost = num_steps * stored  # of the weight's own size
        expected = values(single)
        largest: dict[str, float] = defaultdict(float)  # root mean square of any parameter of a module
        for name in single.trained:
            largest[_owner(name)] = max(largest[_owner(name)], _rms(expected[name]))
        others = [values(seen) for seen in sharded if seen.start]
        for name in single.trained:
            if not any(bool(value[name].isfinite().all()) for value in (expected, *others)):
                yield name, what, None
                continue
            least = largest[_owner(name)] * math.sqrt(expected[name].numel())
            least = max(least, float(expected[name].norm(dtype=torch.float64)))
            allowed = LATER if what == "weights" else unit  # so that what is lost alone stays within it
            least += lost / allowed * float(single.start[name].norm(dtype=torch.float64))
            yield name, what, max(_relative(other[name], expected[name], least) for other in others) / unit


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _way(start: Mapping[str, torch.Tensor], end: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value - start[name] for name, value in end.items() if value.is_floating_point()}


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.norm(dtype=torch.float64)) / math.sqrt(max(tensor.numel(), 1))


# ----------------------------------------------------------------------------------------------------------- the runs


def verify(options: Options, tolerance: float | None = None) -> Report | int:
    """Run the model in one process and then sharded, on this machine, and compare.

    Returns:
        The report; or the exit code of a run that failed, which has said why.

    Raises:
        ConfigError: the options are wrong, or the runs cannot be compared.
    """
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise ConfigError(f"tolerance: got {tolerance}, expected a finite number of 0 or more")
    config = configure(options, "sharded")
    parallel = config.parallel
    assert isinstance(parallel.data, int)
    sizes = {"single": 1, "sharded": parallel.tensor.size * parallel.pipeline.size * parallel.data}
    with tempfile.TemporaryDirectory(prefix="paramp-verify-") as name:
        folder = Path(name)
        (folder / "options.json").write_text(json.dumps(asdict(options)), encoding="utf-8")
        seen: dict[str, list[Seen]] = {}
        for run, size in sizes.items():
            code = start_processes([sys.executable, "-m", "paramp.tools.verify.run", name, run], size)
            if code:
                print(f"error: the {run} run failed ({size} process{'es' if size > 1 else ''})", file=sys.stderr)
                return 2 if code == 2 else 1
            seen[run] = [
                Seen(**torch.load(folder / f"{run}-{rank}.pt", weights_only=True, mmap=True)) for rank in range(size)
            ]
        return compare(seen["single"][0], seen["sharded"], config, tolerance)
