"""Gradients of parameters that data ranks shard: absent, changed by hand, accumulated; against plain torch."""

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks
from reference import assert_trained, local, rank_slice
from torch import nn
from torch.distributed.tensor import DTensor

import paramp
from paramp.compat.colossalai.amp import AMP_TYPE

LAYOUTS = {"fsdp2": {}, "kept": {"reshard_after_forward": False}}


def layout(name):
    return {"data": {"shard": 2} | LAYOUTS[name]}


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


def build():
    torch.manual_seed(0)
    return Model()


def adamw(parameters):
    # Its decay moves what is not absent, gradient or not; its bias correction counts each parameter's own steps.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, weight_decay=0.1)


def sgd(parameters):
    # Its steps are as large as the gradients are, which Adam's are not.
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def data(step):
    return torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(step))


def plain_backward(model, x, y, uses_extra, factor=1.0):
    """The mean of both ranks' losses; ``uses_extra``: on each rank."""
    for rank, uses in enumerate(uses_extra):
        own = rank_slice(x, rank, 2), torch.tensor([uses])
        (F.mse_loss(model(*own), rank_slice(y, rank, 2)) / 2 * factor).backward()


def engine_backward(engine, x, y, uses_extra):
    rank = engine.context.batch_axis.rank
    uses = torch.full((4,), uses_extra[rank])
    engine.forward_backward((rank_slice(x, rank, 2), uses), rank_slice(y, rank, 2))


def assert_equal_weights(engine, plain, what):
    start, expected = build().state_dict(), plain.state_dict()
    still = tuple(name for name, value in expected.items() if torch.equal(value, start[name]))
    assert set(still) <= {"bonus", "extra", "blocks.0.extra", "blocks.1.extra"}
    assert_trained(engine.full_state_dict(), expected, start, atol=1e-6, still=still, what=what)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks(2)
def test_a_parameter_is_stepped_if_any_rank_has_a_gradient(world, name, make):
    plain = build()
    optimizer = make(plain.parameters())
    with paramp.launch_from_torch({"parallel": layout(name)}):
        engine, *_ = paramp.initialize(build(), make, F.mse_loss)
        for step, uses_extra in enumerate([(True, True), (False, True), (False, False), (True, False)]):
            x, y = data(step)
            optimizer.zero_grad()
            plain_backward(plain, x, y, uses_extra)
            optimizer.step()
            engine_backward(engine, x, y, uses_extra)
            assert engine.step().stepped
            engine.zero_grad()
            assert_equal_weights(engine, plain, f"step {step}")


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


BY_HAND = [nothing, give, drop, replace, change, nothing]


@pytest.mark.parametrize("before_step", [False, True])
@on_ranks(2)
def test_gradients_that_are_changed_by_hand(world, before_step):
    plain = build()
    optimizer = sgd(plain.parameters())
    with paramp.launch_from_torch({"parallel": layout("fsdp2")}):
        engine, *_ = paramp.initialize(build(), sgd, F.mse_loss)
        for step, by_hand in enumerate(BY_HAND):
            x, y = data(step)
            optimizer.zero_grad()
            plain_backward(plain, x, y, (False, False))
            by_hand(dict(plain.named_parameters()))
            optimizer.step()
            engine_backward(engine, x, y, (False, False))
            if before_step:
                engine.before_step[:] = [lambda by_hand=by_hand: by_hand(dict(engine.named_parameters()))]
            else:
                by_hand(dict(engine.named_parameters()))
            assert engine.step().stepped
            engine.zero_grad()
            assert_equal_weights(engine, plain, by_hand.__name__)
        for made in (1.0, 0.5):  # all by hand, without any backward
            optimizer.zero_grad()
            for model in (plain, engine.module):
                model.get_parameter("head.bias").grad = whole_like(model.get_parameter("head.bias").detach(), made)
            optimizer.step()
            assert engine.step().stepped
            engine.zero_grad()
            assert_equal_weights(engine, plain, f"without a backward: {made}")


@on_ranks(2)
def test_windows_of_several_batches(world):
    """Changed by hand within a window; the last window is shorter."""
    plain = build()
    optimizer = sgd(plain.parameters())
    with paramp.launch_from_torch({"parallel": layout("fsdp2"), "gradient_accumulation": 3}):
        engine, *_ = paramp.initialize(build(), sgd, F.mse_loss)
        windows = [(nothing, nothing, nothing), (give, nothing, nothing), (drop, nothing, drop), (nothing, give)]
        for number, window in enumerate(windows):
            optimizer.zero_grad()
            for call, by_hand in enumerate(window):
                uses_extra = (False, number == 0 and call == 1)
                x, y = data(10 * number + call)
                # a gradient that is given is that of a whole window
                plain_backward(plain, x, y, uses_extra, 1 / 3)
                by_hand(dict(plain.named_parameters()))
                engine_backward(engine, x, y, uses_extra)
                by_hand(dict(engine.named_parameters()))
                if call < len(window) - 1:
                    assert not engine.step().stepped
            if len(window) < 3:
                for parameter in plain.parameters():
                    if parameter.grad is not None:
                        parameter.grad *= 3 / len(window)
                result = engine.flush()
            else:
                result = engine.step()
            optimizer.step()
            assert result.stepped
            engine.zero_grad()
            assert_equal_weights(engine, plain, f"window {number}")


