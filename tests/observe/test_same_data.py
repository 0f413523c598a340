"""Ranks of one model group that are given different data: an error on each of them before the batch runs."""

import itertools
import re

import numpy as np
import pytest
import torch
from counting import Collectives
from pool import on_ranks
from small_engines import engine_of, train_step
from torch import nn
from torch.distributed import HashStore

import paramp
from paramp.observe.same_data import NUM_COMPARED, LaterBatches, Leaf, _leaves
from paramp.parallel.microbatches import Batch

PLAN = {"0": "colwise", "2": "rowwise"}
RANKS = {
    "tensor": ("rank 0 (pp 0, dp 0, tp 0)", "rank 1 (pp 0, dp 0, tp 1)"),
    "pipeline": ("rank 0 (pp 0, dp 0, tp 0)", "rank 1 (pp 1, dp 0, tp 0)"),
    "context": ("rank 0 (pp 0, dp 0, cp 0, tp 0)", "rank 1 (pp 0, dp 0, cp 1, tp 0)"),
}


def build():
    return engine_of(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), plan=PLAN)


@pytest.mark.parametrize("axis", RANKS)
@on_ranks(2)
def test_different_batches_are_an_error_on_every_rank(world, axis):
    first, second = RANKS[axis]
    x, y = torch.ones(4, 4, 4), torch.zeros(4, 4, 4)
    half, typed = 4 - 2 * world.rank, y.to((torch.float32, torch.int64)[world.rank])
    wrong = [
        (x + world.rank, y, f"inputs[0]: {first} has float32 (4, 4, 4), but {second} has other values"),
        (x[:half], y[:half], f"inputs[0]: {first} has float32 (4, 4, 4), but {second} has float32 (2, 4, 4)"),
        (x, typed, f"target: {first} has float32 (4, 4, 4), but {second} has int64 (4, 4, 4)"),
    ]
    for own_x, own_y, message in wrong:
        with paramp.launch_from_torch({"parallel": {axis: 2}}):
            engine = build()
            for call in (engine.forward_backward, engine.evaluate):
                with pytest.raises(paramp.ConfigError, match=f"{re.escape(message)}.*use the loader that initialize r"):
                    call(own_x, own_y)
                assert train_step(engine, x, y).stepped  # nothing is lost, and no rank is out of step


@on_ranks(2)
def test_arguments_of_a_call_are_compared_by_their_names(world):
    class Masked(nn.Linear):
        def forward(self, x, mask):
            return super().forward(x) * mask

    with paramp.launch_from_torch({"parallel": {"tensor": 2}}):
        engine = engine_of(Masked(4, 4), plan={})
        mask = torch.ones(4, dtype=torch.bool)
        engine(torch.ones(2, 4), mask=mask)
        mask[3] = bool(world.rank)
        with pytest.raises(paramp.ConfigError, match=r"^inputs\['mask'\]: rank 0 .* has bool \(4,\), but rank 1 "):
            engine(torch.ones(2, 4), mask=mask)


@on_ranks(2)
def test_only_the_first_batches_are_compared(world):
    x = torch.ones(2, 4)
    for axis, expected in (("tensor", 3), ("data", 0)):
        with paramp.launch_from_torch({"parallel": {axis: 2}}):
            engine = build()
            counted = []
            for _ in range(5):
                with Collectives() as collectives:
                    engine.forward_backward(x, x)
                counted.append(bool(collectives.counts["allgather"]))
                engine.step()
            assert counted == [True] * expected + [False] * (5 - expected)


def test_what_is_compared_of_a_later_batch():
    """Shapes, dtypes and what is no tensor."""
    x, given = torch.ones(2, 4), {"factor": 2.0, "share": np.float32(0.5), "name": "a"}

    def compared(**other):
        return _leaves(Batch.of({"x": x} | given | other), hashed=False)

    assert compared() == compared(x=x + 1)
    for key, value in (("x", x[:1]), ("x", x.double()), ("factor", 3.0), ("share", np.float32(0.25)), ("name", "b")):
        assert compared() != compared(**{key: value}), key


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
def test_of_two_neighbours_with_other_shapes_the_second_finds_it(order):
    """In the order in which ranks come to the batch; other batches are not compared with it."""
    kinds, store = ["float32 (8, 4)", "float32 (8, 4)", "float32 (4, 4)", "float32 (8, 4)"], HashStore()
    ranks = [LaterBatches(store, "engine", rank, range(4)) for rank in range(4)]
    for place, rank in enumerate(order):
        ranks[rank].differ(6 + 2 * (rank % 2), [Leaf("inputs[0]", str(rank), None)])
        found = ranks[rank].differ(9, [Leaf("inputs[0]", kinds[rank], None)])
        before = set(order[:place])
        differs = before & ({1, 3} if rank == 2 else {2} if rank in (1, 3) else set())
        expected = {other: kinds[other] for other in before | {rank}} if differs else {}
        assert {other: leaves[0].kind for other, leaves in found.items()} == expected


@on_ranks(2)
def test_the_report_of_replicas_that_differ_says_that_data_differed(world):
    config = {"parallel": {"tensor": 2}, "check_replicas_every": NUM_COMPARED + 1}
    x, y = torch.ones(4, 4), torch.zeros(4, 4)
    for other in (0.0, 1.0):
        with paramp.launch_from_torch(config):
            engine = build()
            for _ in range(NUM_COMPARED):
                train_step(engine, x, y)
            engine.forward_backward(x, y + other * world.rank)
            engine.module[2].bias.grad.add_(float(world.rank))
            with pytest.raises(paramp.ReplicaDrift) as found:
                engine.step()
            assert "the weight of '2.bias' on rank 1" in str(found.value)
            words = "had different data: target of batch 1 of the last window: rank 0"
            assert (words in str(found.value)) == bool(other)
