"""Sampling without state, and what a path is found to hold."""

import hashlib
import json
import math
import os
import warnings

import numpy as np
import pytest
import torch

from paramp import ConfigError, DataError
from paramp.base import sizes
from paramp.data.corpus import Corpus, bigram_loss, load_corpus, standard_library
from paramp.data.sampling import held_out_windows, sample_offsets, training_windows
from paramp.data.text_corpus import TextFile, Tokenizer, find_text, read_chunks
from paramp.data.token_sources import ArrayTokens, ChainedTokens


def tiny_corpus(text: bytes, held_out: bytes) -> Corpus:
    return Corpus("t", source(np.frombuffer(text, np.uint8)), source(np.frombuffer(held_out, np.uint8)), 2, "")


def source(array):
    return ArrayTokens(array, "t")


def everything(tokens):
    return tokens.read(0, len(tokens)).tolist()


def text(tokens):
    return bytes(everything(tokens)).decode()


def test_slices_of_a_batch_equal_the_batch():
    tokens = source(np.arange(10_000, dtype=np.int64).astype(np.uint8))
    x, y = training_windows(tokens, 16, seed=1, step=5, first=0, count=12)
    assert x.shape == y.shape == (12, 16)
    assert torch.equal(x[:, 1:], y[:, :-1])
    for first, count in ((0, 4), (4, 4), (8, 4), (3, 1)):
        part, _ = training_windows(tokens, 16, seed=1, step=5, first=first, count=count)
        assert torch.equal(part, x[first : first + count])


def test_offsets_are_uniform_and_depend_on_seed_step_and_index():
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
    assert held
    assert sorted(line[2:] for line in text(corpus.held_out).splitlines() if line) == sorted(held)
    assert "left out" not in text(corpus.training)
    assert corpus.num_files == 60
    (tmp_path / names[0]).write_text("# changed\n")
    assert standard_library(tmp_path).sha256 != corpus.sha256


def test_a_python_without_its_source_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"0 Python files under .*, too few to train on"):
        standard_library(tmp_path)


def test_the_standard_library_of_this_machine_is_read():
    corpus = load_corpus("stdlib")
    assert len(corpus.training) > 5_000_000
    assert 0.01 < len(corpus.held_out) / len(corpus.training) < 0.15
    assert 2.0 < bigram_loss(corpus) < 3.0


def test_the_bigram_loss_equals_hand_arithmetic():
    # After a: b twice. After b: a once. Counts start at one for each of 256 bytes.
    corpus = tiny_corpus(b"abab", b"aba")
    expected = -(math.log(3 / 258) + math.log(2 / 257)) / 2
    assert bigram_loss(corpus) == pytest.approx(expected)
    # in pieces, the pairs across their borders count too
    chunks = [source(np.frombuffer(chunk, np.uint8)) for chunk in (b"a", b"b", b"ab")]
    assert bigram_loss(Corpus("t", ChainedTokens(chunks), corpus.held_out, 2, "")) == pytest.approx(expected)


def test_held_out_windows_cover_the_data_from_start_to_end():
    tokens = source(np.arange(101, dtype=np.uint8))
    x, y = held_out_windows(tokens, 10, 0, 4, 4)
    assert x[:, 0].tolist() == [0, 30, 60, 90]
    assert y[-1, -1] == 100


def test_a_sequence_longer_than_the_data_is_an_error():
    with pytest.raises(ConfigError, match="seq_len: got 50, expected less than the data's 10 tokens"):
        training_windows(source(np.zeros(10, np.uint8)), 50, 0, 0, 0, 1)


def test_a_text_file_is_read_as_its_bytes(tmp_path):
    path = tmp_path / "notes.md"
    path.write_text("häuser\n" * 100)
    corpus = load_corpus(str(path))
    content = path.read_bytes()
    assert text(corpus.training) + text(corpus.held_out) == content.decode()
    assert len(corpus.held_out) == len(content) // 20
    assert (corpus.unit, corpus.vocab_size, corpus.num_files) == ("byte", 256, 1)


