"""ZeRO-1: the same training as without, with the optimizer's work and memory shared out over data ranks."""

import functools
import gc
import math
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from beside_plain import randn, seeded
from counting import Collectives
from pool import on_ranks, shared_folder
from reference import assert_trained, batches, steep_gpt
from small_engines import assert_same_tensors, engine_of, own_part, train_step
from test_flat_weights import Net, data
from torch import nn
from torch.utils.checkpoint import checkpoint

import paramp
from paramp.base import loop_block_sizes

NAIVE = {"mode": "16-naive", "init_scale": 1024.0}


def buckets(size):
    return mock.patch.object(loop_block_sizes, "BUCKET", size)


def train(parallel, precision, masters):
    """The whole model, and the gradient norms."""
    with paramp.launch_from_torch({"parallel": parallel, "precision": precision, "masters": masters}) as context:
        model = steep_gpt(num_layers=2)
        engine = engine_of(model, model.loss, functools.partial(torch.optim.AdamW, lr=1e-3))
        results = [train_step(engine, *own_part(context, *batch)) for batch in batches(6)]
        assert all(result.stepped for result in results)
        return engine.full_state_dict(), [result.grad_norm for result in results]


@pytest.mark.parametrize("bucket", [2**25, 2**11])
@pytest.mark.parametrize(("precision", "masters"), [("32-true", None), (NAIVE, "full"), (NAIVE, "remainder")])
@on_ranks(2)
def test_weights_are_bit_equal_to_those_without(world, precision, masters, bucket):
    with buckets(bucket):
        (expected, norms), (found, others) = (train({"zero": stage}, precision, masters) for stage in (0, 1))
    assert others == pytest.approx(norms, rel=1e-6 if precision == "32-true" else 1e-5)
    assert_trained(found, expected, steep_gpt(num_layers=2).state_dict())


def test_zero_on_one_rank_changes_nothing():
    assert_same_tensors(*(train({"zero": stage}, "32-true", None)[0] for stage in (0, 1)))
    assert not dist.is_initialized()


@on_ranks(2)
def test_an_overflow_put_in_by_hand_after_the_reduction_skips_everywhere(world):
    """Also in the part of the gradient that another rank steps."""
    for place in (0, -1):
        with paramp.launch_from_torch({"parallel": {"zero": 1}}):
            engine = engine_of(Net())
            before = engine.full_state_dict()
            engine.forward_backward(*data(1)[0])
            if world.rank == 1:
                list(engine.named_parameters())[place][1].grad.view(-1)[place] = float("inf")
            result = engine.step()
            assert result.overflow
            assert not math.isfinite(result.grad_norm)
            assert_same_tensors(engine.full_state_dict(), before)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("bucket", "num_buckets"), [(2**25, 1), (64, 3)])
@on_ranks(2)
def test_the_collectives_of_a_step(world, bucket, num_buckets, stage):
    """One control all-reduce. For each bucket a reduce-scatter and an all-gather, or without ZeRO an all-reduce.

    Of several reduce-scatters some run before the backward comes to the first layer.
    """
    reduced = []
    with buckets(bucket), paramp.launch_from_torch({"parallel": {"zero": stage}}):
        model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 10))  # each fills a small bucket
        engine = engine_of(model, optimizer=torch.optim.AdamW)
        note = lambda _: reduced.append(before.counts["reduce_scatter"])  # noqa: E731
        engine.module[0].register_forward_hook(lambda _, args, output: output.register_hook(note) and None)
        for _ in range(2):
            with Collectives() as before:
                engine.forward_backward(torch.ones(4, 10), torch.ones(4, 10), return_loss=False)
            with Collectives() as within:
                assert engine.step().loss > 0
    assert [count > 0 for count in reduced] == [stage == 1 and num_buckets > 1] * 2
    if stage == 1:
        assert before.counts == {"reduce_scatter": num_buckets}
        assert within.counts == {"allreduce": 1, "allgather": num_buckets}
    else:
        assert before.counts == {}
        assert within.counts == {"allreduce": 1 + num_buckets}


