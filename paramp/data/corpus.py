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

from ..base.errors import ConfigError, DataError
from .corpus_formats import FoundData, ReadOptions, open_data, open_standard_library
from .sampling import check_length
from .text_corpus import Bytes, Encoder, Tokenizer
from .token_sources import CheckedTokens, SlicedTokens, TokenSource, fingerprint, sample

TAIL_ONE_IN = 20


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
        different = [
            f"{words[key]}: {str(saved.get(key))[:12]} then, {str(value)[:12]} now"
            for key, value in self.identity().items()
            if saved.get(key) != value
        ]
        return f"{self.name!r} is not the data of then ({'; '.join(different)})" if different else None

    def check_seq_len(self, seq_len: int) -> None:
        """Complain if a sequence does not fit into either part.

        Raises:
            ConfigError: it does not.
        """
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
    found = open_data(data, options)
    if validation_data is not None:
        found = _with_validation_data(found, data, validation_data, options)
    training, held_out = _split(found)
    vocabularies = (vocab_size, encoder.vocab_size if tokenizer is not None else None, found.vocab_size)
    size = next((number for number in vocabularies if number is not None), default_vocab_size)
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


def _with_validation_data(found: FoundData, data: str, validation_data: str, options: ReadOptions) -> FoundData:
    """``found``, what lies at ``data``, with what ``validation_data`` holds out, or else all of it, held out."""
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


def _split(found: FoundData) -> tuple[TokenSource, TokenSource]:
    """What to train on, and what is held out: the last twentieth where the data sets nothing apart."""
    if found.held_out is not None:
        return found.training, found.held_out
    tokens = found.training
    size = len(tokens) - len(tokens) // TAIL_ONE_IN
    return SlicedTokens(tokens, 0, size), SlicedTokens(tokens, size, len(tokens) - size)


def _checked(source: TokenSource, vocab_size: int) -> CheckedTokens:
    """``source``, a sample of which was compared with the vocabulary.

    Raises:
        ConfigError: a token is outside of it.
    """
    checked = CheckedTokens(source, vocab_size)
    try:
        for _ in sample(checked):  # reading is checking
            pass
    except DataError as error:
        raise ConfigError(str(error)) from None
    return checked


def standard_library(root: Path | None = None) -> Corpus:
    """The source of this Python's standard library: about 12 MB of text that every machine with Python has.

    Tests and installed packages are left out. One file in twenty, chosen by a hash of its name, is held out.

    Raises:
        ConfigError: this Python comes without its source.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    found = open_standard_library(root, ReadOptions(Bytes(), "auto", split=True))
    assert found.held_out is not None
    return Corpus(
        "stdlib", found.training, found.held_out, found.num_files, fingerprint(found.training, found.held_out)
    )
