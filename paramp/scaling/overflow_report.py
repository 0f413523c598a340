"""Reports of skipped steps: the values that were not finite, their ranks, and the remedy.

To find the origin of a value that is not finite, the batch is run again (:mod:`paramp.observe.window_replay`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..base.collectives import gather_objects
from ..base.dtensor import is_dtensor, is_inexact, local, own_part
from .copies_per_element import World

Kind = Literal["NaN", "inf"]
During = Literal["forward", "backward", "sum over microbatches", "sum over ranks"]

SHOWN = 5
"""The maximum number of gradients that a report lists."""


@dataclass(frozen=True)
class RankCoordinates:
    """A rank, its coordinates in the mesh, and a stage of the pipeline."""

    rank: int
    axes: tuple[tuple[str, int], ...] = ()
    """Each axis of the mesh and the rank's coordinate on it; empty without a context."""
    stage: int | None = None

    @staticmethod
    def here(context: World | None, stage: int | None = None) -> RankCoordinates:
        """The coordinates of this rank; ``stage`` None: its first stage."""
        if context is None:
            return RankCoordinates(dist.get_rank() if dist.is_initialized() else 0)
        stage = context.pp.rank if stage is None else stage
        return RankCoordinates(context.rank, tuple(context.coordinates.items()), stage)

    def __str__(self) -> str:
        axes = "".join(f"{name} {rank}, " for name, rank in self.axes)
        return f"rank {self.rank} ({axes}stage {self.stage})" if axes else f"rank {self.rank}"


@dataclass(frozen=True, kw_only=True)
class NonFiniteGradient:
    """A parameter with a gradient that is not finite on one rank."""

    name: str
    place: RankCoordinates
    kind: Kind
    """``NaN`` if any element is NaN."""
    count: int
    """Elements that are not finite."""
    size: int
    """Elements that the rank holds."""
    largest: float
    """The largest finite magnitude in ``.grad``, not unscaled; 0 if there is none."""
    experts: tuple[int, ...] = ()
    """Of a stack of experts: the indices, in the whole stack, of those whose gradients are not finite."""

    def describe(self, scale: float, tokens: Mapping[str, Sequence[int]]) -> str:
        """One line; ``scale`` is the scale that the gradient carries, ``tokens`` as in :class:`OverflowReport`."""
        size = "" if self.count == self.size else f"; {_size(self.largest, 'the others', scale)}"
        experts = _experts(self.experts, tokens.get(self.name.rpartition(".")[0], ()), ", of ")
        count = f"{self.count} of {self.size} elements{experts}"
        return f"gradient of {self.name} on {self.place}: {self.kind}, {count}{size}"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The first value that was not finite, in the order in which the model computes."""

    during: During
    """The pass, or a sum of values that were finite before."""
    module: str
    """The module's full name; outside of the modules ``the batch``, ``the criterion``, ..."""
    place: RankCoordinates
    kind: Kind
    call: int
    """The index, from 0, of the ``forward_backward`` call in the window; gradient accumulation makes several."""
    microbatch: int | None
    """None for a sum over ranks."""
    largest: float
    """The largest finite magnitude in the tensor that has the value; 0 if there is none."""
    parameter: str | None = None
    """The parameter whose gradient has the value; None for an activation's gradient."""
    weight: str | None = None
    """A parameter of the module that is not finite itself."""
    operation: str | None = None
    """In the backward: autograd's name of the operation that computed the value."""
    helped_by_scale: bool | None = None
    """In the backward: whether everything is finite at a loss scale of 1. None if that was not tried."""
    experts: tuple[int, ...] = ()
    """If the module is a stack of experts: the indices of those that may have produced the value."""
    positions: tuple[tuple[int, int], ...] = ()
    """Under an engine's context axis: where in their whole sequences the tokens are whose values are not finite, as
    ranges, each by its first position and the one after its last; ascending. Empty: not known, or of no activation."""

    def describe(self, scale: float, tokens: Mapping[str, Sequence[int]]) -> str:
        """The cause and the remedy; ``tokens`` as in :class:`OverflowReport`."""
        if self.during == "sum over ranks":
            return (
                f"overflow in the sum over ranks: the gradient of {self.parameter} is finite on each rank and "
                f"{self.kind} when they are added up, seen on {self.place}; set reduce_dtype to 'float32', or lower "
                "the initial scale"
            )
        where = f"microbatch {self.microbatch}{f' of call {self.call}' if self.call else ''} on {self.place}"
        where += _positions(self.positions)
        if self.during == "sum over microbatches":
            return (
                f"overflow in the sum over microbatches: the gradient of {self.parameter} became {self.kind} when that "
                f"of {where} was added; set grad_dtype to 'float32' (with parallel.data.shard: reduce_dtype), or lower "
                "the initial scale"
            )
        module = self.module + _experts(self.experts, tokens.get(self.module, ()), " in ")
        if self.during == "forward":
            weight = "" if self.weight is None else f"; its {self.weight} is not finite itself"
            return f"no scale helps: {module} produced {self.kind} in the forward of {where}{weight}"
        what = "" if self.parameter is None else f" in the gradient of {self.parameter}"
        if self.helped_by_scale is False:
            also = "" if scale == 1 else ", and does so without loss scaling too"
            return f"no scale helps: {module} produced {self.kind}{what} in the backward of {where}{also}"
        return (
            f"backward overflow in {module}: {self.kind}{what} in {where} at a loss scale of {scale:g}: lower the "
            "learning rate or the initial scale"
        )


