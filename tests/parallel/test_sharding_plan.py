"""What parameters were given before ``initialize`` shards, casts, fills or moves them: hooks and attributes."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from beside_plain import assert_weights, randn, seeded, train_both
from counting import Collectives, Operators
from pool import on_ranks
from reference import batches, small_gpt
from small_engines import engine_of, everywhere, own_part, train_step
from small_mixture import PLAN, WIDTH, layers, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import paramp
from paramp.optim import replicated_gradients


class Halves(nn.Module):
    """The sum of the halves of the features."""

    def forward(self, x):
        return x.unflatten(-1, (2, -1)).sum(-2)


def chain():
    layers = nn.Linear(4, 8), Halves(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)
    return nn.Sequential(*layers).double()


def halve(parameter):
    parameter.grad.mul_(0.5)


def clamp_(gradient):
    gradient.clamp_(-0.01, 0.01)


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


@pytest.mark.parametrize("precision", ["64-true", "bf16-naive"])
@on_ranks(2)
def test_hooks_and_attributes_of_parameters_hold_in_every_layout(world, precision):
    plan = {"0": "packed_colwise_2", "2": "rowwise", "4": "colwise", "5": "rowwise"}
    given = [randn(2, 4, 4, seed=seed, dtype=torch.float64) for seed in range(2)]
    for parallel in (
        {"tensor": 2},
        {"data": 2, "zero": 1},
        {"pipeline": {"size": 2, "microbatches": 1, "schedule": "gpipe"}},
    ):
        linear = "data" in parallel  # each data rank has its part of the gradient
        plain = seeded(chain)
        add_to(plain, linear).remove()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
        with paramp.launch_from_torch({"precision": precision, "parallel": parallel}):
            model = seeded(chain)
            removed_later = add_to(model, linear)
            own = torch.optim.SGD(model.parameters(), lr=0.5)
            engine = engine_of(model, optimizer=own, plan=plan if "tensor" in parallel else None)
            removed_later.remove()
            for x, y in given:  # data ranks get the same
                optimizer.zero_grad()
                F.mse_loss(plain(x), y).backward()
                optimizer.step()
                engine.forward_backward(x, y if precision == "64-true" else y.float())
                engine.step()
                engine.zero_grad()
            assert all(parameter.called == name for name, parameter in engine.named_parameters())
            stepped = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
            assert {parameter.called for parameter in stepped} <= set(plain.state_dict())
            found = {name: value.double() for name, value in engine.full_state_dict().items()}
            assert_weights(found, plain.state_dict(), atol=1e-12 if precision == "64-true" else 2e-2)


@pytest.mark.parametrize(
    "plan", [("colwise", "rowwise"), (ColwiseParallel(), RowwiseParallel())], ids=["own", "torchs"]
)
@on_ranks(2)
def test_a_pair_of_layers_follows_plain_torch_with_two_all_reduces(world, plan):
    """One of the sum in the forward, one of the input's gradient in the backward."""

    def build():
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    x, y = randn(2, 4, 4, dtype=torch.float64)
    with paramp.launch_from_torch({"parallel": {"tensor": 2}, "precision": "64-true"}) as context:
        engine = engine_of(seeded(build), plan=dict(zip("13", plan, strict=True)))
        train_both(context, engine, seeded(build), [(x, y)] * 5, atol=1e-12)  # first batches are compared between ranks
        with Collectives() as training:
            engine.forward_backward(x, y, return_loss=False)
        with Collectives() as forward, torch.no_grad():
            engine.module(x)
        assert (forward.counts, training.counts) == ({"allreduce": 1}, {"allreduce": 2})


