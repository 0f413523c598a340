"""Sources of tokens by index: in memory, concatenated, sliced, or checked against a vocabulary."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..base import sizes
from ..base.errors import DataError

Tokens: TypeAlias = NDArray[np.integer[Any]]
"""1-dim, of any integer dtype."""

NUM_SAMPLES = 48
SAMPLED_TOKENS = 1024
"""The number of slices, and the tokens of each, in a sample of a source."""


class TokenSource(ABC):
    """A sequence of token ids, read in slices. It can be pickled and used in forked processes."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, start: int, count: int) -> Tokens:
        """Tokens ``start`` to ``start + count - 1``, all within the source: 1-dim, of any integer dtype."""

    @abstractmethod
    def place(self, index: int) -> str:
        """The location of token ``index``, for messages."""

    def blocks(self, size: int | None = None) -> Iterator[Tokens]:
        """All tokens in order, ``size`` at a time; None: as many as a whole source is read in."""
        size = size or sizes.TOKENS_READ
        for start in range(0, len(self), size):
            yield self.read(start, min(size, len(self) - start))


@dataclass(eq=False)
class ArrayTokens(TokenSource):
    """Tokens in memory, or in a buffer mapped by another library such as Arrow."""

    array: Tokens
    name: str

    def __len__(self) -> int:
        return len(self.array)

    def read(self, start: int, count: int) -> Tokens:
        return self.array[start : start + count]

    def place(self, index: int) -> str:
        return f"{self.name}, token {index}"


class ChainedTokens(TokenSource):
    """Concatenated sources; a read may span several."""

    def __init__(self, parts: Sequence[TokenSource]) -> None:
        self.parts = list(parts)
        self._ends = list(itertools.accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, count: int) -> Tokens:
        index, found = bisect.bisect_right(self._ends, start), []
        while count > 0:
            within = start - (self._ends[index] - len(self.parts[index]))
            size = min(count, len(self.parts[index]) - within)
            found.append(self.parts[index].read(within, size))
            start, count, index = start + size, count - size, index + 1
        return found[0] if len(found) == 1 else np.concatenate(found or [np.zeros(0, np.uint8)])

    def place(self, index: int) -> str:
        part = bisect.bisect_right(self._ends, index)
        return self.parts[part].place(index - (self._ends[part] - len(self.parts[part])))


@dataclass(eq=False)
class SlicedTokens(TokenSource):
    """``count`` tokens of ``source`` from ``start`` on, all within it."""

    source: TokenSource
    start: int
    count: int

    def __len__(self) -> int:
        return self.count

    def read(self, start: int, count: int) -> Tokens:
        return self.source.read(self.start + start, count)

    def place(self, index: int) -> str:
        return self.source.place(self.start + index)


@dataclass(eq=False)
class CheckedTokens(TokenSource):
    """``source`` with a check of every token that is read against the vocabulary.

    Without it, a token outside is an index error in the embedding, or on a GPU a device-side assertion without details.
    """

    source: TokenSource
    vocab_size: int

    def __len__(self) -> int:
        return len(self.source)

    def read(self, start: int, count: int) -> Tokens:
        """As :class:`TokenSource`. Raises DataError for a token that is negative or not below ``vocab_size``."""
        tokens = self.source.read(start, count)
        if count and (int(tokens.max()) >= self.vocab_size or int(tokens.min()) < 0):
            first = int(np.argmax((tokens >= self.vocab_size) | (tokens < 0)))
            raise DataError(
                f"data: {self.source.place(start + first)} is {int(tokens[first])}, expected 0 to "
                f"{self.vocab_size - 1}, the vocabulary's {self.vocab_size} tokens; set train.vocab_size or "
                "train.tokenizer to that of the data, or train.data_dtype if it is not "
                f"{tokens.dtype.name}"
            )
        return tokens

    def place(self, index: int) -> str:
        return self.source.place(index)


def sample(source: TokenSource) -> Iterator[tuple[int, Tokens]]:
    """Starts and tokens of a few dozen short slices, spread from end to end; all of a short source."""
    starts = range(0, len(source), max(SAMPLED_TOKENS, -(-len(source) // NUM_SAMPLES)))
    last = max(0, len(source) - SAMPLED_TOKENS)
    for start in sorted({*starts, last}):
        yield start, source.read(start, min(SAMPLED_TOKENS, len(source) - start))


def fingerprint(*sources: TokenSource) -> str:
    """A SHA-256 of ``sources`` in hexadecimal.

    It covers the length and the tokens of each source: all tokens in memory, or those of :func:`sample` of a file. So
    two large files that differ in few places may have the same fingerprint.
    """
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{len(source)}\0".encode())
        in_memory = isinstance(source, ArrayTokens)
        for tokens in source.blocks() if in_memory else (tokens for _, tokens in sample(source)):
            digest.update(np.ascontiguousarray(tokens).tobytes())
    return digest.hexdigest()
