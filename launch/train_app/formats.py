"""The formats of training data, one row of :data:`FORMATS` each, opened as token sources.

============================  ========================================================================================
``stdlib``                    the source of this Python's standard library, as bytes
a text file                   its bytes, or its tokens if there is a ``tokenizer``
a folder of text              the same, file by file (:func:`train_app.text_to_tokens.find_text` lists them); one file
                              in twenty is held out
``X.bin``                     uint16 or uint32, as nanoGPT writes it
a folder with ``train.bin``   the same, with ``val.bin`` held out
``X``, ``X.bin``, ``X.idx``   where both ``X.bin`` and ``X.idx`` exist: Megatron's pair
a folder of ``datasets``      saved with ``save_to_disk``: ``input_ids`` if there, else ``text``; the splits
                              ``validation`` or ``test`` are held out
``X.csv``, ``.json``,         a table that ``datasets`` reads, with the same columns; ``.jsonl`` too
``.parquet``
============================  ========================================================================================

Tokenized text and folders of text are held in the memory of every rank. ``launch/prepare_data.py`` converts them to
token files, which are read from disk, at any size. A ``meta.json`` beside a ``.bin`` may give ``dtype``,
``vocab_size`` and ``unit``. Pickles, such as nanoGPT's ``meta.pkl``, are never read.
"""

from __future__ import annotations

import json
import os
import struct
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paramp import ConfigError
from paramp.base.errors import nearest
from paramp.base.values_checked_by_type import user_path

from .text_to_tokens import Encoder, TextFiles, find_text, is_held_out, read_text, split_by_name, why_not_text
from .token_sources import ArrayTokens, FileTokens, TokenSource

STANDARD_LIBRARY = "stdlib"
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
TOKEN_SUFFIXES = (".bin", ".idx")
TABLES = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
"""Suffix -> what ``datasets.load_dataset`` reads it with."""
TOKENS, TEXT = "input_ids", "text"
"""The columns that are read: lists of integers, or strings."""
HELD_OUT_SPLITS = ("validation", "valid", "val", "test", "eval")
FLAT_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
SURE_FROM = 256
"""With fewer pairs of numbers, a pattern may be chance."""
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER = struct.Struct("<9sQBQQ")
INDEX_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "float64", 7: "float32", 8: "<u2"}


@dataclass(frozen=True)
class FoundData:
    """The data at a path."""

    training: TokenSource
    held_out: TokenSource | None
    """The held-out part of the data; None if the data has none."""
    num_files: int
    unit: str = "token"
    vocab_size: int | None = None
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


def open_data(name: str, options: ReadOptions) -> FoundData:
    """Open the data ``name``, a path or ``stdlib``, without a vocabulary check."""
    if name == STANDARD_LIBRARY:
        return _standard_library(Path(sysconfig.get_paths()["stdlib"]), options)
    path = user_path(name)
    opens = next((opens for matches, opens in FORMATS if name and matches(path)), None)
    if opens is None:
        raise ConfigError(
            f"data: got {name!r}, expected stdlib or the path of a text file, a folder, a .bin of tokens or Megatron's "
            f"pair of .bin and .idx; nothing is there{nearest(name, [STANDARD_LIBRARY])}"
        )
    return opens(path, options)


# ---------------------------------------------------------------------------------------------------------------- text


def _standard_library(root: Path, options: ReadOptions) -> FoundData:
    """The Python files under ``root``."""
    files: TextFiles = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_LIBRARY]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            if why_not_text(path) is None:
                files.append((path.relative_to(root).as_posix(), path))
    if len({is_held_out(name) for name, _ in files}) < 2:
        raise ConfigError(f"data: {len(files)} Python files under {str(root)!r}, too few to train on")
    return _encoded(sorted(files), options, STANDARD_LIBRARY)


def _text(path: Path, options: ReadOptions) -> FoundData:
    files, num_skipped = find_text(path)
    if path.is_file() and options.encoder.unit == "byte":  # read from disk, at any size
        return FoundData(FileTokens(path, np.uint8), None, 1, "byte", options.encoder.vocab_size)
    notes = (f"data: {num_skipped} files in {str(path)!r} are empty or not valid UTF-8 and were skipped",)
    return replace(_encoded(files, options, str(path)), notes=notes if num_skipped else ())


def _encoded(files: TextFiles, options: ReadOptions, name: str) -> FoundData:
    """The tokens of ``files`` in memory."""
    encoder = options.encoder
    training, held_out = split_by_name(files) if options.split else ([path for _, path in files], [])
    tokens = [encoder.encode_all(map(read_text, paths)) for paths in (training, held_out)]
    apart = ArrayTokens(tokens[1], f"the text of {name!r} held out") if held_out else None
    source = ArrayTokens(tokens[0], f"the text of {name!r} to train on")
    return FoundData(source, apart, len(files), encoder.unit, encoder.vocab_size)


# --------------------------------------------------------------------------------------------------------- token files