@dataclass(frozen=True)
class OverflowReport:
    """The reason why a step was skipped, the same on every rank; its ``str`` is the message."""

    scale: float
    """The loss scale of the step."""
    gradients: tuple[NonFiniteGradient, ...]
    """By rank, then in the model's order. If the batch was run again, each is from one data rank, or a shard of the sum
    over data ranks if these shard the parameters."""
    origin: Origin | None = None
    """None if the batch was not run again, or if that run gave only finite values."""
    unknown: str = ""
    """What could not be determined, and why."""
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """How many tokens each expert got in the batches that were run again, on all data ranks, by the name of the stack;
    a token that is computed again for activation checkpointing counts once."""
    scaled: bool = True
    """Whether the gradients are known to carry the scale; a scaler may have unscaled them already."""

    @property
    def kind(self) -> Literal["forward", "backward", "weight gradient", "sum", "gradients", "unknown"]:
        """Where the first non-finite value arose; ``gradients``: it is only known that gradients are not finite."""
        if self.origin is None:
            return "gradients" if self.gradients else "unknown"
        if self.origin.during == "backward":
            return "backward" if self.origin.parameter is None else "weight gradient"
        return "forward" if self.origin.during == "forward" else "sum"

    @property
    def closest(self) -> list[NonFiniteGradient]:
        """The gradients, those closest to the origin first; at most :data:`SHOWN`."""
        return sorted(self.gradients, key=self._distance)[:SHOWN]

    def _distance(self, gradient: NonFiniteGradient) -> tuple[bool, bool, bool]:
        """The sort key of a gradient: those closest to the origin first."""
        if (origin := self.origin) is None:
            return False, False, False
        outside = not gradient.name.startswith(f"{origin.module}.")
        return gradient.name != origin.parameter, gradient.place.rank != origin.place.rank, outside

    def __str__(self) -> str:
        lines = []
        if self.origin is not None:
            lines += [self.origin.describe(self.scale, self.tokens), _size(self.origin.largest, "it")]
        elif self.gradients:
            kinds = " and ".join(sorted({gradient.kind for gradient in self.gradients}))
            lines.append(
                f"gradients are not finite ({kinds}) at a loss scale of {self.scale:g}; the "
                f"first is the gradient of {self.gradients[0].name} on {self.gradients[0].place}"
            )
        if self.unknown:
            lines.append(self.unknown)
        scale = self.scale if self.scaled else 1.0
        lines += [gradient.describe(scale, self.tokens) for gradient in self.closest]
        if len(self.gradients) > SHOWN:
            lines.append(f"gradients that are not finite and not shown: {len(self.gradients) - SHOWN}")
        return "\n  ".join(lines) or "no gradient that is not finite was found"


def _experts(indices: Sequence[int], tokens: Sequence[int], before: str) -> str:
    """``expert 3 (17 tokens)`` after ``before``; nothing for no indices."""
    named = [f"{index} ({tokens[index]} tokens)" if index < len(tokens) else str(index) for index in indices[:SHOWN]]
    named += [f"{len(indices) - SHOWN} more"] * (len(indices) > SHOWN)
    return f"{before}expert{'s' * (len(named) > 1)} {', '.join(named)}" if named else ""


