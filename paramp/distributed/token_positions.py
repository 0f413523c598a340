"""The places of a rank's tokens in their sequences, for models whose positions are embedded."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.overrides import handle_torch_function, has_torch_function


class CutSequences(Protocol):
    """Sequences of which each of ``size`` ranks has a part."""

    size: int

    def positions(self, length: int, device: torch.device | str | None) -> torch.Tensor:
        """The places of this rank's ``length`` tokens."""

    def total(self, count: torch.Tensor) -> torch.Tensor:
        """What the loss of this rank's tokens, which are ``count``, is divided by."""

    def running(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of ``tokens`` in the last dim, this rank's, those that the module that runs computes."""


ACTIVE: list[CutSequences] = []
"""The context axis of the engine that computes, the latest last; empty: sequences are whole."""


def token_positions(length: int, device: torch.device | str | None = None) -> torch.Tensor:
    """The places in their sequence of the ``length`` tokens that this rank has of it: (length,), int64.

    A model that embeds positions calls it in its forward, in place of ``torch.arange(length)``, which it returns unless
    ``parallel.context`` cuts sequences.
    """
    if has_torch_function((length, device)):  # a model is traced for a pipeline
        return handle_torch_function(token_positions, (length, device), length, device)
    return ACTIVE[-1].positions(length, device) if ACTIVE else torch.arange(length, device=device)


def sequence_length(length: int) -> int:
    """The length of the sequence of which this rank has ``length`` tokens."""
    return ACTIVE[-1].size * length if ACTIVE else length
