"""A backward in two halves, and frozen parameters under the schedules that run it so."""

import pytest
import torch
import torch.nn.functional as F
from beside_plain import assert_gradients, randn
from families import rarely
from pool import on_ranks
from small_engines import engine_of
from torch import nn

import paramp
from paramp.pipeline.split_backward import SplitBackward


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.v, self.w, self.bias, self.p = (nn.Parameter(torch.rand(3)) for _ in range(4))


class Scaling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


def doubled_gradient(m, x):
    hidden = m.a(x)
    hidden.register_hook(lambda gradient: gradient * 2)
    return (m.b(hidden),)


def from_table(m, x):
    table = m.p.tanh()
    return table, m.b(table), m.a(x) * table


STAGES = {
    "layers": lambda m, x: (m.b(m.a(x).tanh()),),
    "a layer that comes again around another": lambda m, x: (m.a(m.b(m.a(x).tanh()).tanh()),),
    "a bias of two norms": lambda m, x: (F.layer_norm(F.layer_norm(x, (3,), m.v, m.bias), (3,), m.w, m.bias),),
    "an input without gradient": lambda m, x: (m.b(m.a(x.detach()).tanh()),),
    "an input added late": lambda m, x: (m.b(m.a(x.detach()).tanh()) + x,),
    "a table beside": lambda m, x: (m.a(x), m.p.tanh()),
    "a parameter beside": lambda m, x: (m.a(x), m.p),
    "a parameter used partly beside": lambda m, x: (m.a(x) * m.p, m.p.tanh()),
    "outputs made of another": from_table,
    "several outputs of one node": lambda m, x: F.layer_norm(m.a(x), (3,), m.v, m.bias).split(1),
    "Python functions": lambda m, x: (Scaling.apply(Scaling.apply(x, m.p).tanh(), m.w),),
    "a hook on an activation": doubled_gradient,
    "nothing to train": lambda m, x: (x * 2,),
    "no gradient at all": lambda m, x: (x.detach(),),
}


@pytest.mark.parametrize("name", STAGES)
def test_two_halves_are_the_whole(name):
    def run(split):
        layers, x = Layers(), randn(2, 3).requires_grad_()
        calls = []
        for parameter in layers.parameters():
            parameter.register_hook(lambda gradient: gradient * 3)
            parameter.register_post_accumulate_grad_hook(lambda _: calls.append(1))
        outputs = STAGES[name](layers, x)
        outputs = [output for output in outputs if output.requires_grad]
        gradients = [randn(*output.shape) for output in outputs]
        if split:
            backward = SplitBackward(outputs, gradients, [x, None])
            first, nothing = backward.inputs()
            assert nothing is None
            assert not calls
            backward.weights()
        else:
            torch.autograd.backward(outputs, gradients)
            first = x.grad
        return [first, *(parameter.grad for parameter in layers.parameters())], len(calls)

    (halves, calls), (whole, expected_calls) = run(True), run(False)
    assert calls == expected_calls
    assert [one is None for one in halves] == [one is None for one in whole]
    torch.testing.assert_close([one for one in halves if one is not None], [one for one in whole if one is not None])


class Partly(nn.Module):
    """Uses its parameter for what it computes of its input, and for a table that it passes on beside."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1, 4))

    def forward(self, x):
        return x * self.weight, self.weight.tanh()


class Joining(nn.Linear):
    def forward(self, pair):
        return super().forward(pair[0]) * pair[1]


class Embedding(nn.Embedding):
    """Of numbers 0 to 3, given as floating point."""

    def forward(self, x):
        return super().forward((x * 4).long())


def four_stages(frozen=(), first=Embedding):
    torch.manual_seed(0)
    # The last ends with a function whose backward reads what it returned, which the schedule still has.
    last = nn.Sequential(Joining(4, 4), nn.Sigmoid())
    model = nn.Sequential(first(4, 4), nn.Linear(4, 4), Partly(), *last).double()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    return model


class NoWeights(nn.Module):
    def __init__(self, *_):
        super().__init__()

    def forward(self, x):
        return x.unsqueeze(-1).expand(*x.shape, 4).cos()


def freeze(model, names):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.split(".")[0] not in names)


def note(differentiable, name):
    """A hook that notes under ``name`` whether what a stage receives gets a gradient."""

    def hook(_, args):
        received = args[0] if isinstance(args[0], tuple) else args
        differentiable[name] = any(one.requires_grad for one in received)

    return hook


SPLIT = ["1", "2", "3"]
FROZEN = (
    (Embedding, "0", ("0", "02", "0")),
    (Embedding, "012", ("012",)),
    (Embedding, "", ("0", "02", "", "3", "01")),
    (NoWeights, "", ("", "1", "12", "")),
)
"""The first stage, what is frozen from the start, and what in each step."""


SCHEDULES = ["interleaved-zero-bubble", "zbv", "dualpipev", "interleaved-1f1b"]


@pytest.mark.parametrize("schedule", rarely(SCHEDULES, "zbv", "dualpipev"))
@on_ranks(2)
def test_gradients_behind_frozen_stages(world, schedule):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(8, 3, generator=generator).double(), torch.rand(8, 3, 4, generator=generator).double()
    pipeline = {"size": 2, "schedule": schedule, "microbatches": 4, "split": SPLIT}
    for kind, frozen, later in FROZEN:
        plain = four_stages(frozen, kind)
        with paramp.launch_from_torch({"parallel": {"pipeline": pipeline}, "precision": "64-true"}):
            engine, differentiable = engine_of(four_stages(frozen, kind)), {}
            trained = {name[0] for name, one in plain.named_parameters() if one.requires_grad}
            for name in {*SPLIT} & {name for name, _ in engine.module.named_modules()}:
                engine.module.get_submodule(name).register_forward_pre_hook(note(differentiable, name))
            for names in later:
                freeze(plain, names)
                freeze(engine.module, names)
                engine.zero_grad()
                plain.zero_grad()
                loss = F.mse_loss(plain(x), y)
                loss.backward()
                where = f"frozen {frozen!r}, then {names!r}:"
                assert engine.forward_backward(x, y).item() == pytest.approx(loss.item(), rel=1e-6), where
                assert_gradients(engine, plain, atol=1e-12, where=where)
                assert differentiable == {name: min(trained) < name for name in differentiable}, where
                assert engine.step().stepped
                torch.optim.SGD(plain.parameters(), lr=0.1).step()
