"""Scripts in the shape of Apex's examples, after the changes that docs/from-apex.md names, on two ranks.

The references are plain torch loops in fp32, over the samples of all ranks in one process.
"""

import io
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from commands import ROOT
from pool import on_ranks
from torch import nn

from paramp.compat import apex
from paramp.compat.apex import amp, optimizers
from paramp.compat.apex.fp16_utils import *  # noqa: F403  # as the example on ImageNet does
from paramp.compat.apex.parallel import DistributedDataParallel

STEPS, LR = 8, 0.1


@pytest.fixture(autouse=True)
def _fresh():
    yield
    amp.reset()


def batch(step, rank=None, *, width=6, count=16):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(count, width, generator=generator)
    y = x[:, :3].argmax(1)
    return (x, y) if rank is None else (x.chunk(2)[rank], y.chunk(2)[rank])


def network(seed=5):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 3))


def rate(step):
    return LR * min(1.0, (step + 1) / 4)


def plain(make_optimizer):
    model = network()
    optimizer = make_optimizer(model.parameters(), lr=LR)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def check(found, expected, start, rounding=2.0**-11):
    for (name, value), (_, wanted), (_, first) in zip(
        found.items(), expected.named_parameters(), start.named_parameters(), strict=True
    ):
        way = (wanted - first).norm()
        assert 0 < (value - wanted).norm() < 24 * rounding * way, name


def sgd(parameters, **options):
    return torch.optim.SGD(parameters, momentum=0.9, **options)


