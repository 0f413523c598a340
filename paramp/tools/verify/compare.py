"""Comparing a model on a layout with the same model in one process, layer by layer.

Two runs in the same mode, from the same weights and on the same batches, record what they compute. Both round to the
mode's dtype, but at other places and in another order, so values may differ by a few rounding errors. Distances
are relative L2 norms, in units of that rounding error::

    forward     || sharded - single || / || single ||                               of each output of a layer
    gradient    || sharded - single || / max(|| single ||, rms of the layer's)      of each parameter, in the first step
    step        the same of a weight's change in the first step, plus the error of rounding the weight
    weights     the same of a weight's change from start to end

Only the first step is compared strictly. In later steps the weights already differ. At a kink, such as that of ReLU, a
value near 0 can then be on different sides in the two runs, which changes a gradient by the whole contribution of a
sample, at any precision. So later steps fail only if the runs differ by :data:`LATER`, or are not finite.

The rms in the denominator is for parameters whose true gradient is zero, such as the bias of attention keys: their
gradient is only the rounding error of terms that cancel. The optimizer is SGD with momentum. Adam divides a gradient by
its own size, which would hide a gradient of half the right size.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from ...base.errors import ConfigError
from ...config.layout import ParallelConfig
from ...config.schema import Config
from ...precision.modes import Precision
from .activation_recorder import RankRecord
from .options import RUNS
from .report import Layer, Report

UNITS = 32.0
"""The tolerance of a layer, in rounding errors."""
UNITS_FLOAT8 = 6.0
"""The same with float8 linear layers."""
UNITS_LOSS = 4.0
"""The tolerance of a loss, which is an average, in reduced precision. In fp32 and fp64 it is :data:`UNITS`."""
FLOAT8_ROUNDING = 2.0**-4
"""The rounding error of e4m3."""
LATER = 0.5
"""The relative distance that is tolerated after the first step. It is not a multiple of the rounding error, because
kinks dominate there."""


def rounding(precision: Precision) -> float:
    """The relative rounding error of the lowest dtype in a mode's matrix products."""
    return FLOAT8_ROUNDING if precision.float8 is not None else torch.finfo(precision.compute).eps / 2


def compare(
    single: RankRecord, sharded: Sequence[RankRecord], config: Config, tolerance: float | None = None
) -> Report:
    """Compare the records of the sharded run's ranks, of ``config``, with that of the single process.

    ``tolerance``: of a layer in the first step, in rounding errors. None: the mode's default.

    Raises:
        ConfigError: the runs had different initial weights or batches.
    """
    precision, parallel = config.precision, config.parallel
    usual = UNITS if precision.float8 is None else UNITS_FLOAT8
    tolerance = usual if tolerance is None else tolerance
    unit = rounding(precision)
    low = unit > torch.finfo(torch.float32).eps / 2
    limits = tolerance, UNITS_LOSS if low else tolerance, max(LATER / unit, tolerance)
    report = Report(layout_name(parallel), precision.name, unit, *limits, len(single.losses))
    check_same_start(single, sharded)
    runs = dict(zip(RUNS, (single, sharded[0]), strict=True))
    report.losses = {run: record.losses for run, record in runs.items()}
    report.grad_norms = {run: record.grad_norms for run, record in runs.items()}
    report.skipped = {run: record.skipped for run, record in runs.items()}
    report.random_in = single.random_in
    layers = _forwards(single, sharded, parallel.pipeline.num_microbatches, report)
    order = [*layers]
    for name, what, value in () if report.overflows else _parameters(single, sharded, precision, unit):
        layer = layers.setdefault(_owner(name), Layer(_owner(name) or "(model)"))
        _add_distance(layer, what, value)
    for name in (name for name in layers if name not in order):  # never called: listed before its parent module
        users = (index for index, other in enumerate(order) if f"{name}.".startswith(f"{other}." if other else ""))
        order.insert(next(users, len(order)), name)
    report.layers = [layers[name] for name in order]
    return report


