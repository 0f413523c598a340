"""Comparing a model on a layout with the same model in one process, layer by layer.

Both runs make the same steps in the same mode. Before each one, the single process takes the weights that the layout
has come to, so that a difference is of this step alone, and rounding does not add up over steps. What rounding makes
of a step depends on the model: at a kink, such as that of ReLU, or in the routing of experts, one rounding error
decides which way a sample goes. So it is measured. The single process makes each step :data:`NUM_PERTURBED` more times
from weights that differ by one unit in the last place. All distances are L2 norms of differences::

    noise       of the perturbed steps from the single process's, the largest over steps; at least one rounding
                error of the largest value
    forward     || sharded - single || / noise      of each output of a layer, in each microbatch
    gradient    the same of a parameter's gradient, before clipping
    step        the same of a weight's change in the step
    loss, norm  the same of the loss and of the gradient's norm

Right layouts stay near 1. What is lost, counted twice or not added up changes a value by a large part of itself, which
is :data:`TOLERANCE` times the noise unless the noise is that large. The optimizer is SGD: Adam divides a gradient by
its own size, which would hide a gradient of half the right size.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ...base.dtensor import as_real, is_inexact
from ...base.errors import ConfigError
from ...config.layout import ParallelConfig
from ...config.schema import Config
from ...parallel.context_axis.tokens_of_ranks import head_and_tail, taken
from ...precision.modes import Precision
from .activation_recorder import RankRecord
from .options import RUNS
from .report import Layer, Report

TOLERANCE = 4.0
"""How many times the noise a value may be apart."""
NUM_PERTURBED = 2
"""How often the single process repeats a step from perturbed weights."""
FLOAT8_ROUNDING = 2.0**-4
"""The rounding error of e4m3."""
FLOAT32_ROUNDING = 2.0**-24
"""That of losses and norms."""
NUMBERS = {"loss": "losses", "gradient norm": "grad_norms"}
Key = tuple[str, str]


def rounding(precision: Precision) -> float:
    """The relative rounding error of the lowest dtype in a mode's matrix products."""
    return FLOAT8_ROUNDING if precision.float8 is not None else torch.finfo(precision.compute).eps / 2


@dataclass
class Distance:
    """A value of the sharded run beside that of the single process."""

    what: str
    """One of :data:`.report.WHAT`, or ``loss`` or ``gradient norm``."""
    layer: str
    tensor: str
    """Which of the layer's, over all steps."""
    step: int
    """From 1; the microbatch counts from 0."""
    microbatch: int = 0
    distance: float | None = None
    """The norm of the difference; None if the values of both are not finite, or could not be compared."""
    size: float = 0.0
    """The norm of the single process's value."""
    problem: str | None = None
    """Why it could not be compared."""

    @property
    def key(self) -> Key:
        """The kind and the tensor, equal in all steps and microbatches."""
        return self.what, self.tensor


def compare(
    single: RankRecord,
    perturbed: Sequence[RankRecord],
    sharded: Sequence[RankRecord],
    config: Config,
    tolerance: float | None = None,
) -> Report:
    """Compare the records of the sharded run's ranks, of ``config``, with that of the single process.

    ``perturbed``: of the single process from perturbed weights. ``tolerance`` replaces :data:`TOLERANCE`.

    Raises:
        ConfigError: the runs had different initial weights or batches, or a weight is NaN.
    """
    check_same_start(single, sharded)
    tolerance = TOLERANCE if tolerance is None else tolerance
    report = Report(layout_name(config.parallel), config.precision.name, tolerance, len(single.losses))
    runs = dict(zip(RUNS, (single, sharded[0]), strict=True))
    report.losses = {run: record.losses for run, record in runs.items()}
    report.grad_norms = {run: record.grad_norms for run, record in runs.items()}
    report.skipped = {run: record.skipped for run, record in runs.items()}
    report.random_in, report.updated, report.replicas = single.random_in, single.updated, sharded[0].replicas
    chunks = config.parallel.pipeline.num_microbatches
    found = [*_differences(single, sharded, chunks)]
    again = [one for record in perturbed for one in _differences(single, [record], 0)]
    noise = _noise(found, again, rounding(config.precision), single.start)
    layers: dict[str, Layer] = {}
    for one in found:
        units = None if one.distance is None else _ratio(one.distance, noise[one.key])
        if one.what in NUMBERS:
            report.numbers[one.what].append(units)
            continue
        layer = layers.setdefault(one.layer, Layer(one.layer or "(model)"))
        if one.problem is None:
            layer.add(one.what, units, (one.step, one.microbatch), tolerance)
        else:
            layer.problem = one.problem
    order = [*dict.fromkeys(one.layer for one in found if one.what == "forward")]
    for name in (name for name in layers if name not in order):  # never called: listed before its parent module
        users = (index for index, other in enumerate(order) if f"{name}.".startswith(f"{other}." if other else ""))
        order.insert(next(users, len(order)), name)
    report.layers = [layers[name] for name in order]
    return report


