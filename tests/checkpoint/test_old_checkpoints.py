"""Checkpoints that version 0.1.0 saved before its modules were moved into packages: they load, and training goes on."""

import functools
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from pool import on_ranks
from reference import batches, small_gpt
from small_engines import engine_of, own_part

import paramp
from paramp.checkpoint.convert import export_weights

DATA = Path(__file__).parent / "data"
SAVED = DATA / "before_packages"
"""A checkpoint after 3 steps in 16-naive with remainder masters, its exported weights, and what the next steps were."""
OPTIONS = {"precision": "16-naive", "masters": "remainder", "clip_grad_norm": 1.0}
FOUR_RANKS = {"pp2_tp2": {"pipeline": 2, "tensor": 2}, "dp2_tp2_zero1": {"data": 2, "tensor": 2, "zero": 1}}
"""The layouts of those that four ranks saved."""
SHAPE = {"seed": 1, "num_heads": 2, "width": 8, "max_seq_len": 8, "vocab_size": 32}


@pytest.fixture
def engine():
    with paramp.launch_from_torch(OPTIONS):
        model = small_gpt(num_layers=1, dropout=0.1, **SHAPE)
        yield paramp.initialize(
            model,
            functools.partial(torch.optim.AdamW, lr=1e-2),
            model.loss,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        )


def assert_goes_on(engine, folder, then=lambda: None):
    engine.load(folder / "checkpoint")
    weights = engine.full_state_dict()
    expected = safetensors.torch.load_file(folder / "weights.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert (engine.num_steps, engine.num_skipped) == (3, 0)
    steps = json.loads((folder / "next_steps.json").read_text())["loss and gradient norm of the next steps"]
    for batch, (loss, norm) in zip(list(batches(6, size=4, vocab=32, length=8))[3:], steps, strict=True):
        engine.zero_grad()
        engine.forward_backward(*own_part(engine.context, *batch), return_loss=False)
        result = engine.step()
        then()
        # The same bits on the machine that saved it; kernels of other machines sum in another order.
        assert result.loss == pytest.approx(loss, rel=1e-3)
        assert result.grad_norm == pytest.approx(norm, rel=1e-2)


def test_weights_and_next_losses_are_those_of_the_run_that_saved(engine):
    engine, _, _, scheduler = engine
    assert_goes_on(engine, SAVED, scheduler.step)


@pytest.mark.parametrize("saved", FOUR_RANKS)
@on_ranks(4)
def test_those_of_four_ranks_load_on_their_layout_and_another(world, saved):
    for parallel in (FOUR_RANKS[saved], {"data": 2, "pipeline": 2, "zero": 1}):
        with paramp.launch_from_torch(OPTIONS | {"parallel": parallel}):
            model = small_gpt(num_layers=2, **SHAPE)
            engine = engine_of(model, model.loss, functools.partial(torch.optim.AdamW, lr=1e-2))
            assert_goes_on(engine, DATA / saved)


def test_export_gives_the_same_file(tmp_path):
    file = export_weights(SAVED / "checkpoint", tmp_path / "weights.safetensors")
    assert file.read_bytes() == (SAVED / "weights.safetensors").read_bytes()
