"""Collectives on tensors as users have them: of any strides and dtype."""

import pytest
import torch
import torch.distributed as dist
from counting import Collectives
from pool import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from paramp.base.collectives import all_reduce_, broadcast_, gather_dtensors_over_gloo, sum_

VIEWS = {
    "dense": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t(),
    "columns": lambda tensor: tensor[:, 1:3],
    "rows": lambda tensor: tensor[::2],
    "scalar": lambda tensor: tensor[1, 2],
    "empty": lambda tensor: tensor[:0],
    "windows": lambda tensor: tensor.view(-1).unfold(0, 3, 1),
}
DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64),
    *(torch.bool, torch.uint8, torch.int16, torch.uint16, torch.uint64),
]


@on_ranks(2)
def test_a_broadcast_writes_what_the_tensor_shows_and_nothing_else(world):
    for dtype in DTYPES:
        for view in VIEWS.values():
            values = [torch.arange(start, start + 24).view(6, 4) % 250 for start in (0, 100)]
            whole, source = values[world.rank].to(dtype), values[1].to(dtype)
            broadcast_(view(whole), dist.group.WORLD, src=1)
            expected = values[world.rank].to(dtype)
            view(expected.view(torch.uint8) if dtype.itemsize == 1 else expected).copy_(
                view(source.view(torch.uint8) if dtype.itemsize == 1 else source)
            )
            assert torch.equal(whole.view(torch.uint8), expected.view(torch.uint8)), (dtype, view)


@pytest.mark.parametrize("lazy", [torch.conj, torch._neg_view])
@on_ranks(2)
def test_a_broadcast_of_a_view_that_computes(world, lazy):
    whole = torch.full((3,), complex(world.rank, 1 + world.rank))
    broadcast_(lazy(whole), dist.group.WORLD, src=1)
    assert torch.equal(whole, torch.full((3,), complex(1, 2)))


@on_ranks(2)
def test_dtensors_are_gathered_by_the_plain_collective_where_gloo_needs_it(world):
    """On CPUs here, in place of GPUs, where gloo's own way reads the GPU's memory from the host and dies."""
    values = torch.arange(24.0).view(4, 6)
    mesh = init_device_mesh("cpu", (2,))
    sharded = [distribute_tensor(values, mesh, [Shard(dim)], src_data_rank=None) for dim in (0, 1)]
    kernels = gather_dtensors_over_gloo("CPU")
    with torch.profiler.profile(acc_events=True) as profile:  # torch 2.11 warns without
        gathered = [one.full_tensor() for one in sharded]
        moved = sharded[0].redistribute(placements=[Replicate()]).to_local()
        torch.ops._c10d_functional.all_gather_into_tensor_out(
            values[0], 2, mesh.get_group().group_name, out=(twice := torch.empty(12))
        )
    names = {event.key for event in profile.key_averages()}
    del kernels
    with torch.profiler.profile(acc_events=True) as profile:
        sharded[0].full_tensor()
    assert "c10d::allgather_into_tensor_coalesced_" in {event.key for event in profile.key_averages()}
    assert all(torch.equal(one, values) for one in [*gathered, moved])
    assert torch.equal(twice, values[0].repeat(2))
    assert "c10d::_allgather_base_" in names
    assert "c10d::allgather_into_tensor_coalesced_" not in names


@on_ranks(2)
def test_two_ranks_sum_what_is_not_finite_to_the_same_bits(world):
    """The payload of a NaN is that of the first operand, which differs here from rank to rank."""
    payloads = torch.tensor([0x7E01, 0x7E02], dtype=torch.int16)
    values = torch.cat([payloads[world.rank :][:1].view(torch.half), torch.tensor([65504.0, -torch.inf]).half()])
    all_reduce_(values)
    both = [torch.empty(3, dtype=torch.int32) for _ in range(2)]
    dist.all_gather(both, values.view(torch.int16).int())
    assert torch.equal(*both)
    assert values.isnan().tolist() == [True, False, False]
    assert values[1:].tolist() == [torch.inf, -torch.inf]


@on_ranks(2)
def test_tensors_are_summed_in_one_all_reduce_for_each_dtype(world):
    """Such as the gradients of tied parameters and partial ones; in a wider dtype, all of them in one."""
    for wide, counts in ((None, [2 + 4, 3]), (torch.float64, [2 + 3 + 4])):
        tensors = [torch.full((size,), 1.0 + world.rank) for size in (2, 3, 4)]
        tensors[1] = tensors[1].half()
        with Collectives() as collectives:
            sum_(tensors, dist.group.WORLD, wide)
        assert collectives.elements == counts
        assert collectives.counts.total() == len(counts)
        assert [one.tolist() for one in tensors] == [[3.0] * 2, [3.0] * 3, [3.0] * 4]
