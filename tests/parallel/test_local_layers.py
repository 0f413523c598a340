"""Tensor-parallel layers compute on local tensors, against torch's layers in one process, and exchanges by hand."""

import copy
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import paramp
from paramp.parallel.tensor import exchange
from paramp.parallel.tensor.plan import apply_plan, resolve_plan


def whole_and_parts(rank):
    """(ranks, 4, 6): what each rank has; and this rank's, which requires a gradient."""
    every = torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return every, every[rank].clone().requires_grad_()


def of_a_copy(function, group, extra, x):
    return function(x * 1, group, *extra)  # a sum is in place


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("dim", [0, 1, -1])
@on_ranks(2)
def test_exchanges_and_their_duals(world, dim, backend):
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}) as context, warnings.catch_warnings():
        # torch hides it, but not if it is an error
        warnings.filterwarnings("ignore", ".*Function'> should not be instantiated", DeprecationWarning)
        group, rank = context.tp.group, context.tp.rank
        every, own = whole_and_parts(rank)
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
        for name, (expected, gradient) in cases.items():
            x = own.detach().clone().requires_grad_()
            extra = () if name in ("enter", "sum_over_ranks", "on_first_rank") else (dim,)
            call = functools.partial(of_a_copy, getattr(exchange, name), group, extra)
            if backend is not None:
                torch.compiler.reset()  # it counts compilations of one code
                call = torch.compile(call, backend=backend, fullgraph=True)
            output = call(x)
            torch.testing.assert_close(output.detach(), expected.detach(), msg=name)
            output.backward(output.detach().clone())
            torch.testing.assert_close(x.grad, gradient.detach(), msg=name)


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


class CountDTensors(TorchDispatchMode):
    """Counts operators that get DTensors, but views and detach, which only wrap."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from torch.distributed.tensor import DTensor

        if DTensor in types:
            self.found.append(str(func))
            return NotImplemented
        return func(*args, **(kwargs or {}))


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
        assert not [name for name in count.found if "add_" not in name and "detach" not in name], count.found
        torch.testing.assert_close(found.detach(), loss.detach())
        for name, parameter in plain.named_parameters():
            gradient = model.get_parameter(name).grad
            gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            torch.testing.assert_close(gradient, parameter.grad, msg=name)
        with pytest.raises(IndexError, match="token 8, expected one of 0 to 7"):
            model(tokens + 1)


class Doubled(nn.Linear):
    def forward(self, x):
        return F.softmax(super().forward(x), dim=-1)


@on_ranks(2)
def test_a_layer_with_a_forward_of_its_own_sees_the_whole_output(world):
    """A softmax over this rank's outputs alone would be another one, so such layers run on DTensors."""
    torch.manual_seed(6)
    plain, x = Doubled(4, 8).double(), torch.randn(3, 4, dtype=torch.float64)
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}) as context:
        model = sharded(context, nn.ModuleDict({"own": copy.deepcopy(plain)}), {"own": "colwise_gather"})
        torch.testing.assert_close(model["own"](x).detach(), plain(x).detach())


@on_ranks(2)
def test_a_container_in_a_slice_of_the_sequence_has_partial_gradients_in_all_its_layers(world):
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))).double()
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    plain(x).square().sum().backward()
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}) as context:
        model = sharded(context, nn.ModuleDict({"part": copy.deepcopy(plain)}), {"part": "sequence"})
        model["part"](x.chunk(2, 1)[context.tp.rank]).square().sum().backward()
        for name, parameter in plain.named_parameters():
            gradient = model["part"].get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(gradient, parameter.grad, msg=name)


@on_ranks(2)
def test_between_scatter_and_gather_each_rank_has_its_slice_of_the_sequence(world):
    torch.manual_seed(8)
    x, factor = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True), torch.randn(2, 6, 4, dtype=torch.float64)
    expected = x.tanh()
    (expected * factor).sum().backward()
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}) as context:
        layers = nn.ModuleDict({"first": nn.Identity(), "last": nn.Identity()})
        model = sharded(context, layers, {"first": "scatter_sequence", "last": "gather_sequence"})
        own = x.detach().requires_grad_()
        between = model["first"](own)
        torch.testing.assert_close(between.detach(), x.detach()[:, 3 * context.tp.rank :][:, :3])
        output = model["last"](between.tanh())
        torch.testing.assert_close(output.detach(), expected.detach())
        (output * factor).sum().backward()
        torch.testing.assert_close(own.grad, x.grad)
