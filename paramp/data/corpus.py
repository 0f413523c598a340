"""What to train on, and batches that depend on nothing but the seed, the step and the index in the global batch.

:func:`load_corpus` opens what lies at a path as two sources of tokens (:mod:`paramp.data.token_sources`), one to train
on and one held out.

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
    """Of the tokens and their number, a spread sample of them where they are not in memory
    (:func:`paramp.data.token_sources.fingerprint`): two runs with the same hash read the same data."""
    vocab_size: int = 256
    unit: str = "byte"
    """What a token is: ``byte`` or ``token``."""
    notes: tuple[str, ...] = ()
    """What the user should know of what was found."""

    def identity(self) -> dict[str, Any]:
        """What a checkpoint keeps to see whether a later run reads the same data; plain values."""
        return {
            "training": len(self.training),
            "held_out": len(self.held_out),
            "unit": self.unit,
            "vocab_size": self.vocab_size,
            "sha256": self.sha256,
        }

    def difference(self, saved: Mapping[str, Any]) -> str | None:
        """What is different now from the :meth:`identity` of an earlier run, in words; None if nothing is."""
        words = {
            "training": f"{self.unit}s to train on",
            "held_out": f"{self.unit}s held out",
            "unit": "unit",
            "vocab_size": "size of the vocabulary",
            "sha256": "SHA-256 of a sample of it",
        }
        now = self.identity()
        different = [
            f"{word}: {str(saved.get(key))[:12]} then, {str(now[key])[:12]} now"
            for key, word in words.items()
            if saved.get(key) != now[key]
        ]
        return f"{self.name!r} is not the data of then ({'; '.join(different)})" if different else None

    def check_seq_len(self, seq_len: int) -> None:
        """Raise a ConfigError if a sequence does not fit into either part."""
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
    """What lies at ``data``, in any form that :mod:`paramp.data.corpus_formats` lists.

    Where the data sets nothing apart, its last twentieth is held out.

    Args:
        data: ``stdlib`` or a path.
        validation_data: a path whose held-out part, or else all of it, is held out in place of a part of ``data``.
        tokenizer: path of a ``tokenizer.json`` or its folder. Of token files it gives only the size of the vocabulary.
        vocab_size: how many tokens there are. None: as many as the tokenizer or ``meta.json`` has, or 256 for bytes.
        data_dtype: of a flat ``.bin``: ``uint16``, ``uint32``, or ``auto``: that of ``meta.json``, else uint16.
        default_vocab_size: where none of these is known.

    Raises:
        ConfigError: there is no such data, it is damaged, or its tokens are outside the vocabulary.
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
    """The tokens to train on, and those that are held out: the last part of the others where the data has none."""
    tokens = found.training
    if found.held_out is not None:
        return tokens, found.held_out
    size = len(tokens) - len(tokens) // TAIL_ONE_IN
    return SlicedTokens(tokens, 0, size), SlicedTokens(tokens, size, len(tokens) - size)


def _open(data: str, validation_data: str | None, options: ReadOptions) -> FoundData:
    """What lies at ``data``, with what ``validation_data`` holds out, or else all of it, held out if it is given."""
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
    """``source``, a sample of which was compared with the vocabulary."""
    checked = CheckedTokens(source, vocab_size)
    try:
        for _ in sample(checked):  # reading is checking
            pass
    except DataError as error:
        raise ConfigError(str(error)) from None
    return checked


def standard_library(root: Path | None = None) -> Corpus:
    """The source of this Python's standard library: about 12 MB of text that every machine with Python has.

    Tests and installed packages are left out. One file in twenty, chosen by a hash of its name, is held out. Raises
    ConfigError if this Python comes without its source.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    found = open_standard_library(root, ReadOptions(Bytes(), "auto", split=True))
    assert found.held_out is not None
    return Corpus(
        "stdlib", found.training, found.held_out, found.num_files, fingerprint(found.training, found.held_out)
    )


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