@on_ranks(2)
def test_elements_are_counted_once_and_without_padding(world):
    """Some shards are empty, and most are padded. What no rank has a gradient for is not in the histogram."""
    fp16 = {"mode": AMP_TYPE.NAIVE, "log_num_zeros_in_grad": True, "initial_scale": 4.0}
    config = {"fp16": fp16, "parallel": layout("fsdp2"), "clip_grad_norm": None}
    with paramp.launch_from_torch(config):
        engine, *_ = paramp.initialize(build(), sgd, F.mse_loss)
        sizes = {name: parameter.numel() for name, parameter in engine.named_parameters()}
        engine_backward(engine, *data(0), (False, world.size == 2))
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


# -------------------------------------------------------------------------------------------------------------- hooks


@on_ranks(2)
def test_hooks_on_gradients_are_refused_by_name(world):
    hooks = ("register_hook", "register_post_accumulate_grad_hook")
    for hook in hooks:
        with paramp.launch_from_torch({"parallel": layout("fsdp2")}):
            model = build()
            getattr(model.blocks[1].up.weight, hook)(lambda gradient: None)
            with pytest.raises(paramp.ConfigError, match=r"'blocks\.1\.up\.weight' has a hook on its gradient"):
                paramp.initialize(model, sgd, F.mse_loss)
    with paramp.launch_from_torch({"parallel": layout("fsdp2")}):
        engine, *_ = paramp.initialize(build(), sgd, F.mse_loss)
        for hook in hooks:
            handle = getattr(engine.module.get_parameter("head.weight"), hook)(lambda gradient: None)
            with pytest.raises(RuntimeError, match=r"'head\.weight' has a hook on its gradient"):
                engine_backward(engine, *data(0), (True, True))
            handle.remove()
            engine_backward(engine, *data(0), (True, True))
            assert engine.step().stepped


@on_ranks(2)
def test_a_backward_that_is_not_the_engines_is_noticed(world):
    plain = build()
    optimizer = sgd(plain.parameters())
    with paramp.launch_from_torch({"parallel": layout("fsdp2")}) as context:
        engine, *_ = paramp.initialize(build(), sgd, F.mse_loss)
        assert repr(engine).startswith("Engine(Model, 335 parameters, 32-true, pp 1 x dp_replicate 1 x dp_shard 2")
        rank = context.batch_axis.rank
        for step in range(3):
            x, y = data(step)
            own = rank_slice(x, rank, 2), torch.tensor([True])
            if step == 1:
                F.mse_loss(engine(*own), rank_slice(y, rank, 2)).backward()
                with pytest.raises(RuntimeError, match=r"loss\.backward\(\) was called on an output of the engine"):
                    engine.step()
                engine.zero_grad()
            calls = []
            handle = engine.module.blocks[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
            engine.backward(engine.criterion(engine(*own), rank_slice(y, rank, 2)))
            handle.remove()
            assert len(calls) == 2
            assert engine.step().stepped
            engine.zero_grad()
            optimizer.zero_grad()
            plain_backward(plain, x, y, (True, True))
            optimizer.step()
            assert_equal_weights(engine, plain, f"step {step}")


class Views(nn.Module):
    """Blocks that return views, which are changed in place."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (2, 3))) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x += 1
            x = x.flatten(1)
        return x


@on_ranks(2)
def test_outputs_of_blocks_that_are_changed_in_place(world):
    torch.manual_seed(0)
    plain = Views()
    x, y = data(0)
    F.mse_loss(plain(x), y).backward()
    with paramp.launch_from_torch({"parallel": layout("fsdp2")}):
        torch.manual_seed(0)
        engine, *_ = paramp.initialize(Views(), sgd, F.mse_loss)
        assert type(engine.module.blocks[1]).__name__ == "FSDPSequential"
        engine.forward_backward(rank_slice(x, world.rank, 2), rank_slice(y, world.rank, 2))
        for name, parameter in engine.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            assert local(parameter.grad).numel() < parameter.numel()
            torch.testing.assert_close(parameter.grad.full_tensor(), plain.get_parameter(name).grad)