def layout_name(parallel: ParallelConfig) -> str:
    """The axes of more than one rank and their sizes, such as ``pp2·tp2``."""
    data = parallel.data_axes
    number = data.replicate if isinstance(data.replicate, str) else data.replicate // parallel.expert
    replicas = ("dp" if data.shard == 1 else "replicate", number)
    model = (("ep", parallel.expert), ("fsdp", data.shard), ("cp", parallel.context.size), ("tp", parallel.tensor.size))
    sizes = (("pp", parallel.pipeline.size), replicas, *model)
    return "·".join(f"{name}{size}" for name, size in sizes if size != 1) or "1"


def check_same_start(single: RankRecord, sharded: Sequence[RankRecord]) -> None:
    """Raise a ConfigError if the runs had different batches or initial weights, or a weight is NaN."""
    if sharded[0].batches != single.batches:
        pairs = zip(sharded[0].batches, single.batches, strict=True)
        step = next(step for step, (of_sharded, of_single) in enumerate(pairs, 1) if of_sharded != of_single)
        raise ConfigError(
            f"batches: the batch of step {step} differs between the runs; make it depend on the step alone"
        )
    for name, value in single.start.items():
        if is_inexact(value) and value.isnan().any():
            where = value.isnan().nonzero()[0].tolist()
            raise ConfigError(f"model: {name!r} has NaN among its initial values, first at {where}; correct the model")
    first = sharded[0].start
    names = [name for name in single.start if name not in first or not torch.equal(single.start[name], first[name])]
    if names:
        raise ConfigError(
            f"model: {names[0]!r} has different initial values in the two runs; make them depend on torch's seed only"
        )


def _noise(
    found: Iterable[Distance], perturbed: Iterable[Distance], unit: float, weights: Mapping[str, torch.Tensor]
) -> dict[Key, float]:
    """What rounding makes of each value, over all steps; ``unit``: one rounding error.

    A change that is small beside its weight, of ``weights``, is as exact as the weight that was rounded after it.
    """
    noise: dict[Key, float] = defaultdict(float)
    for one in found:
        _raise_to(noise, one.key, one.size * (FLOAT32_ROUNDING if one.what in NUMBERS else unit))
        if one.what == "step" and one.tensor in weights:
            _raise_to(noise, one.key, min(unit, FLOAT32_ROUNDING) * float(as_real(weights[one.tensor]).double().norm()))
    for one in perturbed:
        _raise_to(noise, one.key, one.distance or 0.0)
    return noise


def _raise_to(noise: dict[Key, float], key: Key, value: float) -> None:
    if math.isfinite(value):
        noise[key] = max(noise[key], value)


def _ratio(distance: float | None, noise: float) -> float | None:
    if not distance:
        return distance
    return distance / noise if noise else math.inf


def _differences(single: RankRecord, sharded: Sequence[RankRecord], num_microbatches: int) -> Iterator[Distance]:
    """All values that both runs have; ``num_microbatches``: of each data rank of the sharded one."""
    yield from _outputs(single, sharded, num_microbatches)
    holders = [record for record in sharded if record.start]
    for index, step in enumerate(range(1, len(single.losses) + 1)):
        skipped = single.skipped[index] or sharded[0].skipped[index]
        for what, name in NUMBERS.items():
            if skipped and what == "gradient norm":  # which is not finite
                continue
            pair = [torch.tensor(getattr(record, name)[index], dtype=torch.float64) for record in (sharded[0], single)]
            yield Distance(what, "", "", step, 0, *distance(*pair))
        for what in () if skipped else ("gradient", "step"):
            expected, *others = (getattr(record, f"{what}s")[index] for record in (single, *holders))
            for name in single.trained:
                apart = [distance(other[name], expected[name]) for other in others]
                yield Distance(what, name.rpartition(".")[0], name, step, 0, *largest(apart))


