"""A path that begins with ``~`` lies in the home folder, in every call that takes one."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import paramp
from paramp.base.coerce import user_path
from paramp.checkpoint.convert import export_weights, import_weights
from paramp.checkpoint.open_checkpoint import OpenCheckpoint
from paramp.config.files import read_file
from paramp.observe.grad_histogram import GradientHistogram
from paramp.observe.reporter import Reporter


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


def test_an_engine_saves_and_loads_there(home):
    with paramp.launch_from_torch():
        model = torch.nn.Linear(2, 2)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        engine.save("~/one")
        engine.load("~/one")
        checkpoints = paramp.Checkpoints("~/run", every=1, keep_best="min")
        assert checkpoints.newest() is None
        saved = checkpoints.save(engine, 1, metric=0.5, wait=True)
        assert saved == checkpoints.newest() == checkpoints.best() == home / "run/step-00000001"
        with engine.recording() as timeline:
            engine.forward_backward(torch.ones(2, 2), torch.ones(2, 2))
        timeline.save("~/trace.json")
    export_weights("~/one", "~/weights.safetensors")
    import_weights("~/weights.safetensors", "~/imported")
    with OpenCheckpoint("~/imported") as checkpoint:
        assert checkpoint.path == home / "imported"
    assert {path.name for path in home.iterdir()} >= {"one", "run", "trace.json", "weights.safetensors", "imported"}


def test_configurations_are_read_and_logs_written_there(home):
    (home / "config.toml").write_text("seed = 7")
    assert read_file("~/config.toml") == {"seed": 7}
    with paramp.Metrics("~/metrics") as metrics:
        metrics.write(1, loss=1.0)
    with Reporter(1, "~/log", enabled=True) as reporter:
        reporter.say("a line")
    histogram = GradientHistogram(Counter({0: 1}), 0, 0, 1.0, 1.0, torch.float16)
    histogram.save("~/histogram.json")
    assert {path.name for path in home.iterdir()} == {"config.toml", "metrics", "log", "histogram.json"}
