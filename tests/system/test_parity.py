"""AdamW in fp32 against a plain single-process loop (other modes and layouts: test_matrix.py)."""

import pytest
import torch
from families import number
from pool import on_ranks
from reference import batches, plain_fp32_training, rank_slice, small_gpt

import paramp

LAYOUTS_4 = {
    "pp2-tp2": {"pipeline": {"size": 2, "microbatches": 4}, "tensor": 2},
    "pp2-tp2-gpipe": {"pipeline": {"size": 2, "microbatches": 4, "schedule": "gpipe"}, "tensor": 2},
    "pp2-tp2-sp": {"pipeline": {"size": 2, "microbatches": 4}, "tensor": 2, "sequence_parallel": True},
    "pp4": {"pipeline": {"size": 4, "microbatches": 4}},
    "tp4": {"tensor": 4},
}


def train(world, parallel, steps, num_layers, **config):
    config = {"parallel": parallel, "clip_grad_norm": 1.0, **config}
    with paramp.launch_from_torch(config, device=world.device) as context:
        model = small_gpt(num_layers=num_layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, *_ = paramp.initialize(model, optimizer, paramp.models.GPT.loss)
        losses = []
        for x, y in batches(steps):
            x, y = (rank_slice(t, context.dp.rank, context.dp.size) for t in (x, y))
            losses.append(engine.forward_backward(x, y).item())
            result = engine.step()
            assert result.stepped
            engine.zero_grad()
        return losses, engine.full_state_dict()


def compare(actual, expected, loss_tolerance, weight_tolerance):
    losses, weights = actual
    reference_losses, reference_weights = expected
    assert max(abs(a - b) for a, b in zip(losses, reference_losses, strict=True)) <= loss_tolerance
    assert weights.keys() == reference_weights.keys()
    for name, weight in weights.items():
        difference = (weight - reference_weights[name]).abs().max().item()
        assert difference <= weight_tolerance, f"{name}: {difference}"


@pytest.mark.parametrize("steps", [number(6, 20)])
@pytest.mark.parametrize("layout", LAYOUTS_4)
@on_ranks(4, cuda=True)
def test_fp32_follows_plain_torch_on_four_ranks(world, layout, steps):
    num_layers = 4 if layout == "pp4" else 2
    compare(train(world, LAYOUTS_4[layout], steps, num_layers), plain_fp32_training(steps, num_layers), 1e-5, 2e-5)
