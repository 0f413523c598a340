"""The non-finite values that each rank found in one run of a window, and the choice of the first.

Findings are ordered as one process would compute them, not by time: by call, microbatch, forward before backward, stage
(reversed in the backward), then position in the sequence of checks, which is the same on all tensor ranks of a stage.
Infinities in a forward with a finite loss are often intended, as in a mask. They count only if the backward of a module
that had one in its forward fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..distributed.context import ParallelContext
from ..scaling.overflow_report import During, Origin, RankCoordinates, flaw, gather_findings, largest_finite

Batch = tuple[int, int, int]
"""Data rank, call and microbatch."""


class StagePass(NamedTuple):
    """One microbatch on one stage, of one call."""

    call: int
    """The index of the call of ``forward_backward`` in the window."""
    microbatch: int
    stage: int


@dataclass(frozen=True)
class Finding:
    """The first non-finite value of one pass of one microbatch through one stage, on one rank."""

    origin: Origin
    at: StagePass
    batch: Batch
    position: tuple[int, int, int]
    """The position in the sequence of checks of the pass and stage. Comparable between tensor ranks."""
    received: bool
    """Whether it was first found in the inputs of the module or operation."""
    met_in_forward: bool
    """For a backward: whether the module had non-finite values in the forward of the same microbatch."""


class Findings:
    """The findings of this rank in one run of a window."""

    def __init__(self, context: ParallelContext | None) -> None:
        self._context = context
        self._found: dict[tuple[StagePass, bool], Finding] = {}  # key: pass, is backward
        self._met: set[tuple[int, int, str]] = set()  # call, microbatch, module
        self.failed: set[Batch] = set()
        """The microbatches whose loss is not finite."""

    def has(self, at: StagePass, *, backward: bool) -> bool:
        """Whether the pass already has a finding; only the first is kept."""
        return (at, backward) in self._found

    @property
    def any_backward(self) -> bool:
        """Whether any backward has a finding."""
        return any(backward for _, backward in self._found)

    def meet(self, at: StagePass, module: str) -> None:
        """Record that ``module`` had a non-finite value in its forward."""
        self._met.add((at.call, at.microbatch, module))

    def batch(self, at: StagePass) -> Batch:
        """The microbatch of ``at``, unique over data ranks."""
        return self._context.batch_axis.rank if self._context else 0, at.call, at.microbatch

    def add(
        self,
        during: During,
        module: str,
        value: torch.Tensor,
        at: StagePass,
        position: tuple[int, int, int],
        *,
        received: bool = False,
        parameter: str | None = None,
        weight: str | None = None,
        operation: str | None = None,
    ) -> None:
        """Record a tensor with a non-finite element (any dims and dtype), unless its pass already has a finding."""
        key = (at, during != "forward")
        if key in self._found:
            return
        kind = flaw(value)
        assert kind is not None
        place = RankCoordinates.here(self._context, at.stage)
        largest = largest_finite(value)
        origin = Origin(during, module, place, kind, at.call, at.microbatch, largest, parameter, weight, operation)
        met = during == "backward" and (at.call, at.microbatch, module) in self._met
        self._found[key] = Finding(origin, at, self.batch(at), position, received, met)

    def origin(self) -> Origin | None:
        """The first finding over all ranks, the same on every rank; None if there is none. A world collective."""
        everyone = gather_findings([(list(self._found.values()), self.failed)])
        found = [finding for ((own, _),) in everyone for finding in own]
        failed = {batch for ((_, batches),) in everyone for batch in batches}
        failed |= {finding.batch for finding in found if finding.met_in_forward}
        counted = [finding for finding in found if finding.origin.during != "forward" or finding.batch in failed]
        return min(counted, key=_order).origin if counted else None


def _order(finding: Finding) -> tuple[Any, ...]:
    """The key that sorts findings as one process would compute their values."""
    call, microbatch, stage = finding.at
    backward = finding.origin.during != "forward"
    order = (call, microbatch, backward, -stage if backward else stage)
    return (*order, finding.position, finding.received, finding.origin.place.rank)
