"""Sampling without state, and what a path is found to hold."""

import hashlib
import json
import math
import os
import re
import sys
import warnings

import numpy as np
import pytest
import torch
from test_token_files import write_pair

from paramp import ConfigError, DataError
from paramp.base import sizes
from paramp.data.corpus import Corpus, bigram_loss, load_corpus, standard_library
from paramp.data.hf_datasets import tokens_of
from paramp.data.sampling import held_out_windows, sample_offsets, training_windows
from paramp.data.text_corpus import TextFile, Tokenizer, find_text, read_chunks
from paramp.data.token_sources import ArrayTokens, ChainedTokens


def source(values, dtype=np.uint8):
    values = np.frombuffer(values, np.uint8) if isinstance(values, bytes) else values
    return ArrayTokens(np.asarray(values).astype(dtype), "t")


def everything(tokens):
    return tokens.read(0, len(tokens)).tolist()


def text(tokens):
    return bytes(everything(tokens)).decode()


def write(folder, files):
    """Files by name: text, bytes, or an array of tokens."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        content = content.encode() if isinstance(content, str) else content
        path.write_bytes(content if isinstance(content, bytes) else content.tobytes())


def tokens(*limits, dtype="<u2"):
    return np.arange(*limits).astype(dtype)


def is_held_out(name):
    return hashlib.sha256(name.encode()).digest()[0] % 20 == 0


def test_slices_of_a_batch_equal_the_batch():
    whole = source(np.arange(10_000))
    x, y = training_windows(whole, 16, seed=1, step=5, first=0, count=12)
    assert x.shape == y.shape == (12, 16)
    assert torch.equal(x[:, 1:], y[:, :-1])
    for first, count in ((0, 4), (4, 4), (8, 4), (3, 1)):
        part, _ = training_windows(whole, 16, seed=1, step=5, first=first, count=count)
        assert torch.equal(part, x[first : first + count])


def test_offsets_are_uniform_and_depend_on_seed_step_and_index():
    indices = np.arange(20_000)
    counts = np.bincount(sample_offsets(0, 0, indices, 10), minlength=10)
    assert abs(counts - 2000).max() < 5 * math.sqrt(2000)
    offsets = {(seed, step): sample_offsets(seed, step, indices, 10**6).tolist() for seed in (0, 1) for step in (0, 1)}
    assert len(set(map(tuple, offsets.values()))) == 4


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
    with pytest.raises(ConfigError, match=r"0 Python files under .*, too few to train on"):
        standard_library(tmp_path)  # a Python without its source
    names = [f"module_{index}.py" for index in range(60)]
    write(tmp_path, {name: f"# {name}\n" for name in names} | {"test/left_out.py": "# tests are left out\n"})
    corpus = standard_library(tmp_path)
    held = [name for name in names if is_held_out(name)]
    assert held
    assert sorted(line[2:] for line in text(corpus.held_out).splitlines() if line) == sorted(held)
    assert "left out" not in text(corpus.training)
    assert corpus.num_files == 60
    write(tmp_path, {names[0]: "# changed\n"})
    assert standard_library(tmp_path).sha256 != corpus.sha256


def test_the_standard_library_of_this_machine_is_read():
    corpus = load_corpus("stdlib")
    assert len(corpus.training) > 5_000_000
    assert 0.01 < len(corpus.held_out) / len(corpus.training) < 0.15
    assert 2.0 < bigram_loss(corpus) < 3.0


def test_the_bigram_loss_equals_hand_arithmetic():
    # After a: b twice. After b: a once. Counts start at one for each of 256 bytes.
    expected = -(math.log(3 / 258) + math.log(2 / 257)) / 2
    in_pieces = ChainedTokens([source(chunk) for chunk in (b"a", b"b", b"ab")])  # pairs across the borders count too
    for training in (source(b"abab"), in_pieces):
        assert bigram_loss(Corpus("t", training, source(b"aba"), 2, "")) == pytest.approx(expected)


def test_held_out_windows_cover_the_data_from_start_to_end():
    x, y = held_out_windows(source(np.arange(101)), 10, 0, 4, 4)
    assert x[:, 0].tolist() == [0, 30, 60, 90]
    assert y[-1, -1] == 100


def test_a_text_file_is_read_as_its_bytes(tmp_path):
    content = ("häuser\n" * 100).encode()
    write(tmp_path, {"notes.md": content})
    corpus = load_corpus(str(tmp_path / "notes.md"))
    assert text(corpus.training) + text(corpus.held_out) == content.decode()
    assert len(corpus.held_out) == len(content) // 20
    assert (corpus.unit, corpus.vocab_size, corpus.num_files) == ("byte", 256, 1)


def test_a_folder_of_text_is_split_by_file_and_reports_skipped_files(tmp_path):
    names = [f"part{index % 3}/file_{index}.txt" for index in range(60)]
    write(tmp_path, {name: name for name in names})
    held = sorted(filter(is_held_out, names))
    write(tmp_path, dict.fromkeys((".hidden", ".git/config", "__pycache__/x.py"), b"secret"))
    write(
        tmp_path, {"picture.png": b"\x89PNG\xff", "zeros.bin": bytes(10), "cut.txt": "ä".encode()[:1], "empty.txt": b""}
    )
    corpus = load_corpus(str(tmp_path))
    assert held
    assert text(corpus.held_out) == "\n".join(held)
    assert text(corpus.training) == "\n".join(sorted(set(names) - set(held)))
    assert corpus.num_files == 60
    assert corpus.notes == (f"data: 4 files in {str(tmp_path)!r} are empty or not valid UTF-8 and were skipped",)


def test_with_few_files_the_end_of_the_text_is_held_out(tmp_path):
    write(tmp_path, {"a.txt": "first\n" * 50, "b.txt": "later\n" * 50})
    corpus = load_corpus(str(tmp_path))
    assert text(corpus.training) == "first\n" * 50 + "\n" + "later\n" * 45  # border at byte 570, a line's end
    assert text(corpus.held_out) == "later\n" * 5
    given = load_corpus(str(tmp_path / "a.txt"), validation_data=str(tmp_path / "b.txt"))
    assert (text(given.training), text(given.held_out)) == ("first\n" * 50, "later\n" * 50)


def test_concatenated_chunks_equal_the_text(tmp_path, monkeypatch):
    path = tmp_path / "t.txt"
    content = "äöü€𝄞" * 30 + "\nkurz\n" + "lang" * 20
    path.write_text(content)
    file = TextFile("t.txt", path, path.stat().st_size)
    for size in (1, 2, 3, 7, 64, 10**6):
        monkeypatch.setattr(sizes, "TEXT_READ", size)
        for split in (False, True):
            chunks = list(read_chunks([file], split=split))
            assert "".join(chunk.text for chunk in chunks) == content
            assert [chunk.begins for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
            assert {chunk.held_out for chunk in chunks} == ({False, True} if split else {False})
        assert len(find_text(tmp_path)[0]) == 1


def test_flat_token_files_of_nanogpt_are_read(tmp_path):
    big = tokens(70_000, 70_100, dtype="<u4")
    write(tmp_path, {"train.bin": tokens(2000), "val.bin": tokens(500), "big.bin": big})
    corpus = load_corpus(str(tmp_path), default_vocab_size=2000)
    assert everything(corpus.training) == list(range(2000))
    assert everything(corpus.held_out) == list(range(500))
    assert (corpus.unit, corpus.vocab_size, corpus.num_files) == ("token", 2000, 2)
    alone = load_corpus(str(tmp_path / "train.bin"), vocab_size=3000, default_vocab_size=10)
    assert everything(alone.held_out) == list(range(1900, 2000))
    assert alone.vocab_size == 3000
    found = load_corpus(str(tmp_path / "big.bin"), data_dtype="uint32", vocab_size=2**17)
    assert everything(found.training) == big.tolist()[:95]


def test_meta_json_describes_a_bin_and_a_pickle_is_never_read(tmp_path):
    described = {"dtype": "uint32", "vocab_size": 777, "unit": "token"}
    write(tmp_path, {"train.bin": tokens(400, dtype="<u4"), "meta.json": json.dumps(described)})
    corpus = load_corpus(str(tmp_path))
    assert everything(corpus.training) == list(range(380))
    assert (corpus.vocab_size, corpus.notes) == (777, ())
    for content, message in (
        ('{"dtype": "int7"}', "dtype in .*meta.json' is 'int7', expected 'uint16' or 'uint32'"),
        ('{"vocab_size": "many"}', "vocab_size in .*meta.json' is 'many', expected an integer of 1 or more"),
        ("[1]", "meta.json' holds list, expected an object"),
        ("{", "meta.json' is not valid JSON"),
    ):
        write(tmp_path, {"meta.json": content})
        with pytest.raises(ConfigError, match=message):
            load_corpus(str(tmp_path))
    write(tmp_path, {"train.bin": tokens(1000, dtype="<u4"), "meta.json": '{"dtype": "uint16"}'})
    assert len(load_corpus(str(tmp_path), vocab_size=1000).training) == 1900  # said so, however it looks
    (tmp_path / "meta.json").unlink()
    with pytest.raises(ConfigError, match=r"train.bin' seems to hold uint32, not uint16"):
        load_corpus(str(tmp_path), vocab_size=1000)
    write(tmp_path, {"meta.pkl": b"cos\nsystem\n(S'exit 1'\ntR."})
    corpus = load_corpus(str(tmp_path), data_dtype="uint32", default_vocab_size=1000)
    assert "meta.pkl' is not read, because a pickle can run any code; set train.vocab_size" in corpus.notes[0]


def test_megatrons_pair_opens_by_any_of_its_three_names(tmp_path):
    write_pair(tmp_path / "x.text", [np.arange(60), np.arange(40)])
    names = [str(tmp_path / name) for name in ("x.text", "x.text.bin", "x.text.idx")]
    for name in names:
        corpus = load_corpus(name, vocab_size=60)
        assert everything(corpus.training) + everything(corpus.held_out) == [*range(60), *range(40)]
    (tmp_path / "x.text.bin").unlink()
    for name in names:
        with pytest.raises(ConfigError, match=r"no file '.*x.text.bin'; Megatron's data is a pair"):
            load_corpus(name)


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


def test_text_is_encoded_by_the_tokenizer(tmp_path):
    folder = save_tokenizer(tmp_path / "tokenizer")
    write(tmp_path, {"data/a.txt": "the cat sat\n" * 30, "data/b.txt": "cat cat the dog\n" * 10})
    corpus = load_corpus(str(tmp_path / "data"), tokenizer=str(folder))
    # Of the 520 bytes the last 26 are held out, from a line's end on: the 16 of the last line.
    assert everything(corpus.training) == [2, 3, 4, 5] * 30 + [1] + [3, 3, 2, 0, 5] * 9
    assert everything(corpus.held_out) == [3, 3, 2, 0, 5]
    assert (corpus.vocab_size, corpus.unit) == (6, "token")
    write(tmp_path, {"t.bin": bytes(200)})
    assert load_corpus(str(tmp_path / "t.bin"), tokenizer=str(folder / "tokenizer.json")).vocab_size == 6
    assert len("the cat sat\n" * 1000) > 2 * sizes.TOKENIZED  # in parts that end at lines
    assert Tokenizer(folder).encode("the cat sat\n" * 1000).tolist() == [2, 3, 4, 5] * 1000
    save_tokenizer(folder, end="<END>")  # the end of a text is in the tokenizer's configuration
    assert Tokenizer(folder).end_of_text is None
    write(folder, {"tokenizer_config.json": json.dumps({"eos_token": {"content": "<END>"}})})
    assert Tokenizer(folder).end_of_text == 1


def save_dataset(path, columns=None, **splits):
    datasets = pytest.importorskip("datasets")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = {name: datasets.Dataset.from_dict(rows) for name, rows in splits.items()}
        result = datasets.DatasetDict(whole) if whole else datasets.Dataset.from_dict(columns)
        result.save_to_disk(str(path))
    return result


def test_a_saved_dataset_of_tokens_is_not_copied(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [list(range(index, index + 7)) for index in range(3000)]  # more than one of Arrow's batches
    flat = [token for row in rows for token in row]
    dataset = save_dataset(tmp_path / "tokens", {"text": ["x"] * 3000, "input_ids": rows})
    corpus = load_corpus(str(tmp_path / "tokens"), vocab_size=4000)
    assert everything(corpus.training) + everything(corpus.held_out) == flat
    assert len(corpus.held_out) == len(flat) // 20
    assert corpus.unit == "token"
    loaded = datasets.load_from_disk(str(tmp_path / "tokens"))
    for part, expected in (
        (loaded, flat),
        (loaded.select(range(1500, 1510)), flat[1500 * 7 : 1510 * 7]),  # a slice of the buffers
    ):
        found = tokens_of(part, tmp_path)
        assert everything(found) == expected
        assert all(not each.array.flags.owndata and not each.array.flags.writeable for each in found.parts)
    order = [5, 2900, 17]
    mixed = tokens_of(dataset.select(order), tmp_path)  # rows in another order than they lie
    assert everything(mixed) == [token for index in order for token in rows[index]]


def test_a_difference_from_the_data_of_a_saved_run_is_described(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("some text " * 20)
    earlier = load_corpus(str(path))
    saved = json.loads(json.dumps(earlier.identity()))
    assert load_corpus(str(path)).difference(saved) is None
    path.write_text("same size " * 20)
    changed = load_corpus(str(path))
    hashes = f"SHA-256 of a sample of it: {earlier.sha256[:12]} saved, {changed.sha256[:12]} now"
    assert changed.difference(saved) == f"{str(path)!r} differs from the data of the saved run ({hashes})"
    path.write_text("some text " * 21)
    assert "bytes to train on: 190 saved, 200 now; SHA-256" in load_corpus(str(path)).difference(saved)


def test_saved_splits_and_text_columns_are_read(tmp_path):
    words = {"text": ["the cat sat"] * 20}
    save_dataset(tmp_path / "d", train=words, test={"text": ["cat"]}, validation={"text": ["sat", "the"]})
    corpus = load_corpus(str(tmp_path / "d"))
    assert text(corpus.training) == "\n".join(words["text"])
    assert text(corpus.held_out) == "sat\nthe"
    encoded = load_corpus(str(tmp_path / "d"), tokenizer=str(save_tokenizer(tmp_path / "tokenizer")))
    assert everything(encoded.training) == ([2, 3, 4, 1] * 20)[:-1]
    assert everything(encoded.held_out) == [4, 1, 2]


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


TEXT = "text " * 20
UNUSABLE = [
    ("none", {}, "data: got '{folder}/none', expected stdlib or the path of"),
    ("none.idx", {}, "no file '{folder}/none.idx'"),
    ("", {}, "data: no text in the folder '{folder}' (0 files"),
    ("empty.txt", {"empty.txt": b""}, "data: '{folder}/empty.txt' is empty"),
    ("latin.txt", {"latin.txt": b"caf\xe9 au lait"}, "latin.txt' is not text: not valid UTF-8"),
    ("zero.txt", {"zero.txt": b"abc\0"}, "zero.txt' is not text: byte 3 is zero"),
    ("empty.bin", {"empty.bin": b""}, "empty.bin' is empty"),
    ("odd.bin", {"odd.bin": bytes(7)}, "odd.bin' has 7 bytes, not a multiple of the 2 of uint16"),
    ("t.txt", {"t.txt": TEXT, "tokenizer": None}, "tokenizer: no file '{folder}/tokenizer.json'"),
    ("t.txt", {"t.txt": TEXT, "tokenizer.json": "{}"}, "tokenizer.json' is not a tokenizer.json"),
    ("t.txt", {"t.txt": TEXT, "validation_data": "/none"}, "validation_data: got '/none', expected stdlib or the path"),
]


@pytest.mark.parametrize(("path", "files", "message"), UNUSABLE)
def test_paths_without_data_are_errors(tmp_path, path, files, message):
    options = {"tokenizer": tmp_path} if {"tokenizer", "tokenizer.json"} & files.keys() else {}
    options |= {name: files[name] for name in ("validation_data",) if name in files}
    write(tmp_path, {name: content for name, content in files.items() if "." in name})
    with pytest.raises(ConfigError, match=re.escape(message.format(folder=tmp_path))):
        load_corpus(str(tmp_path / path), **options)


def test_names_that_are_no_path_and_sequences_longer_than_a_part_are_errors(tmp_path):
    for name, message in (("stdlob", r"\(did you mean 'stdlib'\?\)"), ("", "data: got '', expected")):
        with pytest.raises(ConfigError, match=message):
            load_corpus(name)
    write(tmp_path, {"t.txt": TEXT})
    corpus = load_corpus(str(tmp_path / "t.txt"))
    for length, part in ((5, "held out"), (95, "to train on")):
        with pytest.raises(ConfigError, match=rf"expected less than the data's {length} tokens, of '.*t.txt' {part}"):
            corpus.check_seq_len(length)
    with pytest.raises(ConfigError, match="seq_len: got 50, expected less than the data's 10 tokens"):
        training_windows(source(np.zeros(10)), 50, 0, 0, 0, 1)


def test_tokens_outside_the_vocabulary_are_found_at_opening_or_when_read(tmp_path):
    path = tmp_path / "t.bin"
    for place in (10**6 - 3, 5000):
        found = np.zeros(10**6, "<u2")
        found[place] = 300
        found.tofile(path)
        if place > 5000:
            with pytest.raises(
                ConfigError, match=r"t.bin' at byte 1999994 is 300, expected 0 to 255, the vocabulary's"
            ):
                load_corpus(str(path))
    corpus = load_corpus(str(path))  # the sample does not see it
    assert training_windows(corpus.training, 10, 1, 0, 0, 8)[0].sum() == 0
    with pytest.raises(DataError, match=r"t.bin' at byte 10000 is 300, expected 0 to 255"):
        training_windows(corpus.training, 300_000, 1, 0, 0, 40)


def test_the_hash_of_large_data_reads_a_sample_of_it(tmp_path):
    path = tmp_path / "t.bin"
    path.touch()
    found = []
    for size in (10**6, 10**6 + 2, 10**6):
        os.truncate(path, size)
        found.append(load_corpus(str(path)).sha256)
    assert found[0] == found[2] != found[1]
    with path.open("r+b") as file:
        file.write(b"\7")
    assert load_corpus(str(path)).sha256 != found[0]
