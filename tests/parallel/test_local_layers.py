"""Tensor-parallel layers, and a batch's graph, on local tensors: values, gradients and exchanges of one process."""

import copy
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from beside_plain import CountDTensors, assert_gradients, copy_weights, launch_with_compiler, randn, seeded, train_both
from families import rarely
from pool import on_ranks
from reference import whole
from small_engines import engine_of
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import paramp
from paramp.base.collectives import gather_objects
from paramp.base.dtensor import is_dtensor
from paramp.models import GPT, GPTConfig
from paramp.parallel.tensor import differentiable_collectives
from paramp.parallel.tensor.colwise_and_rowwise import PackedRowwise
from paramp.parallel.tensor.sharding_plan import apply_plan, resolve_plan


def of_a_copy(function, group, extra, x):
    return function(x * 1, group, *extra)  # a sum is in place


@pytest.mark.parametrize(
    ("dim", "compiled"), rarely(itertools.product((0, 1, -1), (False, True)), (0, False), (1, False), (-1, True))
)
@on_ranks(2)
def test_exchanges_and_their_duals(world, dim, compiled):
    with launch_with_compiler({"parallel": {"tensor": 2}}) as context:
        group, rank = context.tp.group, context.tp.rank
        every = randn(2, 4, 6, dtype=torch.float64)  # what each rank has
        own = every[rank]
        total, joined = every.sum(0), torch.cat(list(every), dim)

        def mine(tensor):
            return tensor.chunk(2, dim)[rank]

        cases = {  # what each gives, and the gradient for an output gradient that is the output itself
            "enter": (own, total),
            "sum_over_ranks": (total, total),
            "gather": (joined, own),
            "own_slice": (mine(own), torch.cat([one.chunk(2, dim)[index] for index, one in enumerate(every)], dim)),
            "gather_and_enter": (joined, 2 * own),
            "sum_slices": (mine(total), total),
            "on_first_rank": (own * (rank == 0), own * (rank == 0)),
        }
        graphs = []

        def eager(graph, inputs):
            graphs.append([node.name for node in graph.graph.nodes])
            return graph.forward

        for name, (expected, gradient) in cases.items():
            x = own.clone().requires_grad_()
            extra = () if name in ("enter", "sum_over_ranks", "on_first_rank") else (dim,)
            call = functools.partial(of_a_copy, getattr(differentiable_collectives, name), group, extra)
            if compiled:
                torch.compiler.reset()  # it counts compilations of one code
                call = torch.compile(call, backend=eager, fullgraph=True)
            output = call(x)
            torch.testing.assert_close(output.detach(), expected, msg=name)
            output.backward(output.detach().clone())
            torch.testing.assert_close(x.grad, gradient, msg=name)
        assert gather_objects(graphs) == [graphs] * 2  # both ranks compile the same operators


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(8, 4, padding_idx=5)
        self.up, self.act, self.down = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)
        self.norm, self.spread, self.out = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(4, 4, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        x = self.norm(x + self.down(self.act(self.up(x))))
        return self.out(x).relu_().sum() + self.spread(x).square().sum()


PLAN = {"table": "vocab", "up": "colwise", "down": "rowwise", "spread": "colwise_gather", "out": "rowwise_scatter"}


def sharded(context, model, plan):
    apply_plan(model, resolve_plan(plan, [name for name, _ in model.named_modules()]), context.mesh["tp"])
    return model


def norm_of_gradients(loss, model):
    gradients = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    return sum((one.full_tensor() if is_dtensor(one) else one).square().sum() for one in gradients)


@on_ranks(2)
def test_layers_compute_what_torchs_do_without_operators_on_dtensors(world):
    tokens = torch.tensor([[0, 3, 5, 7], [7, 1, 4, 5]])
    plain = Model().double()
    loss = plain(tokens)
    loss.backward()
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}) as context:
        model = copy.deepcopy(sharded(context, Model().double(), PLAN))  # a copy runs with its own weights
        for parameter in model.parameters():
            parameter.detach().mul_(1.0)
        with CountDTensors() as count:
            found = model(tokens)
            found.backward()
        assert not [name for name in count.found if "add_" not in name], count.found
        torch.testing.assert_close(found.detach(), loss.detach())
        assert_gradients(model, plain, atol=1e-12)
        for one in (model, plain):
            norm_of_gradients(one(tokens), one).backward()
        assert_gradients(model, plain, atol=1e-9)
        with pytest.raises(IndexError, match="token 8, expected one of 0 to 7"):
            model(tokens + 1)


class Named(nn.Module):
    """Its layers get their inputs by name."""

    def __init__(self):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(8, 4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, tokens):
        return self.down(input=torch.tanh(self.up(input=self.table(input=tokens))))


