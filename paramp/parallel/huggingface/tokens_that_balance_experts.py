"""Which tokens of a forward balance experts: those that its attention mask shows. Others are padding.

Both that balance ask here: the loss of routers, which transformers gives the mask, and the biases of scores, whose
routers see no mask, so that each forward of a model says it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...base.errors import ConfigError
from ...distributed.token_positions import ACTIVE

MASK = "attention_mask"
"""The name of the input."""

_MASKS: list[Any] = []
"""Those of the forwards that run, the innermost last."""


@contextmanager
def masked_by(mask: Any) -> Iterator[None]:
    """A context for a forward of a model whose attention mask is ``mask``."""
    _MASKS.append(mask)
    try:
        yield
    finally:
        _MASKS.pop()


def shown_in_forward(rows: torch.Tensor) -> torch.Tensor:
    """:func:`shown` by the mask of the forward that runs; all, where a backward repeats a part of it."""
    return shown(_MASKS[-1] if _MASKS else None, rows)


def shown(mask: Any, rows: torch.Tensor) -> torch.Tensor:
    """Which of the ``rows``, one for each token, count: (rows,), bool.

    Args:
        mask: above 0 for tokens that count, (batch or 1, tokens); or for those that a query sees,
            (batch or 1, 1, queries, tokens); None: all do.

    Raises:
        ConfigError: the mask is another one.
    """
    if mask is None:
        return torch.ones_like(rows[:, 0], dtype=torch.bool)
    seen = None
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        seen = mask > 0
    elif isinstance(mask, torch.Tensor) and mask.ndim == 4 and not mask.is_floating_point():
        seen = (mask > 0).any((1, 2))
    if seen is not None and ACTIVE:
        seen = ACTIVE[-1].running(seen)
    if seen is not None and len(seen) == 1:
        seen = seen.expand(len(rows) // seen.shape[1], -1)
    if seen is None or seen.numel() != len(rows):
        what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ConfigError(
            f"inputs[{MASK!r}]: got {what} for {len(rows)} tokens, expected (batch, tokens), or bool (batch, 1, "
            "queries, tokens), because experts are balanced by the tokens that it shows"
        )
    return seen.reshape(-1)
