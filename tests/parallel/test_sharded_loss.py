"""Cross-entropy over sharded classes, as usual and with the same bits as of whole ones, against torch's in fp64."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from beside_plain import randn
from families import rarely
from pool import on_ranks
from small_engines import engine_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import paramp
from paramp.exact.exact_cross_entropy import cross_entropy
from paramp.exact.exact_layout import ExactLayout
from paramp.parallel.tensor.sharded_loss import vocab_parallel_loss

LAYOUT = ExactLayout(seed=0, microchunk=1, slices=8)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-5, torch.bfloat16: 2e-5}
NO_LABELS = (4, 8)
"""The shape of logits whose rows are all ignored."""
EPS = {torch.float64: 0.0, torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def meshes():
    """A mesh of two ranks and one of four."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"], init_device_mesh("cpu", (4,))


def sharded(logits, mesh):
    return distribute_tensor(logits.detach(), mesh, [Shard(1 if logits.ndim > 1 else 0)]).requires_grad_()


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def example(shape, dtype, weighted):
    """Logits with exponentials that are 0, their classes, a row or all ignored, class weights of which some are 0."""
    dim = 1 if len(shape) > 1 else 0
    logits = (torch.randn(shape) * 30 - 100).to(dtype).requires_grad_()
    target = torch.randint(shape[dim], shape[:dim] + shape[dim + 1 :])
    if dim:
        target[0] = -100
    weight = torch.rand(shape[dim]).to(dtype) if weighted else None
    if weighted:
        weight[::3] = 0
        weight[target.view(-1)[-1]] = 1
    if shape == NO_LABELS:
        target[:] = -100
    return logits, target, weight


def in_fp64(logits, target, weight, **options):
    """torch's loss, a factor for each of its elements, and the gradient of the logits."""
    logits = logits.detach().double().requires_grad_()
    loss = F.cross_entropy(logits, target, weight=None if weight is None else weight.double(), **options)
    factor = torch.randn(loss.shape, dtype=torch.float64)
    (loss * factor).sum().backward()
    return loss.detach(), factor, logits.grad


def with_gradient(function, logits, target, factor, **options):
    loss = function(logits, target, **options)
    (loss * factor).sum().backward()
    return loss.detach(), logits.grad


def exact(*args, **options):
    return cross_entropy(LAYOUT, *args, **options)


def usual(*args, **options):
    with vocab_parallel_loss():
        return F.cross_entropy(*args, **options)


SMOOTHED = [(False, 0.0), (True, 0.0), (False, 0.2), (True, 0.2)]


@pytest.mark.parametrize(("weighted", "smoothing"), rarely(SMOOTHED, SMOOTHED[0], SMOOTHED[3]))
@on_ranks(4)
def test_losses_and_gradients_have_the_same_bits_however_classes_are_sharded(world, weighted, smoothing):
    torch.manual_seed(3)
    both = meshes()
    cases = [((7, 296), "none"), ((7, 296), "mean"), ((7, 296), "sum"), ((3, 16, 5), "none"), ((8,), "mean")]
    cases.append((NO_LABELS, "mean"))
    for (shape, reduction), dtype in itertools.product(cases, TOLERANCE):
        logits, target, weight = example(shape, dtype, weighted)
        options = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
        expected, factor, expected_gradient = in_fp64(logits, target, **options)
        loss, gradient = with_gradient(exact, logits, target, factor, **options)
        assert loss.dtype is (dtype if dtype.itemsize > 2 else torch.float32)
        assert gradient.dtype is dtype
        least = TOLERANCE[dtype]
        torch.testing.assert_close(loss.double(), expected, atol=least, rtol=least, equal_nan=True)
        bounds = {"atol": least, "rtol": least + EPS[dtype], "equal_nan": True}
        torch.testing.assert_close(gradient.double(), expected_gradient, **bounds)
        if dtype is torch.float64 and shape != (8,):
            loss_of_shards, of_shards = with_gradient(usual, sharded(logits, both[0]), target, factor, **options)
            torch.testing.assert_close(loss_of_shards, expected, atol=1e-11, rtol=1e-12, equal_nan=True)
            torch.testing.assert_close(of_shards.full_tensor(), expected_gradient, **bounds)
        for mesh in both:
            split_loss, split = with_gradient(exact, sharded(logits, mesh), target, factor, **options)
            assert bits(split_loss).equal(bits(loss)), (shape, dtype, options, mesh)
            assert split.placements[0].is_shard()
            assert bits(split.full_tensor()).equal(bits(gradient)), (shape, dtype, options, mesh)


@on_ranks(4)
def test_one_nan_is_one_nan_loss_and_the_others_keep_their_bits(world):
    logits, target = randn(6, 48), torch.tensor([0, 47, 3, 20, 7, 9])
    logits[2, 40] = float("nan")
    logits[4, :] = float("-inf")
    logits[4, 7] = 3.0
    loss = exact(logits, target, reduction="none")
    assert loss[4] == 0
    for mesh in meshes():
        split = exact(sharded(logits, mesh), target, reduction="none")
        assert loss.isnan().tolist() == split.isnan().tolist() == [False, False, True, False, False, False]
        assert bits(loss.nan_to_num(7)).equal(bits(split.nan_to_num(7)))
        usually = usual(sharded(logits, mesh), target, reduction="none")
        assert usually.isnan().tolist() == loss.isnan().tolist()


