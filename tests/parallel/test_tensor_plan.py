"""What parameters were given before ``initialize`` shards, casts, fills or moves them: hooks and attributes."""

import pytest
import torch
import torch.nn.functional as F
from counting import Collectives
from pool import on_ranks
from reference import batches, small_gpt
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import paramp
from paramp.parallel.tensor.linear import PackedColwise
from paramp.parallel.tensor.plan import check_divisible, resolve_plan
from paramp.parallel.tensor.styles import STYLES


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (["0"], "plan: got list, expected a dict of module names and styles"),
        ({"0": "colwize"}, r"plan\['0'\]: got 'colwize', expected one of .*did you mean 'colwise'.*or a ParallelStyle"),
        ({"0": nn.Linear}, r"plan\['0'\]: got <class .*Linear'>, expected a style's name or a ParallelStyle"),
        ({"blocks.*.quv": "colwise"}, r"plan\['blocks\.\*\.quv'\]: no module of the model matches"),
        ({"blocks.0.qvk": "colwise"}, "no module of the model matches.*did you mean 'blocks.0.qkv'"),
    ],
)
def test_mistakes_in_a_plan_are_named(plan, message):
    with pytest.raises(paramp.ConfigError, match=message):
        resolve_plan(plan, ["blocks", "blocks.0", "blocks.0.qkv"])


def test_later_entries_of_a_plan_win():
    names = ["0.qkv", "0.out", "1.qkv", "1.out"]
    found = resolve_plan({"*.qkv": "colwise", "1.qkv": "rowwise"}, names)
    assert {name: type(style) for name, style in found.items()} == {
        "0.qkv": STYLES["colwise"]().__class__,
        "1.qkv": STYLES["rowwise"]().__class__,
    }


@pytest.mark.parametrize(
    ("layer", "style", "message"),
    [
        (nn.Linear(4, 6), "colwise", "'0' has out_features 6, expected a multiple of parallel.tensor.size 4"),
        (nn.Linear(6, 4), "rowwise", "'0' has in_features 6, expected a multiple of parallel.tensor.size 4"),
        (nn.LayerNorm(8), "colwise", "'0' is a LayerNorm: .*supports Linear and Embedding only"),
        (nn.LayerNorm(8), "packed_colwise_2", "'0' is a LayerNorm, expected a Linear or a Conv1D"),
        (nn.Linear(4, 12), "packed_colwise_2", "'0' has 12 outputs, expected a multiple of 2 parts x .* 4"),
    ],
)
def test_layers_that_a_style_cannot_shard_are_named(layer, style, message):
    with pytest.raises(paramp.ConfigError, match=message):
        check_divisible(nn.Sequential(layer), resolve_plan({"0": style}, ["0"]), 4)


def test_divisible_layers_pass():
    layers = nn.Linear(4, 8), nn.Linear(8, 4), nn.Embedding(8, 4), nn.Linear(4, 16)
    styles = dict(zip("0123", ("colwise", "rowwise", "rowwise", "packed_colwise_2"), strict=True))
    check_divisible(nn.Sequential(*layers), resolve_plan(styles, styles), 4)


class Halves(nn.Module):
    """The sum of the halves of the features."""

    def forward(self, x):
        return x.unflatten(-1, (2, -1)).sum(-2)


def chain():
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), Halves(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)
    return nn.Sequential(*layers).double()


CHAIN_PLAN = {"0": "packed_colwise_2", "2": "rowwise", "4": "colwise", "5": "rowwise"}


def add_to(model, linear=False):
    """Hooks that take the whole gradient, that change it in place or run after the accumulation; attributes."""
    mask = torch.arange(32.0).reshape(8, 4) % 3
    removed_later = model[2].bias.register_hook(lambda gradient: gradient * 0)
    model[0].weight.register_hook(lambda gradient: gradient * 0).remove()
    model[0].weight.register_hook(lambda gradient: gradient * mask.to(gradient.dtype))
    if not linear:
        model[2].weight.register_hook(lambda gradient: gradient / gradient.norm())
        model[4].weight.register_hook(clamp_)
    model[3].weight.register_hook(lambda gradient: gradient * mask[1, 0])
    model[5].weight.register_post_accumulate_grad_hook(halve)
    for name, parameter in model.named_parameters():
        parameter.called = name
    return removed_later


def halve(parameter):
    parameter.grad.mul_(0.5)


def clamp_(gradient):
    gradient.clamp_(-0.01, 0.01)


def chain_batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, 4, generator=generator, dtype=torch.float64) for _ in range(2)]


