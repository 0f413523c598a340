"""Two ranks share the experts of a layer; one on rank 1 fails, in the forward or the backward of the second step.

The first argument says in which.
"""

import os
import sys
from pathlib import Path

import torch

import paramp

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_mixture import PLAN, StackedExperts, layers, tokens

steps = 0


def fail(what):
    if os.environ["RANK"] == "1" and sys.argv[1] == what and steps == 1:
        raise ArithmeticError("the expert is broken")


class Fragile(StackedExperts):
    def forward(self, tokens, index, weights):
        fail("forward")
        output = super().forward(tokens, index, weights)
        output.register_hook(lambda _: fail("backward"))
        return output


with paramp.launch_from_torch({"parallel": {"expert": 2}}):
    model = layers(1)
    model[0].experts.__class__ = Fragile
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = paramp.initialize(model, sgd, torch.nn.functional.mse_loss, plan=PLAN)
    while steps < 3:
        engine.forward_backward(tokens(), tokens())
        engine.step()
        engine.zero_grad()
        steps += 1
