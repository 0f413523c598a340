"""The formats of training data, one row of :data:`FORMATS` each, opened as token sources.

============================  ========================================================================================
``stdlib``                    the source of this Python's standard library, as bytes
a text file                   its bytes, or its tokens if there is a ``tokenizer``
a folder of text              the same, file by file (:func:`paramp.data.text_corpus.find_text` lists them); one file in
                              twenty is held out
``X.bin``                     uint16 or uint32, as nanoGPT writes it
a folder with ``train.bin``   the same, with ``val.bin`` held out
``X``, ``X.bin``, ``X.idx``   where both ``X.bin`` and ``X.idx`` exist: Megatron's pair
a folder of ``datasets``      saved with ``save_to_disk``: ``input_ids`` if there, else ``text``; the splits
                              ``validation`` or ``test`` are held out
============================  ========================================================================================

Tokenized text and folders of text are held in the memory of every rank. ``examples/prepare_data.py`` converts them to
token files, which are read from disk, at any size. A ``meta.json`` beside a ``.bin`` may give ``dtype``,
``vocab_size`` and ``unit``. Pickles, such as nanoGPT's ``meta.pkl``, are never read.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..base.coerce import user_path
from ..base.errors import ConfigError, nearest
from .hf_datasets import TOKENS, column_of, is_saved_dataset, load_splits, rows_of_text, tokens_of
from .text_corpus import Bytes, Encoder, TextFile, find_text, held_out_by_name, read_chunks, text_of, why_not_text
from .token_files import FileTokens
from .token_formats import FLAT_DTYPES, open_flat, open_indexed
from .token_sources import ArrayTokens, TokenSource

STANDARD_LIBRARY = "stdlib"
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
TOKEN_SUFFIXES = (".bin", ".idx")


@dataclass(frozen=True)
class FoundData:
    """The data at a path."""

    training: TokenSource
    held_out: TokenSource | None
    """The held-out part of the data; None if the data has none."""
    num_files: int
    unit: str
    vocab_size: int | None
    """None: the data does not give it."""
    notes: tuple[str, ...] = ()


class ReadOptions(NamedTuple):
    """How to read the data."""

    encoder: Encoder
    """Encodes text to tokens."""
    dtype: str
    """The dtype of a flat ``.bin``: ``uint16``, ``uint32`` or ``auto``."""
    split: bool
    """Whether to hold out a part of text that has no held-out part."""


def _text(path: Path, options: ReadOptions) -> FoundData:
    files, num_skipped = find_text(path)
    notes = (f"data: {num_skipped} files in {str(path)!r} are empty or not valid UTF-8 and were skipped",)
    if path.is_file() and isinstance(options.encoder, Bytes):  # read from disk, at any size
        return FoundData(FileTokens(path, np.uint8), None, 1, "byte", options.encoder.vocab_size)
    return replace(_encode(files, options, str(path)), notes=notes if num_skipped else ())


def _encode(files: list[TextFile], options: ReadOptions, name: str) -> FoundData:
    """The tokens of ``files`` in memory."""
    encoder = options.encoder
    training, held_out = text_of(read_chunks(files, split=options.split), encoder)
    return FoundData(
        ArrayTokens(training, f"the text of {name!r} to train on"),
        ArrayTokens(held_out, f"the text of {name!r} held out") if options.split else None,
        len(files),
        encoder.unit,
        encoder.vocab_size,
    )


def _token_folder(path: Path, options: ReadOptions) -> FoundData:
    training, apart = _token_file(path / "train.bin", options), path / "val.bin"
    if not apart.is_file():
        return training
    return replace(training, held_out=_token_file(apart, options).training, num_files=2)


def _token_file(path: Path, options: ReadOptions) -> FoundData:
    """A flat ``.bin``, or one of Megatron's pairs by any of its three names."""
    prefix = _prefix(path)
    if path.suffix == ".idx" or Path(f"{prefix}.idx").is_file():
        return FoundData(open_indexed(prefix), None, 1, "token", None)
    meta = _read_meta(path.with_name("meta.json"))
    dtype = options.dtype if options.dtype != "auto" else meta.get("dtype", "uint16")
    tokens = open_flat(path, dtype, guessed=options.dtype == "auto" and "dtype" not in meta)
    notes: tuple[str, ...] = ()
    if (pickle := path.with_name("meta.pkl")).is_file() and "vocab_size" not in meta:
        notes = (
            f"data: {str(pickle)!r} is not read, because a pickle can run any code; set train.vocab_size to "
            "its vocab_size if the model's does not fit",
        )
    return FoundData(tokens, None, 1, meta.get("unit", "token"), meta.get("vocab_size"), notes)


def _prefix(path: Path) -> Path:
    """The path of a pair's two files without their suffix."""
    return path.with_suffix("") if path.suffix in TOKEN_SUFFIXES else path


def _read_meta(path: Path) -> Mapping[str, Any]:
    """``meta.json`` beside a ``.bin``, empty if there is none."""
    if not path.is_file():
        return {}
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"data: {str(path)!r} is not valid JSON: {error}; correct it or delete it") from None
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


def _saved_dataset(path: Path, options: ReadOptions) -> FoundData:
    """A data set saved by ``datasets``."""
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
    return FoundData(sources[0], sources[1] if len(sources) > 1 else None, len(sources), unit, vocab_size)


def open_standard_library(root: Path, options: ReadOptions) -> FoundData:
    """The Python files under ``root``."""
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


def _is_token_file(path: Path) -> bool:
    return path.is_file() or path.suffix == ".idx" or Path(f"{_prefix(path)}.idx").is_file()


FORMATS: tuple[tuple[Callable[[Path], bool], Callable[[Path, ReadOptions], FoundData]], ...] = (
    (lambda path: path.is_dir() and is_saved_dataset(path), _saved_dataset),
    (lambda path: (path / "train.bin").is_file(), _token_folder),
    (lambda path: path.is_dir(), _text),
    (lambda path: path.is_file() and path.suffix not in TOKEN_SUFFIXES, _text),
    (_is_token_file, _token_file),
)
"""Rows of (whether a path has the format, the function that opens it); the first match is used."""


def open_data(name: str, options: ReadOptions) -> FoundData:
    """Open the data ``name``, a path or ``stdlib``, without a vocabulary check."""
    if name == STANDARD_LIBRARY:
        return open_standard_library(Path(sysconfig.get_paths()["stdlib"]), options)
    path = user_path(name)
    opens = next((opens for matches, opens in FORMATS if name and matches(path)), None)
    if opens is None:
        raise ConfigError(
            f"data: got {name!r}, expected stdlib or the path of a text file, a folder, a .bin of tokens or Megatron's "
            f"pair of .bin and .idx; nothing is there{nearest(name, [STANDARD_LIBRARY])}"
        )
    return opens(path, options)
