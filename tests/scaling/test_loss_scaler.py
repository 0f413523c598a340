"""DistributedGradScaler against torch's own, against hand arithmetic, and where torch's own goes wrong."""

import copy
import itertools
import math
import pickle
import random
import sys

import pytest
import torch
import torch.distributed as dist
from counting import Collectives
from plain_training import ScaleRule
from pool import on_ranks
from reference import local
from small_engines import each_raises, everywhere
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import paramp
from paramp import DistributedGradScaler
from paramp.scaling.complete_and_unscale_gradients import unscale_and_check_
from paramp.scaling.copies_per_element import TiedParameter

BAD = [float("inf"), float("-inf"), float("nan")]


def parameter(value=1.0, size=4, dtype=torch.float32):
    return torch.nn.Parameter(torch.full((size,), value, dtype=dtype))


def sgd(*weights, **options):
    return torch.optim.SGD(weights, **{"lr": 1.0} | options)


def attempt(scaler, *optimizers):
    """A step of each, and an update."""
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def updated(scaler, *overflows):
    for overflow in overflows:
        scaler.commit(torch.tensor(float(overflow)))
    return scaler


def test_it_is_a_grad_scaler_and_follows_torch_step_by_step():
    ours = DistributedGradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    assert isinstance(ours, torch.amp.GradScaler)
    state, defaults = DistributedGradScaler("cpu").state_dict(), torch.amp.GradScaler("cpu").state_dict()
    assert {name: state[name] for name in defaults} == defaults
    assert (defaults["growth_interval"], defaults["growth_factor"]) == (2000, 2.0)
    weights = [parameter(), parameter()]
    optimizers = [sgd(weight, lr=0.1) for weight in weights]
    generator = random.Random(0)
    for step in range(100):
        bad = generator.random() < 0.25
        for scaler, weight, optimizer in zip((ours, theirs), weights, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale((weight * (step + 1)).sum()).backward()
            if bad:
                weight.grad[1] = BAD[step % 3]
            if step % 2:
                scaler.unscale_(optimizer)
            attempt(scaler, optimizer)
        assert torch.equal(*weights)
        assert ours.get_scale() == theirs.get_scale()
        assert ours._get_growth_tracker() == theirs._get_growth_tracker()
    loaded = updated(DistributedGradScaler(hysteresis=2), 1)
    loaded.load_state_dict(theirs.state_dict())
    kept = {"hysteresis": 2, "_overflow_tracker": 0}
    assert loaded.state_dict() == loaded.state_dict() | theirs.state_dict() | kept


@pytest.mark.parametrize(
    ("hysteresis", "floor", "ceiling"), [(1, None, None), (2, 4.0, 2.0**12), (3, None, 2.0**11), (1, 2.0**9, None)]
)
def test_the_scale_over_200_steps_equals_a_hand_computed_trajectory(hysteresis, floor, ceiling):
    options = {"init_scale": 2.0**10, "growth_interval": 4, "hysteresis": hysteresis}
    scaler = DistributedGradScaler(**options, min_scale=floor, max_scale=ceiling)
    rule = ScaleRule(**options, min_scale=floor or 0.0, max_scale=ceiling or float("inf"))
    weight, seen, generator = parameter(), set(), random.Random(hysteresis)
    optimizer = sgd(weight, lr=1e-3)
    for _ in range(200):
        overflow = generator.random() < 0.2
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        assert torch.equal(weight.grad, torch.full((4,), rule.scale))
        if overflow:
            weight.grad[generator.randrange(4)] = generator.choice(BAD)
        before = weight.detach().clone()
        attempt(scaler, optimizer)
        assert torch.equal(weight.detach(), before) == overflow
        rule.update(overflow)
        seen.add(rule.scale)
        assert scaler.get_scale() == rule.scale
    assert len(seen) > 3
    assert floor is None or min(seen) >= floor
    assert ceiling is None or max(seen) <= ceiling
    assert {floor, ceiling} & seen or {floor, ceiling} == {None}  # a limit was met


@pytest.mark.parametrize("count", [2**31 - 1, 2**31, sys.maxsize])
def test_counts_of_any_size_are_never_reached(count):
    """torch keeps the counts in int32."""
    assert updated(DistributedGradScaler(init_scale=64.0, growth_interval=count), 0, 0, 0).get_scale() == 64.0
    assert updated(DistributedGradScaler(init_scale=64.0, hysteresis=count), 1, 1, 1).get_scale() == 64.0


def test_without_a_floor_the_scale_stays_above_zero():
    """And below infinity without a ceiling."""
    theirs, weight = torch.amp.GradScaler("cpu"), parameter()
    optimizer = sgd(weight)
    theirs.scale(weight.sum())  # which makes its scale
    for _ in range(300):
        weight.grad = torch.full_like(weight, torch.nan)
        attempt(theirs, optimizer)
    assert theirs.get_scale() == 0  # torch's has no floor
    assert updated(DistributedGradScaler(), *[1] * 300).get_scale() > 0
    assert updated(DistributedGradScaler(init_scale=2.0**127, growth_interval=1), 0).get_scale() == 2.0**127


def test_state_survives_saving_and_copying_at_any_step():
    """A copy keeps the group, of which only the identity is looked at here; a pickle may go to another process."""
    options = {"init_scale": 64.0, "growth_interval": 3, "hysteresis": 2, "min_scale": 2.0, "max_scale": 128.0}
    pattern = [1, 0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1]
    for partition in range(len(pattern)):
        whole = updated(DistributedGradScaler(**options, group=object()), *pattern[:partition])
        loaded, pickled = DistributedGradScaler(), pickle.loads(pickle.dumps(whole))
        loaded.load_state_dict(whole.state_dict())
        copies = [copy.copy(whole), copy.deepcopy(whole), copy.deepcopy([whole])[0]]
        assert pickled._group is None
        assert all(one._group is whole._group for one in copies)
        expected = updated(whole, *pattern[partition:]).state_dict()
        for one in (loaded, pickled, *copies):
            assert updated(one, *pattern[partition:]).state_dict() == expected


def test_disabled_it_does_nothing():
    scaler = DistributedGradScaler(enabled=False)
    weight = parameter()
    optimizer = sgd(weight)
    loss = weight.sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    attempt(scaler, optimizer)
    assert torch.equal(weight.detach(), torch.zeros(4))
    assert (scaler.state_dict(), scaler.get_scale()) == ({}, 1.0)
    assert not scaler.has_overflowed(optimizer)


def test_large_finite_gradients_are_no_overflow():
    weight, scaler = parameter(size=1000), DistributedGradScaler(init_scale=1.0)
    weight.grad = torch.full((1000,), 3e38)
    attempt(scaler, sgd(weight, lr=1e-38))
    assert scaler.get_scale() == 1.0
    assert (weight < 1).all()


@pytest.mark.parametrize("part", [1j * math.inf, math.nan, -math.inf])
def test_complex_gradients_are_unscaled_and_checked(part):
    weight, real, scaler = torch.nn.Parameter(torch.ones(3) * 1j), parameter(), DistributedGradScaler(init_scale=8.0)
    optimizer = sgd(weight, real)
    scaler.scale((weight.conj() * (2j * torch.ones(3))).real.sum() + real.sum()).backward()
    assert weight.grad.is_conj()
    scaler.unscale_(optimizer)
    assert torch.equal(weight.grad, torch.ones(3) * 2j)
    conjugate, found_inf = (torch.ones(3) * 8j).conj(), torch.zeros(())
    unscale_and_check_([conjugate], torch.tensor(0.125), found_inf)
    assert torch.equal(conjugate, torch.ones(3) * -1j)
    assert not found_inf
    attempt(scaler, optimizer)
    stepped = weight.detach().clone()
    assert torch.equal(stepped, torch.ones(3) * -1j)
    weight.grad = torch.tensor([1, part, 1], dtype=torch.complex64)
    attempt(scaler, optimizer)
    assert torch.equal(weight.detach(), stepped)
    assert scaler.get_scale() == 4.0


def test_sparse_gradients_are_unscaled_and_checked():
    table, scaler = torch.nn.Embedding(5, 2, sparse=True), DistributedGradScaler(init_scale=8.0)
    optimizer = sgd(table.weight)
    before = table.weight.detach().clone()
    scaler.scale(table(torch.tensor([1, 1, 3])).sum()).backward()
    scaler.unscale_(optimizer)
    gradient = torch.tensor([[0.0] * 2, [2.0] * 2, [0.0] * 2, [1.0] * 2, [0.0] * 2])
    assert torch.equal(table.weight.grad.to_dense(), gradient)
    attempt(scaler, optimizer)
    assert torch.equal(table.weight.detach(), before - gradient)
    # Two fp16 entries of one index, each finite, whose sum is not.
    half = torch.nn.Parameter(torch.zeros(3, 1, dtype=torch.float16))
    values = torch.tensor([[60000.0], [60000.0]], dtype=torch.float16)
    with torch.sparse.check_sparse_tensor_invariants():  # the argument check_invariants makes torch 2.11 warn
        half.grad = torch.sparse_coo_tensor([[1, 1]], values, (3, 1))
    attempt(scaler, sgd(half))
    assert torch.equal(half.detach(), torch.zeros(3, 1, dtype=torch.float16))
    assert scaler.get_scale() == 4.0


def test_one_of_several_optimizers_overflows():
    """The other one has gradients in fp16, which torch's scaler refuses."""
    weights = [parameter(dtype=torch.float16), parameter()]
    optimizers = [sgd(weight) for weight in weights]
    scaler = DistributedGradScaler(init_scale=4.0)
    scaler.scale(weights[0].float().sum() + weights[1].sum()).backward()
    weights[1].grad[0] = float("nan")
    scaler.unscale_(optimizers[0])
    assert torch.equal(weights[0].grad, torch.ones(4, dtype=torch.float16))
    attempt(scaler, *optimizers)
    assert torch.equal(weights[0].detach(), torch.zeros(4, dtype=torch.float16))
    assert torch.equal(weights[1].detach(), torch.ones(4))
    assert scaler.get_scale() == 2.0
    assert not any(map(scaler.has_overflowed, optimizers))  # since the update
    assert pickle.loads(pickle.dumps(scaler)).get_scale() == 2.0  # which only takes a scaler between steps


@pytest.mark.parametrize("unscaled", [False, True])
def test_a_fused_optimizer_whose_first_step_is_skipped_starts_clean(unscaled):
    """torch's fused SGD leaves its momentum uninitialised then; also that of a group that comes later."""
    weights = [parameter(size=1000), parameter(size=1000)]
    groups = [{"params": [weight]} for weight in weights]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.5, fused=True)
    scaler = DistributedGradScaler(init_scale=1.0)
    # What the gradients of both weights are, in units of the scale; None: no gradient.
    for first, second in [(float("inf"), None), (1.0, None), (0.0, float("inf")), (0.0, 1.0)]:
        for weight, value in zip(weights, (first, second), strict=True):
            weight.grad = None if value is None else torch.full((1000,), value * scaler.get_scale())
        if unscaled:
            scaler.unscale_(optimizer)
        attempt(scaler, optimizer)
    # The first momentum is the gradient itself, without dampening.
    assert torch.allclose(weights[0].detach(), torch.full((1000,), 1 - 0.1 - 0.09))
    assert torch.allclose(weights[1].detach(), torch.full((1000,), 0.9))