def layout_name(parallel: ParallelConfig) -> str:
    """The axes of more than one rank and their sizes, such as ``pp2·tp2``."""
    data = parallel.data_axes
    replicas = ("dp" if data.shard == 1 else "replicate", data.replicate)
    sizes = (("pp", parallel.pipeline.size), replicas, ("fsdp", data.shard), ("tp", parallel.tensor.size))
    return "·".join(f"{name}{size}" for name, size in sizes if size != 1) or "1"


def _add_distance(layer: Layer, what: str, value: float | None) -> None:
    """Keep the largest distance in ``layer``; None means that the values of both runs are not finite."""
    if value is not None:
        setattr(layer, what, max(value, getattr(layer, what) or 0.0))
    elif what not in layer.not_finite:
        layer.not_finite.append(what)


def check_same_start(single: RankRecord, sharded: Sequence[RankRecord]) -> None:
    """Raise a ConfigError if the runs had different batches or initial weights."""
    if sharded[0].batches != single.batches:
        pairs = zip(sharded[0].batches, single.batches, strict=True)
        step = next(step for step, (of_sharded, of_single) in enumerate(pairs, 1) if of_sharded != of_single)
        raise ConfigError(
            f"batches: the batch of step {step} differs between the runs; make it depend on the step alone"
        )
    first = sharded[0].start
    names = [name for name in single.start if name not in first or not torch.equal(single.start[name], first[name])]
    if names:
        raise ConfigError(
            f"model: {names[0]!r} has different initial values in the two runs; make them depend on torch's seed only"
        )


def _forwards(
    single: RankRecord, sharded: Sequence[RankRecord], num_microbatches: int, report: Report
) -> dict[str, Layer]:
    """The called layers, in the order in which their forwards ended, with the distances of their outputs."""
    calls: dict[tuple[str, int, int], list[tuple[RankRecord, list[torch.Tensor]]]] = defaultdict(list)
    for record in sorted(sharded, key=lambda record: record.tensor_rank):
        for activation in record.activations:
            # The single run's microbatches are those of all data ranks, concatenated by rank.
            microbatch = record.batch_rank * num_microbatches + activation["microbatch"]
            calls[activation["module"], microbatch, activation["call"]].append((record, activation["tensors"]))
    layers: dict[str, Layer] = {}
    names = dict.fromkeys(activation["module"] for activation in single.activations)
    holders_of = {name: [record for record in sharded if has_all(record, name, single)] for name in names}
    for activation in single.activations:
        name, wholes = activation["module"], activation["tensors"]
        holders = holders_of[name]
        if not wholes or not holders:  # a module that spans stages has another output on each
            continue
        layer = layers.setdefault(name, Layer(name or "(model)"))
        ranks = calls[name, activation["microbatch"], activation["call"]]
        found = [tensors for record, tensors in ranks if record in holders]
        if {len(tensors) for tensors in found} != {len(wholes)}:
            layer.problem = "the sharded run calls it another number of times or with other outputs"
            continue
        for whole, *parts in zip(wholes, *found, strict=True):
            _add_output(layer, parts, whole, activation["microbatch"], holders[0], report)
    return layers


def has_all(record: RankRecord, name: str, single: RankRecord) -> bool:
    """Whether the rank has the module ``name`` and all its submodules."""
    inside = {other for other in single.modules if f"{other}.".startswith(f"{name}." if name else "")}
    return inside <= set(record.modules)


