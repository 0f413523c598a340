"""From text to tokens: text files, the held-out split, and encoders.

Text is read in chunks of a few megabytes that end at a line, so files of any size are encoded in constant memory.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..base import sizes
from ..base.coerce import user_path
from ..base.errors import ConfigError
from .token_sources import Tokens

HELD_OUT_ONE_IN = 20
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class TextFile(NamedTuple):
    """A file of valid text, ``size`` bytes."""

    name: str
    """The path relative to the searched folder, with forward slashes."""
    path: Path
    size: int


def find_text(path: Path) -> tuple[list[TextFile], int]:
    """The text files at ``path``, a file or a folder, and the number of files that were skipped.

    A folder is searched recursively; files are sorted by name. Hidden files and folders (``.git``), ``__pycache__``
    and linked folders are ignored. Files that are empty, contain a zero byte or are not valid UTF-8 are skipped.

    Raises:
        ConfigError: the folder has no text file, or the file is not text.
    """
    if path.is_file():
        if not path.stat().st_size:
            raise ConfigError(f"data: {str(path)!r} is empty, expected text; write it again, or give another path")
        if (problem := why_not_text(path)) is not None:
            raise ConfigError(
                f"data: {str(path)!r} is not text: {problem}; convert it to UTF-8, or name it .bin if it holds tokens"
            )
        return [TextFile(path.name, path, path.stat().st_size)], 0
    files, num_skipped = [], 0
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        for name in names:
            file = Path(folder, name)
            if name.startswith(".") or not file.is_file():
                continue
            size = file.stat().st_size
            if not size or why_not_text(file) is not None:
                num_skipped += 1
            else:
                files.append(TextFile(file.relative_to(path).as_posix(), file, size))
    if not files:
        raise ConfigError(
            f"data: no text in the folder {str(path)!r} ({num_skipped} files are empty or not valid UTF-8); expected "
            "text files, train.bin and val.bin, or a data set that datasets saved there"
        )
    return sorted(files, key=lambda file: file.name), num_skipped


def why_not_text(path: Path) -> str | None:
    """Why the file is not valid text, or None."""
    decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        while True:
            block = file.read(sizes.TEXT_READ)
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return f"not valid UTF-8 after byte {position} ({error.reason})"
            if b"\0" in block:
                return f"byte {position + block.index(0)} is zero"
            if not block:
                return None
            position += len(block)


def held_out_by_name(name: str) -> bool:
    """Whether a file is held out: one in twenty, by the hash of its name, so other files do not change its split."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()[0] % HELD_OUT_ONE_IN == 0


class TextChunk(NamedTuple):
    """A part of a document."""

    text: str
    held_out: bool
    begins: bool
    """Whether it is the first chunk of its document."""


