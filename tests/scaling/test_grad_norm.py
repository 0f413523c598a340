"""The norm of the logical model's gradient, against a single process that holds all of it."""

import copy
import itertools
import math
from unittest import mock

import pytest
import torch
from beside_plain import randn
from counting import Collectives
from families import rarely
from layouts import layouts
from pool import on_ranks
from reference import batches, local, small_gpt
from small_engines import engine_of, everywhere
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import paramp
from paramp import clip_grad_norm_
from paramp.base import loop_block_sizes
from paramp.scaling import complete_and_unscale_gradients, grad_norm
from paramp.scaling.complete_and_unscale_gradients import unscale_and_check_
from paramp.scaling.copies_per_element import TiedParameter
from paramp.scaling.local_norm import norm_power

LAYOUTS = layouts("pp2-tp2, pp2-tp2-sp, dp2-tp2, dp2-tp2-sp, pp2-dp2")
ORDERS = [1.0, 2.0, 3.0, math.inf]


def with_gradient(gradient):
    weight = torch.nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient
    return weight


def exact_norm(gradients, order):
    return torch.linalg.vector_norm(torch.cat([one.double().flatten() for one in gradients]), order).item()


def local_gradients(context, **changes):
    """A model on its shards whose gradients are those of the whole batch (every data rank sees all of it)."""
    model = small_gpt(**changes)
    engine = engine_of(model, model.loss)
    engine.forward_backward(*next(batches(1)))
    parameters = [parameter for _, parameter in engine.named_parameters()]
    for parameter in parameters:  # the engine's gradients are divided by the data ranks and summed only at the step
        if parameter.grad is not None:
            local(parameter.grad).mul_(context.dp.size)
    return parameters


TIED = {"pp2-tp2-sp": True, "dp2-tp2-sp": False, "pp2-dp2": True, "dp2-tp2": True, "pp2-tp2": False}
"""By layout, what runs by default."""


@pytest.mark.parametrize(("layout", "tied"), rarely(itertools.product(LAYOUTS, (True, False)), *TIED.items()))
@on_ranks(4, cuda=True)
def test_the_norm_is_that_of_the_logical_model(world, layout, tied):
    model = small_gpt(tied=tied)
    x, y = next(batches(1))
    model.loss(model(x), y).backward()
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout]}, device=world.device) as context:
        parameters = local_gradients(context, tied=tied)
        for order in ORDERS:
            expected = exact_norm([one.grad for one in model.parameters()], order)
            assert clip_grad_norm_(parameters, 1e9, order).item() == pytest.approx(expected, rel=1e-6), order
        clip_grad_norm_(parameters, 0.25)
        assert abs(clip_grad_norm_(parameters, 1e9).item() - 0.25) < 1e-5


@pytest.mark.parametrize("order", ORDERS)
@on_ranks(4)
def test_nonfinite_values_reach_every_rank(world, order):
    """gloo's MAX drops NaN, so the infinity norm must not rest on it."""
    for bad, culprit in itertools.product((math.nan, math.inf), range(4)):
        with paramp.launch_from_torch({"parallel": {"pipeline": 4}}) as context:
            value = bad if world.rank == culprit else 1.0
            norm = clip_grad_norm_([with_gradient(torch.tensor([1.0, value]))], 1.0, order, context=context)
            assert not norm.isfinite()
            with pytest.raises(RuntimeError, match="cannot be clipped"):
                clip_grad_norm_([with_gradient(torch.tensor([value]))], 1.0, order, error_if_nonfinite=True)


@on_ranks(4)
def test_dtensors_alone_need_no_context(world):
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(1.0, 9.0)
    parts = [(grid, [Shard(0), Replicate()]), (grid["b"], [Shard(0)]), (grid, [Shard(0), Shard(0)])]
    parameters = [with_gradient(distribute_tensor(whole, *part)) for part in parts]
    assert abs(clip_grad_norm_(parameters, 1e9).item() - math.sqrt(3) * whole.norm().item()) < 1e-5


def scale_after_a_step(parameters):
    """The loss scale of torch's scaler, 8 before, on this rank."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.step(torch.optim.SGD(parameters, lr=0.1))
    scaler.update()
    return scaler.get_scale()


@on_ranks(4)
def test_torchs_own_scaler_and_clip_are_right_with_fully_shard_alone(world):
    """Layers with biases, of sizes that four ranks do not divide."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3))
    plain, x = copy.deepcopy(model), randn(8, 6)
    plain(x).square().mean().backward()
    mesh = init_device_mesh("cpu", (4,))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    model(x.chunk(4)[world.rank]).square().mean().backward()
    parameters = [*model.parameters()]
    assert {(one.grad.device_mesh, one.grad.placements) for one in parameters} == {(mesh, (Shard(0),))}
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1e9).full_tensor()
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
    before = [local(one).clone() for one in parameters]
    if world.rank == 1:
        local(parameters[0].grad)[0] = math.inf
    assert everywhere(scale_after_a_step(parameters)) == [4.0] * 4
    assert all(torch.equal(local(one), old) for one, old in zip(parameters, before, strict=True))


