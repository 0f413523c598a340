"""Gradients of parameters that data ranks shard, or step parts of: absent, changed by hand, accumulated."""

import functools
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from beside_plain import randn, seeded
from counting import Operators
from families import rarely
from pool import on_ranks
from reference import assert_trained, rank_slice
from small_engines import engine_of, own_part
from torch import nn

import paramp
from paramp.base import loop_block_sizes
from paramp.compat.colossalai.amp import AMP_TYPE

FSDP2 = {"data": {"shard": 2}}
LAYOUTS = {"fsdp2": FSDP2, "kept": {"data": {"shard": 2, "reshard_after_forward": False}}, "zero": {"zero": 1}}


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
    return randn(2, 8, 6, seed=step)


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
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "forward_backward: the second batch before a step")
        engine.forward_backward((x, uses), y)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("layout", rarely(LAYOUTS, "kept", "zero"))
@on_ranks(2)
def test_a_parameter_is_stepped_if_any_rank_has_a_gradient(world, layout, make):
    """Also of several backwards; in small buckets, of which one rank may complete one that the other does not."""
    with mock.patch.object(loop_block_sizes, "BUCKET", 64), paramp.launch_from_torch({"parallel": LAYOUTS[layout]}):
        pair = Pair(make)
        for step, uses_extra in enumerate([(True, True), (False, True), (False, False), (True, False), (False, True)]):
            pair.engine.module.zero_grad()  # which takes the buffers' gradients away
            pair.backward(step, uses_extra)
            if step == 3:
                pair.backward(10 + step, (False, False))
            if step == 4:
                pair.backward(10 + step, (True, False))
            pair.step(f"step {step}")


@pytest.mark.parametrize("parallel", [{"data": 2}, {"zero": 1}, FSDP2])
@on_ranks(2)
def test_a_gradient_from_before_its_parameter_was_frozen_is_stepped_with(world, parallel):
    """As in plain torch, and though one rank has none. In the next window nothing changes the parameter."""
    with paramp.launch_from_torch({"parallel": parallel}):
        pair = Pair()
        pair.backward(0, (True, True))
        pair.step("trained")
        pair.backward(1, (True, False))
        for model in (pair.plain, pair.engine.module):
            model.extra.requires_grad_(False)
        pair.backward(2, (True, False))
        pair.step("frozen inside of the window")
        pair.backward(3, (True, True))
        pair.step("frozen before it")


@on_ranks(2)
def test_what_one_rank_alone_uses_and_has_frozen_is_named_there(world):
    """So that no rank has a gradient, as if no batch had used it."""
    with paramp.launch_from_torch({"parallel": {"data": 2}}):
        pair = Pair()
        pair.backward(0, (True, True))
        pair.step("trained")
        pair.engine.module.extra.requires_grad_(world.rank == 0)
        pair.backward(1, (False, True))
        if world.rank == 0:
            pair.engine.step()
        else:
            with pytest.raises(RuntimeError, match=r"'extra' on rank 1 .* requires_grad was changed"):
                pair.engine.step()


def halve(parameter):
    parameter.grad.mul_(0.5)


HOOKS = {
    "head.weight": (halve, 0.5),
    "blocks.0.up.weight": (lambda parameter: setattr(parameter, "grad", parameter.grad * 0.5), 0.5),
    "extra": (lambda parameter: setattr(parameter, "grad", None), 0.0),
}
"""Of parameters, and what they make of a gradient."""


@on_ranks(2)
def test_with_zero_hooks_that_come_after_initialize_run_before_the_reduction(world):
    with mock.patch.object(loop_block_sizes, "BUCKET", 64), paramp.launch_from_torch({"parallel": {"zero": 1}}):
        pair = Pair()
        for name, (hook, factor) in HOOKS.items():
            pair.engine.module.get_parameter(name).register_post_accumulate_grad_hook(hook)
            pair.plain.get_parameter(name).register_hook(lambda gradient, factor=factor: gradient * factor)
        for step in range(3):
            pair.backward(step, (True, True))
            pair.plain.extra.grad = None
            pair.step(f"step {step}")