def read_chunks(files: Iterable[TextFile], *, split: bool) -> Iterator[TextChunk]:
    """The text of ``files`` in chunks of about 4 MB that end at a line end, if they contain one.

    With ``split``, one file in twenty is held out (:func:`held_out_by_name`). If that leaves either part without a
    file, the last twentieth of the bytes is held out instead, from a line end on if there is one.
    """
    files = list(files)
    by_name = split and len({held_out_by_name(file.name) for file in files}) == 2
    total = sum(file.size for file in files)
    border = total if by_name or not split else total - max(1, total // HELD_OUT_ONE_IN)
    position = 0
    for file in files:
        begins = True
        for text in _lines(file.path):
            for is_tail, part in _split_at(text, border - position):
                held_out = held_out_by_name(file.name) if by_name else is_tail
                yield TextChunk(part, held_out, begins)
                begins = False
            position += len(text.encode())


def _lines(path: Path) -> Iterator[str]:
    """The text of a file in chunks of about 4 MB that end at a line end, if they contain one."""
    decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
    with path.open("rb") as file:
        while block := file.read(sizes.TEXT_READ):
            rest += decoder.decode(block)
            partition = rest.rfind("\n") + 1 or len(rest)
            if partition:
                yield rest[:partition]
            rest = rest[partition:]
    if rest:
        yield rest


def _split_at(text: str, border: int) -> list[tuple[bool, str]]:
    """``text`` before and after the byte ``border``, moved to the end of its line if ``text`` goes beyond it."""
    data = text.encode()
    if not 0 < border < len(data):
        return [(border <= 0, text)]
    partition = data.find(b"\n", border - 1) + 1
    head = data[: partition if 0 < partition < len(data) else border].decode(errors="ignore")
    return [(is_tail, part) for is_tail, part in ((False, head), (True, text[len(head) :])) if part]


class Encoder(Protocol):
    """Encodes text to tokens."""

    vocab_size: int
    dtype: np.dtype[Any]
    unit: str
    """The name of a token in messages: ``byte`` or ``token``."""
    separator: Tokens
    """Tokens between two documents."""

    def encode(self, text: str) -> Tokens:
        """The tokens of ``text``, 1-dim, without special tokens."""


class Bytes:
    """Every byte of UTF-8 is a token; a newline separates documents."""

    vocab_size = 256
    unit = "byte"
    dtype = np.dtype(np.uint8)
    separator: Tokens = np.frombuffer(b"\n", dtype=np.uint8)

    def encode(self, text: str) -> NDArray[np.uint8]:
        return np.frombuffer(text.encode(), dtype=np.uint8)


class Tokenizer:
    """A Hugging Face tokenizer, from a ``tokenizer.json`` or a folder with one.

    An end-of-text token separates documents: the ``eos_token`` in the ``tokenizer_config.json`` beside it, else the
    first of :data:`END_OF_TEXT` in the vocabulary, else none. No other special tokens are added. Truncation and
    padding are switched off, even if the file enables them.

    Raises:
        ConfigError: the file does not exist or is not a tokenizer, or the package ``tokenizers`` is not installed.
    """

    unit = "token"

    def __init__(self, path: str | Path) -> None:
        path = user_path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(
                f"tokenizer: no file {str(file)!r}; expected the path of a tokenizer.json, or of a folder with one"
            )
        try:
            import tokenizers
        except ImportError:
            message = f'tokenizer: {str(file)!r} needs the package tokenizers: pip install "paramp[hf]"'
            raise ConfigError(message) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises bare Exception
            raise ConfigError(f"tokenizer: {str(file)!r} is not a tokenizer.json: {error}; save it again") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ConfigError(f"tokenizer: {str(file)!r} has no tokens; expected a trained one")
        self.vocab_size = max(vocabulary.values()) + 1
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)
        names = (_configured_end(file.with_name("tokenizer_config.json")), *END_OF_TEXT)
        self.end_of_text: int | None = next((vocabulary[name] for name in names if name in vocabulary), None)
        self.separator: Tokens = np.array([] if self.end_of_text is None else [self.end_of_text], dtype=self.dtype)

    def encode(self, text: str) -> Tokens:
        parts = _split_at_lines(text, sizes.TOKENIZED)
        found = [np.array(self._tokenizer.encode(part, add_special_tokens=False).ids, self.dtype) for part in parts]
        return np.concatenate([np.zeros(0, self.dtype), *found])


def _configured_end(path: Path) -> str | None:
    try:
        name = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return name.get("content") if isinstance(name, dict) else name


def _split_at_lines(text: str, size: int) -> list[str]:
    """``text`` in parts of about ``size`` characters, because a tokenizer needs far more memory than its text. Tokens
    may differ from those of the whole only at the ends of parts."""
    parts, start = [], 0
    while len(text) - start > size:
        end = text.rfind("\n", start, start + size) + 1 or start + size
        parts.append(text[start:end])
        start = end
    return [*parts, text[start:]]


def encode(chunks: Iterable[TextChunk], encoder: Encoder) -> Iterator[tuple[bool, Tokens]]:
    """Encode ``chunks`` one by one. Yields whether the tokens are held out, and the tokens, 1-dim."""
    started = {False: False, True: False}
    for chunk in chunks:
        if chunk.begins and started[chunk.held_out] and len(encoder.separator):
            yield chunk.held_out, encoder.separator
        started[chunk.held_out] = True
        yield chunk.held_out, encoder.encode(chunk.text)


def text_of(chunks: Iterable[TextChunk], encoder: Encoder) -> tuple[Tokens, Tokens]:
    """All tokens of ``chunks``, 1-dim each: those to train on and those held out."""
    parts: dict[bool, list[Tokens]] = {False: [], True: []}
    for held_out, tokens in encode(chunks, encoder):
        parts[held_out].append(tokens)
    empty = np.zeros(0, encoder.dtype)
    return np.concatenate([empty, *parts[False]]), np.concatenate([empty, *parts[True]])
