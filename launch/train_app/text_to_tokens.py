"""From text to tokens: text files, and encoders. A file is read in pieces, so that any size takes constant memory."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from paramp import ConfigError
from paramp.base.values_checked_by_type import user_path

from .token_sources import Tokens

READ = 2**22
"""The most bytes of a file that are checked at once."""
ENCODED = 2**20
"""About the characters that are encoded at once: a tokenizer needs far more memory than its text."""
TextFiles: TypeAlias = list[tuple[str, Path]]
"""Text files with their names relative to the folder that was searched, with forward slashes."""
HELD_OUT_ONE_IN = 20
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


def find_text(path: Path, without: Collection[Path] = ()) -> tuple[TextFiles, int]:
    """The text files at ``path``, a file or a folder, and how many were skipped.

    A folder is searched recursively; files are sorted by name. Hidden files and folders (``.git``), ``__pycache__``
    and linked folders are ignored, and so are the files ``without``, given by their resolved paths. Files that are
    empty, contain a zero byte or are not valid UTF-8 are skipped.

    Raises:
        ConfigError: the folder has no text file, or the file is not text.
    """
    if path.is_file():
        if (problem := why_not_text(path)) is not None:
            raise ConfigError(f"data: {str(path)!r} {problem}")
        return [(path.name, path)], 0
    files, num_skipped = [], 0
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        for file in (Path(folder, name) for name in names if not name.startswith(".")):
            if file.resolve() in without:
                continue
            if file.is_file() and why_not_text(file) is None:
                files.append((file.relative_to(path).as_posix(), file))
            elif file.is_file():
                num_skipped += 1
    if not files:
        raise ConfigError(
            f"data: no text in the folder {str(path)!r} ({num_skipped} files are empty or not valid UTF-8); expected "
            "text files, train.bin and val.bin, or a data set that datasets saved there"
        )
    return sorted(files), num_skipped


def why_not_text(path: Path) -> str | None:
    """Why the file is not text, and what to do; None if it is."""
    if not path.stat().st_size:
        return "is empty, expected text; write it again, or give another path"
    fix = "convert it to UTF-8, or name it .bin if it holds tokens"
    decoder, position, block = codecs.getincrementaldecoder("utf-8")(), 0, b"more"
    with path.open("rb") as file:
        while block:
            block = file.read(READ)
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return f"is not text: not valid UTF-8 after byte {position} ({error.reason}); {fix}"
            if b"\0" in block:
                return f"is not text: byte {position + block.index(0)} is zero; {fix}"
            position += len(block)
    return None


def is_held_out(name: str) -> bool:
    """Whether a file is held out: one in twenty, by the hash of its name, so other files do not change its split."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()[0] % HELD_OUT_ONE_IN == 0


def split_by_name(files: TextFiles) -> tuple[list[Path], list[Path]]:
    """Files to train on and files to hold out; none to hold out, if either would have none."""
    training = [path for name, path in files if not is_held_out(name)]
    held_out = [path for name, path in files if is_held_out(name)]
    return (training, held_out) if training and held_out else ([path for _, path in files], [])


def read_text(path: Path) -> Iterator[str]:
    """The text of a file, in pieces of about :data:`ENCODED` characters that end at a line's end."""
    with path.open(encoding="utf-8", newline="") as file:
        while lines := file.readlines(ENCODED):
            yield "".join(lines)


class Encoder:
    """Encodes text to tokens: to its bytes, or with a Hugging Face tokenizer.

    Between two documents stands a newline; with a tokenizer its end-of-text token, which is the ``eos_token`` in the
    ``tokenizer_config.json`` beside it, else the first of :data:`END_OF_TEXT` in the vocabulary, else none. No other
    special tokens are added. Truncation and padding are switched off, even if the file enables them.

    Args:
        tokenizer: the path of a ``tokenizer.json`` or of a folder with one. None: bytes.

    Raises:
        ConfigError: the file does not exist or is not a tokenizer, or the package ``tokenizers`` is not installed.
    """

    def __init__(self, tokenizer: str | Path | None = None) -> None:
        self.unit, self.vocab_size = "byte", 256
        self.dtype: np.dtype[Any] = np.dtype(np.uint8)
        self.separator: Tokens = np.frombuffer(b"\n", dtype=np.uint8)
        self._tokenizer = None
        if tokenizer is None:
            return
        path = user_path(tokenizer)
        file = path / "tokenizer.json" if path.is_dir() else path
        self._tokenizer = _load_tokenizer(file)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ConfigError(f"tokenizer: {str(file)!r} has no tokens; expected a trained one")
        self.unit, self.vocab_size = "token", max(vocabulary.values()) + 1
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)
        names = (_configured_end(file.with_name("tokenizer_config.json")), *END_OF_TEXT)
        self.separator = np.array([vocabulary[name] for name in names if name in vocabulary][:1], self.dtype)

    def encode(self, documents: Iterable[Iterable[str]]) -> Iterator[Tokens]:
        """The tokens of ``documents``, each given as its text in pieces: 1-dim arrays of :attr:`dtype`."""
        for index, document in enumerate(documents):
            if index:
                yield self.separator
            for text in document:
                if self._tokenizer is None:
                    yield np.frombuffer(text.encode(), np.uint8)
                else:
                    yield np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, self.dtype)

    def encode_all(self, documents: Iterable[Iterable[str]]) -> Tokens:
        """The tokens of all ``documents``, 1-dim."""
        return np.concatenate([np.zeros(0, self.dtype), *self.encode(documents)])


def _load_tokenizer(file: Path) -> Any:
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
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises bare Exception
        raise ConfigError(f"tokenizer: {str(file)!r} is not a tokenizer.json: {error}; save it again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _configured_end(path: Path) -> str | None:
    try:
        name = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return name.get("content") if isinstance(name, dict) else name
