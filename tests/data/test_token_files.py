"""Token sources and token files, and what is said of those that are damaged."""

import errno
import os
import pickle
import struct
from unittest import mock

import numpy as np
import pytest
from commands import COLD, python

from paramp import ConfigError, DataError
from paramp.data.token_files import FileTokens
from paramp.data.token_formats import open_flat, open_indexed
from paramp.data.token_sources import ArrayTokens, ChainedTokens, CheckedTokens, SlicedTokens, fingerprint, sample

NUMBERS = np.arange(1000)


def write_pair(prefix, sequences, code=8, dtype="<u2", **changes):
    """Megatron's form, by hand from its description."""
    lengths = [len(sequence) for sequence in sequences]
    starts = [sum(lengths[:index]) * np.dtype(dtype).itemsize for index in range(len(lengths))]
    borders = list(range(len(lengths) + 1))
    header = {"magic": b"MMIDIDX\x00\x00", "version": 1, "lengths": lengths, "starts": starts, **changes}
    index = header["magic"] + struct.pack("<QBQQ", header["version"], code, len(lengths), len(borders))
    index += struct.pack(
        f"<{len(lengths)}i{len(lengths)}q{len(borders)}q", *header["lengths"], *header["starts"], *borders
    )
    prefix.with_name(f"{prefix.name}.idx").write_bytes(index)
    data = np.concatenate(sequences).astype(dtype).tobytes()
    prefix.with_name(f"{prefix.name}.bin").write_bytes(data)
    return prefix


def sources(folder):
    """The numbers 0 to 999 in every kind of source."""
    path = folder / "numbers.bin"
    path.write_bytes(b"xyz" + NUMBERS.astype("<u4").tobytes())
    file = FileTokens(path, "<u4", offset=3)
    array = ArrayTokens(NUMBERS.astype(np.int16), "numbers")
    chain = ChainedTokens(
        [
            SlicedTokens(file, 0, 10),
            ArrayTokens(np.zeros(0, np.uint8), "nothing"),
            ArrayTokens(NUMBERS[10:11].astype(np.uint8), "one"),
            SlicedTokens(array, 11, 989),
        ]
    )
    return {"file": file, "array": array, "chain": chain, "checked": CheckedTokens(chain, 1000)}


@pytest.mark.parametrize("kind", ["file", "array", "chain", "checked"])
def test_any_slice_of_any_source_equals_numpys(tmp_path, kind):
    source = sources(tmp_path)[kind]
    for each in (source, pickle.loads(pickle.dumps(source))):
        assert len(each) == 1000
        for start, count in ((0, 1000), (0, 10), (9, 3), (8, 2), (10, 1), (11, 5), (999, 1), (500, 0)):
            assert each.read(start, count).tolist() == NUMBERS[start : start + count].tolist()
        assert [len(block) for block in each.blocks(300)] == [300, 300, 300, 100]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_a_forked_reader_shares_no_file_position(tmp_path):
    """Both read through one descriptor."""
    source = sources(tmp_path)["file"]
    child = os.fork()
    if not child:
        os._exit(0 if source.read(100, 3).tolist() == [100, 101, 102] else 1)
    assert source.read(0, 2).tolist() == [0, 1]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


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
    "written to": r"t.bin' was changed during the run, found at byte {place}: it was written to since .* at \d\d\d\d-",
    "longer": r"at byte {place}: it had 200 bytes when it was opened and has 201 now; restore the file",
    "truncated": r"t.bin' ends at byte 100, but a read expected bytes up to 120",
    "replaced": r"it was replaced by another file since it was opened",
    "missing": r"t.bin' cannot be opened again, to read from byte 0 on: No such file or directory; restore",
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_file_that_changes_during_the_run_is_an_error_if_its_tokens_may_be_others(path, how):
    """An open file that is deleted or replaced is still read, but a new process does not find it."""
    source = open_flat(path, "uint16")
    pickled = pickle.dumps(SlicedTokens(source, 3, 50))
    assert pickle.loads(pickled).read(0, 2).tolist() == [0, 0]
    if how != "truncated":  # of which a read finds the end
        assert source.read(40, 20).tolist() == [0] * 20
    modify(path, how)
    if how in ("replaced", "missing"):
        assert source.read(40, 20).tolist() == [0] * 20
    else:
        with pytest.raises(DataError, match=CHANGES[how].format(place=80)):
            source.read(40, 20)
    if how != "truncated":
        with pytest.raises(DataError, match=CHANGES[how].format(place=0)):
            pickle.loads(pickled)


