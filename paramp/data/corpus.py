"""What to train on, and batches that depend on nothing but the seed, the step and the place in the global batch.

:func:`load_corpus` finds out from a path what lies there and gives it as two sources of tokens (:mod:`paramp.data.token_files`),
one to train on and one held out.

Sampling is stateless: sample ``i`` of step ``s`` is a function of (seed, s, i). Data ranks, accumulation steps and
microbatches take slices of the same global batch, so every layout and every resumed run sees the same data.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import ConfigError, DataError, nearest
from .hf_datasets import TOKENS, column_of, is_saved_dataset, load_splits, rows_of_text, tokens_of
from .sampling import check_length
from .text_corpus import (
    Bytes,
    Encoder,
    TextFile,
    Tokenizer,
    find_text,
    held_out_by_name,
    read_chunks,
    text_of,
    why_not_text,
)
from .token_files import (
    FLAT_DTYPES,
    ArrayTokens,
    CheckedTokens,
    FileTokens,
    SlicedTokens,
    TokenSource,
    fingerprint,
    open_flat,
    open_indexed,
    sample,
)

__all__ = ["Corpus", "load_corpus", "standard_library"]

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
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
    (:func:`paramp.data.token_files.fingerprint`): two runs with the same hash read the same data."""
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


@dataclass(frozen=True)
class _Found:
    """What lies at a path."""

    training: TokenSource
    held_out: TokenSource | None
    """The part that the data itself sets apart; None if there is no such part."""
    num_files: int
    unit: str
    vocab_size: int | None
    """None: not known from the data."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Options:
    encoder: Encoder
    dtype: str
    split: bool
    """Whether some of what is not divided yet is to be held out, if it can be chosen by name."""


def load_corpus(
    data: str = "stdlib",
    *,
    validation_data: str | None = None,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    data_dtype: str = "auto",
    default_vocab_size: int = 256,
) -> Corpus:
    """What lies at ``data``.

    ============================  ====================================================================================
    ``stdlib``                    the source of this Python's standard library, as bytes
    a text file                   its bytes, or its tokens if there is a ``tokenizer``
    a folder of text              the same, file by file (:func:`paramp.data.text_corpus.find_text` says which); one file in
                                  twenty is held out
    ``X.bin``                     uint16 or uint32, as nanoGPT writes it
    a folder with ``train.bin``   the same, with ``val.bin`` held out
    ``X``, ``X.bin``, ``X.idx``   where both ``X.bin`` and ``X.idx`` exist: Megatron's pair
    a folder of ``datasets``      saved with ``save_to_disk``: ``input_ids`` if there, else ``text``; the splits
                                  ``validation`` or ``test`` are held out
    ============================  ====================================================================================

    Where the data sets nothing apart, its last twentieth is held out. Text that is encoded, and text in many files, is
    held in the memory of every rank; ``examples/prepare_data.py`` makes token files of it, which are read where they
    lie, at any size. Beside a ``.bin``, a ``meta.json`` may say ``dtype``, ``vocab_size`` and ``unit``. A pickle is
    never read, nanoGPT's ``meta.pkl`` neither.

    Args:
        data: ``stdlib`` or a path.
        validation_data: a path whose held-out part, or else all of it, is held out in place of a part of ``data``.
        tokenizer: the path of a ``tokenizer.json``, or of a folder with one. Data that holds tokens already takes only
            the size of the vocabulary from it.
        vocab_size: how many tokens there are. None: as many as the tokenizer or ``meta.json`` has, or 256 for bytes.
        data_dtype: of a flat ``.bin``: ``uint16``, ``uint32``, or ``auto``: as ``meta.json`` says, else uint16.
        default_vocab_size: where nothing says how many tokens there are.

    Raises:
        ConfigError: there is no such data, it is damaged, or its tokens are outside the vocabulary. The message names
            the path and what to do.
    """
    encoder: Encoder = Tokenizer(tokenizer) if tokenizer is not None else Bytes()
    options = _Options(encoder, data_dtype, split=validation_data is None)
    found = _open(data, options)
    apart = None
    if validation_data is not None:
        try:
            apart = _open(validation_data, options)
        except ConfigError as error:
            raise ConfigError(f"validation_{error}" if str(error).startswith("data: ") else str(error)) from None
        if apart.unit != found.unit:
            raise ConfigError(
                f"validation_data: {validation_data!r} holds {apart.unit}s, but {data!r} holds {found.unit}s; "
                "give both in one form"
            )
        found = replace(found, held_out=apart.held_out or apart.training, notes=(*found.notes, *apart.notes))
    if found.held_out is None:
        size = len(found.training) - len(found.training) // TAIL_ONE_IN
        found = replace(
            found,
            training=SlicedTokens(found.training, 0, size),
            held_out=SlicedTokens(found.training, size, len(found.training) - size),
        )
    vocabularies = (vocab_size, encoder.vocab_size if tokenizer is not None else None, found.vocab_size)
    size = next((number for number in vocabularies if number is not None), default_vocab_size)
    assert found.held_out is not None
    training, held_out = CheckedTokens(found.training, size), CheckedTokens(found.held_out, size)
    try:
        for source in (training, held_out):
            for _ in sample(source):  # reading is checking
                pass
    except DataError as error:
        raise ConfigError(str(error)) from None
    return Corpus(
        name=data,
        training=training,
        held_out=held_out,
        num_files=found.num_files + (apart.num_files if apart else 0),
        sha256=fingerprint(found.training, found.held_out),
        vocab_size=size,
        unit=found.unit,
        notes=found.notes,
    )


def _open(name: str, options: _Options) -> _Found:
    """What is called ``name``, nothing checked against a vocabulary yet."""
    path = Path(name).expanduser()
    if name == "stdlib":
        return _standard_library(Path(sysconfig.get_paths()["stdlib"]), options)
    if name and path.is_dir():
        if is_saved_dataset(path):
            return _saved_dataset(path, options)
        if (path / "train.bin").is_file():
            return _token_folder(path, options)
        return _text(path, options)
    if path.is_file() and path.suffix not in (".bin", ".idx"):
        return _text(path, options)
    if path.is_file() or path.suffix == ".idx" or Path(f"{_prefix(path)}.idx").is_file():
        return _token_file(path, options)
    raise ConfigError(
        f"data: got {name!r}, expected stdlib or the path of a text file, a folder, a .bin of tokens or Megatron's "
        f"pair of .bin and .idx; nothing is there{nearest(name, ['stdlib'])}"
    )


def _text(path: Path, options: _Options) -> _Found:
    files, left_out = find_text(path)
    notes = (f"data: {left_out} files in {str(path)!r} are empty or no valid UTF-8 and were left out",)
    if path.is_file() and isinstance(options.encoder, Bytes):  # read where it lies, at any size
        return _Found(FileTokens(path, np.uint8), None, 1, "byte", options.encoder.vocab_size)
    return replace(_encode(files, options, str(path)), notes=notes if left_out else ())


def _encode(files: list[TextFile], options: _Options, name: str) -> _Found:
    """The tokens of ``files`` in memory."""
    encoder = options.encoder
    training, held_out = text_of(read_chunks(files, split=options.split), encoder)
    return _Found(
        ArrayTokens(training, f"the text of {name!r} to train on"),
        ArrayTokens(held_out, f"the text of {name!r} held out") if options.split else None,
        len(files),
        encoder.unit,
        encoder.vocab_size,
    )


def _token_folder(path: Path, options: _Options) -> _Found:
    training = _token_file(path / "train.bin", options)
    if not (path / "val.bin").is_file():
        return training
    held_out = _token_file(path / "val.bin", options)
    return replace(training, held_out=held_out.training, num_files=2)


def _token_file(path: Path, options: _Options) -> _Found:
    """A flat ``.bin``, or one of Megatron's pairs by any of its three names."""
    prefix = _prefix(path)
    if path.suffix == ".idx" or Path(f"{prefix}.idx").is_file():
        return _Found(open_indexed(prefix), None, 1, "token", None)
    meta = _read_meta(path.with_name("meta.json"))
    dtype = options.dtype if options.dtype != "auto" else meta.get("dtype", "uint16")
    tokens = open_flat(path, dtype, guessed=options.dtype == "auto" and "dtype" not in meta)
    notes: tuple[str, ...] = ()
    if (pickle := path.with_name("meta.pkl")).is_file() and "vocab_size" not in meta:
        notes = (
            f"data: {str(pickle)!r} is not read, since a pickle can run any code; set train.vocab_size to the "
            "vocab_size in it if the model's own does not fit",
        )
    return _Found(tokens, None, 1, meta.get("unit", "token"), meta.get("vocab_size"), notes)