@on_ranks(4)
def test_what_hooks_of_parameters_get(world):
    """Those from before ``initialize`` the whole scaled gradient of each microbatch, later ones what the rank has.

    None gets what other data ranks add.
    """
    scale, microbatches = 8.0, 2
    before, after, accumulated, expected = [], [], [], []

    def build():
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

    ranks = 2
    data, tensor = divmod(world.rank, ranks)
    plain, (x, y) = seeded(build), randn(2, 4, 4, seed=data)
    for parts in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        F.mse_loss(plain(parts[0]), parts[1]).backward()
        expected.append(plain[0].weight.grad * scale / microbatches / ranks)
        plain.zero_grad()
    config = {
        "precision": {"mode": "16-mixed", "init_scale": scale},
        "parallel": {"data": 2, "tensor": 2, "pipeline": {"size": 1, "microbatches": microbatches}},
    }
    with paramp.launch_from_torch(config):
        model = seeded(build)
        model[0].weight.register_hook(lambda gradient: before.append(gradient.clone()))
        model[0].weight.register_post_accumulate_grad_hook(lambda parameter: accumulated.append(parameter.grad.clone()))
        engine = engine_of(model, plan={"0": "colwise", "1": "rowwise"})
        engine.module.get_parameter("0.weight").register_hook(lambda gradient: after.append(gradient.clone()))
        with Operators() as operators:
            engine.forward_backward(x, y)
    names = [function.name() for function, _ in operators.calls]
    assert sum(name.startswith("_c10d_functional::all_gather") for name in names) == microbatches  # others: of objects
    own = slice(4 * tensor, 4 * tensor + 4)
    assert [type(one) for one in before] == [torch.Tensor] * microbatches
    found = [*before, *(one.to_local() for one in after), accumulated[-1].to_local()]
    wanted = [*expected, *(one[own] for one in expected), sum(expected)[own]]
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("axis", "build", "name", "whole"),
    [("context", partial(nn.Linear, WIDTH, WIDTH), "weight", False), ("expert", layers, "0.experts.weight", True)],
    ids=["context", "expert"],
)
@on_ranks(2)
def test_what_hooks_get_over_context_ranks_and_of_shared_experts(world, axis, build, name, whole):
    """What this rank's tokens add, and what those of both ranks do."""
    found, x = [], randn(2, 8, WIDTH, dtype=torch.float64) if axis == "context" else tokens().double()
    plain = seeded(build).double()
    F.mse_loss(plain(x), torch.zeros_like(x)).backward()
    with paramp.launch_from_torch({"precision": "64-true", "parallel": {axis: 2}}) as context:
        model = seeded(build).double()
        model.get_parameter(name).register_hook(lambda gradient: found.append(gradient.clone()))
        engine = engine_of(model, plan=PLAN if axis == "expert" else None)
        x = own_part(context, x, x)[0]
        engine.forward_backward(x, torch.zeros_like(x))
    expected = plain.get_parameter(name).grad
    of_all = everywhere(found[-1])
    assert torch.allclose(of_all[0], of_all[1]) == whole
    torch.testing.assert_close(found[-1] if whole else sum(of_all), expected)


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
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item()
    for parallel in (
        {"tensor": 2},
        {"tensor": 2, "sequence_parallel": True},
        {"pipeline": {"size": 2, "schedule": "zbv", "microbatches": 4}},
        {"data": 2, "zero": 1},
    ):
        with paramp.launch_from_torch({"precision": "64-true", "parallel": parallel}):
            engine = engine_of(masked(), model.loss)
            engine.forward_backward(x, y)
            assert engine.step().grad_norm == pytest.approx(norm, rel=1e-12), parallel


@pytest.mark.parametrize("style", [None, "sharded_random"])
@on_ranks(2)
def test_dropout_of_sharded_features(world, style):
    """Tensor ranks draw alike, unless the plan says that its features are sharded; also beside a later context."""
    plan = {"0": "colwise", "2": "rowwise"} | ({"1": style} if style else {})
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}):
        engine, kept = engine_of(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 4)), plan=plan), []
        engine.module.get_submodule("1").register_forward_hook(lambda _, inputs, output: kept.append(output != 0))
        engine.forward_backward(torch.ones(4, 4), torch.ones(4, 4))
        masks = everywhere(kept[0].tolist())
        assert kept[0].shape == (4, 32)
        assert (masks[0] == masks[1]) == (style is None)
        engine.step()
        with paramp.ParallelContext.from_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))):
            engine.forward_backward(torch.ones(4, 4), torch.ones(4, 4))
        masks = everywhere(kept[1].tolist())
        assert (masks[0] == masks[1]) == (style is None)


class Pooled(nn.Module):
    """Takes the mean of a sequence in a module that is called with keywords."""

    class Pool(nn.Module):
        def forward(self, hidden, *, scale=1.0):
            return (hidden + hidden.mean(1, keepdim=True)) * scale

    def __init__(self, name="hidden"):
        super().__init__()
        self.one, self.norm, self.pool, self.name = nn.Linear(4, 4), nn.LayerNorm(4), self.Pool(), name

    def forward(self, x):
        return self.pool(**{self.name: self.norm(self.one(x))}, scale=2.0)


