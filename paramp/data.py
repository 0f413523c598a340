"""Bytes to train on, and batches that depend on nothing but the seed, the step and the place in the global batch.

Sampling is stateless: sample ``i`` of step ``s`` is a function of (seed, s, i). Data ranks, accumulation steps and
microbatches take slices of the same global batch, so every layout and every resumed run sees the same data.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from .precision import ConfigError, nearest

__all__ = ["Corpus", "bigram_loss", "held_out_windows", "load_corpus", "sample_offsets", "training_windows"]

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class Corpus:
    """Bytes, split by file into those to train on and those held out."""

    name: str
    training: NDArray[np.uint8]
    held_out: NDArray[np.uint8]
    num_files: int
    sha256: str
    """Of all files' names and contents in order: two runs with the same hash read the same data."""

    vocab_size: int = 256

    def check_seq_len(self, seq_len: int) -> None:
        """Complain if a sequence does not fit into either part.

        Raises:
            ConfigError: it does not.
        """
        _check_length(self.training, seq_len)
        _check_length(self.held_out, seq_len)


def load_corpus(name: str) -> Corpus:
    """The corpus called ``name``.

    Raises:
        ConfigError: no such corpus.
    """
    known = {"stdlib": standard_library}
    if name not in known:
        raise ConfigError(f"data: got {name!r}, expected one of {', '.join(known)}{nearest(name, known)}")
    return known[name]()


def standard_library(root: Path | None = None) -> Corpus:
    """The source of this Python's standard library: about 12 MB of text that every machine with Python has.

    Tests and installed packages are left out. One file in twenty, chosen by a hash of its name, is held out.

    Raises:
        ConfigError: this Python comes without its source.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        (path.relative_to(root).as_posix(), path)
        for path in root.rglob("*.py")
        if not NOT_LIBRARY & set(path.relative_to(root).parts)
    )
    digest = hashlib.sha256()
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for name, path in paths:
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
        is_held_out = hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_ONE_IN == 0
        parts[is_held_out].append(content)
    if not parts[True] or not parts[False]:
        raise ConfigError(f"data: {len(paths)} Python files under {str(root)!r}, too few to train on")
    training, held_out = (np.frombuffer(b"\n".join(parts[kind]), dtype=np.uint8) for kind in (False, True))
    return Corpus("stdlib", training, held_out, len(paths), digest.hexdigest())


def sample_offsets(seed: int, step: int, indices: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """A place from 0 to ``limit - 1`` for each sample of ``indices`` in the global batch of ``step``.

    SplitMix64 (Steele, Lea and Flood, 2014) of the three numbers: no state, and any sample alone costs the same.
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


def training_windows(
    tokens: NDArray[np.uint8], seq_len: int, seed: int, step: int, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples ``first`` to ``first + count - 1`` of the global batch of ``step``: inputs and next tokens.

    Returns:
        Two int64 tensors of shape (count, seq_len).
    """
    _check_length(tokens, seq_len)
    indices = np.arange(first, first + count, dtype=np.int64)
    return _windows(tokens, seq_len, sample_offsets(seed, step, indices, len(tokens) - seq_len))


def held_out_windows(
    tokens: NDArray[np.uint8], seq_len: int, first: int, count: int, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows ``first`` to ``first + count - 1`` of ``total`` that are spread evenly over ``tokens``."""
    _check_length(tokens, seq_len)
    indices = np.arange(first, first + count, dtype=np.int64)
    return _windows(tokens, seq_len, indices * ((len(tokens) - seq_len - 1) // max(total - 1, 1)))


def _check_length(tokens: NDArray[np.uint8], seq_len: int) -> None:
    if len(tokens) <= seq_len:
        raise ConfigError(f"seq_len: got {seq_len}, expected less than the data's {len(tokens)} tokens")


def _windows(tokens: NDArray[np.uint8], seq_len: int, offsets: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = tokens[offsets[:, None] + np.arange(seq_len + 1)].astype(np.int64)
    return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())


def bigram_loss(corpus: Corpus) -> float:
    """Nats a byte of the held-out files under a byte-bigram model: what context of one byte gets (add-one smoothed)."""
    pairs = corpus.training[:-1].astype(np.int64) * 256 + corpus.training[1:]
    counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256) + 1.0
    log_probabilities = np.log(counts / counts.sum(axis=1, keepdims=True))
    return float(-log_probabilities[corpus.held_out[:-1], corpus.held_out[1:]].mean())
