"""ZeRO-1: the same training as without, with the optimizer's work and memory shared out over data ranks."""

import functools
import gc
import math
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from counting import Collectives
from pool import on_ranks
from reference import assert_trained, batches, small_gpt, steep_gpt
from small_engines import assert_same_tensors, engine_of, own_part, train_step
from test_flat_params import Net, data
from torch import nn
from torch.utils.checkpoint import checkpoint

import paramp
from paramp.base import sizes
from paramp.optim import zero

NAIVE = {"mode": "16-naive", "init_scale": 1024.0}
# Its steps are as large as the gradients are, which Adam's are not.
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adamw = functools.partial(torch.optim.AdamW, lr=1e-3)


def buckets(size):
    return mock.patch.object(sizes, "BUCKET", size)


def check(layout=None, *, steps, optimizer=sgd, accumulation=1, tolerance=None, **config):
    """Weights and norms of a training with ZeRO are those of one without; the norms."""
    weights, norms = [], []
    for stage in (0, 1):
        parallel = {"zero": stage} | (layout or {})
        with paramp.launch_from_torch(
            {"parallel": parallel, "gradient_accumulation": accumulation} | config
        ) as context:
            model = steep_gpt(num_layers=2)
            engine = engine_of(model, model.loss, optimizer)
            results = [train_step(engine, *own_part(context, *batch)) for batch in batches(steps * accumulation)]
            assert [result.stepped for result in results] == ([False] * (accumulation - 1) + [True]) * steps
            weights.append(engine.full_state_dict())
            norms.append([result.grad_norm for result in results[accumulation - 1 :: accumulation]])
    assert norms[1] == pytest.approx(norms[0], rel=1e-6 if config.get("precision") == "32-true" else 1e-5)
    assert_trained(weights[1], weights[0], steep_gpt(num_layers=2).state_dict(), **(tolerance or {}))
    return norms[0]


@pytest.mark.parametrize("bucket", [2**25, 2**11])
@pytest.mark.parametrize(("precision", "masters"), [("32-true", None), (NAIVE, "full"), (NAIVE, "remainder")])
@on_ranks(2)
def test_weights_are_bit_equal_to_those_without(world, precision, masters, bucket):
    with buckets(bucket):
        check(steps=6, precision=precision, masters=masters, optimizer=adamw)


SPLIT = {
    "pp2-dp2": {"pipeline": {"size": 2, "microbatches": 2}},
    "dp2-tp2-sp": {"tensor": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("layout", SPLIT)
@on_ranks(4)
def test_with_pipelines_and_tensor_parallelism(world, layout):
    """In small buckets: some are reduced in the backward; in the step those with tied or mismatched gradients."""
    with buckets(2**10):
        check(SPLIT[layout], steps=4, precision=NAIVE, clip_grad_norm=1.0, tolerance={"of_way": 1e-4})


@on_ranks(2)
def test_clipping_accumulation_and_other_optimizers(world):
    norms = check(steps=20, precision="32-true", clip_grad_norm=0.1, tolerance={"of_way": 1e-5})
    assert norms[0] > 0.1
    rmsprop = functools.partial(torch.optim.RMSprop, lr=1e-3)
    for options in ({}, {"optimizer": rmsprop}, {"accumulation": 2}):
        check(steps=5, precision="32-true", tolerance={"atol": 1e-7, "rtol": 1e-6}, **options)


def test_zero_on_one_rank_changes_nothing():
    check(steps=3, precision="32-true", optimizer=adamw)
    assert not dist.is_initialized()


@on_ranks(2)
def test_data_ranks_that_use_different_parameters(world):
    """One rank's bucket becomes complete in the backward, the other's never does."""
    states = []
    for stage in (0, 1):
        with buckets(64), paramp.launch_from_torch({"parallel": {"zero": stage}}) as context:
            model = Net()
            engine = engine_of(model, optimizer=functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.5))
            for step in range(4):
                model.use = step == 3 or context.dp.rank == step % 2
                first, second = data(2, seed=10 * step + context.dp.rank)
                if step == 2:  # a window of two backwards, the first of which is reduced already
                    engine.forward_backward(*first)
                train_step(engine, *second)
            states.append(engine.full_state_dict())
    assert_trained(*states[::-1], Net().state_dict(), atol=1e-7, rtol=1e-6, still="never")


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


@pytest.mark.parametrize(("bucket", "num_buckets"), [(2**25, 1), (64, 3)])
@on_ranks(2)
def test_the_collectives_of_a_step(world, bucket, num_buckets):
    """One control all-reduce; a reduce-scatter and an all-gather for each bucket, and nothing else.

    No reduction runs when the backward's call returns, else a gradient that is changed by hand would be overwritten.
    """
    running, start = [], zero.start_reduce_scatter

    def start_and_note(*arguments):
        end = start(*arguments)
        running.append(end)

        def end_and_note():
            running.remove(end)
            end()

        return end_and_note

    noting = mock.patch.object(zero, "start_reduce_scatter", start_and_note)
    with buckets(bucket), noting, paramp.launch_from_torch({"parallel": {"zero": 1}}):
        model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 10))  # each fills a small bucket
        engine = engine_of(model, optimizer=torch.optim.AdamW)
        for _ in range(2):
            with Collectives() as before:
                engine.forward_backward(torch.ones(4, 10), torch.ones(4, 10), return_loss=False)
            assert not running
            with Collectives() as within:
                assert engine.step().loss > 0
    assert before.counts == {"reduce_scatter": num_buckets}
    assert within.counts == {"allreduce": 1, "allgather": num_buckets}


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


