"""Text that is converted to token files, and what the train script makes of them."""

import json
import sys

import numpy as np
import pytest
from commands import succeeded, torchrun
from prepare_data import main
from test_corpus import save_tokenizer
from train_app.corpus import load_corpus


def prepare_data(*arguments):
    """The exit code of launch/prepare_data.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prepare_data", *map(str, arguments)])
        return main()


def test_prepared_tokens_are_what_is_trained_on(tmp_path):
    text, output = tmp_path / "text.txt", tmp_path / "prepared"
    text.write_text("the cat sat\nthe dog sat\n" * 200)
    assert prepare_data(text, "--output", output, "--tokenizer", save_tokenizer(tmp_path / "tokenizer")) == 0
    training, held_out = (np.fromfile(output / name, "<u2").tolist() for name in ("train.bin", "val.bin"))
    assert training + held_out == [2, 3, 4, 5, 2, 0, 4, 5] * 200
    assert len(held_out) == 80
    meta = json.loads((output / "meta.json").read_text())
    assert (meta["dtype"], meta["vocab_size"], meta["training_tokens"]) == ("uint16", 6, len(training))
    assert sorted(path.name for path in output.iterdir()) == ["meta.json", "train.bin", "val.bin"]

    arguments = ["--batch-size", "8", "--seq-len", "32", "--steps", "3", "--set", "train.eval_sequences=8"]
    result = succeeded(torchrun(2, "launch/train.py", "--tp", "2", "--data", str(output), *arguments))
    assert all(part in result.stdout for part in ("data_vocab_size = 6", "data_tokens = 1600", "nats/token; "))
    assert "bigram" not in result.stdout


def test_prepared_bytes_of_a_folder_are_split_by_file_and_kept(tmp_path, capsys):
    texts, output = tmp_path / "texts", tmp_path / "out"
    texts.mkdir()
    for index in range(60):
        (texts / f"{index}.txt").write_text(f"file {index}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        assert prepare_data("~/texts", "--output=~/out") == 0  # which a shell leaves as it is
    direct, prepared = load_corpus(str(texts)), load_corpus(str(output))
    assert (prepared.unit, prepared.vocab_size) == ("byte", 256)
    for one, other in ((direct.training, prepared.training), (direct.held_out, prepared.held_out)):
        assert one.read(0, len(one)).tolist() == other.read(0, len(other)).tolist()
    before = (output / "train.bin").read_bytes()
    (texts / "0.txt").write_text("other text\n")
    for data, folder, message in (
        ("/none", "other", "input: '/none' does not exist"),
        (texts, "out", "exists; give another folder, or --force"),
    ):
        assert prepare_data(data, "--output", tmp_path / folder) == 2
        printed = capsys.readouterr().err
        assert message in printed
        assert printed.count("\n") == 1
    assert (output / "train.bin").read_bytes() == before
    for folder in (output, texts / "out", texts / "out"):  # what is in the input folder is not read a second time
        assert prepare_data(texts, "--output", folder, "--force") == 0
        for name in ("train.bin", "val.bin", "meta.json"):
            assert (folder / name).read_bytes() == (output / name).read_bytes()
    assert (output / "train.bin").read_bytes() != before
