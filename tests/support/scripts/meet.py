"""Join by whatever launcher there is, or with rank, size, host and port given; print what each rank sees."""

import sys

import torch.distributed as dist

import paramp

config = {"parallel": {"tensor": 2}}
if len(sys.argv) > 1:
    rank, size, host, port = sys.argv[1:]
    context = paramp.launch(config, int(rank), int(size), host, int(port))
else:
    context = paramp.launch_from_environment(config)
with context:
    seen = [None] * context.world_size
    dist.all_gather_object(seen, (context.rank, context.local_rank))
    if context.is_main:
        print(f"met: {seen}")
