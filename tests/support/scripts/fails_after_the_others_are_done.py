"""Rank 0 finishes, and with it the store that it hosts; then rank 1 fails."""

import sys
import time

import paramp
from paramp.distributed.launcher_env import find_place
from paramp.distributed.local_launcher import start_processes

if find_place() is None:
    sys.exit(start_processes([sys.executable, __file__], 2))
with paramp.launch_from_torch({"parallel": {"data": 2}}) as context:
    if context.rank == 1:
        time.sleep(3)
        raise ValueError("disk full on rank 1")
