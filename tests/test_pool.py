"""The pool of ranks itself: it reports the rank that failed, and goes on."""

import os
import time

import pytest
from pool import on_ranks


@on_ranks(2)
def fails_on_rank_one(world):
    if world.rank == 1:
        raise ValueError("only here")
    time.sleep(60)  # a rank that waits for the other


@on_ranks(2)
def dies_on_rank_zero(world):
    if world.rank == 0:
        os._exit(3)
    time.sleep(60)


@on_ranks(2)
def works(world):
    import torch
    import torch.distributed as dist

    total = torch.ones(())
    dist.all_reduce(total)
    assert total == 2


def test_a_failure_names_the_rank_and_the_next_test_runs():
    with pytest.raises(AssertionError, match=r"rank 1 of 2 failed first:[\s\S]*ValueError: only here"):
        fails_on_rank_one()
    works()


def test_a_death_names_the_rank_and_the_next_test_runs():
    with pytest.raises(AssertionError, match="rank 0 of 2 failed first:\nthe process died"):
        dies_on_rank_zero()
    works()
