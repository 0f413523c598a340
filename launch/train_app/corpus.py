"""A corpus: tokens to train on and held-out tokens, from data in any of :mod:`train_app.formats`; and the batches.

Sampling is stateless: sample ``i`` of step ``s`` is a function of (seed, s, i). Data ranks, accumulation steps and
microbatches take slices of the same global batch, so every layout and every resumed run sees the same data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paramp import ConfigError, DataError

from .formats import FoundData, ReadOptions, open_data
from .text_to_tokens import HELD_OUT_ONE_IN, Encoder
from .token_sources import CheckedTokens, TokenSource, fingerprint

BIGRAM_TOKENS = 2**26
IDENTITY = {
    "training": "{unit}s to train on",
    "held_out": "{unit}s held out",
    "unit": "unit",
    "vocab_size": "size of the vocabulary",
    "sha256": "SHA-256 of a sample of it",
}
"""The keys of :meth:`Corpus.identity`, in words."""


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on, and tokens held out."""

    name: str
    training: CheckedTokens
    held_out: CheckedTokens
    num_files: int
    sha256: str
    """:func:`train_app.token_sources.fingerprint`, which a resumed run compares."""
    vocab_size: int
    unit: str
    """The kind of token: ``byte`` or ``token``."""
    notes: tuple[str, ...]
    """Messages for the user, such as which files were skipped."""

    def identity(self) -> dict[str, Any]:
        """Plain values that a checkpoint keeps, so that a resumed run can check that it reads the same data."""
        sizes = {"training": len(self.training), "held_out": len(self.held_out)}
        return sizes | {"unit": self.unit, "vocab_size": self.vocab_size, "sha256": self.sha256}

    def difference(self, saved: Mapping[str, Any]) -> str | None:
        """The differences from ``saved``, the :meth:`identity` of an earlier run, in words; None if there are none."""
        now = self.identity()
        different = [
            f"{words.format(unit=self.unit)}: {str(saved.get(key))[:12]} saved, {str(now[key])[:12]} now"
            for key, words in IDENTITY.items()
            if saved.get(key) != now[key]
        ]
        return f"{self.name!r} differs from the data of the saved run ({'; '.join(different)})" if different else None

    def check_seq_len(self, seq_len: int) -> None:
        """Raise a ConfigError if the training or the held-out part is shorter than a sequence and its next token."""
        for tokens, what in ((self.training, "to train on"), (self.held_out, "held out")):
            if len(tokens) <= seq_len:
                raise ConfigError(
                    f"seq_len: got {seq_len}, expected less than the data's {len(tokens)} tokens, of {self.name!r} "
                    f"{what}; shorten train.seq_len, or give more data"
                )


def load_corpus(
    data: str = "stdlib",
    *,
    validation_data: str | None = None,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    data_dtype: str = "auto",
    default_vocab_size: int = 256,
) -> Corpus:
    """Open the data at ``data``, in any format that :mod:`train_app.formats` lists.

    If the data has no held-out part, its last twentieth is held out.

    Args:
        data: ``stdlib`` or a path.
        validation_data: a path; its held-out part, or else all of it, is held out instead of a part of ``data``.
        tokenizer: path of a ``tokenizer.json`` or its folder. For token files it gives only the vocabulary size.
        vocab_size: the vocabulary size. None: that of the tokenizer or of ``meta.json``, or 256 for bytes.
        data_dtype: the dtype of a flat ``.bin``: ``uint16``, ``uint32``, or ``auto``: ``meta.json``, else uint16.
        default_vocab_size: the vocabulary size if none of these gives it.

    Raises:
        ConfigError: the data does not exist or is damaged, or tokens are outside the vocabulary.
    """
    encoder = Encoder(tokenizer)
    found = _open(data, validation_data, ReadOptions(encoder, data_dtype, split=validation_data is None))
    from_tokenizer = encoder.vocab_size if tokenizer is not None else None
    sizes = (vocab_size, from_tokenizer, found.vocab_size)
    size = next((size for size in sizes if size is not None), default_vocab_size)
    border = end = len(found.training)
    if found.held_out is None:
        border -= end // HELD_OUT_ONE_IN
        held_out = CheckedTokens(found.training, border, end - border, size)
    else:
        held_out = CheckedTokens(found.held_out, 0, len(found.held_out), size)
    training = CheckedTokens(found.training, 0, border, size)
    try:
        sha256 = fingerprint(training, held_out)  # reading checks the tokens
    except DataError as error:
        raise ConfigError(str(error)) from None
    return Corpus(data, training, held_out, found.num_files, sha256, size, found.unit, found.notes)


def _open(data: str, validation_data: str | None, options: ReadOptions) -> FoundData:
    """The data at ``data``, with the held-out part of ``validation_data``, or all of it, held out if it is given."""
    found = open_data(data, options)
    if validation_data is None:
        return found
    try:
        apart = open_data(validation_data, options)
    except ConfigError as error:
        raise ConfigError(f"validation_{error}" if str(error).startswith("data: ") else str(error)) from None
    if apart.unit != found.unit:
        raise ConfigError(
            f"validation_data: {validation_data!r} holds {apart.unit}s, but {data!r} holds {found.unit}s; "
            "give both in one form"
        )
    held_out, notes = apart.held_out or apart.training, (*found.notes, *apart.notes)
    return replace(found, held_out=held_out, num_files=found.num_files + apart.num_files, notes=notes)


def training_windows(
    tokens: TokenSource, seq_len: int, seed: int, step: int, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples ``first`` to ``first + count - 1`` of the global batch of ``step``: inputs and next tokens.

    Returns:
        Two int64 tensors of shape (count, seq_len). ``tokens`` has to have more than ``seq_len`` tokens.
    """
    indices = np.arange(first, first + count)
    return _windows(tokens, seq_len, sample_offsets(seed, step, indices, len(tokens) - seq_len))


def held_out_windows(
    tokens: TokenSource, seq_len: int, first: int, count: int, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows ``first`` to ``first + count - 1`` of ``total`` windows at even distances in ``tokens``.

    Returns as :func:`training_windows`.
    """
    indices = np.arange(first, first + count)
    return _windows(tokens, seq_len, indices * (len(tokens) - seq_len - 1) // max(total - 1, 1))


def _windows(tokens: TokenSource, seq_len: int, offsets: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = np.empty((len(offsets), seq_len + 1), dtype=np.int64)
    for row, offset in zip(rows, offsets.tolist(), strict=True):
        row[:] = tokens.read(offset, seq_len + 1)
    return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())


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


def bigram_loss(corpus: Corpus) -> float:
    """The held-out loss of a byte-bigram model with add-one smoothing, in nats per byte, as a baseline.

    The tokens have to be bytes. It reads at most the first 64 Mi of each part.
    """
    counts = _count_pairs(corpus.training)
    log_probabilities = np.log((counts + 1.0) / (counts + 1.0).sum(axis=1, keepdims=True))
    held_out = _count_pairs(corpus.held_out)
    return float(-(held_out * log_probabilities).sum() / held_out.sum())


def _count_pairs(source: TokenSource) -> NDArray[np.int64]:
    """Counts of byte pairs, int64 (256, 256): rows are the first byte, columns the next one."""
    counts, previous = np.zeros(256 * 256, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for block in source.blocks(BIGRAM_TOKENS):
        tokens = np.concatenate([previous, block.astype(np.int64)])
        counts += np.bincount(tokens[:-1] * 256 + tokens[1:], minlength=256 * 256)
        previous = tokens[-1:]
    return counts.reshape(256, 256)
