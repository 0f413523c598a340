"""A path that begins with ``~`` lies in the home folder, in every call that takes one. Relative ones stay in place."""

import pytest
import torch
from small_engines import engine_of

import paramp
from paramp.base.values_checked_by_type import user_path
from paramp.checkpoint.convert import export_weights, import_weights
from paramp.checkpoint.open_checkpoint import OpenCheckpoint
from paramp.compat.colossalai.trainer.hooks import SaveCheckpointHook
from paramp.config.files import read_file
from paramp.observe.timeline import RankSpans, Span, Timeline


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(elsewhere)
    yield folder
    assert not [*elsewhere.iterdir()]


def test_only_a_leading_tilde_is_the_home_folder(home):
    assert user_path("~/a") == home / "a"
    assert str(user_path("a/~")) == "a/~"
    assert str(user_path("~nobody-of-this-name/a")) == "~nobody-of-this-name/a"


def test_files_are_read_and_written_there(home):
    (home / "config.toml").write_text("seed = 7")
    assert read_file("~/config.toml") == {"seed": 7}
    with paramp.launch_from_torch("~/config.toml"):
        engine = engine_of(torch.nn.Linear(2, 2))
        engine.save("~/one")
        engine.load("~/one")
        checkpoints = paramp.Checkpoints("~/run", every=1, keep_best="min")
        assert checkpoints.newest() is None
        saved = checkpoints.save(engine, 1, metric=0.5, wait=True)
        assert saved == checkpoints.newest() == checkpoints.best() == home / "run/step-00000001"
        with engine.recording() as timeline:
            loss = engine.forward_backward(torch.ones(2, 2), torch.ones(2, 2))
        timeline.save("~/trace.json")
        engine.gradient_histogram().save("~/histogram.json")
    export_weights("~/one", "~/weights.safetensors")
    import_weights("~/weights.safetensors", "~/imported")
    with OpenCheckpoint("~/imported") as checkpoint:
        assert checkpoint.path == home / "imported"
    with paramp.Metrics("~/metrics") as metrics:
        metrics.write(1, loss=loss)
    names = {"config.toml", "one", "run", "trace.json", "histogram.json", "weights.safetensors", "imported"}
    assert {path.name for path in home.iterdir()} == names | {"metrics"}


def test_what_keeps_a_relative_path_keeps_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    timeline = Timeline("1f1b", [RankSpans("rank 0", [Span("forward", 0.0, 0.5, 0, 0)])], [[0]])
    with paramp.launch_from_torch(), paramp.Metrics("run") as metrics:
        engine, checkpoints = engine_of(torch.nn.Linear(2, 2)), paramp.Checkpoints("run", keep_last=1, keep_best="min")
        hook = SaveCheckpointHook(checkpoint_dir="run")
        checkpoints.save(engine, 1, metric=2.0)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        saved = checkpoints.save(engine, 2, metric=1.0, wait=True)
        assert metrics.record(2, timeline) == tmp_path / "run/traces/step-2.json"
    assert saved == checkpoints.best() == tmp_path / "run/step-00000002"
    assert hook.checkpoint_dir == tmp_path / "run"
    names = {"best.json", "step-00000002", "metrics.jsonl", "events.jsonl", "traces"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == names
