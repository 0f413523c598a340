"""The pool of ranks itself: it reports the rank that failed, and goes on."""

import os
import subprocess
import time

import pytest
import torch
import torch.distributed as dist
import warm
from pool import Choice, on_ranks, run_on_ranks

import paramp


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
def test_a_failure_names_the_rank_and_the_next_test_runs(body, message):
    with pytest.raises(AssertionError, match=message):
        body()
    works()


def count_threads(world):
    torch.ones(1, requires_grad=True).sum().backward()  # the first one starts threads in builds of torch for GPUs
    return len(os.listdir("/proc/self/task"))


@on_ranks(2)
def trains_on_shards(world):
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = {"0": "colwise", "1": "rowwise"}
        engine, *_ = paramp.initialize(model, optimizer, torch.nn.functional.mse_loss, plan=plan)
        engine.forward_backward(torch.ones(2, 4), torch.ones(2, 4))
        assert engine.step().stepped


def test_groups_that_a_body_leaves_do_not_keep_their_threads():
    """Those of gloo poll, also while the rank is idle. DTensor's caches of meshes keep groups."""
    before = run_on_ranks(2, __name__, "count_threads", {})
    trains_on_shards()
    after = run_on_ranks(2, __name__, "count_threads", {})
    assert all(now <= then for now, then in zip(after, before, strict=True))


def test_the_environment_chooses_device_and_backend():
    assert Choice.of({}, 0) == Choice(("cpu",), "gloo")
    assert Choice.of({}, 1) == Choice(("cpu", "cuda"), "gloo")
    assert Choice.of({"PARAMP_TEST_DEVICE": "cpu"}, 4) == Choice(("cpu",), "gloo")
    nccl = Choice.of({"PARAMP_TEST_DEVICE": "cuda", "PARAMP_TEST_BACKEND": "nccl"}, 2)
    assert nccl == Choice(("cuda",), "nccl")
    assert nccl.why_not(4, "cuda", 2) == "4 ranks over NCCL need 4 GPUs, and torch sees 2"
    assert nccl.why_not(2, "cuda", 2) is None
    assert Choice().why_not(4, "cuda", 1) is None  # gloo's ranks may share it


@pytest.mark.parametrize(
    ("device", "backend", "num_gpus", "message"),
    [
        ("tpu", "", 4, "PARAMP_TEST_DEVICE: got 'tpu', expected cpu, cuda"),
        ("", "mpi", 4, "PARAMP_TEST_BACKEND: got 'mpi', expected gloo, nccl"),
        ("cuda", "", 0, "sees no GPU"),
        ("cpu", "nccl", 4, "moves GPU tensors only"),
    ],
)
def test_a_choice_that_cannot_be_served_is_an_error(device, backend, num_gpus, message):
    with pytest.raises(ValueError, match=message):
        Choice.of({"PARAMP_TEST_DEVICE": device, "PARAMP_TEST_BACKEND": backend}, num_gpus)


def test_a_warm_process_has_all_files_that_it_was_given():
    """Whatever numbers the server's own files have."""
    warm.start()
    code = "import os, sys; [os.write(int(fd), b'+') for fd in sys.argv[1:]]"
    read, write = os.pipe()
    files = [os.dup(write) for _ in range(40)]
    subprocess.run([warm.python(), "-c", code, *map(str, files)], pass_fds=files, check=True, timeout=60)
    for file in (write, *files):
        os.close(file)
    with os.fdopen(read, "rb") as received:
        assert len(received.read()) == len(files)