def change(what, model):
    """Change gradients by hand."""
    parameters = dict(model.named_parameters())
    up, bias = parameters["blocks.0.up.weight"], parameters["head.bias"]
    if what == "give":  # to what has none
        for name in ("bonus", "extra", "blocks.1.extra"):
            parameters[name].grad = torch.full_like(parameters[name].detach(), 0.25)
    elif what == "drop":
        up.grad = bias.grad = None
    elif what == "replace":
        up.grad = up.grad * 3
    elif what == "multiply":
        parameters["head.weight"].grad.mul_(-2)


BY_HAND = [(what,) for what in ("nothing", "give", "drop", "replace", "multiply", "nothing")]
WINDOWS = [("nothing", "nothing", "nothing"), ("give", "nothing", "nothing"), ("drop", "nothing", "drop")]
WINDOWS += [("nothing", "give")]  # which is shorter


@pytest.mark.parametrize("when", rarely(["after a backward", "before the step", "within a window"], "within a window"))
@on_ranks(2)
def test_gradients_that_are_changed_by_hand(world, when):
    windows, size = (WINDOWS, 3) if when == "within a window" else (BY_HAND, 1)
    with paramp.launch_from_torch({"parallel": FSDP2, "gradient_accumulation": size}):
        pair = Pair()
        engine = pair.engine
        for number, window in enumerate(windows):
            for call, what in enumerate(window):
                # a gradient that is given is that of a whole window
                pair.backward(10 * number + call, (False, size > 1 and number == 0 and call == 1), 1 / size)
                change(what, pair.plain)
                if when == "before the step":
                    engine.before_step[:] = [functools.partial(change, what, engine.module)]
                else:
                    change(what, engine.module)
                assert call == len(window) - 1 or not engine.step().stepped
            for parameter in pair.plain.parameters():
                if parameter.grad is not None:
                    parameter.grad *= size / len(window)
            pair.step(f"window {number}", engine.step if len(window) == size else engine.flush)
        if when == "after a backward":
            for made in (1.0, 0.5):  # all by hand, without any backward
                for model in (pair.plain, engine.module):
                    bias = model.get_parameter("head.bias")
                    bias.grad = torch.full_like(bias.detach(), made)
                pair.step(f"without a backward: {made}")


@on_ranks(2)
def test_elements_are_counted_once_and_without_padding(world):
    """Most shards are padded. What no rank has a gradient for is not in the histogram."""
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


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
@on_ranks(2)
def test_hooks_on_gradients_are_refused_by_name(world, hook):
    with paramp.launch_from_torch({"parallel": FSDP2}):
        model = build()
        getattr(model.blocks[1].up.weight, hook)(lambda gradient: None)
        with pytest.raises(paramp.ConfigError, match=r"'blocks\.1\.up\.weight' has a hook on its gradient"):
            engine_of(model)
    with paramp.launch_from_torch({"parallel": FSDP2}):
        engine = engine_of(build(), optimizer=sgd)
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
        pair.engine.backward(F.mse_loss(pair.engine(x, torch.tensor([True])), y))
        pair.plain_backward(0, (True, True))
        pair.step("the engine's backward")


def test_gradients_set_by_hand_are_stepped_in_a_dispatch_mode():
    """In one, torch's _foreach_copy_ leaves the version of what it fills as it was."""
    with paramp.launch_from_torch():
        engine, plain = engine_of(seeded(lambda: nn.Linear(4, 4))), seeded(lambda: nn.Linear(4, 4))
        for parameter in engine.parameters():
            parameter.grad = torch.ones_like(parameter)
        with Operators():
            assert engine.step().stepped
        for parameter, before in zip(engine.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter, before - 0.1)
