"""The pool of ranks itself: it reports the rank that failed, and goes on."""

import os
import subprocess
import threading
import time

import pool
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


def tell_process(world):
    return os.getpid()


@on_ranks(2)
def leaves_threads(world):
    for _ in range(pool.MOST_THREADS):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def test_ranks_with_many_threads_make_way_for_new_ones():
    before = run_on_ranks(2, __name__, "tell_process", {})
    assert run_on_ranks(2, __name__, "tell_process", {}) == before
    leaves_threads()
    assert not {*run_on_ranks(2, __name__, "tell_process", {})} & {*before}


def count_threads(world):
    return len(os.listdir("/proc/self/task"))


@on_ranks(2)
def leaves_a_cycle(world):
    before = count_threads(world)
    group = dist.new_group([0, 1])
    cycle = [group]
    cycle.append(cycle)
    dist.destroy_process_group(group)
    dist.barrier()
    del group, cycle
    assert count_threads(world) > before


@on_ranks(2)
def trains_on_shards(world):
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = {"0": "colwise", "1": "rowwise"}
        engine, *_ = paramp.initialize(model, optimizer, torch.nn.functional.mse_loss, plan=plan)
        engine.forward_backward(torch.ones(2, 4), torch.ones(2, 4))
        assert engine.step().stepped


@on_ranks(2)
def runs_a_backward(world):
    torch.ones(1, requires_grad=True).sum().backward()


@pytest.mark.parametrize(("body", "times"), [(leaves_a_cycle, 3), (trains_on_shards, 1)])
def test_groups_that_a_body_leaves_do_not_keep_their_threads(body, times):
    """Those of gloo poll, also while the rank is idle. Cycles keep groups, and so do DTensor's caches of meshes."""
    runs_a_backward()  # the first one of a process starts threads in builds of torch for GPUs
    before = run_on_ranks(2, __name__, "count_threads", {})
    for _ in range(times):
        body()
    after = run_on_ranks(2, __name__, "count_threads", {})
    assert all(now <= then for now, then in zip(after, before, strict=True))


def test_the_environment_chooses_device_and_backend():
    assert Choice.of({}, 0) == Choice(("cpu",), "gloo")
    assert Choice.of({}, 1) == Choice(("cpu", "cuda"), "gloo")
    assert Choice.of({"PARAMP_TEST_DEVICE": "cpu"}, 4) == Choice(("cpu",), "gloo")
    nccl = Choice.of({"PARAMP_TEST_DEVICE": "cuda", "PARAMP_TEST_BACKEND": "nccl"}, 2)
    assert nccl == Choice(("cuda",), "nccl")
    assert (nccl.backend_of("cuda"), nccl.backend_of("cpu")) == ("nccl", "gloo")
    assert nccl.why_not(4, "cuda", 2) == "4 ranks over NCCL need 4 GPUs, and torch sees 2"
    assert nccl.why_not(2, "cuda", 2) is None
    assert nccl.why_not(4, "cpu", 0) is None
    assert Choice().why_not(4, "cuda", 1) is None  # gloo's ranks may share it


@pytest.mark.parametrize(
    ("device", "backend", "num_gpus", "message"),
    [
        ("tpu", "", 4, "PARAMP_TEST_DEVICE: got 'tpu', expected cpu, cuda"),
        ("", "mpi", 4, "PARAMP_TEST_BACKEND: got 'mpi', expected gloo, nccl"),
        ("cuda", "", 0, "sees no GPU"),
        ("", "nccl", 0, "sees no GPU"),
        ("cpu", "nccl", 4, "moves GPU tensors only"),
    ],
)
def test_a_choice_that_cannot_be_served_is_an_error(device, backend, num_gpus, message):
    with pytest.raises(ValueError, match=message):
        Choice.of({"PARAMP_TEST_DEVICE": device, "PARAMP_TEST_BACKEND": backend}, num_gpus)


def test_a_warm_process_has_all_files_that_it_was_given():
    """Whatever numbers the server's own files have, of which there are more while other processes run."""
    warm.start()
    code = "import os, sys; [os.write(int(fd), b'+') for fd in sys.argv[1:]]; sys.stdin.read()"
    read, write = os.pipe()
    files = [os.dup(write) for _ in range(40)]
    processes = [
        subprocess.Popen([warm.python(), "-c", code, *map(str, files)], stdin=subprocess.PIPE, pass_fds=files)
        for _ in range(12)
    ]
    for process in processes:
        process.communicate(b"", timeout=60)
    for file in (write, *files):
        os.close(file)
    with os.fdopen(read, "rb") as received:
        assert len(received.read()) == len(files) * len(processes)