@on_ranks(2)
def test_arguments_that_torch_refuses_are_refused(world):
    """And what cannot be sharded."""
    logits, target = randn(4, 16), torch.randint(16, (4,))
    mesh = init_device_mesh("cpu", (2,))
    shards = sharded(logits, mesh)
    for wrong, options, message in [
        (target[:1], {}, r"target of shape \(1,\) for logits of shape \(4, 16\), expected \(4,\)"),
        (target, {"reduction": "men"}, "men is not a valid value for reduction"),
        (target, {"weight": torch.ones(17)}, r"weight of shape \(17,\), expected \(16,\)"),
        (target, {"label_smoothing": 1.5}, "label_smoothing=1.5, expected a number from 0 to 1"),
    ]:
        with pytest.raises((ValueError, RuntimeError)):
            F.cross_entropy(logits, wrong, **options)
        for function, given in ((exact, logits), (usual, shards)):
            with pytest.raises(ValueError, match=message):
                function(given, wrong, **options)
    for function in (exact, usual):
        with pytest.raises(paramp.ConfigError, match="got probabilities as target"):
            function(shards, torch.rand(4, 16).softmax(-1))
        with pytest.raises(paramp.ConfigError, match="got create_graph=True, expected gradients of the first order"):
            torch.autograd.grad(function(shards, target), shards, create_graph=True)
    for wrong in (16, -1):
        with pytest.raises((IndexError, RuntimeError), match=f"index {wrong} is out of bounds"):
            usual(shards, target * 0 + wrong)
    with pytest.raises(paramp.ConfigError, match=r"10 classes sharded over 2 ranks.*slices = 8.*to 16 classes"):
        exact(sharded(logits[:, :10], mesh), target)
    with pytest.raises(paramp.ConfigError, match=r"placements .*Partial.*expected logits that are summed up"):
        exact(DTensor.from_local(logits, mesh, [Partial()]), target)


@on_ranks(2)
def test_classes_that_ranks_do_not_divide_half_precision_and_old_arguments(world):
    logits, target = randn(6, 7, dtype=torch.float64), torch.tensor([0, 6, 3, 3, 1, 2])
    shards = sharded(logits, init_device_mesh("cpu", (2,))).detach()
    half = usual(shards.half(), target)
    torch.testing.assert_close(half, F.cross_entropy(logits.half().float(), target))
    with pytest.warns(UserWarning, match="size_average"):
        summed = usual(shards, target, size_average=False)
    torch.testing.assert_close(summed, F.cross_entropy(logits, target, reduction="sum"), atol=1e-11, rtol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@on_ranks(2)
def test_losses_are_masked_and_added_to_others(world, smoothing):
    target, mask = torch.tensor([0, 6, 3, 3]), torch.tensor([True, False, True, True])

    def criterion(logits, target):
        losses = F.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)
        mean = F.cross_entropy(logits, target)
        right = logits.max(-1).indices == target
        masked = (losses * (mask & ~right)).sum() / mask.sum() + logits.logsumexp(-1).square().mean()
        entropy = (F.softmax(logits, -1) * logits.log_softmax(-1)).sum(-1).mean()
        halved = F.nll_loss(F.log_softmax(logits, -1) / 2, target)
        return mean + masked + entropy + halved

    logits = randn(4, 7, dtype=torch.float64).requires_grad_()
    shards = sharded(logits, init_device_mesh("cpu", (2,)))
    expected, expected_gradient = with_gradient(criterion, logits, target, 1.0)
    with vocab_parallel_loss():
        loss, gradient = with_gradient(criterion, shards, target, 1.0)
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient.full_tensor(), expected_gradient, atol=1e-12, rtol=0)


@pytest.mark.parametrize("own_loop", [False, True])
@on_ranks(2)
def test_a_plan_that_keeps_logits_sharded_trains_as_plain_torch(world, own_loop):
    """By a criterion, and by a loss outside of ``engine.criterion``, where no function of torch is another."""
    torch.manual_seed(3)
    plain, x, target = nn.Linear(4, 8).double(), torch.eye(4).double(), torch.arange(4)
    mean = nn.CrossEntropyLoss(label_smoothing=0.1)

    def criterion(output, target, gathers=False):
        return output.gather(-1, target[:, None]).mean() if gathers else mean(output, target)

    with paramp.launch_from_torch({"parallel": {"tensor": 2}, "precision": "64-true"}):
        model = nn.Sequential(nn.Linear(4, 8))
        model[0].load_state_dict(plain.state_dict())
        engine = engine_of(model, None if own_loop else criterion, plan={"0": "vocab_logits"})
        if own_loop:
            plain(x).log_softmax(-1).square().mean().backward()
            engine.backward(engine(x).log_softmax(-1).square().mean())
        else:
            expected = criterion(plain(x), target)
            expected.backward()
            with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor") as raised:
                engine.criterion(engine(x), target, gathers=True)
            assert "take .full_tensor() of it" in raised.value.__notes__[0]
            assert engine.forward_backward(x, target).item() == pytest.approx(expected.item(), rel=1e-6)
        engine.step()
        for name, value in plain.named_parameters():
            moved = value.detach() - 0.1 * value.grad
            torch.testing.assert_close(engine.full_state_dict()[f"0.{name}"], moved, atol=1e-12, rtol=0)
            assert value.grad.abs().max() > 1e-4
