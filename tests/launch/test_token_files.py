"""Files of tokens that change or fail while they are read, and the memory that reading takes."""

import errno
import os
import struct
from unittest import mock

import numpy as np
import pytest
from commands import COLD, ROOT, python, succeeded
from train_app.corpus import load_corpus, training_windows

from paramp import DataError


def megatron(name, sequences, code=8, dtype="<u2", **changes):
    """The two files of Megatron's form, by hand from its description."""
    lengths = [len(sequence) for sequence in sequences]
    starts = [sum(lengths[:index]) * np.dtype(dtype).itemsize for index in range(len(lengths))]
    borders = list(range(len(lengths) + 1))
    header = {"magic": b"MMIDIDX\x00\x00", "version": 1, "lengths": lengths, "starts": starts, **changes}
    index = header["magic"] + struct.pack("<QBQQ", header["version"], code, len(lengths), len(borders))
    index += struct.pack(f"<{len(lengths)}i", *header["lengths"])
    index += struct.pack(f"<{len(lengths)}q{len(borders)}q", *header["starts"], *borders)
    return {f"{name}.idx": index, f"{name}.bin": np.concatenate(sequences).astype(dtype).tobytes()}


@pytest.fixture
def path(tmp_path):
    """A file of 200 bytes, 100 tokens of 0."""
    path = tmp_path / "t.bin"
    path.write_bytes(bytes(200))
    return path


def modify(path, how):
    """Change the file; its time of modification moves on even where the disk's clock is coarse."""
    written = path.stat().st_mtime_ns
    if how == "truncated":
        os.truncate(path, 100)
    elif how == "missing":
        path.unlink()
    elif how == "replaced":
        other = path.with_suffix(".new")
        other.write_bytes(bytes(200))
        os.utime(other, ns=(0, written))
        os.replace(other, path)
    else:
        with path.open("r+b" if how == "written to" else "ab") as file:
            file.write(b"\7")
        os.utime(path, ns=(0, written + 10**9))


CHANGES = {
    "written to": r"t.bin' was changed during the run, found at byte 80: it was written to since .* at \d\d\d\d-",
    "longer": r"at byte 80: it had 200 bytes when it was opened and has 201 now; restore the file",
    "truncated": r"t.bin' ends at byte 100, but a read expected bytes up to 120",
    "replaced": None,
    "missing": None,
}
"""What is done to the file, and the error of the next read. None: what was opened is read on."""


@pytest.mark.parametrize("how", CHANGES)
def test_a_file_that_changes_during_the_run_is_an_error_if_its_tokens_may_be_others(path, how):
    source = load_corpus(str(path)).training
    modify(path, how)
    if CHANGES[how] is None:
        assert source.read(40, 20).tolist() == [0] * 20
    else:
        with pytest.raises(DataError, match=CHANGES[how]):
            source.read(40, 20)


def test_a_read_takes_the_bytes_of_one_window(path, monkeypatch):
    source, reads, pread = load_corpus(str(path)).training, [], os.pread
    monkeypatch.setattr(os, "pread", lambda *given: reads.append(given[1]) or pread(*given))
    training_windows(source, 16, seed=1, step=0, first=0, count=4)
    assert reads == [17 * 2] * 4


def test_a_failing_disk_is_an_error(path, monkeypatch):
    source = load_corpus(str(path)).training
    monkeypatch.setattr(os, "pread", mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(DataError, match=r"t.bin' cannot be read at byte 80: Input/output error; check its disk"):
        source.read(40, 20)


def test_reading_four_gigabytes_takes_constant_memory(tmp_path):
    """A fresh process: torch and paramp are most of what it holds."""
    path = tmp_path / "sparse.bin"
    path.touch()
    os.truncate(path, 2**32)
    script = (
        "import re, sys, paramp\n"
        "from train_app.corpus import held_out_windows, load_corpus, training_windows\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1]) // 1024\n"
        "before = peak()\n"
        "corpus = load_corpus(sys.argv[1], default_vocab_size=50257)\n"
        "for step in range(20):\n"
        "    training_windows(corpus.training, 1024, 1, step, 0, 64)\n"
        "    held_out_windows(corpus.held_out, 1024, 0, 64, 64)\n"
        "print(len(corpus.training) + len(corpus.held_out), before, peak())\n"
    )
    result = succeeded(python("-c", script, str(path), PYTHONPATH=f"{ROOT}:{ROOT / 'launch'}", **COLD))
    tokens, before, after = map(int, result.stdout.split())
    assert tokens == 2**31
    assert after - before < 64, "megabytes that reading takes"
    assert after < 400, "megabytes of the whole process"
