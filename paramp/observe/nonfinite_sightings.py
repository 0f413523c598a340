"""The non-finite values that were seen while a window runs again, and which of them is the first.

The first value is that which one process would compute first, not the first in time: by call, microbatch, forward
before backward, stage (reversed in the backward), then position in the sequence of checks, which is the same on all
tensor ranks of a stage. Infinities in a forward with a finite loss are often intended, as in a mask. They count only if
the backward of a module that had one in its forward fails.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..distributed.context import ParallelContext
from ..scaling.overflow_report import During, Origin, RankCoordinates, flaw, gather_findings, largest_finite

if TYPE_CHECKING:
    from ..parallel.context_axis.cut_sequences import SequencePlaces

Position = tuple[int, int, int]
AFTER_NODES: Position = (1, 0, 0)
"""The position of what parameter hooks and sums see; larger than that of any node."""


class StagePass(NamedTuple):
    """One microbatch on one stage, of one call of ``forward_backward``."""

    call: int
    microbatch: int
    stage: int


class Sighting(NamedTuple):
    """The first non-finite value of one pass of one microbatch through one stage, on one rank."""

    order: tuple[Any, ...]
    """Sorts them as one process would compute their values."""
    batch: tuple[int, int, int]
    """Data rank, call and microbatch."""
    origin: Origin
    met_in_forward: bool
    """For a backward: whether the module had non-finite values in the forward of the same microbatch."""


class Sightings:
    """What this rank has seen in one run of a window."""

    def __init__(self, context: ParallelContext | None) -> None:
        self._context = context
        self.places: SequencePlaces | None = None
        """Of the values of the batch that runs; None: sequences are whole, or what cuts them is not known."""
        self._first: dict[tuple[StagePass, bool], Sighting] = {}  # key: pass, is backward
        self.met: set[tuple[int, int, str]] = set()
        """Call, microbatch and module of forwards that had a non-finite value."""
        self.failed: set[tuple[int, int, int]] = set()
        """The microbatches (:meth:`batch`) whose loss is not finite."""

    def has_backward(self, at: StagePass | None = None) -> bool:
        """Whether the backward of ``at`` already has a value, or any backward; only the first of each is kept."""
        return any(backward for _, backward in self._first) if at is None else (at, True) in self._first

    def batch(self, at: StagePass) -> tuple[int, int, int]:
        """The microbatch of ``at``, unique over data ranks."""
        return self._context.dp.rank if self._context else 0, at.call, at.microbatch

    def add(
        self,
        during: During,
        module: str,
        value: torch.Tensor,
        at: StagePass,
        position: Position,
        *,
        received: bool = False,
        **details: Any,
    ) -> None:
        """Record a tensor with a non-finite element (any dims and dtype), unless its pass already has one.

        Args:
            position: in the sequence of checks of the pass and stage. Comparable between tensor ranks.
            received: whether it was seen in the inputs of the module or operation.
            details: ``parameter``, ``weight``, ``operation`` and ``experts`` of the :class:`Origin`.
        """
        backward = during != "forward"
        if (at, backward) in self._first:
            return
        kind = flaw(value)
        assert kind is not None
        place = RankCoordinates.here(self._context, at.stage)
        origin = Origin(
            during=during,
            module=module,
            place=place,
            kind=kind,
            call=at.call,
            microbatch=at.microbatch,
            largest=largest_finite(value),
            **details,
        )
        if self.places is not None and origin.parameter is None:
            origin = replace(origin, positions=self.places.not_finite(value))
        stage = -at.stage if backward else at.stage
        order = (at.call, at.microbatch, backward, stage, position, received, place.rank)
        met = during == "backward" and (at.call, at.microbatch, module) in self.met
        self._first[at, backward] = Sighting(order, self.batch(at), origin, met)

    def origin(self) -> Origin | None:
        """The first value over all ranks, the same on every rank; None if there is none. A world collective."""
        everyone = [seen for (seen,) in gather_findings([(list(self._first.values()), self.failed)])]
        sightings = [sighting for of_rank, _ in everyone for sighting in of_rank]
        failed = {batch for _, batches in everyone for batch in batches}
        failed |= {sighting.batch for sighting in sightings if sighting.met_in_forward}
        counted = [seen for seen in sightings if seen.origin.during != "forward" or seen.batch in failed]
        return min(counted, key=lambda sighting: sighting.order).origin if counted else None
