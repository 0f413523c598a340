"""torch's GradScaler under tensor parallelism: one rank skips a step that the other makes. paramp's: both skip.

    torchrun --standalone --nproc-per-node 2 examples/torchs_scaler_diverges.py

One weight is replicated, one is sharded. The gradient overflows only in the second rank's shard.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import paramp


def local(tensor: torch.Tensor | None) -> torch.Tensor:
    """This rank's shard, not a copy of it."""
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


with paramp.launch_from_torch({"parallel": {"tensor": 2}}, device="cpu") as context:
    mesh = context.mesh["tp"]
    for name, scaler in (
        ("torch.amp.GradScaler", torch.amp.GradScaler("cpu", init_scale=8.0)),
        ("paramp.DistributedGradScaler", paramp.DistributedGradScaler("cpu", init_scale=8.0)),
    ):
        norm, matrix = (
            distribute_tensor(torch.ones(4), mesh, [placement]).requires_grad_()
            for placement in (Replicate(), Shard(0))
        )
        optimizer = torch.optim.SGD([norm, matrix], lr=0.1)
        scaler.scale(norm.sum() + matrix.sum()).backward()
        if context.rank == 1:
            local(matrix.grad)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        results: list[Any] = [None, None]
        dist.all_gather_object(results, (scaler.get_scale(), local(norm)[0].item()))
        if context.rank == 0:
            print(name)
            for index, (scale, weight) in enumerate(results):
                print(f"  rank {index}: scale {scale:g}, replicated weight {weight:.2f}")
