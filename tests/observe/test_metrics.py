"""The log of metrics that any loop writes."""

import math

import torch

from paramp.observe.metrics import Metrics
from paramp.tools.plot import read_run


def test_a_loop_writes_metrics_of_its_own(tmp_path):
    folder = tmp_path / "new" / "run"
    for resumed_at in (None, 2):
        with Metrics(folder, resumed_at=resumed_at) as metrics:
            for step in range((resumed_at or 0) + 1, 4):
                metrics.write(step, loss=torch.tensor(0.5), grad_norm=math.inf, accuracy=step / 4, skipped=0)
    run = read_run(folder)  # as `paramp plot` does
    assert run.records == [
        {"step": step, "loss": 0.5, "grad_norm": None, "accuracy": step / 4, "skipped": 0} for step in (1, 2, 3)
    ]
    assert len((folder / "metrics.1.jsonl").read_text().splitlines()) == 3
    with Metrics(tmp_path / "none", enabled=False) as metrics:
        metrics.write(1, loss=0.5)
    assert not (tmp_path / "none").exists()
