"""Rank 0 finishes, and with it the store that it hosts; then rank 1 fails."""

import os
import sys
import time

import torch.distributed as dist

import paramp
from paramp.distributed.launcher_variables import find_place
from paramp.distributed.local_launcher import start_processes


def is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


if find_place() is None:
    sys.exit(start_processes([sys.executable, __file__], 2))
with paramp.launch_from_torch({"parallel": {"data": 2}}) as context:
    processes = [0, 0]
    dist.all_gather_object(processes, os.getpid())
    if context.rank == 1:
        while is_there(processes[0]):
            time.sleep(0.05)
        raise ValueError("disk full on rank 1")
