"""ZeRO-1: the same training as without, with the optimizer's work and memory shared out over data ranks."""

import copy
import gc
import math
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from counting import Collectives
from pool import on_ranks
from reference import assert_trained, batches, rank_slice, small_gpt, steep_gpt
from torch import nn
from torch.utils.checkpoint import checkpoint

import paramp
import paramp.optim.flat_params
from paramp.base import sizes


def run(zero, precision, *, steps=20, clip=None, optimizer=None, masters=None, accumulation=1, layout=None):
    """The weights after ``steps`` steps, in full precision, and the steps' results."""
    config = {
        "parallel": {"zero": zero} | (layout or {}),
        "precision": precision,
        "clip_grad_norm": clip,
        "masters": masters,
        "gradient_accumulation": accumulation,
    }
    with paramp.launch_from_torch(config) as context:
        model = steep_gpt(num_layers=2)
        make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
        engine, *_ = paramp.initialize(model, make, model.loss)
        results = []
        for x, y in batches(steps * accumulation):
            x, y = (rank_slice(value, context.dp.rank, context.dp.size) for value in (x, y))
            engine.forward_backward(x, y)
            results.append(engine.step())
            engine.zero_grad()
        return engine.full_state_dict(), results[accumulation - 1 :: accumulation]


NAIVE = {"mode": "16-naive", "init_scale": 1024.0}


