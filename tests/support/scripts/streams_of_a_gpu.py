"""What a program on a GPU draws after a save, and after a load in another process's place; on the fake device.

Started as ``streams_of_a_gpu.py FOLDER``. The numbers, two lists of steps, go to stdout as JSON, and behind them what
a context with a seed draws twice, and whether it left each stream as it was.
"""

# isort: off
import fake_cuda  # before torch

# isort: on
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import paramp
from paramp.distributed.rng import forked, random_states


def all_gather(object_list, obj, group=None):
    object_list[:] = [obj]


def gather(obj, object_gather_list=None, **_):
    object_gather_list[:] = [obj]


def scatter(scatter_object_output_list, scatter_object_input_list=None, **_):
    scatter_object_output_list[:] = scatter_object_input_list


# In a world of one. torch's would make tensors of bytes, which cannot be on the fake device.
dist.all_gather_object, dist.gather_object, dist.scatter_object_list = all_gather, gather, scatter
dist.broadcast_object_list = lambda *_, **__: None


class Draws(nn.Module):
    """Records numbers that the device's generator and the CPU's draw in a forward."""

    drawn: list[float] = []  # noqa: RUF012  # of all modules of this process

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        self.drawn.append(draw_own())
        return x * self.weight


def draw_own():
    return torch.rand((), generator=fake_cuda.GENERATOR).item(), torch.rand(()).item()


def start():
    model = Draws()
    return paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)[0]


def draw(engine, steps):
    found = []
    for _ in range(steps):
        Draws.drawn.clear()
        x = torch.ones(4, 4).cuda()
        engine.forward_backward(x, x)
        engine.step()
        engine.zero_grad()
        found.append([*Draws.drawn, draw_own()])
    return found


def main(folder):
    with paramp.launch_from_torch({}, backend="gloo", device="cuda"), fake_cuda.Device():
        engine = start()
        fake_cuda.GENERATOR.manual_seed(5)
        draw(engine, 2)
        engine.save(folder / "saved")
        went_on = draw(engine, 2)
        engine = start()
        fake_cuda.GENERATOR.manual_seed(6)
        draw(engine, 1)
        engine.load(folder / "saved")
        return went_on, draw(engine, 2), draw_seeded(torch.device("cuda", 0))


def draw_seeded(device):
    before = random_states(device)
    with forked(device) as seed:
        seed(3)
        first = draw_own()
        seed(3)
        again = draw_own()
    unchanged = [torch.equal(*pair) for pair in zip(before, random_states(device), strict=True)]
    return first, again, unchanged


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    answer, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(main(Path(sys.argv[1]))), file=answer)
