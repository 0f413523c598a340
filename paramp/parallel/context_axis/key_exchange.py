"""How the keys and values of all ranks, and the gradients of them, travel.

Bytes that a rank sends for one layer, of N ranks, where KV is what it has of keys and values and G the same in the
dtype of accumulation (fp32 for halves)::

    all-gather, ring    forward (N - 1) KV    backward (N - 1) (KV + G)

Sources: the ring is that of Liu et al. 2023, the all-gather that of Llama 3 (Grattafiori et al. 2024, section 3.3.2).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...base.collectives import all_gather_single, reduce_scatter_single, sends_by_host
from .merged_attention import KeyExchange, Visit, VisitBack, packed, unpacked
from .tokens_of_ranks import SequenceLayout


class Alone:
    """One process has all keys."""

    def __init__(self, layout: SequenceLayout) -> None:
        self._all = ((0, layout.length),)

    def forward(self, k: torch.Tensor, v: torch.Tensor, visit: Visit) -> None:
        visit(self._all, k, v)

    def backward(self, k: torch.Tensor, v: torch.Tensor, visit: VisitBack) -> torch.Tensor:
        return visit(self._all, k, v)


class AllGather:
    """Each rank gets all keys and values at once; their gradients are summed by a reduce-scatter."""

    def __init__(self, layout: SequenceLayout) -> None:
        self._layout = layout

    def forward(self, k: torch.Tensor, v: torch.Tensor, visit: Visit) -> None:
        visit(((0, self._layout.length),), *self._gathered(k, v))

    def backward(self, k: torch.Tensor, v: torch.Tensor, visit: VisitBack) -> torch.Tensor:
        layout = self._layout
        keys, values = self._gathered(k, v)
        gradients = unpacked(visit(((0, layout.length),), keys, values), keys, values)
        sent = gradients[0].new_empty(layout.size, k.numel() + v.numel())
        del keys, values
        for rank, row in enumerate(sent):
            for shard, whole in zip(unpacked(row, k, v), gradients, strict=True):
                shard.copy_(layout.shard(whole, 2, rank))
        del gradients
        local = torch.empty_like(sent[0])
        reduce_scatter_single(local, sent.view(-1), group=layout.group)
        return local

    def _gathered(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layout, local = self._layout, packed(k, v)
        everyone = local.new_empty(layout.size * local.numel())
        all_gather_single(everyone, local, group=layout.group)
        shards = [unpacked(shard, k, v) for shard in everyone.view(layout.size, -1)]
        return layout.whole([keys for keys, _ in shards], 2), layout.whole([values for _, values in shards], 2)


class Ring:
    """Keys and values go from each rank to the next one until all ranks have seen them.

    In the backward they go round once more. The sum of their gradients follows them, one step behind, and comes home
    with a last step; the owner's own share does not travel. Each transfer begins before what is computed meanwhile.
    """

    def __init__(self, layout: SequenceLayout) -> None:
        self._layout = layout

    def forward(self, k: torch.Tensor, v: torch.Tensor, visit: Visit) -> None:
        layout, here = self._layout, packed(k, v)
        for step in range(layout.size):
            coming = _Transfer(here, layout) if step + 1 < layout.size else None
            visit(self._segments(step), *unpacked(here, k, v))
            here = coming.wait() if coming else here

    def backward(self, k: torch.Tensor, v: torch.Tensor, visit: VisitBack) -> torch.Tensor:
        layout, here = self._layout, packed(k, v)
        local = arriving = None
        for step in range(layout.size):
            coming = _Transfer(here, layout) if step + 1 < layout.size else None
            found = visit(self._segments(step), *unpacked(here, k, v))
            if arriving is not None:
                found += arriving.wait()  # of the ranks that have seen these keys before
            if local is None:
                local = found
            else:
                arriving = _Transfer(found, layout)
            here = coming.wait() if coming else here
        assert local is not None
        return local if arriving is None else local.add_(arriving.wait())

    def _segments(self, step: int) -> tuple[tuple[int, int], ...]:
        """Where in the sequence the keys are that this rank has in a step."""
        layout = self._layout
        return layout.segments((layout.rank - step) % layout.size)


class _Transfer:
    """A tensor on its way to the next rank of the ring, and the previous rank's on its way here."""

    def __init__(self, sent: torch.Tensor, layout: SequenceLayout) -> None:
        group, rank, size = layout.group, layout.rank, layout.size
        self._device = sent.device
        self._sent = sent.cpu() if sends_by_host(sent.device, group) else sent
        self._received = torch.empty_like(self._sent)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, self._received, group=group, group_peer=(rank - 1) % size),
            ]
        )

    def wait(self) -> torch.Tensor:
        """What the previous rank has sent."""
        for work in self._works:
            work.wait()
        return self._received.to(self._device)


EXCHANGES: dict[str, type[AllGather | Ring]] = {"all-gather": AllGather, "ring": Ring}


def key_exchange(method: str, layout: SequenceLayout) -> KeyExchange:
    """The exchange of keys by its name."""
    return Alone(layout) if layout.size == 1 else EXCHANGES[method](layout)
