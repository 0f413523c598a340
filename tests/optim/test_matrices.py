"""Several optimizers, and those that need whole matrices where ranks have shards, against one process."""

import functools

import pytest
import torch
import torch.nn.functional as F
from families import WHOLE, cases, family
from pool import on_ranks
from reference import batches, rank_slice, small_gpt
from torch import nn

import paramp

NOISE = 1e-7


def hidden_and_rest(model):
    """The 2-dim weights of the blocks, and the other parameters."""
    hidden = [value for name, value in model.named_parameters() if name.startswith("blocks.") and value.ndim == 2]
    chosen = set(hidden)
    return hidden, [value for value in model.parameters() if value not in chosen]


def muon_and_adamw(model):
    hidden, rest = hidden_and_rest(model)
    return [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]


def one_process(make, steps, noise=0.0, clip=1.0):
    """The weights after a plain torch loop, whose gradients are multiplied by 1 + ``noise`` x standard normal."""
    model = small_gpt(num_layers=2)
    optimizers = make(model)
    generator = torch.Generator().manual_seed(1)
    for x, y in batches(steps):
        model.zero_grad()
        logits = model(x)
        F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1)).backward()
        for parameter in model.parameters():
            parameter.grad *= 1 + noise * torch.randn(parameter.shape, generator=generator)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def in_layout(parallel, make, steps, precision="32-true", clip=1.0):
    with paramp.launch_from_torch(
        {"parallel": parallel, "precision": precision, "clip_grad_norm": clip}
    ) as context:
        model = small_gpt(num_layers=2)
        engine, *_ = paramp.initialize(model, make(model), model.loss)
        for x, y in batches(steps):
            engine.forward_backward(*(rank_slice(value, context.dp.rank, context.dp.size) for value in (x, y)))
            assert engine.step().stepped
        return engine.full_state_dict()


def distance(weights, others):
    return max((weights[name] - other).abs().max().item() for name, other in others.items())


LAYOUTS = {
    "tp2": {"tensor": 2},
    "dp2-zero": {"zero": 1},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_muon_and_adamw_follow_one_process(world, layout):
    expected = one_process(muon_and_adamw, 20)
    allowed = 3 * distance(one_process(muon_and_adamw, 20, NOISE), expected)
    actual = in_layout(LAYOUTS[layout], muon_and_adamw, 20)
    print("DRIFT", layout, allowed / 3, distance(actual, expected))
    assert 0 < distance(actual, expected) <= allowed
