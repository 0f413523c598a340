"""The pool of ranks itself: it reports the rank that failed, and goes on."""

import os
import time

import pytest
import torch
import torch.distributed as dist
import warm
from commands import python, succeeded
from pool import Choice, RankPool, on_ranks, shared_folder


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
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (fails_on_rank_one, r"rank 1 of 2 failed first:[\s\S]*ValueError: only here"),
        (dies_on_rank_zero, "rank 0 of 2 failed first:\nthe process died"),
    ],
)
def test_a_failure_names_the_rank_and_the_next_test_runs(body, message, monkeypatch):
    monkeypatch.setattr("pool.GRACE", 0.5)
    with pytest.raises(AssertionError, match=message):
        body()
    works()


def writes(world):
    folder = shared_folder()
    (folder / str(world.rank)).touch()
    return folder


def test_what_bodies_wrote_is_deleted_with_the_pool():
    pool = RankPool(2, "cpu")
    folder, same = pool.run(__name__, "writes", {})
    assert folder == same
    assert {path.name for path in folder.iterdir()} == {"0", "1"}
    pool.close()
    assert not folder.parent.exists()


def test_the_environment_chooses_device_and_backend():
    assert Choice.of({}, 1) == Choice(("cpu", "cuda"), "gloo")
    nccl = Choice.of({"PARAMP_TEST_DEVICE": "cuda", "PARAMP_TEST_BACKEND": "nccl"}, 2)
    assert nccl == Choice(("cuda",), "nccl")
    assert nccl.why_not(4, "cuda", 2) == "4 ranks over NCCL need 4 GPUs, and torch sees 2"
    assert nccl.why_not(2, "cuda", 2) is None
    for device, backend, num_gpus, message in (
        ("tpu", "", 4, "PARAMP_TEST_DEVICE: got 'tpu', expected cpu, cuda"),
        ("cuda", "", 0, "sees no GPU"),
        ("cpu", "nccl", 4, "moves GPU tensors only"),
    ):
        with pytest.raises(ValueError, match=message):
            Choice.of({"PARAMP_TEST_DEVICE": device, "PARAMP_TEST_BACKEND": backend}, num_gpus)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_process_runs_on_the_cores_of_the_one_that_starts_it():
    warm.start()  # with all that there are here
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        result = succeeded(python("-c", "import os; print(*os.sched_getaffinity(0))"))
    finally:
        os.sched_setaffinity(0, before)
    assert result.stdout == f"{min(before)}\n"