@on_ranks(4)
def test_what_torchs_own_scaler_and_clip_do(world):
    """Right on one mesh; on several they raise, or each part decides alone. ``docs/fsdp2.md`` has the table."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh("cpu", (4,))

    def weight(mesh=None, *placements):
        whole = torch.arange(1.0, 9.0)
        return with_gradient(whole if mesh is None else distribute_tensor(whole, mesh, placements))

    def clipped(parameters):
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1e9)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    collectives = Collectives()

    def scales(parameters):
        """Of each rank, after a step in which rank 1's part of the last gradient is infinite."""
        if world.rank == 1:
            local(parameters[-1].grad)[-1] = math.inf
        collectives.counts.clear()
        with collectives:
            scale = scale_after_a_step(parameters)
        return everywhere(scale)

    length = torch.arange(1.0, 9.0).norm().item()
    one_mesh = [weight(flat, Shard(0)), weight(flat, Shard(0))]
    assert clipped(one_mesh) == pytest.approx(math.sqrt(2) * length)
    assert scales(one_mesh) == [4.0] * 4
    two_meshes = [weight(grid["dp"], Shard(0)), weight(grid, Shard(0), Shard(0))]
    with pytest.raises((RuntimeError, ValueError), match="mesh"):
        clipped(two_meshes)
    assert len({*scales(two_meshes)}) == 2  # replicas over "tp" diverge
    with_plain = [weight(grid["dp"], Shard(0)), weight()]
    for call in (clipped, scales):
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            call(with_plain)
    stages = [weight()]  # each rank's own
    assert clipped(stages) == pytest.approx(length)
    assert scales(stages) == [8.0, 4.0, 8.0, 8.0]
    assert not collectives.counts


def maybe_sparse(sparse):
    weight = with_gradient(torch.ones(3))
    if sparse:
        weight.grad = weight.grad.to_sparse()
    return weight


@on_ranks(2)
def test_a_gradient_without_a_norm_is_the_same_error_on_every_rank(world):
    for parallel in ({"data": 2}, {"pipeline": 2}):
        with paramp.launch_from_torch({"parallel": parallel}) as context:
            for norm_type in (2.0, math.inf):
                message = r"^rank 1: a gradient of shape \(3,\) is sparse.*to_dense"
                with pytest.raises(ValueError, match=message):
                    clip_grad_norm_([maybe_sparse(False), maybe_sparse(world.rank == 1)], 1.0, norm_type)
            if context.pp.size > 1:
                tied = maybe_sparse(world.rank == 1)  # its sum is dense
                context.ties.append(TiedParameter("tied", tied, context.pp.group, owner=world.rank == 0))
                assert clip_grad_norm_([tied], 1e9).item() == pytest.approx(math.sqrt(12.0))
    with pytest.raises(ValueError, match=r"^rank 1: a plain parameter in a world of 2 ranks.*launch_from_torch"):
        clip_grad_norm_([maybe_sparse(False)] if world.rank else [], 1.0)


@on_ranks(2)
def test_where_the_host_does_not_wait_the_error_of_a_rank_is_every_ranks_next_one(world):
    def clip(sparse=False):
        return clip_grad_norm_([maybe_sparse(sparse)], 1e9).item()

    grad_norm._failures, norm = grad_norm._Failures(), pytest.approx(math.sqrt(3.0))
    with mock.patch.object(grad_norm, "DELAYED", {"cpu"}), paramp.launch_from_torch({"parallel": {"data": 2}}):
        with pytest.raises(ValueError, match=r"^rank 1: a gradient of shape .* is sparse"):
            clip(sparse=world.rank == 1)  # the first call waits
        assert clip() == norm
        if world.rank == 1:
            with pytest.raises(ValueError, match=r"^a gradient of shape .* is sparse"):
                clip(sparse=True)
        else:
            clip()
        with pytest.raises(ValueError, match="a rank could not clip its gradients in the last call"):
            clip()
        assert clip() == norm


