"""The user's optimizer in an engine: what trainers call on it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks
from torch import nn

import paramp

MODES = ("32-true", "16-mixed", {"mode": "16-naive", "init_scale": 4.0}, "bf16-true")

MAKES = (
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
)


def trained(clear, config, optimizer):
    """Weights after steps between which gradients are cleared by ``clear``, once after a backward of no use."""
    with paramp.launch_from_torch(config):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        engine, *_ = paramp.initialize(model, optimizer, F.mse_loss)
        for step in range(3):
            if step == 1:
                engine.forward_backward(torch.full((2, 4), 9.0), torch.ones(2, 4))
                clear(engine)
                assert not any(parameter.grad.any() for parameter in engine.module.parameters())
            loss = engine.forward_backward(torch.ones(2, 4), torch.ones(2, 4))
            assert engine.step().loss == pytest.approx(loss.item())
            clear(engine)
        assert copy.deepcopy(engine.optimizer).state_dict().keys() == engine.optimizer.state_dict().keys()
        return engine.full_state_dict()


@on_ranks(2)
def test_the_optimizers_zero_grad_is_the_engines(world):
    for mode in MODES:
        for parallel in ({}, {"zero": 1}):
            for make in MAKES:
                config = {"precision": mode, "parallel": parallel}
                expected = trained(lambda engine: engine.zero_grad(), config, make)
                actual = trained(lambda engine: engine.optimizer.zero_grad(set_to_none=False), config, make)
                assert all(torch.equal(value, expected[name]) for name, value in actual.items())


def test_an_unfinished_window_accumulates_under_either():
    norms = []
    for clear in (lambda engine: engine.zero_grad(), lambda engine: engine.optimizer.zero_grad()):
        with paramp.launch_from_torch({"gradient_accumulation": 2}):
            model = nn.Linear(4, 4)
            nn.init.ones_(model.weight)
            engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
            for value in (1.0, 2.0):
                engine.forward_backward(torch.full((2, 4), value), torch.ones(2, 4))
                result = engine.step()
                clear(engine)
            norms.append(result.grad_norm)
    assert norms[1] == norms[0] > 0


class Sharpness(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Sharpness])
def test_an_optimizer_that_evaluates_the_model_is_refused(kind):
    model = nn.Linear(2, 2)
    found = f"optimizer: {kind.__name__} evaluates the model in its step"
    with paramp.launch_from_torch({}), pytest.raises(paramp.ConfigError, match=found):
        paramp.initialize(model, kind(model.parameters(), lr=0.1), F.mse_loss)