def _prefix(path: Path) -> Path:
    """What the two files of a pair have in common."""
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def _read_meta(path: Path) -> Mapping[str, Any]:
    """``meta.json`` beside a ``.bin``, empty if there is none.

    Raises:
        ConfigError: it is no JSON, or says something impossible.
    """
    if not path.is_file():
        return {}
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"data: {str(path)!r} is no valid JSON: {error}; correct it or delete it") from None
    allowed = {
        "dtype": (lambda value: value in FLAT_DTYPES, " or ".join(map(repr, FLAT_DTYPES))),
        "vocab_size": (lambda value: type(value) is int and value >= 1, "an integer of 1 or more"),
        "unit": (lambda value: value in ("byte", "token"), "'byte' or 'token'"),
    }
    if not isinstance(meta, dict):
        raise ConfigError(
            f"data: {str(path)!r} holds {type(meta).__name__}, expected an object with {', '.join(allowed)}"
        )
    for key, (is_allowed, words) in allowed.items():
        if key in meta and not is_allowed(meta[key]):
            raise ConfigError(f"data: {key} in {str(path)!r} is {meta[key]!r}, expected {words}; correct it")
    return meta


def _saved_dataset(path: Path, options: _Options) -> _Found:
    """A data set that ``datasets`` has saved."""
    splits = [split for split in load_splits(path) if split is not None]
    columns = [column_of(split, path) for split in splits]
    if len(set(columns)) > 1:
        raise ConfigError(
            f"data: the splits of {str(path)!r} have different columns, {' and '.join(columns)}; give both the same"
        )
    if columns[0] == TOKENS:
        sources: list[TokenSource] = [tokens_of(split, path) for split in splits]
        unit, vocab_size = "token", None
    else:
        parts = [text_of(rows_of_text(split, held_out=False), options.encoder)[0] for split in splits]
        sources = [ArrayTokens(part, f"column {columns[0]} of {str(path)!r}") for part in parts]
        unit, vocab_size = options.encoder.unit, options.encoder.vocab_size
    return _Found(sources[0], sources[1] if len(sources) > 1 else None, len(sources), unit, vocab_size)


def standard_library(root: Path | None = None) -> Corpus:
    """The source of this Python's standard library: about 12 MB of text that every machine with Python has.

    Tests and installed packages are left out. One file in twenty, chosen by a hash of its name, is held out.

    Raises:
        ConfigError: this Python comes without its source.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    found = _standard_library(root, _Options(Bytes(), "auto", split=True))
    assert found.held_out is not None
    return Corpus(
        "stdlib", found.training, found.held_out, found.num_files, fingerprint(found.training, found.held_out)
    )


def _standard_library(root: Path, options: _Options) -> _Found:
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_LIBRARY]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            if why_not_text(path) is None:
                files.append(TextFile(path.relative_to(root).as_posix(), path, path.stat().st_size))
    files.sort(key=lambda file: file.name)
    if len({held_out_by_name(file.name) for file in files}) < 2:
        raise ConfigError(f"data: {len(files)} Python files under {str(root)!r}, too few to train on")
    return _encode(files, options, "stdlib")