@pytest.mark.parametrize("make", ["sgd", "FusedSGD", "FusedAdam"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@on_ranks(2)
def test_the_examples_on_distributed_training_and_imagenet(world, level, make):
    """simple/distributed and imagenet: options as strings, Apex's DDP, a rate set by hand, a checkpoint halfway."""
    make_optimizer = {
        "sgd": sgd,
        "FusedSGD": lambda parameters, lr: optimizers.FusedSGD(parameters, lr, momentum=0.9),
        "FusedAdam": lambda parameters, lr: optimizers.FusedAdam(parameters, lr / 10, eps=1e-4),
    }[make]
    reference = {"FusedAdam": lambda parameters, lr: torch.optim.AdamW(parameters, lr, weight_decay=0, eps=1e-4)}
    amp.reset()

    def start(seed):
        amp.reset()
        model = network(seed)
        optimizer = make_optimizer(model.parameters(), lr=LR)
        options = {"opt_level": level, "keep_batchnorm_fp32": None, "loss_scale": "1024.0", "verbosity": 0}
        model, optimizer = apex.amp.initialize(model, optimizer, **options)
        return DistributedDataParallel(model, delay_allreduce=True), optimizer

    model, optimizer = start(5 + world.rank)  # as in Apex, rank 0's weights count
    criterion = nn.CrossEntropyLoss()
    for step in range(STEPS):
        if step == STEPS // 2:
            masters = torch.cat([master.detach().flatten() for master in amp.master_params(optimizer)])
            everywhere = [torch.empty_like(masters) for _ in range(world.size)]
            dist.all_gather(everywhere, masters)
            assert torch.equal(*everywhere)
            saved = io.BytesIO()
            torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
            saved.seek(0)
            model, optimizer = start(50)
            checkpoint = torch.load(saved)
            model.load_state_dict(checkpoint["state_dict"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        x, y = batch(step, world.rank)
        output = model(x)
        loss = criterion(output, y)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    reduced = loss.data.clone()
    dist.all_reduce(reduced)
    assert to_python_float(reduced / world.size) < 1.0  # noqa: F405
    weights = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    check(weights, plain(reference.get(make, sgd)), network())
    amp.reset()


@pytest.mark.parametrize("level", ["O1", "O2"])
@on_ranks(2)
def test_accumulation_with_no_sync_as_on_the_page(world, level):
    page = (ROOT / "docs" / "from-apex.md").read_text(encoding="utf-8")
    (source,) = (body for body in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "def accumulate(" in body)
    names = {"amp": amp}
    exec(source, names)
    amp.reset()
    model, expected = network(), network()
    options = {"opt_level": level, "loss_scale": 1024.0, "verbosity": 0}
    model, optimizer = amp.initialize(model, sgd(model.parameters(), lr=LR), **options)
    distributed, reference = DistributedDataParallel(model), sgd(expected.parameters(), lr=LR)
    for step in range(3):
        x = batch(step)[0]
        names["accumulate"](distributed, optimizer, x.chunk(2)[world.rank].chunk(4))
        reference.zero_grad()
        expected(x).square().mean().backward()
        reference.step()
    check(model.state_dict(), expected, network())
    amp.reset()


# ----------------------------------------------------------------------------------------------------- two networks


def gan():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)), nn.Sequential(
        nn.Linear(4, 12), nn.Linear(12, 6)
    )


def gan_step(step, nets, optimizers, backward):
    """The order of calls of dcgan: two backwards of D, a step, and one through D into G, whose gradients in D stay."""
    (net_d, net_g), (optimizer_d, optimizer_g) = nets, optimizers
    real, noise = batch(step)[0], batch(100 + step, width=4)[0]
    criterion = nn.BCEWithLogitsLoss()
    net_d.zero_grad()
    label = torch.ones(len(real), 1)
    backward(criterion(net_d(real), label), optimizer_d, 0)
    fake = net_g(noise)
    backward(criterion(net_d(fake.detach()), torch.zeros_like(label)), optimizer_d, 1)
    optimizer_d.step()
    net_g.zero_grad()
    backward(criterion(net_d(fake), label), optimizer_g, 2)
    optimizer_g.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
@on_ranks(2)
def test_the_example_of_two_networks_and_three_losses(world, level):
    plain_nets, nets = gan(), gan()
    plain_optimizers = [sgd(net.parameters(), lr=LR) for net in plain_nets]
    optimizers_ = [sgd(net.parameters(), lr=LR) for net in nets]
    amp.reset()
    nets, optimizers_ = amp.initialize(
        list(nets), optimizers_, opt_level=level, num_losses=3, verbosity=0, max_loss_scale=1024.0
    )

    def scaled(loss, optimizer, loss_id):
        with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
            scaled_loss.backward()

    for step in range(STEPS):
        gan_step(step, plain_nets, plain_optimizers, lambda loss, *_: loss.backward())
        gan_step(step, nets, optimizers_, scaled)
    for net, expected, first in zip(nets, plain_nets, gan(), strict=True):
        check(net.state_dict(), expected, first)
    amp.reset()


# ------------------------------------------------------------------------------------------------------------- names


def test_batch_norms_are_torchs_synchronised_ones():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    converted = apex.parallel.convert_syncbn_model(model)
    assert type(converted[1]) is torch.nn.SyncBatchNorm is apex.parallel.SyncBatchNorm


@on_ranks(2)
def test_arguments_of_apexs_ddp_that_torch_has_not_are_refused(world):
    for options, message in (
        ({"gradient_average": False}, "gradient_average: got False"),
        ({"allreduce_always_fp32": True}, "allreduce_always_fp32: got True"),
    ):
        with pytest.raises(ValueError, match=message):
            DistributedDataParallel(network(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = DistributedDataParallel(network(), 10_000_000, find_unused_parameters=True)
    assert isinstance(model, nn.parallel.DistributedDataParallel)


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("optimizers", "FusedLAMB", "FusedAdam"),
        ("optimizers", "FusedNovoGrad", "FusedAdam"),
        ("optimizers", "FusedAdagrad", "torch.optim.Adagrad"),
        ("optimizers", "FP16_Optimizer", "amp.initialize"),
        ("parallel", "LARC", "clip_grad_norm_"),
        ("parallel", "Reducer", "no_sync"),
        ("fp16_utils", "network_to_half", "opt_level='O2'"),
    ],
)
def test_what_is_not_there_says_what_to_use(module, name, instead):
    with pytest.raises(ImportError, match=f"has no {name}: .*{instead}"):
        exec(f"from paramp.compat.apex.{module} import {name}")
