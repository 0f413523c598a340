"""The tokens of a batch: random training windows and fixed held-out windows."""

import numpy as np
import torch
from numpy.typing import NDArray

from ..base.errors import ConfigError
from .token_sources import TokenSource


def sample_offsets(seed: int, step: int, indices: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """An offset from 0 to ``limit - 1`` for each sample of ``indices`` in the global batch of ``step``.

    A hash of the three numbers by SplitMix64 (Steele, Lea and Flood, 2014). It is stateless.
    """
    with np.errstate(over="ignore"):
        state = _splitmix64(np.uint64(seed % 2**64) + np.zeros(len(indices), dtype=np.uint64))
        state = _splitmix64(state ^ np.uint64(step))
        state = _splitmix64(state ^ indices.astype(np.uint64))
    return (state % np.uint64(limit)).astype(np.int64)


def _splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def training_windows(
    tokens: TokenSource, seq_len: int, seed: int, step: int, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples ``first`` to ``first + count - 1`` of the global batch of ``step``: inputs and next tokens.

    Returns:
        Two int64 tensors of shape (count, seq_len).

    Raises:
        ConfigError: ``tokens`` has no more than ``seq_len`` tokens.
    """
    check_length(tokens, seq_len)
    indices = np.arange(first, first + count)
    return _windows(tokens, seq_len, sample_offsets(seed, step, indices, len(tokens) - seq_len))


def held_out_windows(
    tokens: TokenSource, seq_len: int, first: int, count: int, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows ``first`` to ``first + count - 1`` of ``total`` windows at even distances in ``tokens``.

    Returns and raises as :func:`training_windows`.
    """
    check_length(tokens, seq_len)
    indices = np.arange(first, first + count)
    return _windows(tokens, seq_len, indices * (len(tokens) - seq_len - 1) // max(total - 1, 1))


def check_length(tokens: TokenSource, seq_len: int, what: str = "") -> None:
    """Raise a ConfigError unless ``tokens``, called ``what``, has more than ``seq_len`` tokens."""
    if len(tokens) <= seq_len:
        where = f", of {what}" if what else ""
        raise ConfigError(
            f"seq_len: got {seq_len}, expected less than the data's {len(tokens)} tokens{where}; "
            "shorten train.seq_len, or give more data"
        )


def _windows(tokens: TokenSource, seq_len: int, offsets: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = np.empty((len(offsets), seq_len + 1), dtype=np.int64)
    for row, offset in zip(rows, offsets.tolist(), strict=True):
        row[:] = tokens.read(offset, seq_len + 1)
    return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())
