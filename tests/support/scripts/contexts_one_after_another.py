"""Contexts of two layouts in turn, each with a world of its own; before them, one of rank 0 alone."""

import os

import torch

import paramp
from paramp.distributed.rendezvous import free_port

if os.environ["RANK"] == "0":
    with paramp.launch(None, 0, 1, "localhost", free_port()) as context:
        assert context.world_size == 1

for round_ in range(4):
    parallel = {"tensor": 2} if round_ % 2 else {"pipeline": 2}
    with paramp.launch_from_torch({"parallel": parallel}) as context:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        engine, *_ = paramp.initialize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            torch.nn.functional.mse_loss,
            plan={"0": "colwise", "1": "rowwise"},
        )
        loss = engine.forward_backward(torch.ones(4, 4), torch.ones(4, 4)).item()
        engine.step()
        child = os.fork()
        if not child:
            with context:
                pass
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert context.departures.first() == ""  # the rank has not left
        torch.distributed.barrier()
        if context.is_main:
            print(f"round {round_}: {loss:.5f}", flush=True)
