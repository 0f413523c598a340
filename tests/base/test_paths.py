"""A path that begins with ``~`` lies in the home folder, in every call that takes one."""

import pytest
import torch
from small_engines import engine_of

import paramp
from paramp.base.values_checked_by_type import user_path
from paramp.checkpoint.convert import export_weights, import_weights
from paramp.checkpoint.open_checkpoint import OpenCheckpoint
from paramp.config.files import read_file


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
