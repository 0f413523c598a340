"""What a run writes."""

import json
import math

import pytest
import torch
from train_app.reporter import Reporter, check_tensorboard, memory_bytes
from train_app.settings import TrainConfig

import paramp

RECORD = {"step": 1, "loss": 2.5, "grad_norm": math.inf, "loss_scale": 8.0, "skipped": 1, "lr": 0.1}
RECORD |= {"tokens_per_second": 1000.0, "step_seconds": 0.5, "memory_bytes": 3 * 2**20}


def test_a_step_is_one_json_object_with_null_for_non_finite_values(tmp_path, capsys):
    """And a line of text; files of an earlier run are kept, and other ranks write nothing."""
    folder = tmp_path / "new" / "folder"
    for index in range(3):
        with Reporter(TrainConfig(steps=2, log_dir=str(folder)), True) as reporter:
            reporter.say("hello")
            reporter.step(RECORD | {"lr": float(index)})
            reporter.step({**RECORD, "step": 2, "grad_norm": 1.0, "skipped": 0})
    for index, name in enumerate(("metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl")):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        assert lines[0] == {**RECORD, "lr": float(index), "grad_norm": None}
        assert lines[1:] == [{**RECORD, "step": 2, "grad_norm": 1.0, "skipped": 0}]
    log = (folder / "train.log").read_text()
    assert capsys.readouterr().out.endswith(log)
    assert "hello" in log
    assert "step 1/2  loss 2.5000  scale 8  grad norm inf  skipped 1  1,000 tokens/s  3 MiB" in log
    assert "step 2/2  loss 2.5000  scale 8  grad norm 1.000  skipped 1  1,000 tokens/s  3 MiB" in log
    with Reporter(TrainConfig(steps=2, log_dir=str(tmp_path / "other")), False) as reporter:
        reporter.say("hello")
        reporter.step(RECORD)
    assert not (tmp_path / "other").exists()
    assert capsys.readouterr().out == ""


def test_memory_bytes_is_the_peak_of_this_process():
    assert 10 * 2**20 < memory_bytes(torch.device("cpu")) < 2**40


def test_tensorboard_gets_every_finite_scalar(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Reporter(TrainConfig(steps=2, log_dir=str(tmp_path), tensorboard=True), True) as reporter:
        reporter.step({**RECORD, "mfu": None})
        reporter.step({**RECORD, "step": 2, "loss": math.nan, "grad_norm": 1.5, "val_loss": 2.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = {tag: events.Tensors(tag) for tag in events.Tags()["tensors"]}
    assert "speed/mfu" not in tags
    assert [event.step for event in tags["train/loss"]] == [1]
    assert [event.step for event in tags["train/grad_norm"]] == [2]
    assert [event.step for event in tags["val/loss"]] == [2]
    assert tags["memory/peak_bytes"][0].tensor_proto.double_val[0] == RECORD["memory_bytes"]


def test_a_missing_tensorboard_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(paramp.ConfigError, match="no log_dir"):
        TrainConfig(tensorboard=True)
    monkeypatch.setattr("train_app.reporter.importlib.util.find_spec", lambda name: None)
    with pytest.raises(paramp.ConfigError, match=r"pip install .paramp\[tensorboard\]"):
        check_tensorboard()