SPECIAL = [0.0, -0.0, 1.0, -3.5, 2.0**-133, -(2.0**-140), 3.0e38, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("wrong", [None, *SPECIAL])
@pytest.mark.parametrize("factor", [1.0, 2.0**-16, 2.0**-130])
def test_bfloat16_gradients_are_checked_and_unscaled_as_torchs_kernel_does(factor, wrong):
    """The two fused passes for GPUs, run on the CPU, where torch's own kernel takes bfloat16 too."""
    values = [torch.randn(5, 7), torch.tensor(2.0), torch.zeros(0), torch.tensor(SPECIAL[:7]), torch.randn(9)[::2]]
    if wrong is not None:
        values[0][3, 2] = wrong
    ours, theirs = ([one.bfloat16().clone() for one in values] for _ in range(2))
    found, expected = torch.zeros(()), torch.zeros(())
    complete_and_unscale_gradients._unscale_bfloat16_(ours, found, torch.tensor(factor))
    torch._amp_foreach_non_finite_check_and_unscale_(theirs, expected, torch.tensor(factor))
    assert found.item() == expected.item() == float(wrong is not None and not math.isfinite(wrong))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_flag_that_is_set_stays():
    """Also without any gradients in bfloat16."""
    for given in ([], [torch.zeros(0, dtype=torch.bfloat16)], [torch.ones(2, dtype=torch.bfloat16)]):
        for flag in (0.0, 1.0):
            found = torch.tensor(flag)
            complete_and_unscale_gradients._unscale_bfloat16_(given, found, torch.tensor(0.5))
            unscale_and_check_(given, torch.tensor(0.5), found)
            assert found.item() == flag


def test_one_process_is_torchs_own_clipping():
    for order, limit in itertools.product(ORDERS, (0.5, 100.0)):
        ours, theirs = ([with_gradient(torch.linspace(-1.0, 2.0, 5) * factor) for factor in (1, 2)] for _ in range(2))
        norm = clip_grad_norm_(ours, limit, order)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, limit, order))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.grad, b.grad)


@on_ranks(1)
def test_a_plain_gradient_needs_no_context_in_a_world_of_one_rank(world):
    assert clip_grad_norm_([with_gradient(torch.tensor([3.0, 4.0]))], 1.0).item() == pytest.approx(5.0)


def test_arguments_and_gradients_that_torch_takes():
    """Numbers as strings, and a gradient whose elements share memory."""
    weight = torch.nn.Parameter(torch.zeros(4))
    for order, expected in (("inf", 3.0), ("2", 6.0), (" 1e0", 12.0)):
        weight.grad = torch.full((1,), 3.0).expand(4)
        assert clip_grad_norm_(weight, "1.5", order).item() == pytest.approx(expected)
        torch.testing.assert_close(weight.grad, torch.full((4,), 4.5 / expected))
    weight.grad, scaler = torch.full((1,), 3.0).expand(4), paramp.DistributedGradScaler("cpu", init_scale=2.0)
    scaler.unscale_(torch.optim.SGD([weight]))
    assert weight.grad.tolist() == [1.5] * 4
    for order in ("two", "nan", None, -1):
        with pytest.raises(ValueError, match=r"norm_type: got .*expected a number above 0, or math.inf"):
            clip_grad_norm_(weight, 1.0, order)
    for limit in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm: got"):
            clip_grad_norm_(weight, limit)


@pytest.mark.parametrize("order", ORDERS)
def test_long_gradients_are_added_up_exactly(order):
    """torch's own 2-norm of the fp32 one is 4e-4 off on a CPU, its 1-norm 1e-3.

    Half-precision ones are widened in parts; the largest element is in the last one. Their squares overflow.
    """
    assert clip_grad_norm_([with_gradient(torch.full((4,), 30000.0).half())], 1e9).item() == 60000.0
    for size, factor, dtype in (
        (10_000_019, 1e-3, torch.float32),
        (2400, 1e30 if order < 3 or order == math.inf else 1.0, torch.float32),
        (3 * loop_block_sizes.WIDEN_BLOCK + 100, 1.0, torch.float16),
        (3 * loop_block_sizes.WIDEN_BLOCK + 100, 1.0, torch.bfloat16),
    ):
        gradient = (randn(size) * factor).to(dtype)
        gradient[-1] = 8.0 * factor
        expected = exact_norm([gradient], order)
        assert clip_grad_norm_([with_gradient(gradient)], 1e9, order).item() == pytest.approx(expected, rel=1e-6)


def test_the_blocks_of_a_long_gradient_are_added_up_in_fp64():
    values = torch.rand(3_000_001) + 0.5
    power = norm_power([values], [1.0], 2.0, values.device)
    assert power.item() == pytest.approx(values.double().square().sum().item(), rel=5e-9)