def plain_chain(linear):
    model = chain()
    add_to(model, linear).remove()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x, y in chain_batches():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


@on_ranks(2)
def test_hooks_and_attributes_of_parameters_hold_in_every_layout(world):
    for precision in ("64-true", "bf16-naive"):
        for parallel, plan in (
            ({"tensor": 2}, CHAIN_PLAN),
            ({"data": 2, "zero": 1}, None),
            ({"pipeline": {"size": 2, "microbatches": 1, "schedule": "gpipe"}}, None),
        ):
            with paramp.launch_from_torch({"precision": precision, "parallel": parallel}):
                linear = "data" in parallel  # each data rank has its part of the gradient
                expected = plain_chain(linear)
                model = chain()
                removed_later = add_to(model, linear)
                engine, *_ = paramp.initialize(
                    model, torch.optim.SGD(model.parameters(), lr=0.5), F.mse_loss, plan=plan
                )
                removed_later.remove()
                for x, y in chain_batches():  # data ranks get the same
                    engine.forward_backward(x, y if precision == "64-true" else y.float())
                    engine.step()
                    engine.zero_grad()
                assert all(parameter.called == name for name, parameter in engine.named_parameters())
                stepped = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
                assert {parameter.called for parameter in stepped} <= set(expected)
                tolerance = 1e-12 if precision == "64-true" else 2e-2
                for name, value in engine.full_state_dict().items():
                    where = f"{precision} {parallel} {name}"
                    assert (value.double() - expected[name]).abs().max() < tolerance, where


class Parts(nn.Module):
    """The product of the parts of the features, which lie one after the other, times different numbers."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x):
        parts = x.chunk(self.number, -1)
        return torch.stack([part + index for index, part in enumerate(parts)]).prod(0)


@on_ranks(2)
def test_packed_parts_are_sharded_one_by_one_and_a_plain_style_mixes_them_up(world):
    def loss(number, style):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4 * number), Parts(number), nn.Linear(4, 4))
        plan = {"0": style, "2": "rowwise"}
        expected = F.mse_loss(model(x), x).item()
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, plan=plan)
        return engine.forward_backward(x, x).item(), expected

    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}):
        for number, style in ((2, "packed_colwise_2"), (3, "packed_colwise_3"), (4, PackedColwise(4)), (1, "colwise")):
            actual, expected = loss(number, style)
            assert actual == pytest.approx(expected, rel=1e-5)
        actual, expected = loss(3, "colwise")
        assert actual != pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize(
    "plan", [("colwise", "rowwise"), (ColwiseParallel(), RowwiseParallel())], ids=["own", "torchs"]
)
@on_ranks(2)
def test_a_pair_of_layers_follows_plain_torch_with_two_all_reduces(world, plan):
    """One of the sum in the forward, one of the input's gradient in the backward."""

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    x, y = chain_batches()[0]
    with paramp.launch_from_torch({"parallel": {"tensor": 2}, "precision": "64-true"}):
        model = build()
        styles = dict(zip("13", plan, strict=True))
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.5), F.mse_loss, plan=styles)
        for _ in range(5):  # the first batches are compared between ranks
            F.mse_loss(plain(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            with Collectives() as training:
                engine.forward_backward(x, y, return_loss=False)
            engine.step()
            engine.zero_grad()
        with Collectives() as forward, torch.no_grad():
            engine.module(x)
        assert (forward.counts, training.counts) == ({"allreduce": 1}, {"allreduce": 2})
        for name, value in engine.full_state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], atol=1e-12, rtol=0)


