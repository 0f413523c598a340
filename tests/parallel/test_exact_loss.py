"""Cross-entropy with the same bits for whole and for sharded classes, against torch's in fp64."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks

from paramp.base.errors import ConfigError
from paramp.distributed.reproducible.place import Place
from paramp.parallel.reproducible.loss import cross_entropy
from paramp.parallel.tensor.loss import vocab_parallel_loss

PLACE = Place(seed=0, chunk=1, slices=8)
DTYPES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-5, torch.bfloat16: 2e-5}
EPS = {torch.float64: 0.0, torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def meshes():
    """A mesh of two ranks and one of four."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"], init_device_mesh("cpu", (4,))


def sharded(logits, mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(logits.detach(), mesh, [Shard(1 if logits.ndim > 1 else 0)]).requires_grad_()


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def example(shape, dtype, weighted):
    """Logits with exponentials that are 0, their classes, one row ignored, and class weights of which some are 0."""
    dim = 1 if len(shape) > 1 else 0
    logits = (torch.randn(shape) * 30 - 100).to(dtype).requires_grad_()
    target = torch.randint(shape[dim], shape[:dim] + shape[dim + 1 :])
    if dim:
        target[0] = -100
    weight = torch.rand(shape[dim]).to(dtype) if weighted else None
    if weighted:
        weight[::3] = 0
        weight[target.view(-1)[-1]] = 1
    return logits, target, weight


def with_gradient(logits, target, factor, **options):
    loss = cross_entropy(PLACE, logits, target, **options)
    (loss * factor).sum().backward()
    return loss, logits.grad


@on_ranks(4)
def test_losses_and_gradients_have_the_same_bits_however_classes_are_sharded(world):
    torch.manual_seed(3)
    both = meshes()
    cases = [((7, 296), "none"), ((7, 296), "mean"), ((7, 296), "sum"), ((3, 16, 5), "none"), ((8,), "mean")]
    for (shape, reduction), dtype in itertools.product(cases, DTYPES):
        for weighted, smoothing in [(False, 0.0), (True, 0.0), (True, 0.2)]:
            logits, target, weight = example(shape, dtype, weighted)
            options = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
            reference = logits.detach().double().requires_grad_()
            wide = options | {"weight": weight if weight is None else weight.double()}
            expected = F.cross_entropy(reference, target, **wide)
            factor = torch.randn(expected.shape)
            (expected * factor).sum().backward()
            loss, gradient = with_gradient(logits, target, factor, **options)
            assert loss.dtype is (dtype if dtype.itemsize > 2 else torch.float32)
            assert gradient.dtype is dtype
            torch.testing.assert_close(loss.double(), expected, atol=DTYPES[dtype], rtol=DTYPES[dtype], equal_nan=True)
            bounds = {"atol": DTYPES[dtype], "rtol": DTYPES[dtype] + EPS[dtype]}
            torch.testing.assert_close(gradient.double(), reference.grad, **bounds, equal_nan=True)
            for mesh in both:
                split_loss, split = with_gradient(sharded(logits, mesh), target, factor, **options)
                assert bits(split_loss).equal(bits(loss)), (shape, dtype, options, mesh)
                assert split.placements[0].is_shard()
                assert bits(split.full_tensor()).equal(bits(gradient)), (shape, dtype, options, mesh)


@on_ranks(4)
def test_one_nan_is_one_nan_loss_and_the_others_keep_their_bits(world):
    torch.manual_seed(3)
    for mesh in meshes():
        logits = torch.randn(6, 48)
        logits[2, 40] = float("nan")
        logits[4, :] = float("-inf")
        logits[4, 7] = 3.0
        target = torch.tensor([0, 47, 3, 20, 7, 9])
        loss = cross_entropy(PLACE, logits, target, reduction="none")
        split = cross_entropy(PLACE, sharded(logits, mesh), target, reduction="none")
        assert loss.isnan().tolist() == split.isnan().tolist() == [False, False, True, False, False, False]
        assert loss[4] == 0
        assert bits(loss.nan_to_num(7)).equal(bits(split.nan_to_num(7)))


@on_ranks(2)
def test_whole_classes_of_any_number_are_one_slice_and_sharded_ones_an_error(world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard

    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (2,))
    logits, target = torch.randn(4, 10), torch.randint(10, (4,))
    whole = cross_entropy(PLACE, logits, target)
    torch.testing.assert_close(whole, F.cross_entropy(logits, target))
    rows = DTensor.from_local(logits[2 * world.rank :][:2], mesh, [Shard(0)]).requires_grad_()
    gathered = cross_entropy(PLACE, rows, target)
    gathered.backward()
    leaf = logits.clone().requires_grad_()
    cross_entropy(PLACE, leaf, target).backward()
    assert bits(gathered).equal(bits(whole))
    assert bits(rows.grad.full_tensor()).equal(bits(leaf.grad))
    with pytest.raises(ConfigError, match=r"10 classes sharded over 2 ranks.*slices = 8.*to 16 classes"):
        cross_entropy(PLACE, sharded(logits, mesh), target)
    with pytest.raises(ConfigError, match=r"placements .*Partial.*expected logits that are summed up"):
        cross_entropy(PLACE, DTensor.from_local(logits, mesh, [Partial()]), target)
    chances = torch.rand(4, 16).softmax(-1)
    logits = torch.randn(4, 16)
    torch.testing.assert_close(cross_entropy(PLACE, logits, chances), F.cross_entropy(logits, chances), atol=0, rtol=0)
    with pytest.raises(ConfigError, match="got probabilities as target"):
        cross_entropy(PLACE, sharded(logits, mesh), chances)


@on_ranks(2)
def test_arguments_that_torch_refuses_are_refused(world):
    """In the usual mode too, for sharded classes."""
    from torch.distributed.device_mesh import init_device_mesh

    logits, target = torch.randn(4, 16), torch.randint(16, (4,))
    shards = sharded(logits, init_device_mesh("cpu", (2,)))
    for wrong, options, message in [
        (target[:1], {}, r"target of shape \(1,\) for logits of shape \(4, 16\), expected \(4,\)"),
        (target, {"reduction": "men"}, "men is not a valid value for reduction"),
        (target, {"weight": torch.ones(17)}, r"weight of shape \(17,\), expected \(16,\)"),
        (target, {"label_smoothing": 1.5}, "label_smoothing=1.5, expected a number from 0 to 1"),
    ]:
        with pytest.raises((ValueError, RuntimeError)):
            F.cross_entropy(logits, wrong, **options)
        with pytest.raises(ValueError, match=message):
            cross_entropy(PLACE, logits, wrong, **options)
        with vocab_parallel_loss(), pytest.raises(ValueError, match=message):
            F.cross_entropy(shards, wrong, **options)
