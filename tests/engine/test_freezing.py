"""Parameters that are frozen and unfrozen between steps, against a plain torch loop that does the same."""

import pytest
import torch
from pool import on_ranks
from reference import assert_trained, rank_slice
from torch import nn

import paramp

LAYOUTS = {
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": {"size": 2, "microbatches": 2, "split": ["2"]}},
    "zero1": {"data": 2, "zero": 1},
    "fsdp2": {"data": {"shard": 2}},
}
FROZEN = ("", "0", "0", "", "2", "02", "")
"""The modules that are frozen, at each step."""


def adamw(parameters):
    # Its decay moves what is not frozen, gradient or not; its bias correction counts each parameter's own steps.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, weight_decay=0.1)


def sgd(parameters):
    # It takes the size of a gradient, which AdamW divides by.
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9, weight_decay=0.1)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 8))


def freeze(model, names):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.split(".")[0] not in names)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_freezing_between_steps(world, layout):
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(2, 8, 8, generator=generator) for _ in FROZEN]
    for make, precision, of_way in ((adamw, "32-true", 1e-4), (sgd, "32-true", 1e-5), (sgd, "16-naive", 0.02)):
        plain, start = build(), build().state_dict()
        optimizer = make(plain.parameters())
        with paramp.launch_from_torch({"parallel": LAYOUTS[layout], "precision": precision}) as context:
            plan = {"0": "colwise", "2": "rowwise"} if layout == "tp2" else None
            engine, *_ = paramp.initialize(build(), make, nn.functional.mse_loss, plan=plan)
            for names, (x, y) in zip(FROZEN, data, strict=True):
                for model in (plain, engine.module):
                    freeze(model, names)
                before = {name: value.clone() for name, value in engine.full_state_dict().items()}
                optimizer.zero_grad()
                nn.functional.mse_loss(plain(x), y).backward()
                optimizer.step()
                engine.forward_backward(*(rank_slice(t, context.dp.rank, context.dp.size) for t in (x, y)))
                assert engine.step().stepped
                engine.zero_grad()
                after = engine.full_state_dict()
                where = f"{make.__name__}, {precision}, frozen {names!r}:"
                for name, value in after.items():
                    assert torch.equal(value, before[name]) == (name[0] in names), f"{where} {name}"
                assert_trained(after, plain.state_dict(), start, of_way=of_way, what=where)
