"""How many tokens each expert of a mixture got, over all data ranks: what a loss that balances experts needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..base.collectives import all_reduce_


class TokenCounts(nn.Module):
    """The number of tokens that chose each of ``num_experts``, of all data ranks once an engine has the model.

    A module of the user's router calls it in training: with it, a loss that balances experts is one of the global batch
    (Qiu et al. 2025, *Demons in the detail*, arXiv 2501.11873). Every data rank has to call it as often. It keeps
    nothing from call to call: a forward that checkpointing repeats has the same counts.

    Attributes:
        group: the data ranks, whose counts are added up; None: this process alone.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.group: dist.ProcessGroup | None = None

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        """Counts (experts), int64, of ``index``, the experts of each token (tokens, choices), int64."""
        chosen = index.reshape(-1)
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=index.device)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        if self.group is not None:
            all_reduce_(counts, self.group)
        return counts

    def __getstate__(self) -> dict[str, Any]:
        """What a copy gets: it counts for itself."""
        return vars(self) | {"group": None}


def token_counts(module: nn.Module) -> list[TokenCounts]:
    """Those in ``module``: in their forwards data ranks wait for each other."""
    return [one for one in module.modules() if isinstance(one, TokenCounts)]
