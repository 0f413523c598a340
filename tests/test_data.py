"""Sampling without state, and the embedded data."""

import hashlib
import math

import numpy as np
import pytest
import torch

from paramp import ConfigError
from paramp.data import (
    Corpus,
    bigram_loss,
    held_out_windows,
    load_corpus,
    sample_offsets,
    standard_library,
    training_windows,
)


def tiny_corpus(text: bytes, held_out: bytes) -> Corpus:
    return Corpus("t", np.frombuffer(text, np.uint8), np.frombuffer(held_out, np.uint8), 2, "")


def test_a_batch_is_its_slices():
    tokens = np.arange(10_000, dtype=np.int64).astype(np.uint8)
    x, y = training_windows(tokens, 16, seed=1, step=5, first=0, count=12)
    assert x.shape == y.shape == (12, 16)
    assert torch.equal(x[:, 1:], y[:, :-1])
    for first, count in ((0, 4), (4, 4), (8, 4), (3, 1)):
        part, _ = training_windows(tokens, 16, seed=1, step=5, first=first, count=count)
        assert torch.equal(part, x[first : first + count])


def test_offsets_are_spread_evenly_and_depend_on_everything():
    indices = np.arange(20_000)
    offsets = sample_offsets(0, 0, indices, 10)
    counts = np.bincount(offsets, minlength=10)
    assert abs(counts - 2000).max() < 5 * math.sqrt(2000)
    assert not np.array_equal(sample_offsets(1, 0, indices, 10**6), sample_offsets(0, 0, indices, 10**6))
    assert not np.array_equal(sample_offsets(0, 1, indices, 10**6), sample_offsets(0, 0, indices, 10**6))


def test_the_hash_is_splitmix64():
    """By hand, in Python's whole numbers."""

    def mix(state):
        mask = 2**64 - 1
        state = (state + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of the published generator seeded with 0
    expected = [mix(mix(mix(7) ^ 3) ^ i) % 1000 for i in range(5)]
    assert sample_offsets(7, 3, np.arange(5), 1000).tolist() == expected


def test_the_standard_library_is_split_by_file(tmp_path):
    names = [f"module_{index}.py" for index in range(60)]
    for name in names:
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "left_out.py").write_text("# tests are left out\n")
    corpus = standard_library(tmp_path)
    held = [name for name in names if hashlib.sha256(name.encode()).digest()[0] % 20 == 0]
    text = bytes(corpus.held_out).decode()
    assert held
    assert sorted(line[2:] for line in text.splitlines() if line) == sorted(held)
    assert b"left out" not in bytes(corpus.training)
    assert corpus.num_files == 60
    (tmp_path / names[0]).write_text("# changed\n")
    assert standard_library(tmp_path).sha256 != corpus.sha256


def test_a_python_without_its_source(tmp_path):
    with pytest.raises(ConfigError, match=r"0 Python files under .*, too few to train on"):
        standard_library(tmp_path)


def test_this_machines_standard_library():
    corpus = load_corpus("stdlib")
    assert len(corpus.training) > 5_000_000
    assert 0.01 < len(corpus.held_out) / len(corpus.training) < 0.15
    assert 2.0 < bigram_loss(corpus) < 3.0


def test_the_bigram_loss_by_hand():
    # After a: b twice. After b: a once. Counts start at one for each of 256 bytes.
    corpus = tiny_corpus(b"abab", b"aba")
    expected = -(math.log(3 / 258) + math.log(2 / 257)) / 2
    assert bigram_loss(corpus) == pytest.approx(expected)


def test_held_out_windows_reach_from_end_to_end():
    tokens = np.arange(101, dtype=np.uint8)
    x, y = held_out_windows(tokens, 10, 0, 4, 4)
    assert x[:, 0].tolist() == [0, 30, 60, 90]
    assert y[-1, -1] == 100


def test_a_sequence_longer_than_the_data():
    with pytest.raises(ConfigError, match="seq_len: got 50, expected less than the data's 10 tokens"):
        training_windows(np.zeros(10, np.uint8), 50, 0, 0, 0, 1)
