"""Your own model and loop, tensor-parallel and pipelined, in fp16.

python examples/own_model.py                                                    one process
torchrun --standalone --nproc-per-node 4 examples/own_model.py 2 2              tensor 2 x pipeline 2
"""

import sys
from collections import OrderedDict

import torch
from torch import nn

import paramp


class Block(nn.Module):
    """Two layers that tensor parallelism shares out: the first by its outputs, the second by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


tensor, pipeline = (int(argument) for argument in sys.argv[1:] or ("1", "1"))
config = {"parallel": {"tensor": tensor, "pipeline": pipeline}, "precision": "16-mixed", "clip_grad_norm": 1.0}

with paramp.launch_from_torch(config) as context:
    model = nn.Sequential(OrderedDict((f"block{index}", Block()) for index in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine, *_ = paramp.initialize(
        model, optimizer, nn.functional.mse_loss, plan={"block*.up": "colwise", "block*.down": "rowwise"}
    )
    for step in range(1, 41):
        generator = torch.Generator().manual_seed(step * context.dp.size + context.dp.rank)  # this data rank's samples
        x = torch.randn(16, 32, generator=generator)
        loss = engine.forward_backward(x, x.roll(1, dims=1))
        result = engine.step()
        engine.zero_grad()
        if context.is_main and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}, grad norm {result.grad_norm:.3f}, scale {result.loss_scale:g}")