def sgd(parameters):
    """Its steps are as large as the gradients are, which Adam's are not."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def assert_trains_as(actual, expected, **tolerance):
    assert_trained(actual, expected, steep_gpt(num_layers=2).state_dict(), **tolerance)


@pytest.mark.parametrize("bucket", [2**25, 2**11])
@pytest.mark.parametrize(("precision", "masters"), [("32-true", None), (NAIVE, "full"), (NAIVE, "remainder")])
@on_ranks(2)
def test_weights_are_bit_equal_to_those_without(world, precision, masters, bucket):
    sizes.BUCKET, whole = bucket, sizes.BUCKET
    try:
        expected, _ = run(0, precision, masters=masters)
        actual, _ = run(1, precision, masters=masters)
    finally:
        sizes.BUCKET = whole
    assert_trains_as(actual, expected)


SPLIT = {
    "pp2-dp2": {"pipeline": {"size": 2, "microbatches": 2}},
    "dp2-tp2-sp": {"tensor": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("layout", SPLIT)
@on_ranks(4)
def test_with_pipelines_and_tensor_parallelism(world, layout):
    """In small buckets: some are reduced in the backward; in the step those with tied or mismatched gradients."""
    sizes.BUCKET, whole = 2**10, sizes.BUCKET
    try:
        expected, norms = run(0, NAIVE, steps=4, clip=1.0, layout=SPLIT[layout], optimizer=sgd)
        actual, found = run(1, NAIVE, steps=4, clip=1.0, layout=SPLIT[layout], optimizer=sgd)
    finally:
        sizes.BUCKET = whole
    assert all(result.stepped for result in norms)
    assert [result.grad_norm for result in found] == pytest.approx([result.grad_norm for result in norms], rel=1e-5)
    assert_trains_as(actual, expected, of_way=1e-4)


@on_ranks(2)
def test_norms_and_clipped_weights_are_those_without(world):
    expected, norms = run(0, "32-true", clip=0.1, optimizer=sgd)
    actual, found = run(1, "32-true", clip=0.1, optimizer=sgd)
    assert [result.grad_norm for result in found] == pytest.approx([result.grad_norm for result in norms], rel=1e-6)
    assert norms[0].grad_norm > 0.1
    assert_trains_as(actual, expected, of_way=1e-5)


@pytest.mark.parametrize("kind", ["rmsprop", "accumulated", "sgd"])
@on_ranks(2)
def test_other_optimizers_and_accumulation(world, kind):
    options = {
        "rmsprop": {"optimizer": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3)},
        "sgd": {"optimizer": sgd},
        "accumulated": {"accumulation": 2, "optimizer": sgd},
    }[kind]
    expected, _ = run(0, "32-true", steps=5, **options)
    actual, _ = run(1, "32-true", steps=5, **options)
    assert_trains_as(actual, expected, atol=1e-7, rtol=1e-6)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.never = nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(3, 3)
        self.use = True

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.second(x) if self.use else x


@on_ranks(2)
def test_data_ranks_that_use_different_parameters(world):
    """One rank's bucket becomes complete in the backward, the other's never does."""
    sizes.BUCKET, whole = 64, sizes.BUCKET
    states = []
    try:
        for zero in (0, 1):
            with paramp.launch_from_torch({"parallel": {"zero": zero}}) as context:
                model = Branches()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
                engine, *_ = paramp.initialize(model, optimizer, F.mse_loss)
                for step in range(4):
                    model.use = step == 3 or context.dp.rank == step % 2
                    torch.manual_seed(10 * step + context.dp.rank)
                    engine.forward_backward(torch.randn(4, 40), torch.randn(4, 40))
                    if step == 2:  # a window of two backwards, the first of which was reduced already
                        engine.forward_backward(torch.randn(4, 40), torch.randn(4, 40))
                    engine.step()
                    engine.zero_grad()
                states.append(engine.full_state_dict())
    finally:
        sizes.BUCKET = whole
    assert_trained(states[1], states[0], Branches().state_dict(), atol=1e-7, rtol=1e-6, still="never")


@on_ranks(2)
def test_an_overflow_put_in_by_hand_after_the_reduction_skips_everywhere(world):
    """Also in the part of the gradient that another rank steps."""
    for place in (0, -1):
        with paramp.launch_from_torch({"parallel": {"zero": 1}}) as context:
            model = Branches()
            engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
            before = engine.full_state_dict()
            engine.forward_backward(torch.ones(4, 40), torch.ones(4, 40))
            if context.rank == 1:
                list(engine.named_parameters())[place][1].grad.view(-1)[place] = float("inf")
            result = engine.step()
            assert result.overflow
            assert not math.isfinite(result.grad_norm)
            assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())


@pytest.mark.real_sizes
@on_ranks(2)
def test_bytes_a_parameter(world):
    from test_flat_params import bytes_a_parameter

    for masters, allowed in (("full", 4 + 12 / 2 + 0.1), ("remainder", 4 + 10 / 2 + 0.1)):
        config = {"parallel": {"zero": 1}, "precision": "16-naive", "masters": masters}
        assert bytes_a_parameter(config) <= allowed
    for mode in ("16-naive", "bf16-naive"):
        config = {"parallel": {"zero": 1}, "precision": mode, "optimizer_state": "bf16"}
        assert bytes_a_parameter(config) == pytest.approx(4 + 8 / 2, abs=0.1)


@pytest.mark.parametrize("bucket", [2**25, 64])
@on_ranks(2)
def test_the_collectives_of_a_step(world, bucket):
    """One control all-reduce; a reduce-scatter and an all-gather for each bucket, and nothing else."""
    sizes.BUCKET, whole = bucket, sizes.BUCKET
    try:
        with paramp.launch_from_torch({"parallel": {"zero": 1}}):
            model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 10))  # each fills a small bucket
            engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters()), F.mse_loss)
            for _ in range(2):
                with Collectives() as before:
                    engine.forward_backward(torch.ones(4, 10), torch.ones(4, 10), return_loss=False)
                with Collectives() as within:
                    result = engine.step()
                engine.zero_grad()
    finally:
        sizes.BUCKET = whole
    assert result.loss > 0
    num_buckets = 3 if bucket == 64 else 1
    assert before.counts == {"reduce_scatter": num_buckets}
    assert within.counts == {"allreduce": 1, "allgather": num_buckets}


@on_ranks(2)
def test_no_reduction_runs_when_the_call_returns(world):
    """Else a gradient that is changed by hand before the step would be overwritten."""
    running, start = [], paramp.optim.zero.start_reduce_scatter

    def start_and_note(*arguments):
        end = start(*arguments)
        running.append(end)

        def end_and_note():
            running.remove(end)
            end()

        return end_and_note

    paramp.optim.zero.start_reduce_scatter = start_and_note
    try:
        with paramp.launch_from_torch({"parallel": {"zero": 1}}):
            model = nn.Linear(4, 4)
            engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters()), F.mse_loss)
            engine.forward_backward(torch.ones(2, 4), torch.ones(2, 4), return_loss=False)
            assert not running
            assert engine.step().stepped
    finally:
        paramp.optim.zero.start_reduce_scatter = start


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
        model = Reentrant()
        engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters()), F.mse_loss)
        with pytest.raises(RuntimeError, match=r"'layer.*got two gradients in one backward.*use_reentrant=False"):
            engine.forward_backward(torch.ones(2, 4), torch.ones(2, 4))


@on_ranks(2)
def test_gradients_dropped_by_hand_before_a_backward_are_summed_all_the_same(world):
    """``module.zero_grad()`` takes the buffers' gradients away; what replaces them has to be reduced, too."""
    weights = []
    for zero in (0, 1):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 200), torch.nn.Linear(200, 3))
        start = copy.deepcopy(model.state_dict())
        with paramp.launch_from_torch({"parallel": {"zero": zero}}):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine, *_ = paramp.initialize(model, optimizer, torch.nn.functional.mse_loss)
            for step in range(3):
                engine.module.zero_grad()
                x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2 * step + world.rank))
                engine.forward_backward(x, x[:, :3])
                engine.step()
                engine.zero_grad()
            weights.append(engine.full_state_dict())
    assert_trained(weights[1], weights[0], start)