@pytest.mark.parametrize("make", [torch.amp.GradScaler, DistributedGradScaler])
def test_misuse_is_reported_as_torch_does(make):
    """Also an optimizer over the parameters of another model; nothing may hide that, and nothing may move the scale."""
    for fused, unscaled in itertools.product((False, True), (False, True)):
        weight, optimizer = parameter(), sgd(parameter(), fused=fused)
        scaler = make("cpu", growth_interval=1)
        scaler.scale(weight.sum()).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        if fused:
            scaler.step(optimizer)
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.update() if fused else scaler.step(optimizer)
        assert scaler.get_scale() == 2.0**16
    scaler, optimizer = make("cpu"), sgd(weight)
    scaler.scale(weight.sum()).backward()
    each_raises(AssertionError, {"No inf checks": scaler.update})
    for call in (scaler.unscale_, scaler.step):
        call(optimizer)
        each_raises(RuntimeError, {"already been called": lambda call=call: call(optimizer)})


IMPOSSIBLE = {
    "init_scale: got 0": {"init_scale": 0.0},
    r"init_scale: got 1e\+39": {"init_scale": 1e39},
    "init_scale: got 1e-46": {"init_scale": 1e-46},
    "growth_factor: got 1": {"growth_factor": 1.0},
    "growth_factor: got inf": {"growth_factor": math.inf},
    "backoff_factor: got 1": {"backoff_factor": 1.0},
    "growth_interval: got 0": {"growth_interval": 0},
    "hysteresis: got 0": {"hysteresis": 0},
    "min_scale: got 0": {"min_scale": 0.0},
    r"min_scale: got 1e\+39": {"min_scale": 1e39},
    "max_scale: got 4": {"min_scale": 8.0, "max_scale": 4.0},
    r"max_scale: got 1e\+39": {"max_scale": 1e39},
    "max_scale: got nan": {"max_scale": math.nan},
}