@on_ranks(2)
def test_what_hooks_of_parameters_get(world):
    """Those from before ``initialize`` the whole scaled gradient of each microbatch, later ones what the rank has."""
    scale, microbatches = 8.0, 2
    before, after, accumulated = [], [], []

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

    plain = build()
    x, y = (part.float() for part in chain_batches()[0])
    expected = []
    for parts in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        F.mse_loss(plain(parts[0]), parts[1]).backward()
        expected.append(plain[0].weight.grad * scale / microbatches)
        plain.zero_grad()
    config = {
        "precision": {"mode": "16-mixed", "init_scale": scale},
        "parallel": {"tensor": 2, "pipeline": {"size": 1, "microbatches": microbatches}},
    }
    with paramp.launch_from_torch(config):
        model = build()
        model[0].weight.register_hook(lambda gradient: before.append(gradient.clone()))
        model[0].weight.register_post_accumulate_grad_hook(lambda parameter: accumulated.append(parameter.grad.clone()))
        engine, *_ = paramp.initialize(
            model, torch.optim.SGD(model.parameters(), lr=0.5), F.mse_loss, plan={"0": "colwise", "1": "rowwise"}
        )
        engine.module.get_parameter("0.weight").register_hook(lambda gradient: after.append(gradient.clone()))
        engine.forward_backward(x, y)
    for found, whole in zip(before, expected, strict=True):
        torch.testing.assert_close(found, whole, atol=2e-2, rtol=2e-2)
    assert [type(one) for one in before] == [torch.Tensor] * microbatches
    own = slice(4 * world.rank, 4 * world.rank + 4)
    for found, whole in zip(after, expected, strict=True):
        torch.testing.assert_close(found.to_local(), whole[own], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(accumulated[-1].to_local(), sum(expected)[own], atol=2e-2, rtol=2e-2)


@on_ranks(2)
def test_masks_of_gradients_mean_the_same_for_every_kind_of_layer(world):
    def masked():
        model = small_gpt(num_layers=2, tied=False).double()
        generator = torch.Generator().manual_seed(2)
        for parameter in model.parameters():
            mask = torch.rand(parameter.shape, generator=generator).double()
            parameter.register_hook(lambda gradient, mask=mask: gradient * mask)
        return model

    model = masked()
    ((x, y),) = batches(1)
    model.loss(model(x), y).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = torch.nn.utils.get_total_norm(expected.values()).item()
    for parallel in (
        {"tensor": 2},
        {"tensor": 2, "sequence_parallel": True},
        {"pipeline": {"size": 2, "schedule": "zbv", "microbatches": 4}},
        {"data": 2, "zero": 1},
    ):
        with paramp.launch_from_torch({"precision": "64-true", "parallel": parallel}):
            model = masked()
            engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.5), model.loss)
            engine.forward_backward(x, y)
            assert engine.step().grad_norm == pytest.approx(norm, rel=1e-12), parallel


@on_ranks(2)
def test_hooks_and_attributes_of_a_model_on_meta_hold(world):
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4))
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient: gradient * (torch.arange(gradient.shape[0]) % 2 == 0).sum())
            parameter.called = name
        plan = {"0": "colwise", "1": "rowwise"}
        engine, *_ = paramp.initialize(
            model, lambda parameters: torch.optim.SGD(parameters, lr=0.5), F.mse_loss, plan=plan
        )
        reference = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4))
        reference.load_state_dict(engine.full_state_dict())
        x = torch.ones(2, 4)
        F.mse_loss(reference(x), x).backward()
        engine.forward_backward(x, x)
        for name, parameter in engine.named_parameters():
            assert parameter.called == name
            expected = reference.get_parameter(name)
            gradient = getattr(parameter.grad, "full_tensor", lambda: parameter.grad)()  # noqa: B023
            torch.testing.assert_close(gradient, expected.grad * (len(expected) // 2))


@on_ranks(2)
def test_hooks_whose_meaning_would_be_lost_are_an_error_on_every_rank(world):
    def start(model, plan=None):
        paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, plan=plan)

    def on_one_rank():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if world.rank == 1:
            model[1].bias.register_hook(print)
        return model

    for parallel, plan in (({"tensor": 2}, {"0": "colwise", "1": "rowwise"}), ({"pipeline": 2}, None)):
        message = r"rank 1 has \('1\.bias', \(4,\), torch\.float32, True, '1 hooks'\)"
        with paramp.launch_from_torch({"parallel": parallel}), pytest.raises(paramp.ConfigError, match=message):
            start(on_one_rank(), plan)
    with paramp.launch_from_torch({"parallel": {"data": 2}}):
        start(on_one_rank())
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}):
        model = chain()
        model[0].weight.register_post_accumulate_grad_hook(print)
        with pytest.raises(paramp.ConfigError, match=r"'0\.weight' has a hook that runs after the accumulation"):
            start(model, CHAIN_PLAN)
        with pytest.raises(paramp.ConfigError, match="'3' is a LayerNorm, expected a Linear or a Conv1D"):
            start(chain(), {"3": "packed_colwise_2"})
    for schedule, split in (("1f1b", ["1"]), ("zbv", ["1", "2", "3"])):
        with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 2, "schedule": schedule, "split": split}}}):
            model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
            model[3].weight = model[0].weight
            model[0].weight.register_hook(print)
            with pytest.raises(paramp.ConfigError, match=r"0\.weight and 3\.weight are one parameter with hooks"):
                start(model)
