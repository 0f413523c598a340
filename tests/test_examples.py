"""The examples run as their first lines say."""

import pytest
from commands import python, torchrun


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