def test_impossible_arguments_are_errors():
    """CUDA without a GPU too, which torch's own takes and does nothing. The outermost scales are possible."""
    without = {} if torch.cuda.is_available() else {"torch sees no GPU": {"device": "cuda"}}
    for message, options in (IMPOSSIBLE | without).items():
        each_raises(ValueError, {message: lambda options=options: DistributedGradScaler(**options)})
    for scale in (torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max):
        assert DistributedGradScaler(init_scale=scale, min_scale=scale, max_scale=scale).get_scale() == scale
    assert updated(DistributedGradScaler(max_scale=math.inf, growth_interval=1), 0).get_scale() == 2.0**17


def sharded(mesh, placement, value):
    return DTensor.from_local(value, mesh, [placement], run_check=False)


@on_ranks(4)
def test_mixed_plain_and_sharded_gradients_on_several_meshes(world):
    """torch's scaler raises here, or lets one rank skip while another steps."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for culprit, where in itertools.product(range(4), range(3)):
        values = [
            torch.ones(4),
            sharded(grid["a"], Shard(0), torch.ones(2)),
            sharded(grid["b"], Replicate(), torch.ones(3)),
        ]
        weights = [torch.nn.Parameter(value) for value in values]
        optimizer, scaler = sgd(*weights, foreach=False), DistributedGradScaler("cpu", init_scale=8.0)
        for weight in weights:
            weight.grad = torch.full_like(weight, 8.0)
        if world.rank == culprit:
            local(weights[where].grad)[-1] = BAD[where]
        with Collectives() as collectives:
            scaler.unscale_(optimizer)
            attempt(scaler, optimizer)
        assert (collectives.counts, collectives.elements) == ({"allreduce": 1}, [1])
        assert all(local(weight).eq(1).all() for weight in weights)
        assert everywhere(scaler.get_scale()) == [4.0] * 4


@on_ranks(4)
def test_a_partial_gradient_overflows_only_in_its_sum_and_a_part_that_is_cut_away_counts(world):
    """A replicated gradient of a sharded weight: what this rank drops, no other rank may have seen."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    weight = torch.nn.Parameter(sharded(mesh, Replicate(), torch.zeros(2, dtype=torch.float16)))
    optimizer, scaler = sgd(weight), DistributedGradScaler("cpu", init_scale=2.0)
    for own, after in (([30000.0, 1.0], [0.0, 0.0]), ([0.5, 1.0], [-2.0, -4.0])):  # the sum of four, unscaled by 1
        weight.grad = sharded(mesh, Partial(), torch.tensor(own, dtype=torch.float16))
        attempt(scaler, optimizer)
        assert scaler.get_scale() == 1.0
        assert weight.to_local().tolist() == after
    weight.grad = sharded(mesh, Partial("avg"), torch.tensor([4.0 * world.rank, 8.0], dtype=torch.float16))
    attempt(scaler, optimizer)
    assert weight.to_local().tolist() == [-8.0, -12.0]  # the mean of four
    weight = torch.nn.Parameter(sharded(mesh, Shard(0), torch.zeros(2)))
    weight.grad = sharded(mesh, Replicate(), torch.ones(8))
    if world.rank == 0:
        weight.grad.to_local()[7] = float("inf")
    attempt(scaler, sgd(weight))
    assert scaler.get_scale() == 0.5
    assert weight.to_local().tolist() == [0.0, 0.0]