def test_a_folder_of_text_is_split_by_file_and_reports_skipped_files(tmp_path):
    names = [f"part{index % 3}/file_{index}.txt" for index in range(60)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name}")
    held = sorted(name for name in names if hashlib.sha256(name.encode()).digest()[0] % 20 == 0)
    for name, content in (
        (".hidden", b"secret"),
        (".git/config", b"secret"),
        ("__pycache__/x.py", b"secret"),
        ("picture.png", b"\x89PNG\xff"),
        ("zeros.bin", bytes(10)),
        ("cut.txt", "ä".encode()[:1]),
        ("empty.txt", b""),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    corpus = load_corpus(str(tmp_path))
    assert held
    assert text(corpus.held_out) == "\n".join(held)
    assert text(corpus.training) == "\n".join(sorted(set(names) - set(held)))
    assert corpus.num_files == 60
    assert corpus.notes == (f"data: 4 files in {str(tmp_path)!r} are empty or not valid UTF-8 and were skipped",)


def test_with_few_files_the_end_of_the_text_is_held_out(tmp_path):
    (tmp_path / "a.txt").write_text("first\n" * 50)
    (tmp_path / "b.txt").write_text("later\n" * 50)
    corpus = load_corpus(str(tmp_path))
    assert text(corpus.training) == "first\n" * 50 + "\n" + "later\n" * 45  # border at byte 570, a line's end
    assert text(corpus.held_out) == "later\n" * 5


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
    np.arange(2000).astype("<u2").tofile(tmp_path / "train.bin")
    np.arange(500).astype("<u2").tofile(tmp_path / "val.bin")
    corpus = load_corpus(str(tmp_path), default_vocab_size=2000)
    assert everything(corpus.training) == list(range(2000))
    assert everything(corpus.held_out) == list(range(500))
    assert (corpus.unit, corpus.vocab_size, corpus.num_files) == ("token", 2000, 2)
    alone = load_corpus(str(tmp_path / "train.bin"), vocab_size=3000, default_vocab_size=10)
    assert everything(alone.held_out) == list(range(1900, 2000))
    assert alone.vocab_size == 3000
    np.arange(70_000, 70_100).astype("<u4").tofile(tmp_path / "big.bin")
    big = load_corpus(str(tmp_path / "big.bin"), data_dtype="uint32", vocab_size=2**17)
    assert everything(big.training) == list(range(70_000, 70_095))


def test_meta_json_describes_a_bin_and_a_pickle_is_never_read(tmp_path):
    np.arange(400).astype("<u4").tofile(tmp_path / "train.bin")
    meta = tmp_path / "meta.json"
    meta.write_text(json.dumps({"dtype": "uint32", "vocab_size": 777, "unit": "token"}))
    corpus = load_corpus(str(tmp_path))
    assert everything(corpus.training) == list(range(380))
    assert (corpus.vocab_size, corpus.notes) == (777, ())
    for content, message in (
        ('{"dtype": "int7"}', "dtype in .*meta.json' is 'int7', expected 'uint16' or 'uint32'"),
        ('{"vocab_size": "many"}', "vocab_size in .*meta.json' is 'many', expected an integer of 1 or more"),
        ("[1]", "meta.json' holds list, expected an object"),
        ("{", "meta.json' is not valid JSON"),
    ):
        meta.write_text(content)
        with pytest.raises(ConfigError, match=message):
            load_corpus(str(tmp_path))
    np.arange(1000).astype("<u4").tofile(tmp_path / "train.bin")
    meta.write_text(json.dumps({"dtype": "uint16"}))  # said so, however it looks
    assert len(load_corpus(str(tmp_path), vocab_size=1000).training) == 1900
    meta.unlink()
    with pytest.raises(ConfigError, match=r"train.bin' seems to hold uint32, not uint16"):
        load_corpus(str(tmp_path), vocab_size=1000)
    (tmp_path / "meta.pkl").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    corpus = load_corpus(str(tmp_path), data_dtype="uint32", default_vocab_size=1000)
    assert "meta.pkl' is not read, because a pickle can run any code; set train.vocab_size" in corpus.notes[0]


def test_megatrons_pair_opens_by_any_of_its_three_names(tmp_path):
    from test_token_files import write_pair

    write_pair(tmp_path / "x.text", [np.arange(60), np.arange(40)])
    for name in ("x.text", "x.text.bin", "x.text.idx"):
        corpus = load_corpus(str(tmp_path / name), vocab_size=60)
        assert everything(corpus.training) + everything(corpus.held_out) == [*range(60), *range(40)]
    (tmp_path / "x.text.bin").unlink()
    for name in ("x.text", "x.text.bin", "x.text.idx"):
        with pytest.raises(ConfigError, match=r"no file '.*x.text.bin'; Megatron's data is a pair"):
            load_corpus(str(tmp_path / name))


def test_validation_data_replaces_the_held_out_part(tmp_path):
    (tmp_path / "a.txt").write_text("train " * 50)
    (tmp_path / "b.txt").write_text("check " * 10)
    corpus = load_corpus(str(tmp_path / "a.txt"), validation_data=str(tmp_path / "b.txt"))
    assert text(corpus.training) == "train " * 50
    assert text(corpus.held_out) == "check " * 10
    with pytest.raises(ConfigError, match=r"^validation_data: got '/none', expected stdlib or the path"):
        load_corpus(str(tmp_path / "a.txt"), validation_data="/none")


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
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("the cat sat\n" * 30)
    (data / "b.txt").write_text("cat cat the dog\n" * 10)
    corpus = load_corpus(str(data), tokenizer=str(folder))
    # Of the 520 bytes the last 26 are held out, from a line's end on: the 16 of the last line.
    assert everything(corpus.training) == [2, 3, 4, 5] * 30 + [1] + [3, 3, 2, 0, 5] * 9
    assert everything(corpus.held_out) == [3, 3, 2, 0, 5]
    assert (corpus.vocab_size, corpus.unit) == (6, "token")
    np.zeros(100, "<u2").tofile(tmp_path / "t.bin")
    assert load_corpus(str(tmp_path / "t.bin"), tokenizer=str(folder / "tokenizer.json")).vocab_size == 6


def test_a_long_text_is_encoded_in_parts_that_end_at_lines(tmp_path):
    tokenizer = Tokenizer(save_tokenizer(tmp_path / "tokenizer"))
    assert len("the cat sat\n" * 1000) > 2 * sizes.TOKENIZED
    assert tokenizer.encode("the cat sat\n" * 1000).tolist() == [2, 3, 4, 5] * 1000


def test_the_end_of_text_token_is_that_of_the_tokenizers_configuration(tmp_path):
    folder = save_tokenizer(tmp_path / "tokenizer", end="<END>")
    assert Tokenizer(folder).end_of_text is None
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<END>"}}))
    assert Tokenizer(folder).end_of_text == 1


def save_dataset(path, columns, **splits):
    datasets = pytest.importorskip("datasets")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = {name: datasets.Dataset.from_dict(rows) for name, rows in splits.items()} or None
        result = datasets.DatasetDict(whole) if whole else datasets.Dataset.from_dict(columns)
        result.save_to_disk(str(path))
    return result


def test_a_saved_dataset_of_tokens_is_not_copied(tmp_path):
    rows = [list(range(index, index + 7)) for index in range(3000)]  # more than one of Arrow's batches
    flat = [token for row in rows for token in row]
    dataset = save_dataset(tmp_path / "tokens", {"text": ["x"] * 3000, "input_ids": rows})
    corpus = load_corpus(str(tmp_path / "tokens"), vocab_size=4000)
    assert everything(corpus.training) + everything(corpus.held_out) == flat
    assert len(corpus.held_out) == len(flat) // 20
    assert corpus.unit == "token"

    import datasets

    from paramp.data.hf_datasets import tokens_of

    loaded = datasets.load_from_disk(str(tmp_path / "tokens"))
    found = tokens_of(loaded, tmp_path)
    assert everything(found) == flat
    assert all(not each.array.flags.owndata and not each.array.flags.writeable for each in found.parts)
    part = tokens_of(loaded.select(range(1500, 1510)), tmp_path)  # a slice of the buffers
    assert all(not each.array.flags.owndata and not each.array.flags.writeable for each in part.parts)
    assert everything(part) == [token for row in rows[1500:1510] for token in row]
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
    assert changed.difference(saved) == (
        f"{str(path)!r} differs from the data of the saved run "
        f"(SHA-256 of a sample of it: {earlier.sha256[:12]} saved, "
        f"{changed.sha256[:12]} now)"
    )
    path.write_text("some text " * 21)
    assert "bytes to train on: 190 saved, 200 now; SHA-256" in load_corpus(str(path)).difference(saved)


def test_saved_splits_and_text_columns_are_read(tmp_path):
    words = {"text": ["the cat sat"] * 20}
    save_dataset(tmp_path / "d", None, train=words, test={"text": ["cat"]}, validation={"text": ["sat", "the"]})
    corpus = load_corpus(str(tmp_path / "d"))
    assert text(corpus.training) == "\n".join(words["text"])
    assert text(corpus.held_out) == "sat\nthe"
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    tokens = load_corpus(str(tmp_path / "d"), tokenizer=str(tokenizer))
    assert everything(tokens.training) == ([2, 3, 4, 1] * 20)[:-1]
    assert everything(tokens.held_out) == [4, 1, 2]


def test_unusable_saved_datasets_are_errors(tmp_path):
    save_dataset(tmp_path / "columns", {"content": ["a"], "label": [1]})
    with pytest.raises(ConfigError, match=r"columns' has the columns content, label; expected input_ids"):
        load_corpus(str(tmp_path / "columns"))
    save_dataset(tmp_path / "strings", {"input_ids": ["a", "b"]})
    with pytest.raises(ConfigError, match=r"input_ids of .*strings' has the type string; expected lists of integers"):
        load_corpus(str(tmp_path / "strings"))
    save_dataset(tmp_path / "missing", {"input_ids": [[1, None, 2]]})
    with pytest.raises(ConfigError, match="has 1 missing values; expected lists of integers"):
        load_corpus(str(tmp_path / "missing"))
    save_dataset(tmp_path / "negative", {"input_ids": [[1, -3, 2] * 50]})
    with pytest.raises(ConfigError, match=r"column input_ids of .*negative', token 1 is -3, expected 0 to 9"):
        load_corpus(str(tmp_path / "negative"), vocab_size=10)
    save_dataset(tmp_path / "splits", None, one={"text": ["a"]}, two={"text": ["b"]})
    with pytest.raises(ConfigError, match="splits' has the splits one, two; expected train"):
        load_corpus(str(tmp_path / "splits"))
    for file in (tmp_path / "negative").glob("*.arrow"):
        file.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"datasets cannot load .*negative'"):
        load_corpus(str(tmp_path / "negative"))


