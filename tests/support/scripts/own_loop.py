"""A user's own script; the rank in its command line stops in the middle of it."""

import sys

import torch

import paramp

with paramp.launch_from_torch({"parallel": {"data": 2}}) as context:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = paramp.initialize(model, optimizer, torch.nn.functional.mse_loss)
    for step in range(5):
        if step == 2 and context.rank == int(sys.argv[1]):
            raise ValueError("my own mistake")
        engine.forward_backward(torch.ones(2, 2), torch.ones(2, 1))
        engine.step()
