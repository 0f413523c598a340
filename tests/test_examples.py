"""The examples run as their first lines say."""

import json
import runpy
import sys

import numpy as np
import pytest
from commands import ROOT, python, torchrun
from test_data import save_tokenizer


def losses(output):
    return [float(line.split("loss ")[1].split(",")[0]) for line in output.splitlines() if "loss" in line]


@pytest.mark.parametrize("example", ["own_model", "huggingface_llama"])
def test_an_example_is_the_same_on_one_rank_and_on_four(example):
    if example == "huggingface_llama":
        pytest.importorskip("transformers")
    alone = python(f"examples/{example}.py")
    assert alone.returncode == 0, alone.stderr
    spread = torchrun(4, f"examples/{example}.py", "2", "2")
    assert spread.returncode == 0, spread.stderr
    assert len(losses(alone.stdout)) == 4
    assert losses(alone.stdout)[-1] < losses(alone.stdout)[0]
    for one, four in zip(losses(alone.stdout), losses(spread.stdout), strict=True):
        assert abs(one - four) < 2e-3


def test_the_scaler_example_shows_ranks_that_agree():
    result = torchrun(2, "examples/torchs_scaler_diverges.py")
    assert result.returncode == 0, result.stderr
    ours = result.stdout.partition("paramp.DistributedGradScaler")[2]
    assert ours.count("scale 4, replicated weight 1.00") == 2


def prepare_data(monkeypatch, capsys, *arguments):
    """The exit code of examples/prepare_data.py, run in this process, and what it prints."""
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples/prepare_data.py"), run_name="__main__")
    printed = capsys.readouterr()
    return ended.value.code, printed.out + printed.err


def test_prepared_tokens_are_what_is_trained_on(tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat\nthe dog sat\n" * 200)
    folder = save_tokenizer(tmp_path / "tokenizer")
    output = tmp_path / "prepared"
    code, printed = prepare_data(monkeypatch, capsys, text, "--output", output, "--tokenizer", folder)
    assert code == 0, printed
    expected = [2, 3, 4, 5, 2, 0, 4, 5] * 200
    training, held_out = (np.fromfile(output / name, "<u2").tolist() for name in ("train.bin", "val.bin"))
    assert training + held_out == expected
    assert len(held_out) == 80  # the last 240 of 4800 bytes
    meta = json.loads((output / "meta.json").read_text())
    assert (meta["dtype"], meta["vocab_size"], meta["training_tokens"]) == ("uint16", 6, len(training))
    assert sorted(path.name for path in output.iterdir()) == ["meta.json", "train.bin", "val.bin"]

    arguments = ["--batch-size", "8", "--seq-len", "32", "--steps", "3", "--set", "train.eval_sequences=8"]
    result = torchrun(2, "launch/train.py", "--tp", "2", "--data", str(output), *arguments)
    assert result.returncode == 0, result.stderr
    assert "data_vocab_size = 6" in result.stdout
    assert "data_tokens = 1600" in result.stdout
    assert "nats/token; " in result.stdout
    assert "bigram" not in result.stdout


def test_prepared_bytes_of_a_folder_are_split_by_file(tmp_path, monkeypatch, capsys):
    from paramp.data import load_corpus

    texts = tmp_path / "texts"
    texts.mkdir()
    for index in range(60):
        (texts / f"{index}.txt").write_text(f"file {index}\n")
    code, printed = prepare_data(monkeypatch, capsys, texts, "--output", tmp_path / "out")
    assert code == 0, printed
    direct, prepared = load_corpus(str(texts)), load_corpus(str(tmp_path / "out"))
    assert (prepared.unit, prepared.vocab_size) == ("byte", 256)
    for one, other in ((direct.training, prepared.training), (direct.held_out, prepared.held_out)):
        assert one.read(0, len(one)).tolist() == other.read(0, len(other)).tolist()


def test_what_prepare_data_refuses(tmp_path, monkeypatch, capsys):
    text, output = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("some text\n" * 10)

    def refused(*arguments):
        code, printed = prepare_data(monkeypatch, capsys, *arguments, "--output", output)
        assert code == 2
        assert printed.count("\n") == 1
        assert not output.exists() or not any(path.name.startswith(".") for path in output.iterdir())
        return printed

    assert "error: input: '/none' does not exist" in refused("/none")
    assert "error: tokenizer: no file '/none'" in refused(text, "--tokenizer", "/none")
    (tmp_path / "one.txt").write_text("x")
    assert "too few to hold some out" in refused(tmp_path / "one.txt")
    assert list(output.iterdir()) == []
    assert prepare_data(monkeypatch, capsys, text, "--output", output)[0] == 0
    before = (output / "train.bin").read_bytes()
    text.write_text("other text\n" * 10)
    assert "train.bin' exists; give another folder, or --force" in refused(text)
    assert (output / "train.bin").read_bytes() == before
    assert prepare_data(monkeypatch, capsys, text, "--output", output, "--force")[0] == 0
    assert (output / "train.bin").read_bytes() != before
