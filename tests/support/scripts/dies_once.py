"""Rank 1 dies after the ranks have met, the first time that it is started; the mark of that is the file named."""

import os
import sys
from pathlib import Path

import torch.distributed as dist

import paramp

mark = Path(sys.argv[1])
with paramp.launch_from_torch({"parallel": {"data": 2}}) as context:
    if context.rank == 1 and not mark.exists():
        mark.touch()
        os._exit(3)
    seen = [None, None]
    dist.all_gather_object(seen, context.rank)
    print(f"met: {seen}", flush=True)
