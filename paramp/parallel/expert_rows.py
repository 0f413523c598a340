"""What experts compute for each token, shown to who asks for it: a diagnosis that runs a batch again."""

from collections.abc import Callable
from contextvars import ContextVar

import torch

SEE_ROWS: ContextVar[Callable[[torch.Tensor, torch.Tensor], None] | None] = ContextVar("see_rows", default=None)
"""Called in each forward of experts over ranks with what they computed for this rank's tokens, a row for each token and
expert, (rows, features), and with each row's expert, (rows,), by its index among all."""
