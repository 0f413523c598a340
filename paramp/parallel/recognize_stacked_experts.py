"""What a stack of experts is; and what its experts compute for each token, shown to a diagnosis that asks for it."""

from collections.abc import Callable
from contextvars import ContextVar

import torch
from torch import nn

SEE_ROWS: ContextVar[Callable[[torch.Tensor, torch.Tensor], None] | None] = ContextVar("see_rows", default=None)
"""Called in each forward of experts over ranks with what they computed for this rank's tokens, a row for each token and
expert, (rows, features), and with each row's expert, (rows,), by its index among all."""


def num_experts(module: nn.Module) -> int:
    """The number of experts in the whole of ``module``, a stack of them; 0 if it is none, such as a router.

    A stack has parameters (experts, ...), all of its own, of which one has 3 dims or more, and an attribute
    ``num_experts``: their number, or that of this rank's part once they are sharded.
    """
    shapes = [one.shape for one in module.parameters(recurse=False)]
    here, sizes = getattr(module, "num_experts", 0), {shape[:1] for shape in shapes}
    if not isinstance(here, int) or here < 1 or len(sizes) != 1 or max(map(len, shapes)) < 3:
        return 0
    (size,) = sizes.pop() or (0,)
    return size if size % here == 0 else 0