def _outputs(single: RankRecord, sharded: Sequence[RankRecord], num_microbatches: int) -> Iterator[Distance]:
    """The outputs of modules, in the order in which their forwards ended."""
    calls: dict[tuple[int, str, int], list[tuple[RankRecord, int, list[torch.Tensor]]]] = defaultdict(list)
    for record in sorted(sharded, key=lambda record: (record.context_rank, record.tensor_rank)):
        for output in record.activations:
            # The single run's microbatches are those of all data ranks, concatenated by rank.
            microbatch = record.batch_rank * num_microbatches + output["microbatch"]
            calls[output["step"], output["module"], microbatch].append((record, output["call"], output["tensors"]))
    names = dict.fromkeys(output["module"] for output in single.activations)
    holders_of = {name: [record for record in sharded if has_all(record, name, single)] for name in names}
    for output in single.activations:
        name, wholes = output["module"], output["tensors"]
        holders = holders_of[name]
        if not wholes or not holders:  # a module that spans stages has another output on each
            continue
        at = output["step"], name, output["microbatch"]
        of_ranks = [one for one in calls[at] if one[0] in holders and one[1] == output["call"]]
        ranks, found = [record for record, _, _ in of_ranks], [tensors for _, _, tensors in of_ranks]
        problem: str | None = None
        if len({record.stage_rank for record in ranks}) > 1 or len({*ranks}) < len(ranks):
            problem = "several stages call it"  # one without weights, which other stages give what they have
        elif {len(tensors) for tensors in found} != {len(wholes)}:
            problem = "the sharded run calls it another number of times or with other outputs"
        if problem is not None:
            yield Distance("forward", name, name, output["step"], problem=problem)
            continue
        packed = {*holders[0].packed, holders[0].microbatch_size} - {0, 1}
        size = max(record.context_rank for record in sharded) + 1
        for index, (whole, *parts) in enumerate(zip(wholes, *found, strict=True)):
            if size > 1 and not whole.ndim:  # a loss of some of the tokens
                continue
            difference = Distance("forward", name, f"{name} {index}", output["step"], output["microbatch"])
            by_context = [
                [part for record, part in zip(ranks, parts, strict=True) if record.context_rank == rank]
                for rank in range(size)
            ]
            yield _of_sequences(difference, by_context, whole, packed)


def has_all(record: RankRecord, name: str, single: RankRecord) -> bool:
    """Whether the rank has the module ``name`` and all its submodules."""
    inside = {other for other in single.modules if f"{other}.".startswith(f"{name}." if name else "")}
    return inside <= set(record.modules)


def _of_sequences(
    difference: Distance, by_context: list[list[torch.Tensor]], whole: torch.Tensor, packed: set[int]
) -> Distance:
    """``difference`` of an output from ``whole``; ``by_context``: the parts of the tensor ranks, by context rank."""
    size, found = len(by_context), difference
    for wholes in ([whole] * size, *_cut_sequences(whole, size)) if size > 1 else [[whole]]:
        every = [_of_output(difference, parts, one, packed) for parts, one in zip(by_context, wholes, strict=True)]
        found = next((one for one in every if one.problem is not None), every[0])
        if found.problem is None:
            distances = [one.distance for one in every]
            apart = None if None in distances else math.hypot(*(one or 0.0 for one in distances))
            return replace(found, distance=apart, size=math.hypot(*(one.size for one in every)))
    return found


def _cut_sequences(whole: torch.Tensor, size: int) -> Iterator[list[torch.Tensor]]:
    """The tokens of ``whole`` that each of ``size`` context ranks has, for each dim in which the tokens may be."""
    for dim in (1, 2):
        if whole.ndim > dim and whole.shape[dim] % (2 * size) == 0:
            length = whole.shape[dim]
            yield [taken(whole, dim, head_and_tail(rank, size, length)) for rank in range(size)]


def _of_output(difference: Distance, parts: list[torch.Tensor], whole: torch.Tensor, packed: set[int]) -> Distance:
    """``difference`` of an output, ``parts`` of the tensor ranks, from ``whole``."""
    if all(part.shape == whole.shape for part in parts):
        apart = largest([distance(part, whole) for part in parts])
    else:
        ways = [distance(tensor, whole) for tensor in joined(parts, whole, packed)]
        if not ways:
            problem = f"shapes {[tuple(part.shape) for part in parts]} and {tuple(whole.shape)}"
            return replace(difference, problem=problem)
        apart = min(ways, key=lambda way: way[0] or 0.0)  # if one is None, all are
    return replace(difference, distance=apart[0], size=apart[1])


def distance(actual: torch.Tensor, expected: torch.Tensor) -> tuple[float | None, float]:
    """``|| actual - expected ||`` and ``|| expected ||``, L2 norms of tensors of one shape.

    Elements where both are at the end of the dtype's range, as masks are, are ignored. The first is infinite if only
    one of them is finite, and None if neither is.
    """
    actual, expected = as_real(actual), as_real(expected)
    bad = [bool((tensor.isnan() | tensor.isposinf()).any()) for tensor in (actual, expected)]
    if all(bad):
        return None, math.inf
    masked = (actual == expected) & (expected.abs() >= torch.finfo(expected.dtype).max)
    actual, expected = (tensor.double().masked_fill(masked, 0.0) for tensor in (actual, expected))
    apart, size = float((actual - expected).norm()), float(expected.norm())
    return apart if math.isfinite(apart) else math.inf, size


def largest(apart: Sequence[tuple[float | None, float]]) -> tuple[float | None, float]:
    """The largest of distances from one value; None if one of them is."""
    return max(apart, key=lambda one: math.inf if one[0] is None else one[0])


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
