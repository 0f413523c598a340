"""A byte-bigram model of the training data: the loss that a trained model should beat."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .corpus import Corpus
from .token_sources import SlicedTokens, TokenSource

BIGRAM_TOKENS = 2**26


def bigram_loss(corpus: Corpus) -> float:
    """Nats a byte of what is held out under a byte-bigram model: what context of one byte gets (add-one smoothed).

    Of larger data it counts the first 64 M bytes of each part.

    Raises:
        ValueError: the tokens are no bytes.
    """
    if corpus.unit != "byte":
        raise ValueError(f"corpus: its unit is {corpus.unit!r}, expected 'byte'")
    counts = _count_pairs(corpus.training)
    log_probabilities = np.log((counts + 1.0) / (counts + 1.0).sum(axis=1, keepdims=True))
    held_out = _count_pairs(corpus.held_out)
    return float(-(held_out * log_probabilities).sum() / held_out.sum())


def _count_pairs(source: TokenSource) -> NDArray[np.int64]:
    """How often each byte (columns) follows each other one (rows)."""
    counts = np.zeros(256 * 256, dtype=np.int64)
    previous = np.zeros(0, dtype=np.int64)
    for block in SlicedTokens(source, 0, min(len(source), BIGRAM_TOKENS)).blocks():
        tokens = np.concatenate([previous, block.astype(np.int64)])
        counts += np.bincount(tokens[:-1] * 256 + tokens[1:], minlength=256 * 256)
        previous = tokens[-1:]
    return counts.reshape(256, 256)
