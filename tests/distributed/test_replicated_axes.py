"""Who holds what, by the ranks of a mesh: its axes may be called anything, or lie askew to the context's."""

import pytest
import torch
from pool import on_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import paramp

WHOLE = torch.arange(1.0, 17.0).view(4, 4)
R, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)


def meshes(context):
    """Meshes of all ranks, or equal ones side by side, with placements."""
    dp_tp = context.mesh["dp", "tp"]
    flat = dp_tp._flatten("all")
    yield from ((dp_tp, [R, ROWS]), (dp_tp, [ROWS, COLUMNS]), (dp_tp, [R, R]))
    yield from ((flat, [ROWS]), (flat, [R]), (context.mesh["tp"], [ROWS]))
    for names in (None, ("replicate", "shard"), ("tp", "dp")):
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        yield from ((square, [R, ROWS]), (square, [ROWS, R]), (square, [COLUMNS, ROWS]))
    yield from ((init_device_mesh("cpu", (4,)), [ROWS]), (DeviceMesh("cpu", [2, 0, 3, 1]), [ROWS]))
    askew = DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("a", "b"))
    yield from ((askew, [R, ROWS]), (askew["a"], [ROWS]), (askew["b"], [COLUMNS]), (askew["b"], [R]))
    yield DeviceMesh("cpu", [0, 2, 3]), [COLUMNS]  # one rank has nothing of it


@pytest.mark.parametrize("parallel", [{"data": 2, "tensor": 2}, {"data": 4}])
@on_ranks(4)
def test_each_shard_and_each_replica_counts_once_on_any_mesh(world, parallel):
    with paramp.launch_from_torch({"parallel": parallel}) as context:
        for mesh, placements in meshes(context):
            parameter = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, placements))
            parameter.grad = distribute_tensor(WHOLE, mesh, placements)
            norm = paramp.clip_grad_norm_([parameter], 1e9)
            assert abs(norm.item() - WHOLE.norm().item()) < 1e-5, (parallel, mesh, placements)


@on_ranks(4)
def test_stages_have_parameters_of_their_own_on_any_mesh(world):
    with paramp.launch_from_torch({"parallel": {"pipeline": 2, "data": 2}}) as context:
        for names in (None, ("x", "y")):
            grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            across = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 4), grid, [R, ROWS]))
            across.grad = distribute_tensor(WHOLE, grid, [R, ROWS])
            assert abs(paramp.clip_grad_norm_([across], 1e9).item() - WHOLE.norm().item()) < 1e-5
        for mesh in (context.mesh["dp"], grid["y"]):
            own = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [ROWS]))
            own.grad = distribute_tensor(WHOLE * (1 + context.pp.rank), mesh, [ROWS])
            expected = (WHOLE.norm() * 5**0.5).item()
            assert abs(paramp.clip_grad_norm_([own], 1e9).item() - expected) < 1e-4
