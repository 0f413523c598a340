"""``reproducible=True`` with parameters that FSDP2 shards: the bits of one process, as each mode rounds."""

import pytest
import torch
from beside_plain import randn, seeded
from exact_training import LAYOUTS, Part, assert_same_bits, reference, train, trained
from families import SEED, WHOLE, cases, family, number
from pool import on_ranks, run_on_ranks
from small_engines import engine_of
from torch import nn

import paramp
from paramp.base import sizes

GPT = "gpt" if WHOLE or SEED else "small gpt"
STEPS = number(7, 12)


def train_in_pieces(world, **given):
    """As :func:`train`, with gradients that are summed over data ranks a few elements at a time."""
    before, sizes.SUM_PIECE = sizes.SUM_PIECE, 100
    try:
        return train(world, **given)
    finally:
        sizes.SUM_PIECE = before


@family
@pytest.mark.parametrize("layout", cases("uneven", ["fsdp2", "fsdp4", "hsdp2x2"], ["fsdp2"], 1))
def test_shards_of_different_sizes_and_parameters_without_a_gradient(layout):
    task, mode = "uneven", "16-mixed"
    expected = reference(task, mode, 6)
    given = {"task": task, "mode": mode, "layout": layout, "part": Part(0, 6), "options": {}}
    assert_same_bits(run_on_ranks(LAYOUTS[layout][0], __name__, "train_in_pieces", given)[0], expected)


USES = ["gpt", "gpt, looked at", "gpt, averaged", "gpt, untied", "gpt, counted", "convolutional"]
USES += [f"own, {kind}" for kind in ("shared parameter", "called twice")]
REFERENCES = {"gpt, looked at": "gpt"}


@family
@pytest.mark.parametrize("task", cases("fsdp uses", USES, ["gpt", "own, shared parameter"], 2))
def test_models_have_the_same_bits(task):
    """Of weights, masters, moments, losses and norms; with steps that overflow, and others that are made.

    ``system/test_reproducible`` trains the GPT on every layout in every mode.
    """
    expected = reference(REFERENCES.get(task, task), "16-mixed", 4)
    assert expected["num_skipped"] == 3 or task != "gpt"
    assert_same_bits(trained(task, "16-mixed", "fsdp2", Part(0, 4)), expected)


RESUMED = [("fsdp2", "tp2"), ("tp2", "fsdp2"), ("fsdp4", "1"), ("hsdp2x2", "pp2·fsdp2")]
OF_RESUMED = [(*layouts, mode) for layouts in RESUMED for mode in ("16-mixed", "bf16-naive", "16-naive")]


@family
@pytest.mark.parametrize(
    ("before", "after", "mode"), cases("fsdp resumed", OF_RESUMED, [("fsdp2", "tp2", "16-mixed")], 1)
)
def test_a_run_that_was_stopped_goes_on_in_another_layout(before, after, mode, tmp_path):
    path = str(tmp_path / "checkpoint")
    first = trained(GPT, mode, before, Part(0, STEPS // 2, save=path))
    expected = reference(GPT, mode, STEPS)
    assert first["steps"] == expected["steps"][: STEPS // 2]
    assert_same_bits(trained(GPT, mode, after, Part(STEPS // 2, STEPS, load=path)), expected)


class Failing:
    """A criterion that fails in the chosen call, counted from 1."""

    def __init__(self):
        self.chosen = 0

    def __call__(self, output, target):
        self.chosen -= 1
        if self.chosen == 0:
            raise ArithmeticError("chosen")
        return nn.functional.mse_loss(output, target)


@on_ranks(2)
def test_what_a_failed_batch_left_is_not_in_the_next(world):
    """It fails in its second chunk, so that the first has left gradients."""
    x, y = randn(2, 3, 4, 8, seed=world.rank)
    found = []
    for fails in (False, True):
        with paramp.launch_from_torch({"parallel": {"data": {"shard": 2}}, "reproducible": True}):
            model, criterion = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))), Failing()
            engine = engine_of(model, criterion, torch.optim.AdamW)
            engine.forward_backward(x[0], y[0])
            engine.step()
            if fails:
                criterion.chosen = 2
                with pytest.raises(ArithmeticError, match="chosen"):
                    engine.forward_backward(x[1], y[1])
                engine.zero_grad()
            engine.forward_backward(x[2], y[2])
            engine.step()
            found.append(engine.full_state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