@on_ranks(2)
def test_a_first_input_that_is_given_by_its_name_is_gathered(world):
    plan = {"one": "scatter_sequence", "norm": "sequence", "pool": "gather_sequence"}
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}) as context:
        engine = engine_of(seeded(Pooled), plan=plan)
        train_both(context, engine, seeded(Pooled), [tuple(randn(2, 2, 6, 4))] * 2)
        with pytest.raises(paramp.ConfigError, match="alone, expected that input by its position or as 'hidden'"):
            engine_of(Pooled("other"), plan=plan).forward_backward(*randn(2, 2, 6, 4))


@on_ranks(2)
def test_torchs_encoder_evaluates_with_sharded_layers(world):
    """In evaluation torch has a kernel for a whole layer, which calls no module."""

    def build():
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)

    (x, y), hidden = randn(2, 4, 6, 8), torch.arange(6).expand(4, 6) >= 4
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}):
        engine = engine_of(seeded(build), plan={"**.linear1": "colwise", "**.linear2": "rowwise"})
        for inputs in ({"src": x}, {"src": x, "src_key_padding_mask": hidden}):
            expected = F.mse_loss(seeded(build)(**inputs), y).item()
            assert engine.evaluate(inputs, y).item() == pytest.approx(expected, rel=1e-5)


class NormedHeads(nn.Module):
    """Features of which heads of 4 share a norm, as the queries of an attention may; ``down`` may begin as zeros."""

    def __init__(self, zeros=False):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 16), nn.LayerNorm(4), nn.Linear(16, 4)
        if zeros:
            nn.init.zeros_(self.down.weight)

    def forward(self, x):
        return x + self.down(self.norm(self.up(x).unflatten(-1, (-1, 4))).flatten(-2))


@pytest.mark.parametrize("parallel", [{"data": 2, "zero": 1}, {"data": {"shard": 2}}, {"pipeline": 2}], ids=str)
@on_ranks(4)
def test_what_heads_share_is_refused_without_a_style(world, parallel):
    """On every rank, before its first step with a gradient: that of the second window, behind a layer of zeros."""

    def build(*zeros):
        return nn.Sequential(NormedHeads(*zeros), nn.Linear(4, 4))

    plan, (x, y) = {"*.up": "colwise", "*.down": "rowwise"}, randn(2, 8, 4, 4)
    words = r"tensor ranks have different gradients of '0\.norm\.weight', '0\.norm\.bias', which"
    for zeros, scale in ((False, 1.0), (True, 1.0), (False, 2.0**24)):
        precision = "32-true" if scale == 1.0 else {"mode": "16-mixed", "init_scale": scale}
        with paramp.launch_from_torch({"parallel": {"tensor": 2} | parallel, "precision": precision}) as context:
            engine, part, results = engine_of(seeded(build, zeros), plan=plan), own_part(context, x, y), []
            with pytest.raises(paramp.ConfigError, match=words):
                results.extend(train_step(engine, *part) for _ in range(30))
            assert [result.overflow for result in results] == [not result.stepped for result in results]
            assert (engine.num_steps, any(result.overflow for result in results)) == (zeros, scale > 1.0)
    with paramp.launch_from_torch({"parallel": {"tensor": 2} | parallel}) as context:
        engine, part = engine_of(seeded(build, True), plan=plan), own_part(context, x, y)
        zeros = [one for name, one in engine.named_parameters() if name == "0.down.weight"]  # on its stage
        engine.before_step.append(lambda: [one.grad.mul_(engine.num_steps > 3) for one in zeros])
        with mock.patch.object(replicated_gradients, "MOST_BETWEEN", 1), pytest.raises(paramp.ConfigError, match=words):
            all(train_step(engine, *part).stepped for _ in range(30))
        assert engine.num_steps == 5
    with paramp.launch_from_torch({"parallel": {"tensor": 2} | parallel}) as context:
        plan |= {"*.norm": "partial_gradient"}
        train_both(context, engine_of(seeded(build), plan=plan), seeded(build), [(x, y)] * 4)
        engine = engine_of(seeded(build), plan=plan)
        biases = [one for name, one in engine.named_parameters() if name == "1.bias"]  # on its stage
        engine.before_step.append(lambda: [one.grad.mul_(1e-6 * (1 + context.tp.rank)) for one in biases])
        assert train_step(engine, *part).stepped  # as what cancels but for rounding