def _add_output(
    layer: Layer, parts: list[torch.Tensor], whole: torch.Tensor, microbatch: int, holder: RankRecord, report: Report
) -> None:
    """Record in ``layer`` the distance of its output, ``parts`` of the tensor ranks, from ``whole``."""
    # Minus infinity alone may be a mask.
    bad = [bool((tensor.isnan() | tensor.isposinf()).any()) for tensor in (whole, *parts)]
    if bad[0] and any(bad[1:]):
        layer.microbatch = layer.microbatch if "forward" in layer.not_finite else microbatch
        _add_distance(layer, "forward", None)
        return
    if all(part.shape == whole.shape for part in parts):
        distances = [max(relative(part, whole) for part in parts)]
    else:
        packed = {*holder.packed, holder.microbatch_size} - {0, 1}
        distances = [relative(tensor, whole) for tensor in joined(parts, whole, packed)]
    if not distances:
        layer.problem = f"shapes {[tuple(part.shape) for part in parts]} and {tuple(whole.shape)}"
        return
    units = min(distances) / report.unit
    if layer.forward is None or (units > layer.forward and not layer.exceeds("forward", report.tolerance)):
        layer.forward, layer.microbatch = units, microbatch


def _parameters(
    single: RankRecord, sharded: Sequence[RankRecord], precision: Precision, unit: float
) -> Iterator[tuple[str, str, float | None]]:
    """For each parameter the name, the kind of distance, and its value in rounding errors.

    The value is the largest over the ranks with a record of it; None if the values of both runs are not finite.
    """
    stored = torch.finfo(torch.float32 if precision.masters else precision.weights).eps / 2
    compared: dict[str, tuple[int, Callable[[RankRecord], dict[str, torch.Tensor]]]] = {
        "gradient": (0, lambda record: record.gradient),
        "step": (1, lambda record: _change(record.start, record.after_first)),
        "weights": (len(single.losses), lambda record: _change(record.start, record.end)),
    }
    for what, (num_steps, values) in compared.items():
        lost = num_steps * stored  # the rounding error of the stored weight, relative to the weight
        expected = values(single)
        largest: dict[str, float] = defaultdict(float)  # the largest rms among a module's parameters
        for name in single.trained:
            largest[_owner(name)] = max(largest[_owner(name)], _rms(expected[name]))
        others = [values(record) for record in sharded if record.start]
        for name in single.trained:
            if not any(bool(value[name].isfinite().all()) for value in (expected, *others)):
                yield name, what, None
                continue
            least = largest[_owner(name)] * math.sqrt(expected[name].numel())
            least = max(least, float(expected[name].norm(dtype=torch.float64)))
            # Divided by the tolerance, so that this rounding alone never exceeds it.
            allowed = LATER if what == "weights" else unit
            least += lost / allowed * float(single.start[name].norm(dtype=torch.float64))
            yield name, what, max(relative(other[name], expected[name], least) for other in others) / unit


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _change(start: Mapping[str, torch.Tensor], end: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value - start[name] for name, value in end.items() if value.is_floating_point()}


def relative(actual: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """``|| actual - expected || / max(|| expected ||, least)``, L2 norms of tensors of one shape.

    Elements where both are at the end of the dtype's range, as masks are, are ignored. Infinite if a non-finite element
    differs.
    """
    limit = torch.finfo(expected.dtype).max
    masked = (actual == expected) & (expected.abs() >= limit)
    actual, expected = (tensor.double().masked_fill(masked, 0.0) for tensor in (actual, expected))
    difference, norm = float((actual - expected).norm()), max(float(expected.norm()), least)
    if difference == 0.0:
        return 0.0
    return difference / norm if norm and math.isfinite(difference) else math.inf


def joined(parts: Sequence[torch.Tensor], whole: torch.Tensor, packed: Iterable[int]) -> Iterator[torch.Tensor]:
    """The shards ``parts`` of ``whole`` joined in each way in which it may have been sharded.

    ``packed`` are the possible numbers of separately sharded blocks in the sharded dim: query, key and value in a dim
    of features, or samples in a dim of samples x heads.
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


def _rms(tensor: torch.Tensor) -> float:
    """The root mean square of a tensor of any shape; 0 if it is empty."""
    return float(tensor.norm(dtype=torch.float64)) / math.sqrt(max(tensor.numel(), 1))
