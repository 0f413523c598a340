"""Accumulation windows: which gradients a step has."""

import copy

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks
from torch import nn

import paramp

MESSAGE = r"step\(\): no backward since the last step"


@on_ranks(2)
def test_each_step_needs_a_backward_of_its_own(world):
    """Gradients that were reduced once would be reduced again; those of half a window would count as whole ones."""
    pipeline = {"pipeline": {"size": 2, "microbatches": 2}}
    for parallel in ({}, {"zero": 1}, pipeline):
        for accumulation in (1, 2):
            with paramp.launch_from_torch({"parallel": parallel, "gradient_accumulation": accumulation}):
                torch.manual_seed(0)
                model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
                plain = copy.deepcopy(model)
                engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
                reference = torch.optim.SGD(plain.parameters(), lr=0.1)
                x, y = torch.ones(2, 4), torch.zeros(2, 4)
                for _ in range(2):
                    for call in range(accumulation):
                        with pytest.raises(RuntimeError, match=MESSAGE):
                            engine.step()
                        engine.forward_backward(x, y)
                        assert engine.step().stepped == (call == accumulation - 1)
                    reference.zero_grad()
                    F.mse_loss(plain(x), y).backward()
                    reference.step()
                expected = plain.state_dict()
                for name, value in engine.full_state_dict().items():
                    torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-6)


def test_a_dropped_backward_is_none():
    with paramp.launch_from_torch():
        model = nn.Linear(4, 4)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        engine.forward_backward(torch.ones(2, 4), torch.ones(2, 4))
        engine.zero_grad()
        with pytest.raises(RuntimeError, match=MESSAGE):
            engine.step()
        F.mse_loss(engine(torch.ones(2, 4)), torch.ones(2, 4)).backward()
        with pytest.raises(RuntimeError, match=r"engine.backward\(loss\) in place of loss.backward"):
            engine.step()