@on_ranks(2)
def test_layers_take_their_inputs_by_name(world):
    plan = {"table": "vocab", "up": "colwise", "down": "rowwise"}
    packed = {"up": "packed_colwise_2", "down": PackedRowwise(2)}
    torchs = {"table": RowwiseParallel(input_layouts=Replicate()), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for styles, numerics in ((plan, {}), (packed, {}), (torchs, {}), (plan, {"reproducible": {"slices": 2}})):
        with paramp.launch_from_torch({"parallel": {"tensor": 2}} | numerics) as context:
            engine = engine_of(seeded(Named), plan=styles)
            train_both(context, engine, seeded(Named), [(torch.arange(8).view(2, 4), randn(2, 4, 4))])


class Cut(torch.autograd.Function):
    """A copy, which passes no gradient on."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@on_ranks(2)
def test_weights_behind_a_function_that_passes_no_gradient_on_have_none(world):
    """As torch's have, and no zeros, with which an optimizer would decay them."""
    plain, x = nn.Linear(4, 8), torch.ones(3, 4)
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}) as context:
        model = sharded(context, nn.ModuleDict({"up": copy.deepcopy(plain)}), {"up": "colwise"})["up"]
        for layer in (plain, model):
            Cut.apply(layer(x)).sum().backward()
            assert [parameter.grad for parameter in layer.parameters()] == [None, None]


class Doubled(nn.Linear):
    def forward(self, x):
        return F.softmax(super().forward(x), dim=-1)


@on_ranks(2)
def test_a_layer_with_a_forward_of_its_own_sees_the_whole_output(world):
    """A softmax over this rank's outputs alone would be another one, so such layers run on DTensors."""
    plain, x = seeded(Doubled, 4, 8).double(), randn(3, 4, dtype=torch.float64)
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}) as context:
        model = sharded(context, nn.ModuleDict({"own": copy.deepcopy(plain)}), {"own": "colwise_gather"})
        torch.testing.assert_close(model["own"](x).detach(), plain(x).detach())


@on_ranks(2)
def test_a_container_in_a_slice_of_the_sequence_has_partial_gradients_in_all_its_layers(world):
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))).double()
    x = randn(2, 6, 4, dtype=torch.float64)
    plain(x).square().sum().backward()
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}) as context:
        model = sharded(context, nn.ModuleDict({"part": copy.deepcopy(plain)}), {"part": "sequence"})
        model["part"](x.chunk(2, 1)[context.tp.rank]).square().sum().backward()
        assert_gradients(model["part"], plain, atol=1e-12)


# ------------------------------------------------------------------------- gradients and logits in a criterion

SHAPE = GPTConfig(num_layers=2, num_heads=2, width=8, max_seq_len=8, vocab_size=100, tied=False, init_std=0.5)
BALANCED = "blocks.0.mlp.down.weight"
TP2 = {"parallel": {"tensor": 2}, "precision": "64-true"}
assert_same_gradients = functools.partial(assert_gradients, atol=1e-13, rtol=1e-9)


def gpt():
    return seeded(GPT, SHAPE, seed=3).double()


def batches():
    tokens = torch.randint(100, (3, 4, 9), generator=torch.Generator().manual_seed(4))
    return [(part[:, :-1], part[:, 1:]) for part in tokens]


def after_a_step(engine, plain, given):
    """Which finds gradients with other placements; the plain model gets the weights."""
    for x, y in given:
        engine.forward_backward(x, y)
        engine.step()
        engine.flush()
        engine.zero_grad()
    copy_weights(engine, plain)


@on_ranks(2)
def test_a_criterion_may_ask_for_gradients_of_parameters_and_logits(world):
    """As where losses are balanced by the norms of their gradients."""

    def balanced(parameter, logits, target):
        loss = GPT.loss(logits, target)
        other = F.cross_entropy(logits.view(-1, logits.shape[-1]), target.reshape(-1), label_smoothing=0.3)
        norms = [
            sum(
                whole(one).square().sum()
                for one in torch.autograd.grad(value, [parameter(), logits], retain_graph=True)
            )
            for value in (loss, other)
        ]
        return loss * (norms[1] / norms[0]).sqrt() + other

    (x, y), *_ = batches()
    with paramp.launch_from_torch(TP2):
        plain = gpt()
        engine = engine_of(gpt(), functools.partial(balanced, lambda: engine.module.get_parameter(BALANCED)))
        after_a_step(engine, plain, [(x, y)])
        engine.forward_backward(x, y)
        balanced(lambda: plain.get_parameter(BALANCED), plain(x), y).backward()
        assert_same_gradients(engine, plain)


def changed_under_a_view(logits, target):
    rows = logits.view(-1, logits.shape[-1])
    logits.div_(2)
    return F.cross_entropy(rows, target.reshape(-1))


def changed_through_a_view(logits, target):
    logits.flatten(0, 1).mul_(2)
    return F.cross_entropy(logits.transpose(1, 2), target)


@pytest.mark.parametrize("criterion", [changed_under_a_view, changed_through_a_view])
@on_ranks(2)
def test_a_criterion_that_changes_logits_after_they_were_used(world, criterion):
    with paramp.launch_from_torch(TP2):
        engine, plain, (x, y) = engine_of(gpt(), criterion), gpt(), batches()[0]
        engine.forward_backward(x, y)
        criterion(plain(x), y).backward()
        assert_same_gradients(engine, plain)