def test_a_failing_disk_is_an_error(path, monkeypatch):
    source = open_flat(path, "uint16")
    monkeypatch.setattr(os, "pread", mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(DataError, match=r"t.bin' cannot be read at byte 80: Input/output error; check its disk"):
        source.read(40, 20)


@pytest.mark.parametrize("token", [900, -1])
def test_a_token_outside_the_vocabulary_is_named_with_its_place(path, token):
    numbers = np.zeros(100, "<i2")
    numbers[70] = token
    path.write_bytes(numbers.tobytes())
    source = SlicedTokens(CheckedTokens(SlicedTokens(FileTokens(path, "<i2"), 5, 95), 500), 5, 90)
    assert source.read(0, 60).tolist() == [0] * 60
    with pytest.raises(DataError, match=rf"t.bin' at byte 140 is {token}, expected 0 to 499, .* train.vocab_size"):
        source.read(50, 20)


def test_the_sample_covers_the_source_and_stays_small():
    class Endless(ArrayTokens):
        def __init__(self):
            self.reads = []

        def __len__(self):
            return 10**12 + 7

        def read(self, start, count):
            self.reads.append((start, count))
            return np.zeros(count, np.uint16)

    source = Endless()
    list(sample(source))
    assert source.reads[0][0] == 0
    assert sum(source.reads[-1]) == len(source)
    assert sum(count for _, count in source.reads) < 60_000
    short = ArrayTokens(np.arange(1500), "short")
    assert {token for _, tokens in sample(short) for token in tokens.tolist()} == set(range(1500))


def test_the_fingerprint_depends_on_lengths_and_tokens():
    def of(tokens, name="a"):
        return fingerprint(ArrayTokens(tokens, name), ArrayTokens(np.arange(3), "b"))

    changed = np.where(np.arange(100) == 50, 0, np.arange(100))
    one, renamed, shorter, other = of(np.arange(100)), of(np.arange(100), "c"), of(np.arange(99)), of(changed)
    assert one == renamed
    assert len({one, shorter, other}) == 3


@pytest.mark.parametrize(("dtype", "code"), [("<u1", 1), ("<i2", 3), ("<i4", 4), ("<i8", 5), ("<u2", 8)])
def test_megatrons_pair_is_read(tmp_path, dtype, code):
    sequences = [np.arange(5), np.arange(0), np.arange(100, 117), np.array([7])]
    prefix = write_pair(tmp_path / "some.text_document", sequences, code, dtype)
    tokens = open_indexed(prefix)
    assert tokens.read(0, len(tokens)).tolist() == np.concatenate(sequences).tolist()
    assert tokens.read(4, 3).tolist() == [4, 100, 101]


DAMAGE = {
    "wrong magic": ({"magic": b"TNTIDX\x00\x00\x00"}, r"x.idx' begins with b'TNTIDX.*, expected b'MMIDIDX"),
    "another version": ({"version": 2}, r"x.idx' has version 2, expected 1"),
    "unknown dtype code": ({"code": 11}, r"x.idx' has the dtype code 11, expected an integer dtype: 1 uint8"),
    "tokens that are floats": ({"code": 7}, r"dtype code 7 \(float32\), expected an integer dtype"),
    "another dtype than the bin's": ({"code": 4}, r"does not match .*its sequences are not contiguous"),
    "more tokens than there are": ({"lengths": [3, 9]}, r"does not match .*it counts 24 bytes, the .bin has 14"),
    "sequences that leave a gap": ({"starts": [0, 8]}, "its sequences are not contiguous"),
    "a negative length": ({"lengths": [3, -4]}, "its sequences are not contiguous"),
}


@pytest.mark.parametrize("case", [*DAMAGE, 60, 20, None])
def test_a_damaged_index_is_an_error(tmp_path, case):
    """``case``: what its header says, the bytes that are left of it, or None where there is no .bin."""
    changes, message = DAMAGE.get(case, ({}, ""))
    write_pair(tmp_path / "x", [np.arange(3), np.arange(4)], **changes)
    if isinstance(case, int):
        os.truncate(tmp_path / "x.idx", case)
        whole = "x.idx' has 60 bytes, expected 82 for its 2 sequences and 3 doc"
        message = whole if case == 60 else "expected b'MMIDIDX"
    elif case is None:
        (tmp_path / "x.bin").unlink()
        message = "no file '.*x.bin'; Megatron's data is a pair"
    with pytest.raises(ConfigError, match=message):
        open_indexed(tmp_path / "x")


def test_a_flat_file_of_the_wrong_dtype_is_an_error(path):
    def refused(content, message, **options):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            open_flat(path, "uint16", **options)

    wide = np.arange(3000).astype("<u4").tobytes()
    refused(bytes(1001), r"t.bin' has 1001 bytes, not a multiple of the 2 of uint16; set train")
    refused(b"", r"t.bin' is empty")
    refused(wide, r"seems to hold uint32, not uint16.*data_dtype to 'uint32'", guessed=True)
    assert len(open_flat(path, "uint16")) == 6000  # said, not guessed
    assert open_flat(path, "uint32").read(2999, 1).tolist() == [2999]
    path.write_bytes(np.arange(3000).astype("<u2").tobytes())
    assert len(open_flat(path, "uint16", guessed=True)) == 3000


def test_reading_four_gigabytes_takes_constant_memory(tmp_path):
    """A fresh process: torch and paramp are most of what it holds."""
    path = tmp_path / "sparse.bin"
    path.touch()
    os.truncate(path, 2**32)
    script = (
        "import re, sys, paramp\n"
        "from paramp.data.corpus import load_corpus\n"
        "from paramp.data.sampling import training_windows, held_out_windows\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1]) // 1024\n"
        "before = peak()\n"
        "corpus = load_corpus(sys.argv[1], default_vocab_size=50257)\n"
        "for step in range(20):\n"
        "    training_windows(corpus.training, 1024, 1, step, 0, 64)\n"
        "    held_out_windows(corpus.held_out, 1024, 0, 64, 64)\n"
        "print(len(corpus.training) + len(corpus.held_out), before, peak())\n"
    )
    result = python("-c", script, str(path), **COLD)
    assert result.returncode == 0, result.stderr
    tokens, before, after = map(int, result.stdout.split())
    assert tokens == 2**31
    assert after - before < 64, "megabytes that reading takes"
    assert after < 400, "megabytes of the whole process"
