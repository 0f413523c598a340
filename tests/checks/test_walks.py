"""What a reader follows: the files that run in one step, and the modules that a scaler on its own loads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import paramp

SCALER = (
    "import sys, paramp; paramp.DistributedGradScaler; print(sum(name.startswith('paramp') for name in sys.modules))"
)


def walked(function):
    """The number of files of the package that run in ``function``, and of their lines."""
    seen = set()

    def see(frame, event, _):
        if event == "call" and f"{os.sep}paramp{os.sep}" in frame.f_code.co_filename:
            seen.add(frame.f_code.co_filename)

    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(seen), sum(len(Path(name).read_text(encoding="utf-8").splitlines()) for name in seen)


@pytest.mark.parametrize(
    ("mode", "forward_backward", "step"), [("16-mixed", (12, 2323), (12, 2402)), ("16-naive", (12, 2323), (13, 2591))]
)
def test_one_step_of_one_process_crosses_few_files(mode, forward_backward, step):
    with paramp.launch_from_torch({"precision": mode, "clip_grad_norm": 1.0, "emulate_fp16": False}):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), nn.functional.mse_loss)
        x = torch.randn(4, 8)
        for _ in range(2):
            engine.forward_backward(x, x)
            engine.step()
        run = walked(lambda: engine.forward_backward(x, x))
        stepped = walked(engine.step)
    for found, most in ((run, forward_backward), (stepped, step)):
        assert found[0] <= most[0]
        assert found[1] <= most[1]


def test_a_scaler_on_its_own_loads_few_modules():
    assert int(subprocess.check_output([sys.executable, "-c", SCALER], text=True)) <= 12
