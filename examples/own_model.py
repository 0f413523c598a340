"""A model and a loop of your own, tensor-parallel and pipelined, in fp16.

python examples/own_model.py                      one process
paramp run examples/own_model.py --tp 2 --pp 2    tensor 2 x pipeline 2
"""

import torch
from torch import nn

import paramp


class Block(nn.Module):
    """A residual MLP: one layer up, one layer down."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


with paramp.launch_from_torch({"precision": "16-mixed", "clip_grad_norm": 1.0}) as context:
    model = nn.Sequential(*(Block() for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    plan = {"*.up": "colwise", "*.down": "rowwise"}
    engine, *_ = paramp.initialize(model, optimizer, nn.functional.mse_loss, plan=plan)
    for step in range(1, 41):
        x = torch.randn(16, 32).chunk(context.dp.size)[context.dp.rank]  # each data rank has a part of the batch
        loss = engine.forward_backward(x, x.roll(1, dims=1))
        result = engine.step()
        engine.zero_grad()
        if context.is_main and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}, grad norm {result.grad_norm:.3f}, scale {result.loss_scale:g}")