def halve(parameter):
    parameter.grad.mul_(0.5)


def replace_by_half(parameter):
    parameter.grad = parameter.grad * 0.5


def drop(parameter):
    parameter.grad = None


@pytest.mark.parametrize("with_hooks", [False, True])
@on_ranks(2)
def test_gradients_dropped_by_hand_and_hooks_registered_after_initialize(world, with_hooks):
    """``module.zero_grad()`` takes the buffers' gradients away; what replaces them has to be reduced too.

    Hooks run before the reduction.
    """
    weights = []
    for stage in (0, 1):
        with paramp.launch_from_torch({"parallel": {"zero": stage}}) as context:
            model = small_gpt(num_layers=2)
            engine = engine_of(model, model.loss, sgd)
            parameters = list(engine.module.parameters())
            for index, parameter in enumerate(parameters if with_hooks else ()):
                if index % 4 < 3 or parameter is parameters[-1]:
                    parameter.register_post_accumulate_grad_hook((halve, replace_by_half, drop)[index % 3])
            for batch in batches(4):
                if not with_hooks:
                    engine.module.zero_grad()
                train_step(engine, *own_part(context, *batch))
            weights.append(engine.full_state_dict())
    start = small_gpt(num_layers=2).state_dict()
    still = tuple(name for name, value in weights[0].items() if torch.equal(value, start[name]))
    assert with_hooks == (len(still) > 0)  # those whose gradient is dropped
    assert len(still) < len(start) / 2
    assert_trained(weights[1], weights[0], start, still=still)


OWN_STEPS = {
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.05, momentum=0.9),
    "nadam": functools.partial(torch.optim.NAdam, lr=0.2),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.2, foreach=True),
}


def two_steps(engine):
    for _ in range(2):
        assert train_step(engine, *data(1)[0]).stepped
    return engine.full_state_dict()


@pytest.mark.parametrize("name", OWN_STEPS)
@on_ranks(2)
def test_weights_without_dims_go_on_from_a_checkpoint(world, name, tmp_path):
    """In the same layout, with and without ZeRO, and in another mode, which keeps the state in another dtype."""
    for before, loads in (
        (0, [(1, "32-true"), (0, "bf16-true")]),
        (1, [(1, "32-true"), (0, "32-true"), (1, "bf16-true")]),
    ):
        with paramp.launch_from_torch({"parallel": {"zero": before}}):
            engine = engine_of(Net(), optimizer=OWN_STEPS[name])
            saved = two_steps(engine)
            engine.save(tmp_path / str(before))
            expected = two_steps(engine)
        for after, mode in loads:
            with paramp.launch_from_torch({"parallel": {"zero": after}, "precision": mode}):
                engine = engine_of(Net(), optimizer=OWN_STEPS[name])
                engine.load(tmp_path / str(before))
                close = {} if mode == "32-true" else {"of_way": 0.1}
                loaded = {name: value.to(engine.precision.weights) for name, value in saved.items()}
                assert_trained(two_steps(engine), expected, loaded, still=("never", "sometimes"), **close)


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
