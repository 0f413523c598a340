"""The pipeline schedules, one row each: the order in which a rank runs forwards and backwards, and how long it idles.

A rank has one stage or several. They are placed in loops, or in a V, whose two arms meet on the last rank::

    loop    rank 0: stages 0, 2      V    rank 0: stages 0, 3        the last stage, and so the loss, is on rank 0
            rank 1: stages 1, 3           rank 1: stages 1, 2

**The bubble** is the fraction of a step that ranks idle. With p ranks, m microbatches and v stages a rank, if the
backward takes twice as long as the forward and sending takes no time, it is

    (p - 1) / (k v m + p - 1)

Schedules that run whole backwards have k = 1: filling and draining the pipeline costs p - 1 forwards and backwards of
one stage (Huang et al. 2019, GPipe; Narayanan et al. 2021, section 2.2, who divide by the ideal time instead;
Lamy-Poirier 2022 for looped BFS). Schedules that split the backward compute the gradients of weights, which no rank
waits for, in the idle time, and have k = 3: p - 1 forwards of one stage remain, because the last rank starts that much
later (Qi et al. 2023, whose ZB-H1 idles (p - 1) (T_F + T_B - T_W), and whose V shape has no bubble if each rank is
counted from its own first forward; DeepSeek-AI 2024 for DualPipe, whose overlapped pairs are counted one after the
other here). A test runs torch's own orders with these times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One schedule."""

    torch_name: str
    """The name in ``torch.distributed.pipelining`` (``get_schedule_class``)."""
    stages_per_rank: int = 1
    """Stages on a rank by default."""
    any_stages: bool = False
    """Whether a rank may have another number of stages."""
    v_shaped: bool = False
    """Whether stages are placed in a V, not in loops."""
    splits_backward: bool = False
    """Whether gradients of weights are computed later than those of activations."""
    in_rounds: bool = False
    """Whether microbatches run in rounds of equal size, each of at least as many as there are ranks."""
    least_microbatches: Callable[[int], int] = lambda ranks: 1
    """The fewest microbatches that the schedule accepts, by the number of ranks."""
    filled_by: Callable[[int], int] = lambda ranks: ranks
    """The fewest microbatches that keep every rank busy between filling and draining, by the number of ranks."""

    def bubble(self, ranks: int, stages_per_rank: int, microbatches: int) -> float | None:
        """The theoretical fraction of a step that ranks idle, see the module. None if the pipeline never fills."""
        if microbatches < self.filled_by(ranks):
            return None
        busy = (3 if self.splits_backward else 1) * stages_per_rank * microbatches
        return (ranks - 1) / (busy + ranks - 1)

    def rank_of(self, stage: int, ranks: int) -> int:
        """The pipeline rank that runs ``stage``."""
        loop, position = divmod(stage, ranks)
        return ranks - 1 - position if self.v_shaped and loop % 2 else position


V_SHAPED: dict[str, Any] = {"stages_per_rank": 2, "v_shaped": True, "splits_backward": True}
SCHEDULES = {
    "gpipe": Schedule(torch_name="GPipe", filled_by=lambda ranks: 1),
    "1f1b": Schedule(torch_name="1F1B", least_microbatches=lambda ranks: ranks),
    "interleaved-1f1b": Schedule(torch_name="Interleaved1F1B", stages_per_rank=2, any_stages=True, in_rounds=True),
    "looped-bfs": Schedule(torch_name="LoopedBFS", stages_per_rank=2, any_stages=True),
    "interleaved-zero-bubble": Schedule(
        torch_name="InterleavedZeroBubble", stages_per_rank=2, any_stages=True, in_rounds=True, splits_backward=True
    ),
    "zbv": Schedule(torch_name="ZBVZeroBubble", **V_SHAPED, filled_by=lambda ranks: 2 * ranks - 1),
    "dualpipev": Schedule(
        torch_name="DualPipeV",
        **V_SHAPED,
        least_microbatches=lambda ranks: 2 * ranks,
        filled_by=lambda ranks: 2 * ranks,
    ),
}
"""By name."""


def canonical_name(name: str) -> str:
    """The key of :data:`SCHEDULES` for ``name``: any case, also torch's names; else ``name`` unchanged."""
    plain = name.lower().replace("_", "-")
    by_torch_name = {row.torch_name.lower(): key for key, row in SCHEDULES.items()}
    return plain if plain in SCHEDULES else by_torch_name.get(plain.removeprefix("schedule"), name)
