"""Local parts of DTensors, against those that torch makes."""

import torch
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from paramp.base.dtensor import own_part, version

TENSOR_PLACEMENTS = (Shard(0), Shard(1), Replicate())


def test_the_version_of_a_tensor_grows_and_that_of_an_inference_tensor_is_0():
    with torch.inference_mode():
        uncounted = torch.zeros(2).add_(1)
    counted = torch.zeros(2)
    before = version(counted)
    counted.add_(1)
    assert version(counted) > before
    assert version(uncounted) == 0


@on_ranks(4)
def test_own_part_is_what_fully_shard_gives_a_rank(world):
    """With dims that ranks divide, dims that they do not, and dims shorter than the axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    for shape in ((8, 4), (6, 4), (2, 2), (1, 6), (12,)):
        for placement in TENSOR_PLACEMENTS[: len(shape)]:
            if shape[getattr(placement, "dim", 0)] % 2:
                continue
            whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
            module = nn.Module()
            module.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [placement]))
            fully_shard(module, mesh=mesh["dp_shard"])
            weight = module.weight
            assert torch.equal(own_part(whole, weight), weight.to_local()), (shape, placement)
            assert torch.equal(own_part(whole, weight, mesh.get_coordinate()), weight.to_local())