def _token_folder(path: Path, options: ReadOptions) -> FoundData:
    training, apart = _token_file(path / "train.bin", options), path / "val.bin"
    if not apart.is_file():
        return training
    return replace(training, held_out=_token_file(apart, options).training, num_files=2)


def _token_file(path: Path, options: ReadOptions) -> FoundData:
    """A flat ``.bin``, or one of Megatron's pairs by any of its three names."""
    prefix = _prefix(path)
    if path.suffix == ".idx" or Path(f"{prefix}.idx").is_file():
        return FoundData(_open_indexed(prefix), None, 1)
    meta = _read_meta(path.with_name("meta.json"))
    dtype = options.dtype if options.dtype != "auto" else meta.get("dtype", "uint16")
    tokens = FileTokens(path, FLAT_DTYPES[dtype])
    if not len(tokens):
        raise ConfigError(f"data: {str(path)!r} is empty; write it again, for instance with launch/prepare_data.py")
    if options.dtype == "auto" and "dtype" not in meta:
        _check_uint16(tokens)
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
    allowed: dict[str, tuple[Callable[[Any], bool], str]] = {
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


def _check_uint16(tokens: FileTokens) -> None:
    """Refuse a file that was taken for uint16 and looks like uint32.

    Every second number would be (nearly) zero, and a model would train on it without an error.
    """
    # slices start at even indices, so that the halves of a uint32 keep their order
    slices = [piece[: len(piece) // 2 * 2] for start, piece in tokens.sample() if start % 2 == 0]
    pairs = np.concatenate(slices).reshape(-1, 2)
    if len(pairs) >= SURE_FROM and pairs[:, 1].max() < 16 <= pairs[:, 0].max():
        raise ConfigError(
            f"data: {str(tokens.path)!r} seems to hold uint32, not uint16: every second number in it is below 16; "
            "set train.data_dtype to 'uint32', or to 'uint16' if it is uint16"
        )


def _open_indexed(prefix: Path) -> FileTokens:
    """Megatron's pair ``prefix.bin`` and ``prefix.idx``: the concatenated sequences, in the order of the file.

    The ``.bin`` has the tokens of all sequences, the ``.idx`` their places, little-endian throughout::

        9 bytes     b"MMIDIDX\\0\\0"
        uint64      version, 1
        uint8       code of the tokens' dtype
        uint64      number of sequences n
        uint64      number of document borders m
        int32[n]    tokens of each sequence
        int64[n]    offset of each sequence in the .bin, in bytes
        int64[m]    index of the first sequence of each document, then n

    (Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``.) Raises ConfigError if a file is missing, or the two
    do not match.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, data):
        if not path.is_file():
            raise ConfigError(
                f"data: no file {str(path)!r}; Megatron's data is a pair of .bin and .idx: put both there"
            )
    dtype, num_sequences, num_borders = _read_index_header(index)
    has, size, at = index.stat().st_size, data.stat().st_size, INDEX_HEADER.size
    expected = at + 12 * num_sequences + 8 * num_borders
    if has not in (expected, expected + num_sequences):  # optionally one byte per sequence, its mode
        raise ConfigError(
            f"data: {str(index)!r} has {has} bytes, expected {expected} for its {num_sequences} sequences and "
            f"{num_borders} document borders; it is incomplete or damaged: make it again"
        )
    counted, contiguous = 0, True
    if num_sequences:
        lengths = np.memmap(index, "<i4", "r", at, (num_sequences,))
        pointers = np.memmap(index, "<i8", "r", at + 4 * num_sequences, (num_sequences,))
        ends = np.cumsum(lengths, dtype=np.int64) * np.dtype(dtype).itemsize
        counted = int(ends[-1])
        contiguous = pointers[0] == 0 <= lengths.min() and np.array_equal(pointers[1:], ends[:-1])
    if not contiguous or counted != size:
        how = f"it counts {counted} bytes, the .bin has {size}" if contiguous else "its sequences are not contiguous"
        raise ConfigError(f"data: {str(index)!r} does not match {str(data)!r}: {how}; take both from the same run")
    if not size:
        raise ConfigError(f"data: {str(data)!r} is empty; write it again")
    return FileTokens(data, dtype)


def _read_index_header(index: Path) -> tuple[str, int, int]:
    """The tokens' dtype, the number of sequences and the number of document borders."""
    with index.open("rb") as file:
        header = file.read(INDEX_HEADER.size)
    if len(header) < INDEX_HEADER.size or header[: len(INDEX_MAGIC)] != INDEX_MAGIC:
        raise ConfigError(
            f"data: {str(index)!r} begins with {header[: len(INDEX_MAGIC)]!r}, expected {INDEX_MAGIC!r}: it is not "
            "an index of Megatron; if the .bin is flat, move the .idx away"
        )
    _, version, code, num_sequences, num_borders = INDEX_HEADER.unpack(header)
    if version != 1:
        raise ConfigError(f"data: {str(index)!r} has version {version}, expected 1; make it again with Megatron-LM")
    dtype = INDEX_DTYPES.get(code)
    if dtype is None or dtype.startswith("float"):
        known = ", ".join(f"{key} {np.dtype(name).name}" for key, name in INDEX_DTYPES.items() if name[0] == "<")
        raise ConfigError(
            f"data: {str(index)!r} has the dtype code {code}{f' ({dtype})' if dtype else ''}, expected an "
            f"integer dtype: {known}"
        )
    return dtype, num_sequences, num_borders


# ------------------------------------------------------------------------------------------------ data sets of datasets


def _is_dataset(path: Path) -> bool:
    """Whether ``path`` is a saved ``Dataset`` or ``DatasetDict``, or a table."""
    names = ("dataset_info.json", "state.json")
    saved = (path / "dataset_dict.json").is_file() or all((path / name).is_file() for name in names)
    return saved or (path.is_file() and path.suffix in TABLES)


def _dataset(path: Path, options: ReadOptions) -> FoundData:
    """What ``datasets`` reads. Rows of integers stay in the memory that Arrow has mapped."""
    splits = _load_splits(path)
    columns = {_column_of(split, path) for split in splits}
    if len(columns) > 1:
        raise ConfigError(
            f"data: the splits of {str(path)!r} have different columns, {' and '.join(sorted(columns))}; give both "
            "the same"
        )
    column, encoder = columns.pop(), options.encoder
    arrays = [_integers(split, path) if column == TOKENS else encoder.encode_all(_rows(split)) for split in splits]
    sources = [ArrayTokens(array, f"column {column} of {str(path)!r}") for array in arrays]
    unit, vocab_size = ("token", None) if column == TOKENS else (encoder.unit, encoder.vocab_size)
    return FoundData(sources[0], sources[1] if len(sources) > 1 else None, len(sources), unit, vocab_size)


def _load_splits(path: Path) -> list[Any]:
    """The training split, which is ``train`` or the only one, and the first of :data:`HELD_OUT_SPLITS` if any is."""
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(f'data: {str(path)!r} needs the package datasets: pip install "paramp[hf]"') from None
    datasets.disable_progress_bars()
    try:
        if path.is_dir():
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(TABLES[path.suffix], data_files=str(path))
    except Exception as error:  # errors of Arrow, the file system or JSON have the same fix
        raise ConfigError(f"data: datasets cannot load {str(path)!r}: {error}; save it again") from None
    if not isinstance(loaded, datasets.DatasetDict):
        return [loaded]
    if "train" not in loaded and len(loaded) != 1:
        raise ConfigError(f"data: {str(path)!r} has the splits {', '.join(loaded) or 'none'}; expected train")
    training = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    held_out = [loaded[name] for name in HELD_OUT_SPLITS if name in loaded and loaded[name] is not training]
    return [training, *held_out[:1]]


def _column_of(dataset: Any, path: Path) -> str:
    """The column to read: ``input_ids``, else ``text``. Raises ConfigError if it has neither."""
    for name in (TOKENS, TEXT):
        if name in dataset.column_names:
            return name
    raise ConfigError(
        f"data: {str(path)!r} has the columns {', '.join(dataset.column_names) or 'none'}; expected {TOKENS} "
        f"(lists of integers) or {TEXT} (strings): rename one of them with dataset.rename_column"
    )


def _integers(dataset: Any, path: Path) -> Any:
    """The concatenated rows of ``input_ids``, an Arrow array; a ConfigError if they are not all integers.

    Arrow stores such a column as a few large integer buffers, with the row offsets apart: nothing is copied.
    """
    import pyarrow as pa  # type: ignore[import-untyped]

    if dataset._indices is not None:  # rows are not in the order of the buffers, as after ``shuffle``
        dataset = dataset.flatten_indices()
    chunks = [pa.array([], pa.int64())]
    for chunk in dataset.data.column(TOKENS).chunks:
        while isinstance(chunk, (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)):
            chunk = chunk.flatten()  # keeps only the array's slice of the buffer
        if not pa.types.is_integer(chunk.type) or chunk.null_count:
            what = f"{chunk.null_count} missing values" if chunk.null_count else f"the type {chunk.type}"
            raise ConfigError(f"data: the column {TOKENS} of {str(path)!r} has {what}; expected lists of integers")
        chunks.append(chunk)
    return pa.chunked_array(chunks[1:] or chunks)


def _rows(dataset: Any) -> Any:
    """Each row of ``text`` as a document."""
    return ([row[TEXT]] for row in dataset.with_format(None).select_columns([TEXT]) if row[TEXT])


FORMATS: tuple[tuple[Callable[[Path], bool], Callable[[Path, ReadOptions], FoundData]], ...] = (
    (_is_dataset, _dataset),
    (lambda path: (path / "train.bin").is_file(), _token_folder),
    (lambda path: path.is_dir(), _text),
    (lambda path: path.is_file() and path.suffix not in TOKEN_SUFFIXES, _text),
    (lambda path: path.is_file() or path.suffix == ".idx" or Path(f"{_prefix(path)}.idx").is_file(), _token_file),
)
"""Rows of (whether a path has the format, the function that opens it); the first match is used."""