@on_ranks(2)
def test_a_window_that_was_dropped_leaves_no_reduction_to_the_next(world):
    """In its last call gradients were reduced; the next window has one call, in which none are."""
    batch, folder, norms = data(4)[world.rank], shared_folder(), []

    def failing(output, target):
        assert not failing.fails, "refused"
        return nn.functional.mse_loss(output, target)

    for stage in (0, 1):
        with paramp.launch_from_torch({"parallel": {"zero": stage}, "gradient_accumulation": 2}):
            engine, failing.fails = engine_of(Net(), failing), False
            engine.save(folder / f"zero{stage}")
            for way in ("a batch that fails", "a load"):
                train_step(engine, *batch)
                failing.fails = way == "a batch that fails" and world.rank == 1
                if way == "a load":
                    engine.forward_backward(*batch)
                    engine.load(folder / f"zero{stage}")
                else:
                    with pytest.raises((AssertionError, RuntimeError), match="refused"):
                        engine.forward_backward(*batch)
                    engine.zero_grad()
                failing.fails = False
                engine.forward_backward(*batch)
                norms.append(engine.flush().grad_norm)
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-6)


class Reentrant(nn.Module):
    """Its layer is used twice, and the second time in a backward within the backward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(self.layer, self.layer(x), use_reentrant=True)


@on_ranks(2)
def test_a_second_gradient_in_one_backward_is_refused(world):
    """The buffer may be on its way to the other ranks by then."""
    with paramp.launch_from_torch({"parallel": {"zero": 1}}):
        engine = engine_of(Reentrant())
        with pytest.raises(RuntimeError, match=r"'layer.*got two gradients in one backward.*use_reentrant=False"):
            engine.forward_backward(torch.ones(2, 4), torch.ones(2, 4))


@on_ranks(2)
def test_an_engine_is_freed_with_its_context(world):
    """Its parameters, which others may hold, do not keep it; the groups of a context that is kept have threads."""
    with paramp.launch_from_torch({"parallel": {"zero": 1}}) as context:
        model = nn.Linear(4, 4)
        engine = engine_of(model)
        train_step(engine, torch.ones(2, 4))
    freed = weakref.ref(engine), weakref.ref(context)
    del engine, context
    gc.collect()
    assert [reference() for reference in freed] == [None, None]
    model(torch.ones(2, 4)).sum().backward()


class Conditioned(nn.Module):
    """A block of a sequence with a norm that only some batches use."""

    uses = True

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x) if Conditioned.uses else x)))


PLAN = {
    "0": "scatter_sequence",
    "*.norm": "sequence",
    "*.up": "sequence_colwise",
    "*.down": "sequence_rowwise",
    "3": "gather_sequence",
}
USES = [(True, False), (False, True), (True, True), (False, False)]
"""Of each step on both data ranks: in the first window one rank alone finds which placements gradients have."""


@on_ranks(4)
def test_a_norm_that_one_data_rank_uses_first(world):
    """Under sequence parallelism, in several buckets, which all ranks reduce in one order."""
    parallel = {"data": 2, "zero": 1, "tensor": 2, "sequence_parallel": True}

    def build():
        return seeded(lambda: nn.Sequential(nn.Linear(8, 8), Conditioned(), Conditioned(), nn.Identity()))

    with buckets(2**6), paramp.launch_from_torch({"parallel": parallel}) as context:
        plain, start = build(), build().state_dict()
        engine, optimizer = engine_of(build(), plan=PLAN), torch.optim.SGD(plain.parameters(), lr=0.1)
        for step, used in enumerate(USES):
            x, y = randn(2, 4, 6, 8, seed=step)
            optimizer.zero_grad()
            for rank, Conditioned.uses in enumerate(used):
                part = slice(2 * rank, 2 * rank + 2)
                (nn.functional.mse_loss(plain(x[part]), y[part]) / 2).backward()
            optimizer.step()
            Conditioned.uses = used[context.dp.rank]
            with Collectives() as collectives:
                assert train_step(engine, *own_part(context, x, y)).stepped
            assert collectives.counts["reduce_scatter"] > 2  # buckets
            engine.zero_grad()
            assert_trained(engine.full_state_dict(), plain.state_dict(), start, atol=1e-6, what=f"step {step}")
