"""Scripts in the shape of Apex's examples, after the changes that docs/from-apex.md names.

The references are plain torch loops in fp32, over the samples of all ranks in one process.
"""

import inspect
import io
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from pages import run_code
from pool import on_ranks
from torch import nn
from trainer_runs import LR, check_classifier, check_weights, classifier, plain_epochs, samples, sgd

from paramp.compat import apex
from paramp.compat.apex import amp, optimizers
from paramp.compat.apex.fp16_utils import *  # noqa: F403  # as the example on ImageNet does
from paramp.compat.apex.parallel import DistributedDataParallel

STEPS = 8
RATES = [LR / 2 * min(1.0, (step + 1) / 4) for step in range(STEPS)]
levels = pytest.mark.parametrize("level", ["O1", "O2"])


def batch(step):
    return samples(16, seed=step).tensors


def initialize(*args, **options):
    amp.reset()
    return amp.initialize(*args, verbosity=0, **options)


def scaled_backward(loss, optimizer, loss_id=0):
    with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
        scaled_loss.backward()


MAKE = {
    "sgd": (sgd, sgd),
    "FusedSGD": (lambda parameters, lr: optimizers.FusedSGD(parameters, lr, momentum=0.9), sgd),
    "FusedAdam": (
        lambda parameters, lr: optimizers.FusedAdam(parameters, lr, eps=1e-4),
        lambda parameters, lr: torch.optim.AdamW(parameters, lr, weight_decay=0, eps=1e-4),
    ),
}


@pytest.mark.parametrize("make", MAKE)
@levels
@on_ranks(2)
def test_the_examples_on_distributed_training_and_imagenet(world, level, make):
    """simple/distributed and imagenet: options as strings, Apex's DDP, a rate set by hand, a checkpoint halfway."""
    make, reference = MAKE[make]

    def start(seed):
        model = classifier(seed)
        optimizer = make(model.parameters(), lr=LR)
        options = {"opt_level": level, "keep_batchnorm_fp32": None, "loss_scale": "1024.0"}
        model, optimizer = initialize(model, optimizer, **options)
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
            group["lr"] = RATES[step]
        x, y = (part.chunk(2)[world.rank] for part in batch(step))
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        scaled_backward(loss, optimizer)
        optimizer.step()
    reduced = loss.data.clone()
    dist.all_reduce(reduced)
    assert to_python_float(reduced / world.size) < 1.1  # noqa: F405
    *_, (expected, _) = plain_epochs([[batch(step)] for step in range(STEPS)], reference, rates=RATES)
    check_classifier(model.state_dict(), expected)


@levels
@on_ranks(2)
def test_accumulation_with_no_sync_as_on_the_page(world, level):
    accumulate = run_code("from-apex.md", "def accumulate(", amp=amp)["accumulate"]
    model = classifier()
    model, optimizer = initialize(model, sgd(model.parameters()), opt_level=level, loss_scale=1024.0)
    distributed = DistributedDataParallel(model)
    for step in range(3):
        accumulate(distributed, optimizer, batch(step)[0].chunk(2)[world.rank].chunk(4))
    epochs = [[batch(step)] for step in range(3)]
    *_, (expected, _) = plain_epochs(epochs, criterion=lambda output, _: output.square().mean())
    check_classifier(model.state_dict(), expected)


@pytest.mark.parametrize("synchronised", [False, True])
@levels
@on_ranks(2)
def test_gradients_that_are_unscaled_under_no_sync_stay_those_of_their_rank(world, level, synchronised):
    """They are averaged where each backward averages its own, whenever they are unscaled."""
    own, others = (batch(0)[0].chunk(2)[rank].chunk(2) for rank in (world.rank, 1 - world.rank))
    first = [own[0], others[0] if synchronised else own[0]]
    epochs = [[(torch.cat([*first, own[1], others[1]]), None)]]
    *_, (expected, _) = plain_epochs(epochs, criterion=lambda output, _: output.square().mean())
    for delayed in (False, True)[: 1 + synchronised]:
        model = classifier()
        model, optimizer = initialize(model, sgd(model.parameters()), opt_level=level, loss_scale=1024.0)
        distributed = DistributedDataParallel(model)
        with nullcontext() if synchronised else distributed.no_sync():
            loss = distributed(own[0]).square().mean() / 2
            with amp.scale_loss(loss, optimizer, delay_unscale=delayed) as scaled_loss:
                scaled_loss.backward()
        scaled_backward(distributed(own[1]).square().mean() / 2, optimizer)
        optimizer.step()
        check_classifier(model.state_dict(), expected)


def gan():
    torch.manual_seed(1)
    discriminator = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    return [discriminator, nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 6))]


def gan_step(step, nets, optimizers, backward):
    """The order of calls of dcgan: two backwards of D, a step, and one through D into G, whose gradients in D stay."""
    (net_d, net_g), (optimizer_d, optimizer_g) = nets, optimizers
    real, noise = batch(step)[0], batch(100 + step)[0][:, :4]
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


@levels
def test_the_example_of_two_networks_and_three_losses(level):
    plain, nets = gan(), gan()
    plain_optimizers, optimizers = ([sgd(net.parameters(), lr=0.1) for net in pair] for pair in (plain, nets))
    nets, optimizers = initialize(nets, optimizers, opt_level=level, num_losses=3, max_loss_scale=1024.0)
    for step in range(STEPS):
        gan_step(step, plain, plain_optimizers, lambda loss, *_: loss.backward())
        gan_step(step, nets, optimizers, scaled_backward)
    for net, expected, first in zip(nets, plain, gan(), strict=True):
        start = dict(first.named_parameters())
        check_weights(net.state_dict(), dict(expected.named_parameters()), start, 2.0**-11, least=1e-5)


def test_batch_norms_are_torchs_synchronised_ones():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    converted = apex.parallel.convert_syncbn_model(model)
    assert type(converted[1]) is torch.nn.SyncBatchNorm is apex.parallel.SyncBatchNorm


@on_ranks(2)
def test_arguments_of_apexs_ddp_that_torch_has_not_are_refused(world):
    for name, value in (("gradient_average", False), ("allreduce_always_fp32", True)):
        with pytest.raises(ValueError, match=f"{name}: got {value}"):
            DistributedDataParallel(classifier(), **{name: value})


WITHOUT_EFFECT = {"message_size": 1, "delay_allreduce": True, "shared_param": False, "allreduce_trigger_params": []}
WITHOUT_EFFECT |= {"retain_allreduce_buffers": True, "num_allreduce_streams": 2, "allreduce_communicators": []}
WITHOUT_EFFECT |= {"gradient_predivide_factor": 2.0}


@on_ranks(2)
def test_apexs_other_arguments_of_ddp_have_no_effect_and_unused_parameters_need_torchs(world):
    own = inspect.signature(DistributedDataParallel).parameters.keys() - {"module", "options"}
    assert own == WITHOUT_EFFECT.keys() | {"gradient_average", "allreduce_always_fp32"}
    x, gradients = samples(8).tensors[0].chunk(2)[world.rank], []
    for wrap in (nn.parallel.DistributedDataParallel, partial(DistributedDataParallel, **WITHOUT_EFFECT)):
        model = wrap(classifier())
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        model(x).square().mean().backward()
        gradients.append([one.grad for one in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    for find in (False, True):
        model = classifier()
        model[0].unused = nn.Linear(2, 2)
        model = DistributedDataParallel(model, find_unused_parameters=find)
        model(x).sum().backward()
        with nullcontext() if find else pytest.raises(RuntimeError, match="find_unused_parameters=True"):
            model(x)