@on_ranks(4)
def test_ranks_without_gradients_or_scale_calls_take_part(world):
    """As on the earlier stages of a pipeline, and on a rank whose optimizer has nothing to do."""
    weight = parameter(size=2)
    optimizer = sgd(weight)
    scaler = DistributedGradScaler("cpu", init_scale=4.0, growth_interval=2)
    for overflow in (False, True):
        weight.grad = None
        if world.rank == 3:
            scaler.scale(weight.sum()).backward()
            if overflow:
                weight.grad[0] = float("inf")
        scaler.unscale_(optimizer)
        attempt(scaler, optimizer)
        assert everywhere(scaler.get_scale()) == [2.0 if overflow else 4.0] * 4
    assert weight.tolist() == ([0.0, 0.0] if world.rank == 3 else [1.0, 1.0])


@on_ranks(4)
def test_a_group_decides_for_itself(world):
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    scaler = DistributedGradScaler("cpu", init_scale=4.0, group=halves[world.rank // 2])
    weight = parameter(size=2)
    weight.grad = torch.full((2,), float("nan") if world.rank == 0 else 1.0)
    attempt(scaler, sgd(weight))
    assert everywhere(scaler.get_scale()) == [2.0, 2.0, 4.0, 4.0]
    found = torch.tensor(float(world.rank > 0))
    scaler.agree(found)
    assert float(found) == 1.0  # a flag, on how many ranks ever it was set


@on_ranks(4)
def test_the_sequence_of_collectives_does_not_depend_on_what_is_found(world):
    for gradient in (None, 1.0, float("nan") if world.rank == 1 else 1.0):
        weights = [parameter(size=2) for _ in range(3)]
        for weight in weights:
            weight.grad = None if gradient is None else torch.full((2,), gradient)
        scaler, optimizers = DistributedGradScaler("cpu"), [sgd(weight) for weight in weights]
        with Collectives() as unscaling:
            scaler.unscale_(optimizers[0])
        with Collectives() as stepping:  # which unscales the others
            attempt(scaler, *optimizers)
        assert (unscaling.counts, unscaling.elements) == ({"allreduce": 1}, [1])
        assert (stepping.counts, stepping.elements) == ({"allreduce": 2}, [1, 1])


@on_ranks(4)
def test_a_context_gives_the_scaler_its_ties(world):
    """The gradients of an embedding tied across stages are summed before they are judged, and once.

    One that no stage uses keeps its None. The optimizer skips it, as torch does; zeros would be stepped with: here
    weight decay alone.
    """
    with paramp.launch_from_torch({"parallel": {"pipeline": 4}}) as context:
        used, used_once, unused = weights = [parameter(size=2) for _ in range(3)]
        context.ties += [TiedParameter("w", weight, context.pp.group, owner=world.rank == 0) for weight in weights]
        optimizer = sgd(*weights, weight_decay=0.25)
        scaler = DistributedGradScaler("cpu", init_scale=2.0)
        used.grad = torch.tensor([2.0, 4.0 * world.rank])
        used_once.grad = torch.full((2,), 4.0) if world.rank == 1 else None
        scaler.unscale_(optimizer)
        paramp.clip_grad_norm_(weights, 100.0)
        scaler.step(optimizer)
        assert used.tolist() == [1.0 - 0.25 - 4.0, 1.0 - 0.25 - 12.0]
        assert used_once.tolist() == [1.0 - 0.25 - 2.0] * 2
        assert unused.grad is None
        assert unused.tolist() == [1.0, 1.0]
