"""Gradients of parameters that data ranks shard: absent, changed by hand, accumulated; against plain torch."""

import functools

import pytest
import torch
import torch.nn.functional as F
from beside_plain import seeded
from pool import on_ranks
from reference import assert_trained, rank_slice
from small_engines import engine_of, own_part
from torch import nn

import paramp
from paramp.compat.colossalai.amp import AMP_TYPE

FSDP2 = {"data": {"shard": 2}}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.extra = nn.Parameter(torch.randn(3, 6))

    def forward(self, x, uses_extra):
        x = x + self.down(torch.tanh(self.up(x)))
        return x + self.extra.sum(0) if uses_extra else x


class Model(nn.Module):
    """Blocks, of which the first runs twice; an ``extra`` that not every batch uses, and a ``bonus`` that none does."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 6)
        self.extra, self.bonus = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(2, 3))

    def forward(self, x, uses_extra):
        uses_extra = bool(uses_extra.all())
        for block in (*self.blocks, self.blocks[0]):
            x = block(x, uses_extra)
        x = self.head(x)
        return x * self.extra.sum() if uses_extra else x


build = functools.partial(seeded, Model)
# Its decay moves what is not absent, gradient or not; its bias correction counts each parameter's own steps.
adamw = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, weight_decay=0.1)
# Its steps are as large as the gradients are, which Adam's are not.
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)


def data(step):
    return torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(step))


class Pair:
    """A plain model on the whole batch, and an engine of its own that has a rank's part."""

    def __init__(self, make=sgd):
        self.plain, self.engine = build(), engine_of(build(), optimizer=make)
        self.optimizer = make(self.plain.parameters())

    def backward(self, step, uses_extra=(False, False), factor=1.0):
        """``uses_extra``: on each rank."""
        self.plain_backward(step, uses_extra, factor)
        engine_backward(self.engine, *data(step), uses_extra)

    def plain_backward(self, step, uses_extra, factor=1.0):
        """Of the mean of both ranks' losses."""
        for rank, uses in enumerate(uses_extra):
            x, y = (rank_slice(one, rank, 2) for one in data(step))
            (F.mse_loss(self.plain(x, torch.tensor([uses])), y) / 2 * factor).backward()

    def step(self, what, step=None):
        """Both step, and have equal weights then."""
        self.optimizer.step()
        assert (step or self.engine.step)().stepped
        self.optimizer.zero_grad()
        self.engine.zero_grad()
        start, expected = build().state_dict(), self.plain.state_dict()
        still = tuple(name for name, value in expected.items() if torch.equal(value, start[name]))
        assert set(still) <= {"bonus", "extra", "blocks.0.extra", "blocks.1.extra"}
        assert_trained(self.engine.full_state_dict(), expected, start, atol=1e-6, still=still, what=what)


def engine_backward(engine, x, y, uses_extra):
    uses = torch.full((4,), uses_extra[engine.context.batch_axis.rank])
    x, y = own_part(engine.context, x, y)
    engine.forward_backward((x, uses), y)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["fsdp2", "kept"])
@on_ranks(2)
def test_a_parameter_is_stepped_if_any_rank_has_a_gradient(world, options, make):
    with paramp.launch_from_torch({"parallel": {"data": {"shard": 2} | options}}):
        pair = Pair(make)
        for step, uses_extra in enumerate([(True, True), (False, True), (False, False), (True, False)]):
            pair.backward(step, uses_extra)
            pair.step(f"step {step}")


def whole_like(parameter, value):
    return torch.full_like(parameter, value)


def give(parameters):
    """To what has none."""
    for name in ("bonus", "extra", "blocks.1.extra"):
        parameters[name].grad = whole_like(parameters[name].detach(), 0.25)


def drop(parameters):
    parameters["blocks.0.up.weight"].grad = None
    parameters["head.bias"].grad = None


def replace(parameters):
    parameters["blocks.0.up.weight"].grad = parameters["blocks.0.up.weight"].grad * 3


def change(parameters):
    parameters["head.weight"].grad.mul_(-2)


def nothing(parameters):
    pass


BY_HAND = [(by_hand,) for by_hand in (nothing, give, drop, replace, change, nothing)]
WINDOWS = [(nothing, nothing, nothing), (give, nothing, nothing), (drop, nothing, drop), (nothing, give)]
"""The last one is shorter."""


