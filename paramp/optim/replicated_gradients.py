"""Replicated parameters whose gradients differ between tensor ranks: each rank would step its copy another way.

Such a parameter is used between layers whose features are sharded, as the norm of each head of an attention is, and its
gradient is partial on each rank, but the plan gives it no style that sums the parts.
"""

import math
import statistics
from typing import Any

import torch
import torch.distributed as dist

from ..base.collectives import all_reduce_
from ..base.dtensor import as_real
from ..base.errors import ConfigError
from ..distributed.replicated_axes import replicated_axes
from .flat_gradients import FlatGradients

TOLERANCE = 5e-2
"""Of a gradient's sums. Kernels that round differently make less of a difference, parts of the features about all."""
LEAST = 1e-2
"""Of the usual size of an element. Gradients that cancel but for rounding, as that of a bias before a batch norm, are
below it, and may differ between ranks on a GPU. What all heads share has larger ones: a sum over the heads too."""
MOST_BETWEEN = 64
"""Windows from a comparison to the next one, at most: a layer that is used late trains so long before it is refused."""
PARTIAL = "give the style 'partial_gradient' to a module that has these parameters only"
BEHIND = "use them behind the rowwise layer, or leave these layers out of the plan"
"""What to do about parts of a gradient, the latter with ``reproducible``, which has no such style."""


class ComparedGradients(FlatGradients):
    """The gradients of one of several tensor ranks.

    Attributes:
        awaited: the replicated parameters whose gradients were not compared yet: they were zero or tiny.
    """

    def __init__(self, *args: Any) -> None:
        """As :class:`FlatGradients`."""
        super().__init__(*args)
        axes = {*self.context.axes_of("tensor")}
        here = (param for param in self.params if param.norm_weight)  # of a tied one the copy that counts
        self._replicated = [param for param in here if axes & {*replicated_axes(param.parameter, self.context)}]
        self.awaited = {*self._replicated}
        self._num_windows, self._next = 0, 1

    def complete(self) -> torch.Tensor:
        """As in the base class.

        In windows 1, 2, 4, ..., 64, 128, 192, ... until all were compared, a collective of data and tensor ranks for
        which the host waits: a layer behind zeros has no gradient in the first window.
        """
        found_inf = super().complete()
        self._num_windows += 1
        if self.awaited and self._num_windows >= self._next:
            self._compare()
        return found_inf

    @torch.no_grad()
    def _compare(self) -> None:
        """Compare two sums over each gradient: of its squares, and of its elements with alternating signs."""
        axis, device = self.context.tensor_axis, self.context.device
        sums = []
        for param in self._replicated:
            own = as_real(param.stepped_gradient).view(-1)  # begins at an even element
            squares = torch.linalg.vector_norm(own, dtype=torch.float64).square()
            sums += [squares, own[::2].sum(dtype=torch.float64) - own[1::2].sum(dtype=torch.float64)]
        weights = [param.norm_weight * axis.size for param in self._replicated]
        summed = torch.stack(sums).view(-1, 2) * torch.tensor(weights, dtype=torch.float64, device=device).view(-1, 1)
        all_reduce_(summed, self.context.batch_axis.group)  # data ranks have parts, or copies that weigh less
        bounds = torch.cat([summed, -summed], dim=1).nan_to_num(math.inf, math.inf, math.inf)  # gloo's MAX drops NaN
        all_reduce_(bounds, axis.group, dist.ReduceOp.MAX)
        found = {param: row for param, row in zip(self._replicated, bounds.tolist(), strict=True) if row[0]}
        sizes = {param: math.sqrt(row[0] / param.parameter.numel()) for param, row in found.items()}
        if math.inf in sizes.values():  # an overflow: no step is made, and the next window is looked at
            return
        least = LEAST * statistics.median(sizes.values()) if sizes else 0.0
        shown = [param for param, size in sizes.items() if param in self.awaited and size > least]
        differ = [repr(param.name) for param in shown if _differs(*found[param])]
        if differ:
            self.fail(
                ConfigError(
                    f"plan: tensor ranks have different gradients of {', '.join(differ[:3])}"
                    f"{' ...' * (len(differ) > 3)}, which they replicate: each computes with a part of the features; "
                    + (BEHIND if self.context.config.reproducible else PARTIAL)
                )
            )
            return
        self.awaited.difference_update(shown)
        self._next = self._num_windows + min(self._num_windows, MOST_BETWEEN)


def let_differ(gradients: FlatGradients) -> None:
    """Refuse no more what tensor ranks replicate, but have different ``gradients`` of."""
    if isinstance(gradients, ComparedGradients):
        gradients.awaited.clear()


def _differs(squares: float, signed: float, minus_squares: float, minus_signed: float) -> bool:
    """Whether the sums of some ranks differ; of each the largest, and with a minus sign the smallest."""
    spread = max((squares + minus_squares) / squares, (signed + minus_signed) / math.sqrt(squares))
    return spread > TOLERANCE
