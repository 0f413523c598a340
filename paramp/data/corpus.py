"""A corpus: tokens to train on and held-out tokens, from data in any supported format.

:func:`load_corpus` opens the data at a path as two token sources (:mod:`paramp.data.token_sources`), one to train on
and one held out.

Sampling is stateless: sample ``i`` of step ``s`` is a function of (seed, s, i). Data ranks, accumulation steps and
microbatches take slices of the same global batch, so every layout and every resumed run sees the same data.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import ConfigError, DataError
from .corpus_formats import FoundData, ReadOptions, open_data, open_standard_library
from .sampling import check_length
from .text_corpus import Bytes, Encoder, Tokenizer
from .token_sources import CheckedTokens, SlicedTokens, TokenSource, fingerprint, sample

TAIL_ONE_IN = 20
BIGRAM_TOKENS = 2**26


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on, and tokens held out."""

    name: str
    training: TokenSource
    held_out: TokenSource
    num_files: int
    sha256: str
    """A hash of the number of tokens and of the tokens, or of a sample of tokens that are not in memory
    (:func:`paramp.data.token_sources.fingerprint`). A resumed run compares it."""
    vocab_size: int = 256
    unit: str = "byte"
    """The kind of token: ``byte`` or ``token``."""
    notes: tuple[str, ...] = ()
    """Messages for the user, such as which files were skipped."""

    def identity(self) -> dict[str, Any]:
        """Plain values that a checkpoint keeps, so that a resumed run can check that it reads the same data."""
        return {
            "training": len(self.training),
            "held_out": len(self.held_out),
            "unit": self.unit,
            "vocab_size": self.vocab_size,
            "sha256": self.sha256,
        }

    def difference(self, saved: Mapping[str, Any]) -> str | None:
        """The differences from ``saved``, the :meth:`identity` of an earlier run, in words; None if there are none."""
        words = {
            "training": f"{self.unit}s to train on",
            "held_out": f"{self.unit}s held out",
            "unit": "unit",
            "vocab_size": "size of the vocabulary",
            "sha256": "SHA-256 of a sample of it",
        }
        now = self.identity()
        different = [
            f"{word}: {str(saved.get(key))[:12]} saved, {str(now[key])[:12]} now"
            for key, word in words.items()
            if saved.get(key) != now[key]
        ]
        return f"{self.name!r} differs from the data of the saved run ({'; '.join(different)})" if different else None

    def check_seq_len(self, seq_len: int) -> None:
        """Raise a ConfigError if the training or the held-out part is shorter than a sequence."""
        check_length(self.training, seq_len, f"{self.name!r} to train on")
        check_length(self.held_out, seq_len, f"{self.name!r} held out")


def load_corpus(
    data: str = "stdlib",
    *,
    validation_data: str | None = None,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    data_dtype: str = "auto",
    default_vocab_size: int = 256,
) -> Corpus:
    """Open the data at ``data``, in any format that :mod:`paramp.data.corpus_formats` lists.

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
    encoder: Encoder = Tokenizer(tokenizer) if tokenizer is not None else Bytes()
    options = ReadOptions(encoder, data_dtype, split=validation_data is None)
    found = _open(data, validation_data, options)
    training, held_out = _parts(found)
    own = encoder.vocab_size if tokenizer is not None else None
    size = next((size for size in (vocab_size, own, found.vocab_size) if size is not None), default_vocab_size)
    return Corpus(
        name=data,
        training=_checked(training, size),
        held_out=_checked(held_out, size),
        num_files=found.num_files,
        sha256=fingerprint(training, held_out),
        vocab_size=size,
        unit=found.unit,
        notes=found.notes,
    )


def _parts(found: FoundData) -> tuple[TokenSource, TokenSource]:
    """The training part and the held-out part, which is the last twentieth if the data has none of its own."""
    tokens = found.training
    if found.held_out is not None:
        return tokens, found.held_out
    size = len(tokens) - len(tokens) // TAIL_ONE_IN
    return SlicedTokens(tokens, 0, size), SlicedTokens(tokens, size, len(tokens) - size)


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
    return replace(
        found,
        held_out=apart.held_out or apart.training,
        num_files=found.num_files + apart.num_files,
        notes=(*found.notes, *apart.notes),
    )


def _checked(source: TokenSource, vocab_size: int) -> CheckedTokens:
    """``source`` with a vocabulary check on every read; a sample is checked now."""
    checked = CheckedTokens(source, vocab_size)
    try:
        for _ in sample(checked):  # reading checks the tokens
            pass
    except DataError as error:
        raise ConfigError(str(error)) from None
    return checked


def standard_library(root: Path | None = None) -> Corpus:
    """The source of this Python's standard library, about 12 MB of text, as bytes.

    Tests and installed packages are left out. One file in twenty, chosen by a hash of its name, is held out.

    Raises:
        ConfigError: this Python has too few source files.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    found = open_standard_library(root, ReadOptions(Bytes(), "auto", split=True))
    assert found.held_out is not None
    return Corpus(
        "stdlib", found.training, found.held_out, found.num_files, fingerprint(found.training, found.held_out)
    )


def bigram_loss(corpus: Corpus) -> float:
    """The held-out loss of a byte-bigram model with add-one smoothing, in nats per byte, as a baseline.

    It reads at most the first 64 Mi bytes of each part.

    Raises:
        ValueError: the tokens are not bytes.
    """
    if corpus.unit != "byte":
        raise ValueError(f"corpus: its unit is {corpus.unit!r}, expected 'byte'")
    counts = _count_pairs(corpus.training)
    log_probabilities = np.log((counts + 1.0) / (counts + 1.0).sum(axis=1, keepdims=True))
    held_out = _count_pairs(corpus.held_out)
    return float(-(held_out * log_probabilities).sum() / held_out.sum())


def _count_pairs(source: TokenSource) -> NDArray[np.int64]:
    """Counts of byte pairs, int64 (256, 256): rows are the first byte, columns the next one."""
    counts = np.zeros(256 * 256, dtype=np.int64)
    previous = np.zeros(0, dtype=np.int64)
    for block in SlicedTokens(source, 0, min(len(source), BIGRAM_TOKENS)).blocks():
        tokens = np.concatenate([previous, block.astype(np.int64)])
        counts += np.bincount(tokens[:-1] * 256 + tokens[1:], minlength=256 * 256)
        previous = tokens[-1:]
    return counts.reshape(256, 256)