def halve(parameter):
    parameter.grad.mul_(0.5)


def replace_by_half(parameter):
    parameter.grad = parameter.grad * 0.5


def drop(parameter):
    parameter.grad = None


@on_ranks(2)
def test_hooks_registered_after_initialize_run_before_the_reduction(world):
    weights = []
    for zero in (0, 1):
        with paramp.launch_from_torch({"parallel": {"zero": zero}}) as context:
            model = small_gpt(num_layers=2)
            engine, *_ = paramp.initialize(model, sgd, model.loss)
            hooks = (halve, replace_by_half, drop)
            for index, parameter in enumerate(engine.module.parameters()):
                if index % 4 < 3 or index == len(list(engine.module.parameters())) - 1:
                    parameter.register_post_accumulate_grad_hook(hooks[index % 3])
            for x, y in batches(4):
                x, y = (rank_slice(value, context.dp.rank, context.dp.size) for value in (x, y))
                engine.forward_backward(x, y)
                engine.step()
                engine.zero_grad()
            weights.append(engine.full_state_dict())
    start = small_gpt(num_layers=2).state_dict()
    still = tuple(name for name, value in weights[0].items() if torch.equal(value, start[name]))
    assert 0 < len(still) < len(start) / 2  # those whose gradient is dropped
    assert_trained(weights[1], weights[0], start, still=still)


def test_zero_on_one_rank_changes_nothing():
    expected, _ = run(0, "32-true", steps=3)
    actual, _ = run(1, "32-true", steps=3)
    assert_trains_as(actual, expected)
    assert not dist.is_initialized()


class Scaled(nn.Module):
    """With a weight without dims, as CLIP's ``logit_scale``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(0.25))

    def forward(self, x):
        return self.linear(x) * self.scale


OWN_STEPS = (
    lambda parameters: torch.optim.RMSprop(parameters, lr=0.05, momentum=0.9),
    lambda parameters: torch.optim.NAdam(parameters, lr=0.2),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.2, foreach=True),
)


def steps(engine, count):
    for _ in range(count):
        engine.forward_backward(torch.ones(2, 4), torch.zeros(2, 4))
        assert engine.step().stepped


@on_ranks(2)
def test_weights_without_dims_go_on_from_a_checkpoint(world, tmp_path):
    """In the same layout, with and without ZeRO, and in another mode, which keeps the state in another dtype."""
    cases = [(0, 1, "32-true"), (1, 1, "32-true"), (1, 0, "32-true"), (1, 1, "bf16-true"), (0, 0, "bf16-true")]
    for index, make in enumerate(OWN_STEPS):
        for case, (before, after, mode) in enumerate(cases):
            path = tmp_path / f"{index}-{case}"
            with paramp.launch_from_torch({"parallel": {"zero": before}}):
                engine, *_ = paramp.initialize(Scaled(), make, F.mse_loss)
                steps(engine, 2)
                engine.save(path)
                saved = engine.full_state_dict()
                steps(engine, 2)
                expected = engine.full_state_dict()
            with paramp.launch_from_torch({"parallel": {"zero": after}, "precision": mode}):
                engine, *_ = paramp.initialize(Scaled(), make, F.mse_loss)
                engine.load(path)
                steps(engine, 2)
                close = {} if mode == "32-true" else {"of_way": 0.1}
                assert_trained(engine.full_state_dict(), expected, saved, **close)


@on_ranks(2)
def test_an_engine_is_freed_with_its_context(world):
    """Its parameters, which others may hold, do not keep it; the groups of a context that is kept have threads."""
    with paramp.launch_from_torch({"parallel": {"zero": 1}}) as context:
        model = nn.Linear(4, 4)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        engine.forward_backward(torch.ones(2, 4), torch.ones(2, 4))
        engine.step()
    freed = weakref.ref(engine), weakref.ref(context)
    del engine, context
    gc.collect()
    assert [reference() for reference in freed] == [None, None]
    model(torch.ones(2, 4)).sum().backward()
