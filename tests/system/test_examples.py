"""The examples run as their first lines say."""

import contextlib
import io
import math
import re
import runpy
import sys

import numpy as np
import pytest
import torch
from commands import ROOT, python, succeeded, torchrun
from families import WHOLE, family, long, rarely
from pool import run_on_ranks
from test_dataloader import few_cores

import paramp
from paramp.compat.apex import amp

SHORT_LOOPS = {} if WHOLE else {"huggingface_llama": ("range(1, 21)", "range(1, 11)")}
"""What makes an example short in ``make test``."""


def losses(output):
    return [float(line.split("loss ")[1].split(",")[0]) for line in output.splitlines() if "loss" in line]


def run_example(name, *arguments):
    """What an example prints, run in this process; on a rank of the pool it takes part in that world."""
    path, printed = ROOT / f"examples/{name}.py", io.StringIO()
    before, sys.argv = sys.argv, [name, *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(printed):
            if name in SHORT_LOOPS:
                source = path.read_text(encoding="utf-8")
                assert SHORT_LOOPS[name][0] in source
                code = compile(source.replace(*SHORT_LOOPS[name]), str(path), "exec")
                exec(code, {"__name__": "__main__", "__file__": str(path)})
            else:
                runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = before
    return printed.getvalue()


def on_rank(world, name, arguments):
    return run_example(name, 2, 2, *arguments)


def run_on_four_ranks(name, *arguments):
    return run_on_ranks(4, __name__, "on_rank", {"name": name, "arguments": arguments})


LAYOUTS = ("--tp 2 --pp 2", "--fsdp 4", "--fsdp 2 --replicate 2", "--dp 2 --zero 1")
SAME = [*(("own_model", flags) for flags in LAYOUTS), ("huggingface_llama", "")]


@family
@pytest.mark.parametrize(("name", "flags"), rarely(SAME, SAME[0]))
def test_an_example_is_the_same_on_one_rank_and_on_four(name, flags):
    if name == "huggingface_llama":
        of_a_pretrained_model(name)
        return
    alone = succeeded(python("examples/own_model.py"))
    spread = succeeded(python("-m", "paramp", "run", "examples/own_model.py", *flags.split()))
    assert (alone.stderr, spread.stderr) == ("", "")
    assert len(losses(alone.stdout)) == 4
    assert losses(alone.stdout)[-1] < losses(alone.stdout)[0]
    assert losses(spread.stdout) == pytest.approx(losses(alone.stdout), abs=2e-3)


def of_a_pretrained_model(name):
    pytest.importorskip("transformers")
    alone = losses(run_example(name))
    assert len(alone) == (4 if WHOLE else 2)
    assert alone[-1] < alone[0]
    assert losses(run_on_four_ranks("huggingface_llama")[0]) == pytest.approx(alone, abs=2e-3)


def test_the_scaler_example_shows_ranks_that_agree():
    result = succeeded(torchrun(2, "examples/torchs_scaler_diverges.py"))
    ours = result.stdout.partition("paramp.DistributedGradScaler")[2]
    assert ours.count("scale 4, replicated weight 1.00") == 2
    if torch.__version__.startswith("2.13."):
        assert result.stdout in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_the_apex_script_learns_at_every_level(level):
    amp.reset()
    try:
        printed = run_example("apex_migration", level)
    finally:
        amp.reset()
    first, *_, last = (line for line in printed.splitlines() if line.startswith("step"))
    assert losses(last)[0] < 0.75 * losses(first)[0]
    assert last.endswith("scales 65536, 65536" if level in ("O1", "O2") else "scales 1, 1")


def save_cifar10(folder, training, held_out):
    """Files in the form of CIFAR-10's, in two batches: each class has a brightness of its own."""
    folder = folder / "cifar-10-batches-bin"
    folder.mkdir()
    labels = np.arange(training + held_out) % 10
    pixels = np.random.default_rng(0).integers(0, 30, (len(labels), 3072)) + labels[:, None] * 20
    parts = np.split(np.column_stack([labels, pixels]).astype(np.uint8), [training // 2, training])
    for name, part in zip(("data_batch_1", "data_batch_2", "test_batch"), parts, strict=True):
        part.tofile(folder / f"{name}.bin")


@pytest.mark.parametrize(
    ("name", "arguments", "untrained"),
    [
        ("gpt", ["--data", "TEXT", "--seq-len", "32"], math.log(256)),
        ("vision", ["--images", "CIFAR", "--precision", "32-true"], math.log(10)),  # halves are slow on a CPU
        pytest.param("vision", ["--images", "CIFAR"], math.log(10), marks=[family, long]),
        pytest.param("vision", ["--images", "CIFAR", "--model", "vit"], math.log(10), marks=[family, long]),
    ],
    ids=["gpt", "resnet-fp32", "resnet", "vit"],
)
def test_an_example_of_a_model_is_the_same_on_one_rank_and_on_four(tmp_path, name, arguments, untrained):
    (tmp_path / "text").write_text("the cat sat on the mat\n" * 200)
    save_cifar10(tmp_path, training=48, held_out=67)  # two batches, the last of an odd number
    places = {"TEXT": str(tmp_path / "text"), "CIFAR": str(tmp_path)}
    arguments = [places.get(argument, argument) for argument in arguments] + ["--steps", "10", "--batch-size", "8"]
    (alone,) = losses(run_example(name, *arguments))
    assert alone < untrained - 0.2
    printed = run_on_four_ranks(name, *arguments)
    for rank, text in enumerate(printed):
        assert text.startswith(f"rank {rank} has ")
        assert ("head" in text or "fc" in text) == (rank >= 2)  # the last stage
    assert losses(printed[0]) == pytest.approx([alone], abs=5e-3)
    assert ("of 67 held-out images are recognised" in printed[0]) == (name == "vision")


EPOCH = re.compile(r"Epoch (\d+) - train loss: (\S+), lr: (\S+)$", re.MULTILINE)


@family
@pytest.mark.real_sizes  # its 21 million parameters would be 110,000 blocks
@pytest.mark.parametrize("num_ranks", rarely([1, 2], 1))
@few_cores
def test_the_script_of_colossalais_document_trains(tmp_path, monkeypatch, capsys, num_ranks):
    save_cifar10(tmp_path, training=8, held_out=8)
    monkeypatch.setenv("DATA", str(tmp_path))
    if num_ranks == 1:
        try:
            run_example("colossalai_resnet34", "naive", "--epochs", 1, "--images", 2, "--batch-size", 2)
            assert paramp.get_context().config.NUM_EPOCHS == 1
        finally:
            paramp.get_context().close()
        ((_, loss, rate),) = EPOCH.findall(capsys.readouterr().err)
        assert 0 < float(loss) < 100
        assert float(rate) == 0.0  # the cosine of one epoch has ended
        return
    arguments = ["--epochs", "1", "--images", "4", "--batch-size", "2"]
    spread = succeeded(torchrun(2, "examples/colossalai_resnet34.py", *arguments, DATA=str(tmp_path)))
    assert [found[::2] for found in EPOCH.findall(spread.stderr)] == [("0", "0")]  # rank 0 alone says so