@pytest.mark.parametrize("package", ["datasets", "tokenizers"])
def test_a_missing_extra_is_named(tmp_path, monkeypatch, package):
    (tmp_path / "dataset_dict.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(__import__("sys").modules, package, None)
    tokenizer = str(tmp_path) if package == "tokenizers" else None
    with pytest.raises(ConfigError, match=rf'needs the package {package}: pip install "paramp\[hf\]"'):
        load_corpus(str(tmp_path), tokenizer=tokenizer)


def test_paths_without_data_are_errors(tmp_path):
    def complaint(path, **options):
        with pytest.raises(ConfigError) as caught:
            load_corpus(str(path), **options)
        return str(caught.value)

    assert f"data: got '{tmp_path}/none', expected stdlib or the path of" in complaint(tmp_path / "none")
    assert "(did you mean 'stdlib'?)" in complaint("stdlob")
    assert "data: got '', expected" in complaint("")
    assert f"no file '{tmp_path}/none.idx'" in complaint(tmp_path / "none.idx")
    assert f"data: no text in the folder {str(tmp_path)!r} (0 files" in complaint(tmp_path)
    (tmp_path / "empty.txt").touch()
    assert f"data: '{tmp_path}/empty.txt' is empty" in complaint(tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    assert "latin.txt' is not text: not valid UTF-8" in complaint(tmp_path / "latin.txt")
    (tmp_path / "zero.txt").write_bytes(b"abc\0")
    assert "zero.txt' is not text: byte 3 is zero" in complaint(tmp_path / "zero.txt")
    (tmp_path / "empty.bin").touch()
    assert "empty.bin' is empty" in complaint(tmp_path / "empty.bin")
    (tmp_path / "odd.bin").write_bytes(bytes(7))
    assert "odd.bin' has 7 bytes, not a multiple of the 2 of uint16" in complaint(tmp_path / "odd.bin")
    (tmp_path / "text.txt").write_text("text " * 20)
    assert f"tokenizer: no file '{tmp_path}/tokenizer.json'" in complaint(tmp_path / "text.txt", tokenizer=tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "tokenizer.json' is not a tokenizer.json" in complaint(tmp_path / "text.txt", tokenizer=tmp_path)
    # the file is opened but each part has to be longer than a sequence
    with pytest.raises(ConfigError, match=r"expected less than the data's 5 tokens, of '.*text.txt' held out"):
        load_corpus(str(tmp_path / "text.txt")).check_seq_len(5)
    with pytest.raises(ConfigError, match=r"expected less than the data's 95 tokens, of '.*text.txt' to train on"):
        load_corpus(str(tmp_path / "text.txt")).check_seq_len(95)


def test_tokens_outside_the_vocabulary_are_found_at_opening_or_when_read(tmp_path):
    tokens = np.zeros(10**6, "<u2")
    tokens[-3] = 300
    path = tmp_path / "t.bin"
    tokens.tofile(path)
    with pytest.raises(ConfigError, match=r"t.bin' at byte 1999994 is 300, expected 0 to 255, the vocabulary's 256"):
        load_corpus(str(path))
    tokens[-3], tokens[5000] = 0, 300
    tokens.tofile(path)
    corpus = load_corpus(str(path))  # the sample does not see it
    assert training_windows(corpus.training, 10, 1, 0, 0, 8)[0].sum() == 0
    with pytest.raises(DataError, match=r"t.bin' at byte 10000 is 300, expected 0 to 255"):
        training_windows(corpus.training, 300_000, 1, 0, 0, 40)


def test_the_hash_of_large_data_reads_a_sample_of_it(tmp_path):
    path = tmp_path / "t.bin"
    path.touch()
    os.truncate(path, 10**6)
    first = load_corpus(str(path)).sha256
    os.truncate(path, 10**6 + 2)
    assert load_corpus(str(path)).sha256 != first
    os.truncate(path, 10**6)
    assert load_corpus(str(path)).sha256 == first
    with path.open("r+b") as file:
        file.write(b"\7")
    assert load_corpus(str(path)).sha256 != first
