"""The groups of a world over NCCL, with a GPU for each of two ranks: split from the world's communicator."""

import torch
import torch.distributed as dist

import paramp

split, calls = dist.split_group, []
dist.split_group = lambda **options: calls.append(options["split_ranks"]) or split(**options)
for parallel in ({"tensor": 2}, {"pipeline": 2}):
    with paramp.launch_from_torch({"parallel": parallel}) as context:
        assert dist.get_backend() == "nccl"
        assert dist.group.WORLD.bound_device_id == context.device
        last = context.make_group("last", torch.tensor([[1]]))
        assert (last is None) == (context.rank == 0)
        everyone = context.make_group("save", torch.tensor([[0, 1]]), backend="gloo")
        for group, device in ((context.pp.group, "cuda"), (context.tp.group, "cuda"), (everyone, "cpu")):
            total = torch.tensor([2.0**context.rank], device=device)
            dist.all_reduce(total, group=group)
            assert total.item() == sum(2.0**rank for rank in dist.get_process_group_ranks(group))
assert calls == [[[0], [1]], [[1]]] * 2
