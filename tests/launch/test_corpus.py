"""What a path is found to hold, what of it is held out, and which of its tokens a step is given."""

import hashlib
import json
import math
import re
import sys
import sysconfig
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_token_files import megatron
from train_app import batch_reader, text_to_tokens, token_sources
from train_app.corpus import bigram_loss, held_out_windows, load_corpus, sample_offsets, training_windows
from train_app.settings import TrainConfig

from paramp import ConfigError, DataError


def write(folder, files):
    """Files by name: text, bytes, or an array of tokens."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = content.encode() if isinstance(content, str) else content
        path.write_bytes(content if isinstance(content, bytes) else content.tobytes())


def corpus_of(folder, files, name="", **options):
    write(folder, files)
    return load_corpus(str(folder / name), **options)


def parts(corpus):
    """The tokens to train on, and those that are held out."""
    return [part.read(0, len(part)).tolist() for part in (corpus.training, corpus.held_out)]


def joined(corpus):
    training, held_out = parts(corpus)
    return training + held_out


def texts(corpus):
    return [bytes(part).decode() for part in parts(corpus)]


def numbers(*limits, dtype="<u2"):
    return np.arange(*limits).astype(dtype)


def is_held_out(name):
    return hashlib.sha256(name.encode()).digest()[0] % 20 == 0


# ------------------------------------------------------------------------------------------ the tokens of a step


def test_slices_of_a_batch_equal_the_batch(tmp_path):
    source = corpus_of(tmp_path, {"t.bin": numbers(10_000)}, "t.bin", vocab_size=10_000).training
    x, y = training_windows(source, 16, seed=1, step=5, first=0, count=12)
    assert x.shape == y.shape == (12, 16)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(x + 1, y)
    for first, count in ((0, 4), (4, 4), (8, 4), (3, 1)):
        part, _ = training_windows(source, 16, seed=1, step=5, first=first, count=count)
        assert torch.equal(part, x[first : first + count])


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


def test_held_out_windows_cover_the_data_from_start_to_end(tmp_path):
    write(tmp_path, {"train.bin": numbers(200), "val.bin": numbers(101)})
    x, y = held_out_windows(load_corpus(str(tmp_path)).held_out, 10, 0, 4, 4)
    assert x[:, 0].tolist() == [0, 30, 60, 90]
    assert y[-1, -1] == 100


def test_the_held_out_sequences_are_the_same_with_accumulation_and_on_data_ranks(tmp_path, monkeypatch):
    """Two batches of 48, for 64 sequences."""
    monkeypatch.setattr(batch_reader, "raise_on_all_ranks", lambda context, failure: None)
    corpus = corpus_of(tmp_path, {"t.bin": numbers(10_000)}, "t.bin", vocab_size=10_000)
    job = TrainConfig(seq_len=8, batch_size=48, eval_sequences=64)

    def evaluated(ranks, accumulation):
        firsts, config = [], SimpleNamespace(gradient_accumulation=accumulation)
        for rank in range(ranks):
            context = SimpleNamespace(dp=SimpleNamespace(size=ranks, rank=rank), config=config)
            engine = SimpleNamespace(context=context, evaluate=lambda x, y: firsts.extend(x[:, 0].tolist()) or 1.0)
            assert batch_reader.held_out_loss(engine, job, corpus) == 1.0
        return sorted(firsts)

    expected = held_out_windows(corpus.held_out, 8, 0, 96, 96)[0][:, 0].tolist()
    assert [evaluated(*layout) for layout in ((2, 1), (4, 1), (1, 2), (2, 3))] == [expected] * 4


def test_the_bigram_loss_equals_hand_arithmetic(tmp_path, monkeypatch):
    # After a: b twice. After b: a once. Counts start at one for each of 256 bytes.
    expected = -(math.log(3 / 258) + math.log(2 / 257)) / 2
    write(tmp_path, {"a.txt": "abab", "b.txt": "aba"})
    corpus = load_corpus(str(tmp_path / "a.txt"), validation_data=str(tmp_path / "b.txt"))
    for size in (1000, 3, 1):  # pairs across the ends of blocks count too
        monkeypatch.setattr(token_sources, "BLOCK", size)
        assert bigram_loss(corpus) == pytest.approx(expected)


# -------------------------------------------------------------------------------------------------------- text


def test_the_standard_library_is_split_by_file(tmp_path, monkeypatch):
    corpus = load_corpus(TrainConfig().data)
    assert len(corpus.training) > 5_000_000
    assert 0.01 < len(corpus.held_out) / len(corpus.training) < 0.15
    assert 2.0 < bigram_loss(corpus) < 3.0
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    write(tmp_path, {"test/left_out.py": "# tests are left out"})
    with pytest.raises(ConfigError, match=r"0 Python files under .*, too few to train on"):
        load_corpus("stdlib")  # a Python without its source


def test_a_text_file_is_read_as_its_bytes(tmp_path):
    content = "häuser\n" * 100
    corpus = corpus_of(tmp_path, {"notes.md": content}, "notes.md")
    assert "".join(texts(corpus)) == content
    assert len(corpus.held_out) == 800 // 20
    assert (corpus.unit, corpus.vocab_size, corpus.num_files) == ("byte", 256, 1)


def test_a_folder_of_text_is_split_by_file_and_reports_skipped_files(tmp_path):
    names = [f"part{index % 3}/file_{index}.txt" for index in range(60)]
    write(tmp_path, dict.fromkeys((".hidden", ".git/config", "__pycache__/x.py"), b"secret"))
    write(tmp_path, {"picture.png": b"\x89PNG\xff", "zeros.bin": bytes(10), "cut.txt": "ä".encode()[:1], "empty": b""})
    corpus = corpus_of(tmp_path, {name: name for name in names})
    held = sorted(filter(is_held_out, names))
    assert held
    assert texts(corpus) == ["\n".join(sorted(set(names) - set(held))), "\n".join(held)]
    assert corpus.num_files == 60
    assert corpus.notes == (f"data: 4 files in {str(tmp_path)!r} are empty or not valid UTF-8 and were skipped",)


def test_with_few_files_the_end_of_the_text_is_held_out(tmp_path):
    first, later = "first\n" * 50, "later\n" * 50
    corpus = corpus_of(tmp_path, {"a.txt": first, "b.txt": later})
    assert texts(corpus) == [first + "\n" + "later\n" * 45, "later\n" * 5]  # 30 of 601 bytes
    given = load_corpus(str(tmp_path / "a.txt"), validation_data=str(tmp_path / "b.txt"))
    assert texts(given) == [first, later]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10**6])
def test_the_parts_in_which_text_is_read_do_not_show(tmp_path, monkeypatch, size):
    monkeypatch.setattr(text_to_tokens, "READ", size)
    monkeypatch.setattr(text_to_tokens, "ENCODED", size)
    content = "äöü€𝄞" * 30 + "\r\nkurz\n\n" + "lang" * 20
    training, held_out = parts(corpus_of(tmp_path, {"t.txt": content}))
    assert bytes(training + held_out).decode() == content
    assert 0 < len(held_out) < len(content) / 8


# ------------------------------------------------------------------------------------------------- token files


def test_flat_token_files_of_nanogpt_are_read(tmp_path):
    big = numbers(70_000, 70_100, dtype="<u4")
    write(tmp_path, {"train.bin": numbers(2000), "val.bin": numbers(500), "big.bin": big})
    corpus = load_corpus(str(tmp_path), default_vocab_size=2000)
    assert parts(corpus) == [[*range(2000)], [*range(500)]]
    assert (corpus.unit, corpus.vocab_size, corpus.num_files) == ("token", 2000, 2)
    alone = load_corpus(str(tmp_path / "train.bin"), vocab_size=3000, default_vocab_size=10)
    assert parts(alone) == [[*range(1900)], [*range(1900, 2000)]]
    assert alone.vocab_size == 3000
    found = load_corpus(str(tmp_path / "big.bin"), data_dtype="uint32", vocab_size=2**17)
    assert joined(found) == big.tolist()


def test_meta_json_describes_a_bin_and_a_pickle_is_never_read(tmp_path):
    described = {"dtype": "uint32", "vocab_size": 777, "unit": "token"}
    corpus = corpus_of(tmp_path, {"train.bin": numbers(400, dtype="<u4"), "meta.json": json.dumps(described)})
    assert joined(corpus) == [*range(400)]
    assert (corpus.vocab_size, corpus.notes) == (777, ())
    # What is said counts, however the file looks; what is guessed is refused (UNUSABLE).
    written = {"train.bin": numbers(1000, dtype="<u4"), "meta.json": '{"dtype": "uint16"}'}
    assert len(corpus_of(tmp_path, written, vocab_size=1000).training) == 1900
    assert len(corpus_of(tmp_path, {"meta.json": "{}", "train.bin": numbers(3000)}, vocab_size=3000).training) == 2850
    corpus = corpus_of(tmp_path, {"meta.pkl": b"cos\nsystem\n(S'exit 1'\ntR."}, vocab_size=3000)
    assert "meta.pkl' is not read, because a pickle can run any code; set train.vocab_size" in corpus.notes[0]


@pytest.mark.parametrize(("dtype", "code"), [("<u1", 1), ("<i2", 3), ("<i4", 4), ("<i8", 5), ("<u2", 8)])
def test_megatrons_pair_opens_by_any_of_its_three_names(tmp_path, dtype, code):
    sequences = [np.arange(60), np.arange(0), np.arange(17, 40), np.array([7])]
    write(tmp_path, megatron("x.text", sequences, code, dtype))
    for name in ("x.text", "x.text.bin", "x.text.idx"):
        corpus = load_corpus(str(tmp_path / name), vocab_size=60)
        assert joined(corpus) == np.concatenate(sequences).tolist()
        assert corpus.training.read(59, 3).tolist() == [59, 17, 18]


def test_tokens_outside_the_vocabulary_are_found_at_opening_or_when_read(tmp_path):
    path = tmp_path / "t.bin"

    def written(place, value=300):
        found = np.zeros(10**6, "<u2")
        found[place] = value
        found.tofile(path)
        return load_corpus(str(path))

    with pytest.raises(ConfigError, match=r"t.bin' at byte 1999994 is 300, expected 0 to 255, the vocabulary's"):
        written(10**6 - 3)
    corpus = written(5000)  # the sample that opening reads, and hashes, does not see it
    with pytest.raises(DataError, match=r"t.bin' at byte 10000 is 300, expected 0 to 255"):
        training_windows(corpus.training, 300_000, 1, 0, 0, 40)
    assert corpus.sha256 == written(5001).sha256 != written(0, value=7).sha256


# --------------------------------------------------------------------------- tokenizers and data sets of datasets


def save_tokenizer(folder, *, end="<|endoftext|>"):
    """A tokenizer of words: 0 is unknown, 1 ends a text, then the words."""
    import tokenizers

    words = {"<unk>": 0, end: 1, "the": 2, "cat": 3, "sat": 4, "\n": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("the|cat|sat|\n"), "isolated")
    tokenizer.enable_truncation(3)  # as some files have; training data must not be cut
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_text_is_encoded_by_the_tokenizer(tmp_path, monkeypatch):
    folder = save_tokenizer(tmp_path / "tokenizer")
    write(
        tmp_path, {"data/a.txt": "the cat sat\n" * 1000, "data/b.txt": "cat cat the dog\n" * 100, "t.bin": bytes(200)}
    )
    monkeypatch.setattr(text_to_tokens, "ENCODED", 2**12)  # in pieces that end at lines
    corpus = load_corpus(str(tmp_path / "data"), tokenizer=str(folder))
    assert parts(corpus) == [[2, 3, 4, 5] * 1000 + [1] + [3, 3, 2, 0, 5] * 55, [3, 3, 2, 0, 5] * 45]
    assert (corpus.vocab_size, corpus.unit) == (6, "token")
    first, second = parts(load_corpus(str(tmp_path / "data" / "b.txt"), tokenizer=str(folder)))
    assert first + second == [3, 3, 2, 0, 5] * 100
    assert load_corpus(str(tmp_path / "t.bin"), tokenizer=str(folder / "tokenizer.json")).vocab_size == 6
    # The end of a text is in the tokenizer's configuration, or there is none.
    save_tokenizer(folder, end="<END>")
    for configured, border in (("{}", []), (json.dumps({"eos_token": {"content": "<END>"}}), [1])):
        write(folder, {"tokenizer_config.json": configured})
        found = load_corpus(str(tmp_path / "data"), tokenizer=str(folder))
        assert parts(found)[0][3996:4004] == [2, 3, 4, 5, *border, 3, 3, 2, 0][:8]


def save_dataset(path, columns=None, **splits):
    datasets = pytest.importorskip("datasets")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = {name: datasets.Dataset.from_dict(rows) for name, rows in splits.items()}
        result = datasets.DatasetDict(whole) if whole else datasets.Dataset.from_dict(columns)
        result.save_to_disk(str(path))
    return str(path)


def test_a_saved_dataset_of_tokens_is_not_copied(tmp_path):
    rows = [list(range(index, index + 7)) for index in range(3000)]  # more than one of Arrow's batches
    flat = [token for row in rows for token in row]
    path = save_dataset(tmp_path, {"text": ["x"] * 3000, "input_ids": rows})
    pyarrow = pytest.importorskip("pyarrow")
    before = pyarrow.total_allocated_bytes()
    corpus = load_corpus(path, vocab_size=4000)
    assert joined(corpus) == flat
    assert (len(corpus.held_out), corpus.unit) == (len(flat) // 20, "token")
    for start in (0, 6998, 7000, 13990):
        assert corpus.training.read(start, 12).tolist() == flat[start : start + 12]
    assert pyarrow.total_allocated_bytes() - before < 8 * len(flat) / 2  # what Arrow has mapped is not copied


def test_saved_splits_and_text_columns_are_read(tmp_path):
    words = {"text": ["the cat sat"] * 20}
    path = save_dataset(tmp_path / "d", train=words, test={"text": ["cat"]}, validation={"text": ["sat", "the"]})
    assert texts(load_corpus(path)) == ["\n".join(words["text"]), "sat\nthe"]
    encoded = load_corpus(path, tokenizer=str(save_tokenizer(tmp_path / "tokenizer")))
    assert parts(encoded) == [([2, 3, 4, 1] * 20)[:-1], [4, 1, 2]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # datasets leaves a CSV file open
@pytest.mark.parametrize("suffix", ["csv", "json", "jsonl", "parquet"])
def test_tables_are_read_by_their_suffix(tmp_path, monkeypatch, suffix):
    datasets = pytest.importorskip("datasets")
    rows = {"text": ["the cat sat"] * 30}
    if suffix != "csv":
        rows["input_ids"] = [[index, 7] for index in range(30)]
    datasets.disable_progress_bars()
    getattr(datasets.Dataset.from_dict(rows), f"to_{suffix.removesuffix('l')}")(str(tmp_path / f"t.{suffix}"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    corpus = load_corpus(str(tmp_path / f"t.{suffix}"), default_vocab_size=30)
    expected = [number for row in rows.get("input_ids", []) for number in row]
    assert joined(corpus) == (expected or [*"\n".join(rows["text"]).encode()])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"content": ["a"], "label": [1]}, "d' has the columns content, label; expected input_ids"),
        ({"input_ids": ["a", "b"]}, "input_ids of .*d' has the type string; expected lists of integers"),
        ({"input_ids": [[1, None, 2]]}, "has 1 missing values; expected lists of integers"),
        ({"input_ids": [[1, -3, 2] * 50]}, "column input_ids of .*d', token 1 is -3, expected 0 to 9"),
        ({"one": {"text": ["a"]}, "two": {"text": ["b"]}}, "d' has the splits one, two; expected train"),
        ("nonsense", "datasets cannot load .*d'"),
    ],
)
def test_unusable_saved_datasets_are_errors(tmp_path, rows, message):
    splits = rows if "one" in rows else {}
    save_dataset(tmp_path / "d", {"text": ["a"]} if rows == "nonsense" else rows, **splits)
    if rows == "nonsense":
        for file in (tmp_path / "d").glob("*.arrow"):
            file.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=message):
        load_corpus(str(tmp_path / "d"), vocab_size=None if splits else 10)


@pytest.mark.parametrize("package", ["datasets", "tokenizers"])
def test_a_missing_extra_is_named(tmp_path, monkeypatch, package):
    write(tmp_path, {"dataset_dict.json": "{}", "tokenizer.json": "{}"})
    monkeypatch.setitem(sys.modules, package, None)
    tokenizer = str(tmp_path) if package == "tokenizers" else None
    with pytest.raises(ConfigError, match=rf'needs the package {package}: pip install "paramp\[hf\]"'):
        load_corpus(str(tmp_path), tokenizer=tokenizer)


# ------------------------------------------------------------------------------------------------------- errors


TEXT = "text " * 20
PAIR = np.arange(3), np.arange(4)
META = {"train.bin": bytes(200)}
CUT = megatron("x", PAIR)["x.idx"]
UNUSABLE = [
    ("none", {}, "data: got 'none', expected stdlib or the path of"),
    ("stdlob", {}, "(did you mean 'stdlib'?)"),
    ("", {}, "data: got '', expected"),
    (".", {}, "data: no text in the folder '.' (0 files"),
    ("empty.txt", {"empty.txt": b""}, "data: 'empty.txt' is empty"),
    ("latin.txt", {"latin.txt": b"caf\xe9 au lait"}, "latin.txt' is not text: not valid UTF-8"),
    ("zero.txt", {"zero.txt": b"abc\0"}, "zero.txt' is not text: byte 3 is zero"),
    ("t.txt", {"t.txt": TEXT, "tokenizer": "tokenizer"}, "tokenizer: no file 'tokenizer'"),
    (
        "t.txt",
        {"t.txt": TEXT, "tokenizer": "tokenizer.json", "tokenizer.json": "{}"},
        "tokenizer.json' is not a tokenizer.json",
    ),
    ("t.txt", {"t.txt": TEXT, "validation_data": "none"}, "validation_data: got 'none', expected stdlib or"),
    ("t.txt", {"t.txt": TEXT, "t.bin": bytes(200), "validation_data": "t.bin"}, "t.bin' holds tokens, but"),
    ("empty.bin", {"empty.bin": b""}, "empty.bin' is empty"),
    ("odd.bin", {"odd.bin": bytes(7)}, "odd.bin' has 7 bytes, not a multiple of the 2 of uint16; set train"),
    ("t.bin", {"t.bin": numbers(1000, dtype="<u4")}, "t.bin' seems to hold uint32, not uint16: every second number in"),
    (".", META | {"meta.json": '{"dtype": "int7"}'}, "meta.json' is 'int7', expected 'uint16' or 'uint32'"),
    (".", META | {"meta.json": '{"vocab_size": "many"}'}, "meta.json' is 'many', expected an integer of 1 or more"),
    (".", META | {"meta.json": "[1]"}, "meta.json' holds list, expected an object"),
    (".", META | {"meta.json": "{"}, "meta.json' is not valid JSON"),
    ("none.idx", {}, "no file 'none.idx'; Megatron's data is a pair"),
    ("x.idx", {"x.idx": CUT}, "no file 'x.bin'; Megatron's data is a pair"),
    ("x", megatron("x", PAIR) | {"x.idx": CUT[:60]}, "x.idx' has 60 bytes, expected 82 for its 2 sequences and 3 doc"),
    ("x", megatron("x", PAIR) | {"x.idx": CUT[:20]}, "expected b'MMIDIDX"),
    ("x", megatron("x", PAIR, magic=b"TNTIDX\0\0\0"), "x.idx' begins with b'TNTIDX"),
    ("x", megatron("x", PAIR, version=2), "x.idx' has version 2, expected 1"),
    ("x", megatron("x", PAIR, code=11), "x.idx' has the dtype code 11, expected an integer dtype: 1 uint8"),
    ("x", megatron("x", PAIR, code=7), "dtype code 7 (float32), expected an integer dtype"),
    ("x", megatron("x", PAIR, code=4), "x.bin': its sequences are not contiguous"),
    ("x", megatron("x", PAIR, lengths=[3, 9]), "does not match 'x.bin': it counts 24 bytes, the .bin has 14"),
    ("x", megatron("x", PAIR, starts=[0, 8]), "its sequences are not contiguous"),
    ("x", megatron("x", PAIR, lengths=[3, -4]), "its sequences are not contiguous"),
]
"""Files; ``tokenizer`` and ``validation_data`` among them are names for these options."""


@pytest.mark.parametrize(("path", "files", "message"), UNUSABLE)
def test_paths_without_data_are_errors(tmp_path, monkeypatch, path, files, message):
    monkeypatch.chdir(tmp_path)
    options = {name: files[name] for name in ("tokenizer", "validation_data") if name in files}
    write(tmp_path, {name: content for name, content in files.items() if name not in options})
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_corpus(path, **options)