@pytest.mark.parametrize("when", ["after a backward", "before the step", "within a window"])
@on_ranks(2)
def test_gradients_that_are_changed_by_hand(world, when):
    windows, size = (WINDOWS, 3) if when == "within a window" else (BY_HAND, 1)
    with paramp.launch_from_torch({"parallel": FSDP2, "gradient_accumulation": size}):
        pair = Pair()
        for number, window in enumerate(windows):
            for call, by_hand in enumerate(window):
                # a gradient that is given is that of a whole window
                pair.backward(10 * number + call, (False, size > 1 and number == 0 and call == 1), 1 / size)
                by_hand(dict(pair.plain.named_parameters()))
                if when == "before the step":
                    pair.engine.before_step[:] = [lambda by_hand=by_hand: by_hand(dict(pair.engine.named_parameters()))]
                else:
                    by_hand(dict(pair.engine.named_parameters()))
                assert call == len(window) - 1 or not pair.engine.step().stepped
            for parameter in pair.plain.parameters():
                if parameter.grad is not None:
                    parameter.grad *= size / len(window)
            pair.step(f"window {number}", pair.engine.step if len(window) == size else pair.engine.flush)
        if when == "after a backward":
            for made in (1.0, 0.5):  # all by hand, without any backward
                for model in (pair.plain, pair.engine.module):
                    model.get_parameter("head.bias").grad = whole_like(model.get_parameter("head.bias").detach(), made)
                pair.step(f"without a backward: {made}")


@on_ranks(2)
def test_elements_are_counted_once_and_without_padding(world):
    """Some shards are empty, and most are padded. What no rank has a gradient for is not in the histogram."""
    fp16 = {"mode": AMP_TYPE.NAIVE, "log_num_zeros_in_grad": True, "initial_scale": 4.0}
    config = {"fp16": fp16, "parallel": FSDP2, "clip_grad_norm": None}
    with paramp.launch_from_torch(config):
        engine = engine_of(build(), optimizer=sgd)
        sizes = {name: parameter.numel() for name, parameter in engine.named_parameters()}
        engine_backward(engine, *data(0), (False, True))
        zeros = "head.weight", "blocks.1.up.bias", "blocks.0.extra"
        for name, parameter in engine.named_parameters():
            if name != "bonus":
                parameter.grad.fill_(0.0 if name in zeros else 0.75 if name == "head.bias" else 0.25)
        histogram = engine.gradient_histogram()
        result = engine.step()
    num_zeros, quarters = sum(sizes[name] for name in zeros), sum(sizes.values()) - 6
    quarters -= num_zeros + sizes["head.bias"]
    assert histogram.counts == {-1: sizes["head.bias"], -2: quarters}
    assert (histogram.zeros, histogram.largest, histogram.total) == (num_zeros, 0.75, sum(sizes.values()) - 6)
    assert result.num_zeros == num_zeros + sizes["bonus"]


@on_ranks(2)
def test_hooks_on_gradients_are_refused_by_name(world):
    hooks = ("register_hook", "register_post_accumulate_grad_hook")
    for hook in hooks:
        with paramp.launch_from_torch({"parallel": FSDP2}):
            model = build()
            getattr(model.blocks[1].up.weight, hook)(lambda gradient: None)
            with pytest.raises(paramp.ConfigError, match=r"'blocks\.1\.up\.weight' has a hook on its gradient"):
                engine_of(model)
    with paramp.launch_from_torch({"parallel": FSDP2}):
        engine = engine_of(build(), optimizer=sgd)
        for hook in hooks:
            handle = getattr(engine.module.get_parameter("head.weight"), hook)(lambda gradient: None)
            with pytest.raises(RuntimeError, match=r"'head\.weight' has a hook on its gradient"):
                engine_backward(engine, *data(0), (True, True))
            handle.remove()
            engine_backward(engine, *data(0), (True, True))
            assert engine.step().stepped


@on_ranks(2)
def test_a_backward_that_is_not_the_engines_is_noticed(world):
    with paramp.launch_from_torch({"parallel": FSDP2}) as context:
        pair, (x, y) = Pair(), own_part(context, *data(0))
        F.mse_loss(pair.engine(x, torch.tensor([True])), y).backward()
        with pytest.raises(RuntimeError, match=r"loss\.backward\(\) was called on an output of the engine"):
            pair.engine.step()
        pair.engine.zero_grad()
        calls = []
        handle = pair.engine.module.blocks[0].register_forward_hook(lambda *_: calls.append(1))
        pair.engine.backward(F.mse_loss(pair.engine(x, torch.tensor([True])), y))
        handle.remove()
        assert len(calls) == 2
        pair.plain_backward(0, (True, True))
        pair.step("the engine's backward")