def _positions(ranges: Sequence[tuple[int, int]]) -> str:
    """``, positions 3 to 7 and 12 of the sequence``; nothing for no ranges."""
    named = [str(start) if end == start + 1 else f"{start} to {end - 1}" for start, end in ranges[:SHOWN]]
    named += [f"{len(ranges) - SHOWN} more ranges"] * (len(ranges) > SHOWN)
    plural = "s" if len(named) > 1 or " " in "".join(named) else ""
    listed = " and ".join(filter(None, (", ".join(named[:-1]), *named[-1:])))
    return f", position{plural} {listed} of the sequence" if named else ""


def _size(largest: float, what: str, scale: float = 1.0) -> str:
    if not largest:
        return f"no nonzero value in {what} is finite"
    unscaled = f", {largest / scale:.3g} unscaled" if scale != 1 else ""
    return f"the largest finite magnitude in {what} is {largest:.3g}{unscaled}"


def flaw(tensor: Any) -> Kind | None:
    """``NaN`` or ``inf`` if the local part of ``tensor`` has one; None if it is finite or not floating-point."""
    if not isinstance(tensor, torch.Tensor) or not is_inexact(tensor):
        return None
    values = _values(tensor)
    if bool(values.isfinite().all()):
        return None
    return "NaN" if bool(values.isnan().any()) else "inf"


def largest_finite(tensor: torch.Tensor) -> float:
    """The largest finite magnitude in the local part of ``tensor``; 0 if there is none."""
    values = _values(tensor)
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _values(tensor: torch.Tensor) -> torch.Tensor:
    part = local(tensor).detach()
    part = part._values() if part.is_sparse else part
    return part.float() if part.dtype.itemsize == 1 else part  # float8 has no isfinite


@torch.no_grad()
def find_gradients(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    context: World | None = None,
    stages: Mapping[str, int] | None = None,
    stacks: Collection[str] = (),
) -> list[NonFiniteGradient]:
    """This rank's gradients that are not finite; one synchronisation of the device.

    Args:
        stages: the pipeline stage of each parameter, by name. Missing names, or None: the rank's first stage.
        stacks: the names of the parameters that are stacks of experts.
    """
    triples = [(name, parameter, parameter.grad) for name, parameter in named_parameters]
    gradients = [(name, parameter, gradient) for name, parameter, gradient in triples if gradient is not None]
    if not gradients:
        return []
    device = gradients[0][2].device
    finite = torch.stack([_values(gradient).isfinite().all().to(device) for *_, gradient in gradients]).tolist()
    non_finite = []
    for (name, parameter, gradient), is_finite in zip(gradients, finite, strict=True):
        if kind := None if is_finite else flaw(gradient):
            values = _values(gradient)
            found = NonFiniteGradient(
                name=name,
                place=RankCoordinates.here(context, (stages or {}).get(name)),
                kind=kind,
                count=int((~values.isfinite()).sum()),
                size=values.numel(),
                largest=largest_finite(gradient),
                experts=non_finite_experts(parameter, values) if name in stacks else (),
            )
            non_finite.append(found)
    return non_finite


def non_finite_experts(stack: torch.Tensor, values: torch.Tensor) -> tuple[int, ...]:
    """The indices in a whole ``stack`` (experts, ...) of those whose ``values``, this rank's part, are not finite."""
    indices = torch.arange(len(stack), device=values.device).view(-1, *[1] * (stack.ndim - 1)).expand(stack.shape)
    indices = own_part(indices, stack) if is_dtensor(stack) else indices
    if indices.shape != values.shape:  # such as of a gradient that is a sum of several ranks'
        return ()
    return tuple(indices[~values.isfinite()].unique().tolist())


def gather_findings(local_findings: list[Any], group: dist.ProcessGroup | None = None) -> list[list[Any]]:
    """``local_findings`` of every rank of ``group`` (None: the world), by rank; a collective."""
    return gather_objects(local_findings, group) if dist.is_initialized() else [local_findings]


def refuse_after_update(has_updated: bool, group: dist.ProcessGroup | None = None) -> None:
    """A RuntimeError on every rank of ``group`` if on all of them the scaler ``has_updated`` since the step."""
    if all(updated for (updated,) in gather_findings([has_updated], group)):
        raise RuntimeError(
            "diagnose: update() was called since the step, so the scale is no longer that of these gradients; call it "
            "on every rank after step(optimizer) or unscale_(optimizer), and before update() and zero_grad()"
        )
