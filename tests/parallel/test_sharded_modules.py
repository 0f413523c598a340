"""Models whose parameters FSDP2 shards, in forwards of unusual kinds, against a plain loop on the whole batch."""

import functools

import pytest
import torch
from beside_plain import randn, seeded, train_both
from families import cases, family, number, rarely
from pool import on_ranks, run_on_ranks
from reference import local
from small_engines import engine_of
from small_mlp import Block
from torch import nn
from torch.nn import functional as F

import paramp

sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adamw = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)
FSDP2 = {"data": {"shard": 2}}


class Carrier:
    """Of a class that torch's hooks do not look into."""

    __slots__ = ("hidden",)

    def __init__(self, hidden):
        self.hidden = hidden


class Blocks(nn.Module):
    """Blocks of a kind, which a subclass calls in its way."""

    kind, number = Block, 2

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.kind(6, 5) for _ in range(self.number))


class Transposing(Block):
    """It takes and returns a tensor; the output is a view."""

    wrap = unwrap = staticmethod(lambda x: x)

    def forward(self, given):
        return self.wrap(super().forward(self.unwrap(given)).T.contiguous().T)


class Carrying(Transposing):
    wrap, unwrap = Carrier, staticmethod(lambda carrier: carrier.hidden)


class InPlace(Blocks):
    """It changes what its blocks return in place."""

    kind = Transposing

    def forward(self, x):
        for block in self.blocks:
            x = block.unwrap(block(block.wrap(x)))
            x += 1
        return x


class InPlaceOfObjects(InPlace):
    kind = Carrying


class Viewing(Transposing):
    """It returns two views of one tensor."""

    def forward(self, given):
        output = super().forward(given)
        return output, output[:, :1]


class InPlaceOfOneView(Blocks):
    """It changes one of them in place, and so the other one."""

    kind = Viewing

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.ones(6))

    def forward(self, x):
        for block in self.blocks:
            x, first = block(x)
            x += self.shift
        return x + first


class Looked(Blocks):
    """Rows of a table, whose gradients autograd makes sparse."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 6, sparse=True)

    def forward(self, x):
        first, second = self.blocks
        return second(first(x + self.table((x[:, 0] > 0).long())))


class Twice(Blocks):
    """Runs its first block before and after the second, and on an input without a gradient."""

    def forward(self, x):
        first, second = self.blocks
        return first(second(first(x)))


class Held(Blocks):
    """The first and the last stage use a parameter of the model itself, and each has one of its own there."""

    number = 4

    def __init__(self):
        super().__init__()
        self.both, self.first, self.last = (nn.Parameter(torch.full((6,), value)) for value in (1.1, 0.9, 0.8))

    def forward(self, x):
        x = x * self.both * self.first
        for block in self.blocks:
            x = block(x)
        return x * self.last * self.both


class Uneven(nn.Module):
    """A block whose parameters have 0, 1, 3, 5 and 7 rows, beside an even pair that the plan shards over ``tp``."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.three, self.seven, self.six = nn.Linear(6, 3), nn.Linear(3, 7), nn.Linear(7, 6)
        self.gain = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(5))
        self.nothing = nn.Parameter(torch.ones(0, 4))
        self.fixed = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x):
        x = x + self.gain * self.down(torch.tanh(self.up(self.norm(x)))) + self.nothing.sum()
        return x + self.six(torch.tanh(self.seven(self.three(x)))) * self.fixed + F.pad(self.shift, (0, 1))


def uneven_model():
    return nn.Sequential(nn.Linear(6, 6), Uneven(), Uneven(), nn.Linear(6, 6))


def follow(world, build, parallel, steps=3, plan=None, optimizer=sgd, **options):
    """The engine's model has the weights of the plain one."""
    given, plain = [randn(2, 8, 6, seed=step) for step in range(steps)], seeded(build)
    if build is Looked:
        plain.table.sparse = False  # torch takes no norm of sparse gradients
    config = {"clip_grad_norm": options.get("clip"), "gradient_accumulation": options.get("accumulation", 1)}
    with paramp.launch_from_torch({"parallel": parallel} | config) as context:
        engine = engine_of(seeded(build), F.mse_loss, optimizer, plan=plan)
        here = [parameter for parameter in engine.parameters() if parameter.requires_grad and local(parameter).numel()]
        assert sum(len(group["params"]) for group in engine.optimizer.param_groups) == len(here)
        train_both(context, engine, plain, given, optimizer=optimizer, **{"rtol": 1e-5} | options)


@pytest.mark.parametrize("build", [InPlace, InPlaceOfObjects, InPlaceOfOneView, Looked, Twice])
@on_ranks(2)
def test_blocks_may_be_called_in_any_way(world, build):
    """Also one that returns an object: without a hook on its tensors the backward reads parameters that were freed."""
    for options in [{}, {"reshard_after_forward": False}] if build is Twice else [{}]:
        follow(world, build, {"data": {"shard": 2} | options})


@pytest.mark.parametrize("schedule", rarely(["1f1b", "interleaved-1f1b"], "interleaved-1f1b"))
@on_ranks(4)
def test_stages_of_one_rank_may_use_parameters_of_the_model_itself(world, schedule):
    """Rank 0 has the first and the third stage."""
    pipeline = {"size": 2, "schedule": schedule, "microbatches": 4}
    follow(world, Held, {"data": {"shard": 2, "prefetch": 1}, "pipeline": pipeline})


LAYOUTS = {
    "fsdp2": (2, FSDP2),
    "fsdp4": (4, {"data": {"shard": 4}}),
    "hsdp2x2": (4, {"data": {"replicate": 2, "shard": 2}}),
    "fsdp2·tp2": (4, FSDP2 | {"tensor": 2}),
}


@family
@pytest.mark.parametrize("layout", cases("sharded fp32", list(LAYOUTS), ["fsdp2·tp2"], 1))
def test_shards_of_any_size_follow_a_plain_loop(layout):
    size, parallel = LAYOUTS[layout]
    options = {"clip": 0.3, "accumulation": 2, "atol": 2e-5, "optimizer": adamw}
    plan = {"*.up": "colwise", "*.down": "rowwise"}
    given = {"build": uneven_model, "parallel": parallel, "steps": number(16, 40), "plan": plan}
    run_on_ranks(size, __name__, "follow", given | options)


class ReadsWeights(Blocks):
    """Computes with the weights of a block without calling it."""

    def forward(self, x):
        return self.blocks[1](self.blocks[0].up(x) @ self.blocks[0].up.weight)


@on_ranks(2)
def test_weights_of_a_block_that_is_not_called_are_an_error(world):
    with paramp.launch_from_torch({"parallel": FSDP2}):
        engine, x = engine_of(ReadsWeights()), randn(8, 6)
        with pytest.raises(RuntimeError, match="DTensor") as raised:
            engine.forward_backward(x, x)
        assert "gathered while it is called" in raised.value.__notes__[0]
