"""A checkpoint that version 0.1.0 saved before its modules were moved into packages: it loads, and training goes on."""

import functools
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from reference import batches, small_gpt

import paramp
from paramp.checkpoint.convert import export_weights

SAVED = Path(__file__).parent / "data" / "before_packages"
"""A checkpoint after 3 steps in 16-naive with remainder masters, its exported weights, and what the next steps were."""


@pytest.fixture
def engine():
    with paramp.launch_from_torch({"precision": "16-naive", "masters": "remainder", "clip_grad_norm": 1.0}):
        model = small_gpt(seed=1, num_layers=1, num_heads=2, width=8, max_seq_len=8, vocab_size=32, dropout=0.1)
        yield paramp.initialize(
            model,
            functools.partial(torch.optim.AdamW, lr=1e-2),
            model.loss,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        )


def test_weights_and_next_losses_are_those_of_the_run_that_saved(engine):
    engine, _, _, scheduler = engine
    engine.load(SAVED / "checkpoint")
    weights = engine.full_state_dict()
    expected = safetensors.torch.load_file(SAVED / "weights.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert (engine.num_steps, engine.num_skipped) == (3, 0)
    steps = json.loads((SAVED / "next_steps.json").read_text())["loss and gradient norm of the next steps"]
    for (x, y), (loss, norm) in zip(list(batches(6, size=4, vocab=32, length=8))[3:], steps, strict=True):
        engine.zero_grad()
        engine.forward_backward(x, y, return_loss=False)
        result = engine.step()
        scheduler.step()
        # The same bits on the machine that saved it; kernels of other machines sum in another order.
        assert result.loss == pytest.approx(loss, rel=1e-3)
        assert result.grad_norm == pytest.approx(norm, rel=1e-2)


def test_export_gives_the_same_file(tmp_path):
    file = export_weights(SAVED / "checkpoint", tmp_path / "weights.safetensors")
    assert file.read_bytes() == (SAVED / "weights.safetensors").read_bytes()
