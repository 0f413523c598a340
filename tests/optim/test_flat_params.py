"""The step over flat buffers against torch's own optimizers on separate tensors."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from beside_plain import plain_step
from counting import Operators
from pool import on_ranks
from reference import assert_trained, local
from small_engines import each_raises, engine_of, sgd, train_step
from torch import nn
from torch.utils._pytree import tree_leaves

import paramp
from paramp.base import sizes
from paramp.optim.choose_step import PlainStep, why_not_fused
from paramp.optim.fused_step import FusedStep
from paramp.precision.policy import PRESETS


class Net(nn.Module):
    """Odd sizes, a scalar, a parameter that is used when asked, and one that is never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(7, 13), nn.Linear(13, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.sometimes, self.never = nn.Linear(13, 13), nn.Linear(2, 2)
        self.use = False

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.use:
            x = x + self.sometimes(x)
        return self.second(x) * self.scale


def data(count, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((8, 7), (8, 3))
    return [tuple(torch.randn(size, generator=generator).to(dtype) for size in sizes) for _ in range(count)]


def grouped(kind, **options):
    """Two groups that differ in their options, dealt out in turn so that neighbours are in different ones."""

    def make(parameters):
        own = list(parameters)
        return kind([{"params": own[::2], "lr": 0.02}, {"params": own[1::2], "weight_decay": 0.3}], lr=0.05, **options)

    return make


def momentum_in_one_group(parameters):
    first, *others = parameters
    return torch.optim.SGD([{"params": others, "momentum": 0.9}, {"params": [first]}], lr=0.05)


OPTIMIZERS = {
    "adamw": (grouped(torch.optim.AdamW), FusedStep),
    "adam": (grouped(torch.optim.Adam, amsgrad=True, maximize=True), FusedStep),
    "sgd": (grouped(torch.optim.SGD, momentum=0.9, nesterov=True), FusedStep),
    "plain sgd": (grouped(torch.optim.SGD), FusedStep),
    "momentum in one group": (momentum_in_one_group, FusedStep),
    "dampened": (grouped(torch.optim.SGD, momentum=0.9, dampening=0.5), PlainStep),
    "foreach": (grouped(torch.optim.AdamW, foreach=True), PlainStep),
    "rmsprop": (grouped(torch.optim.RMSprop, momentum=0.9), PlainStep),
    "adagrad": (functools.partial(torch.optim.Adagrad, lr=0.05, weight_decay=0.1), PlainStep),
}


def train(make, batches, bad=(), used=()):
    """The engine, trained; at the steps ``bad`` a gradient is NaN, at those ``used`` a further layer has one."""
    model = Net()
    engine = engine_of(model, optimizer=make(model.parameters()))
    for step, (x, y) in enumerate(batches):
        model.use = step in used
        engine.forward_backward(x, y)
        if step in bad:
            model.second.weight.grad[0, 0] = float("nan")
        assert engine.step().stepped == (step not in bad)
    return engine


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_that_of_torchs_optimizer(name, precision):
    """With clipping, the first step skipped, and a parameter that has a gradient in some windows only."""
    make, kind = OPTIMIZERS[name]
    bad, used, dtype = (0, 4), (2, 3, 5), torch.float64 if precision == "64-true" else torch.float32
    model, start = Net().to(dtype), Net().to(dtype).state_dict()
    optimizer = make(model.parameters())
    for step, batch in enumerate(data(7, dtype=dtype)):
        model.use = step in used
        if step not in bad:
            plain_step(model, optimizer, *batch, clip=0.5)
    with paramp.launch_from_torch({"clip_grad_norm": 0.5, "precision": precision}):
        engine = train(make, data(7, dtype=dtype), bad=bad, used=used)
        assert isinstance(engine._optimizer_step.updates[0], kind)
        if precision == "64-true":
            close = {"atol": 1e-13}
        else:  # amsgrad divides by what small gradients once were
            close = {"atol": 5e-6 if name == "adam" else 5e-7, "rtol": 1e-6}
        assert_trained(dict(engine.named_parameters()), dict(model.named_parameters()), start, still="never", **close)
        pairs = zip(engine.optimizer.param_groups, optimizer.param_groups, strict=True)
        for ours, theirs in ((a, b) for g, h in pairs for a, b in zip(g["params"], h["params"], strict=True)):
            if theirs.grad is not None:
                own, expected = (one.state.get(of, {}) for one, of in ((engine.optimizer, ours), (optimizer, theirs)))
                assert own.keys() == expected.keys()
                for key, value in expected.items():
                    atol = 1e-5 if name == "rmsprop" else 1e-6  # whose momentum is as large as 10
                    torch.testing.assert_close(own[key], torch.as_tensor(value), atol=atol, rtol=1e-5, msg=key)


@pytest.mark.parametrize("masters", ["full", "remainder"])
@pytest.mark.parametrize("mode", ["16-naive", "bf16-naive"])
@pytest.mark.parametrize("make", [sgd, functools.partial(torch.optim.AdamW, lr=0.01)], ids=["sgd", "adamw"])
def test_masters_follow_torchs_optimizer_on_fp32(make, mode, masters):
    """The masters are what it makes of the half-precision model's own gradients, and the weights their rounding."""
    config = {"precision": {"mode": mode} | ({"init_scale": 256.0} if mode == "16-naive" else {}), "masters": masters}
    with paramp.launch_from_torch(config) as context:
        model = Net()
        start = {name: value.detach().clone() for name, value in model.named_parameters()}
        still = ("never", "sometimes")
        copies = {name: nn.Parameter(value.clone()) for name, value in start.items() if not name.startswith(still)}
        optimizer = make(copies.values())
        engine = engine_of(model, optimizer=make(model.parameters()))
        for x, y in data(6):
            engine.forward_backward(x, y)
            for name, parameter in engine.named_parameters():
                if name in copies:
                    copies[name].grad = parameter.grad.float() / engine.scaler.get_scale()
            optimizer.step()
            engine.step()
        masters = engine._weights.full_precision()
        assert_trained(masters, start | copies, start, atol=1e-7, rtol=1e-6, still=still)
        for name, master in masters.items():
            assert torch.equal(engine.module.get_parameter(name).detach(), master.to(engine.precision.weights))
        assert context.config.precision.masters in (True, "remainder")


def test_parameters_and_gradients_are_views_of_the_buffers():
    with paramp.launch_from_torch({"precision": "16-naive"}):
        engine = engine_of(Net())
        (buffer,) = engine._weights.buffers
        x, y = data(1)[0]
        before = engine(x).detach()
        buffer.weights.mul_(2.0)
        assert not torch.equal(engine(x), before)
        engine.forward_backward(x, y)
        inside = [parameter.grad.untyped_storage().data_ptr() for _, parameter in engine.named_parameters()]
        assert set(inside) == {buffer.gradients.untyped_storage().data_ptr()}
        assert buffer.gradients.any()
        buffer.gradients.zero_()
        assert not any(parameter.grad.any() for _, parameter in engine.named_parameters())


MODES = [name for name, row in PRESETS.items() if row.float8 is None and "engine" not in name]


@pytest.mark.parametrize("mode", MODES)
def test_every_trained_parameter_is_in_a_buffer_of_the_modes_dtype(mode):
    with paramp.launch_from_torch({"precision": mode}):
        model = nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), Net(), nn.Linear(3, 3).requires_grad_(False))
        engine = engine_of(model)
        inside = {buffer.weights.untyped_storage().data_ptr() for buffer in engine._weights.buffers}
        for name, parameter in engine.module.named_parameters():
            is_kept = mode == "O2" and name.startswith("1.")
            assert parameter.dtype is (torch.float32 if is_kept else engine.precision.weights), name
            assert (parameter.untyped_storage().data_ptr() in inside) == parameter.requires_grad, name


def test_a_buffer_has_one_optimizer_and_one_dtype_and_ends_once_it_is_long(monkeypatch):
    monkeypatch.setattr(sizes, "BUCKET", 16)
    with paramp.launch_from_torch({"precision": "O2"}):  # batch norms are in fp32
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
        first, *others = model
        engine = engine_of(model, optimizer=[sgd(first.parameters()), sgd(nn.Sequential(*others).parameters())])
        held = sorted(sorted(param.name for param in buffer.params) for buffer in engine._weights.buffers)
    # The first optimizer's; of the second, the batch norm's; and of its other ones 4 + 16 elements each.
    assert held == [[f"{index}.bias", f"{index}.weight"] for index in range(4)]


@pytest.mark.parametrize("mode", ["32-true", "64-true", "16-naive", "bf16-naive", "bf16-true"])
def test_temporaries_of_a_step_are_blocks(mode):
    precision = {"mode": mode} | ({"init_scale": 4.0} if mode == "16-naive" else {})
    with paramp.launch_from_torch({"precision": precision, "clip_grad_norm": 1.0}):
        engine = engine_of(nn.Linear(2**16, 1, bias=False), optimizer=functools.partial(torch.optim.AdamW, eps=1e-4))
        engine.forward_backward(torch.ones(1, 2**16), torch.ones(1, 1))
        (buffer,) = engine._weights.buffers
        states = [value for state in engine.optimizer.state.values() for value in state.values()]
        held = [buffer.weights, buffer.gradients, *buffer.masters.state, *states]
        with Operators() as operators:
            assert engine.step().stepped
    made = [
        one.untyped_storage() for one in tree_leaves([found for _, found in operators.calls]) if torch.is_tensor(one)
    ]
    known = {one.untyped_storage().data_ptr() for one in held}
    largest = max(one.nbytes() for one in made if one.data_ptr() not in known)
    assert 0 < largest <= 2**16  # a half-precision copy of the whole would have twice as many bytes


BYTES = {
    "32-true": (16, 12),
    "16-mixed": (16, 12),
    "bf16-mixed": (16, 12),
    "16-naive": (16, 12),
    "bf16-naive": (16, 12),
    "16-true": (8, 8),
    "bf16-true": (8, 8),
}
"""The table of docs/masters.md: with state in full, and in bfloat16."""


@pytest.mark.real_sizes
@pytest.mark.parametrize("mode", BYTES)
def test_bytes_a_parameter(mode):
    for state, expected in zip(("full", "bf16"), BYTES[mode], strict=True):
        assert bytes_a_parameter({"precision": mode, "optimizer_state": state}) == pytest.approx(expected, abs=0.1)
        if mode.endswith("-naive"):
            found = bytes_a_parameter({"precision": mode, "optimizer_state": state, "masters": "remainder"})
            assert found == pytest.approx(expected - 2, abs=0.1)


@pytest.mark.real_sizes
@on_ranks(2)
def test_bytes_a_parameter_of_shards(world):
    for mode in ("32-true", "16-mixed", "bf16-naive"):
        for state, expected in zip(("full", "bf16"), BYTES[mode], strict=True):
            config = {"precision": mode, "optimizer_state": state, "parallel": {"data": {"shard": 2}}}
            assert bytes_a_parameter(config) == pytest.approx(expected / 2, abs=0.1)
    for masters, allowed in (("full", 4 + 12 / 2 + 0.1), ("remainder", 4 + 10 / 2 + 0.1)):
        assert bytes_a_parameter({"parallel": {"zero": 1}, "precision": "16-naive", "masters": masters}) <= allowed
    for mode in ("16-naive", "bf16-naive"):
        config = {"parallel": {"zero": 1}, "precision": mode, "optimizer_state": "bf16"}
        assert bytes_a_parameter(config) == pytest.approx(4 + 8 / 2, abs=0.1)


def bytes_a_parameter(config):
    """Of weights, gradients, masters and AdamW's state, each storage once, after a step."""
    with paramp.launch_from_torch(config):
        model = nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 300))
        count = sum(parameter.numel() for parameter in model.parameters())
        engine = engine_of(model, optimizer=functools.partial(torch.optim.AdamW, eps=1e-4))
        train_step(engine, torch.ones(2, 300))
        held = [value for state in engine.optimizer.state.values() for value in state.values()]
        held += [value for group in engine.optimizer.param_groups for value in group["params"]]
        held += [value for _, parameter in engine.named_parameters() for value in (parameter, parameter.grad)]
        held += [stored for buffer in engine._weights.buffers for stored in buffer.masters.state]
        held = [local(value) for value in held]
        storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in held}
        return sum(storages.values()) / count


@pytest.mark.parametrize("masters", ["full", "remainder"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_an_optimizers_state_is_saved_and_loaded_bit_by_bit(name, masters, tmp_path):
    make, _ = OPTIMIZERS[name]
    config = {"precision": {"mode": "16-naive", "init_scale": 64.0}, "masters": masters}
    with paramp.launch_from_torch(config):
        engine, other = train(make, data(3), used=(1,)), train(make, data(2, seed=9))
        torch.save(engine.optimizer.state_dict(), tmp_path / "state")
        exact = [engine._weights.exact(param).clone() for param in engine._weights.params]
        other.optimizer.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
        other.module.load_state_dict(engine.module.state_dict())
        other._weights.take_masters(dict(zip(other._weights.params, exact, strict=True)))
        other.scaler.load_state_dict(engine.scaler.state_dict())
        for one in (engine, other):
            one.module.use = True
            for x, y in data(3, seed=2):
                train_step(one, x, y)
        for key, value in engine._weights.full_precision().items():
            assert torch.equal(value, other._weights.full_precision()[key]), key


def result_of(config, *values):
    """Of the step of one fp16 weight that gets the gradients ``values`` in turn, on each rank."""
    config = {"precision": {"mode": "16-naive", "init_scale": 1.0}, "gradient_accumulation": len(values)} | config
    with paramp.launch_from_torch(config) as context:
        terms = len(values) * context.dp.size
        engine = engine_of(nn.Linear(1, 1, bias=False), lambda output, target: (output * target).sum() * terms)
        return [train_step(engine, torch.ones(1, 1), torch.full((1, 1), value)) for value in values][-1]


def test_gradients_of_microbatches_add_up_in_fp32_where_asked():
    """In fp16, 1 more than 2048 is 2048 again."""
    for dtype, expected in (("float16", 2048.0), ("float32", 2051.0)):
        assert result_of({"grad_dtype": dtype}, 2048.0, 1.0, 1.0, 1.0).grad_norm == expected


@on_ranks(2)
def test_the_sum_over_data_ranks_is_made_in_the_dtype_asked_for(world):
    """Two gradients of 40000 are too much for fp16; their true sum is in fp32."""
    assert result_of({"grad_dtype": "float32", "reduce_dtype": "float16"}, 40000.0).overflow
    result = result_of({"grad_dtype": "float32", "reduce_dtype": "float32"}, 40000.0)
    assert (result.overflow, result.grad_norm) == (False, 80000.0)


def test_what_keeps_an_optimizer_from_the_fused_step_is_said():
    weights = list(nn.Linear(2, 2).parameters())
    assert why_not_fused(torch.optim.AdamW(weights)) is None
    assert "RMSprop is not one of" in why_not_fused(torch.optim.RMSprop(weights))
    for option in ("differentiable", "capturable"):
        assert why_not_fused(torch.optim.AdamW(weights, **{option: True})) == "it is differentiable or capturable"
    numbers = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    assert why_not_fused(torch.optim.AdamW([numbers])) == "it has complex parameters"
    message = r"masters: got 'remainder', which needs torch's AdamW.*RMSprop is not one"
    with (
        paramp.launch_from_torch({"precision": "16-naive", "masters": "remainder"}),
        pytest.raises(paramp.ConfigError, match=message),
    ):
        engine_of(nn.Linear(2, 2), optimizer=torch.optim.RMSprop)


def test_hooks_of_the_optimizer_run_and_late_ones_are_refused():
    calls = []
    with paramp.launch_from_torch():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        train_step(engine_of(model, optimizer=optimizer), torch.ones(1, 2))
        assert calls == ["post"]
        engine = engine_of(nn.Linear(2, 2))
        engine.optimizer.register_step_post_hook(lambda *_: calls.append("late"))
        with pytest.raises(RuntimeError, match="step hooks were registered after initialize"):
            train_step(engine, torch.ones(1, 2))


class Taps(nn.Module):
    """Two neighbours in a buffer, each of which can be left out."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.used = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6)), "ab"

    def forward(self, x):
        return sum((x * getattr(self, name) for name in self.used), torch.zeros(6))


def test_a_parameter_unused_in_a_skipped_step_counts_its_own_steps():
    ours, theirs, adam = Taps(), Taps(), functools.partial(torch.optim.Adam, lr=0.1)
    optimizer = adam(theirs.parameters())
    with paramp.launch_from_torch():
        engine = engine_of(ours, optimizer=adam)
        for used, factor in (("b", float("inf")), ("a", 1.0), ("ab", 1.0), ("ab", 1.0)):
            ours.used = theirs.used = used
            x, y = torch.arange(24.0).view(4, 6) * factor, torch.ones(4, 6)
            assert train_step(engine, x, y).stepped == (factor == 1.0)
            if factor == 1.0:
                plain_step(theirs, optimizer, x, y)
    assert_trained(ours.state_dict(), theirs.state_dict(), Taps().state_dict(), atol=1e-6)


@pytest.mark.parametrize("grad_dtype", [None, "float32"])
def test_other_optimizers_of_half_weights_get_unscaled_gradients(grad_dtype):
    """The scale is beyond fp16, and the optimizer is to have gradients of its own dtype."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    before = model.weight.detach().half().float()
    config = {"precision": {"mode": "O3", "init_scale": 2.0**18}, "clip_grad_norm": 0.01, "grad_dtype": grad_dtype}
    with paramp.launch_from_torch(config):
        optimizer = functools.partial(torch.optim.SGD, lr=1.0, foreach=True)
        engine = engine_of(model, lambda output, target: 0.1 * F.mse_loss(output, target), optimizer)
        assert train_step(engine, torch.ones(4, 4)).stepped
        moved = (engine.module.weight.float() - before).norm()
        assert 1e-4 < moved < 0.011


def test_a_state_saved_before_the_first_step_is_loaded_as_zeros():
    with paramp.launch_from_torch():
        engine = engine_of(nn.Linear(4, 4), optimizer=torch.optim.AdamW)
        train_step(engine, torch.ones(4, 4))
        engine.optimizer.load_state_dict(torch.optim.AdamW(nn.Linear(4, 4).parameters()).state_dict())
        assert not any(value.any() for state in engine.optimizer.state.values() for value in state.values())


@pytest.mark.parametrize(
    "move",
    [
        lambda module: module.double().float(),
        lambda module: setattr(module.weight, "data", module.weight.data.clone()),
        lambda module: setattr(module.weight.grad, "data", module.weight.grad.data.clone()),
    ],
)
def test_what_was_moved_out_of_the_buffers_is_refused(move):
    with paramp.launch_from_torch():
        engine = engine_of(nn.Linear(4, 4))
        engine.forward_backward(torch.ones(4, 4), torch.ones(4, 4))
        move(engine.module)
        each_raises(RuntimeError, {"moved after initialize": engine.step})


def test_what_would_pass_the_step_by_is_an_error():
    """Parameters added later, options that need a state that is not there, optimizers of sparse gradients."""
    with paramp.launch_from_torch():
        model = Net()
        optimizer = sgd(model.first.parameters())
        engine, _, _, scheduler = paramp.initialize(
            model, optimizer, F.mse_loss, lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1)
        )
        assert copy.copy(scheduler).get_last_lr() == [0.1]
        optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(RuntimeError, match="set after initialize that needs 'momentum_buffer' in its state"):
            train_step(engine, *data(1)[0])
        optimizer.param_groups[0]["momentum"] = 0
        optimizer.add_param_group({"params": list(model.second.parameters())})
        with pytest.raises(RuntimeError, match="param groups were given other parameters after initialize"):
            train_step(engine, *data(1)[0])
        with pytest.raises(paramp.ConfigError, match="SparseAdam needs sparse gradients"):
            engine_of(nn.Embedding(4, 2, sparse=True), optimizer=torch.optim.SparseAdam)


@pytest.mark.parametrize("clips", [False, True])
def test_a_clip_of_torchs_gives_an_unused_parameter_a_gradient(clips):
    """Its gradient is zeros until the step, not None; after a change in place it is stepped, here by weight decay."""
    with paramp.launch_from_torch():
        engine = engine_of(Net(), optimizer=functools.partial(torch.optim.AdamW, weight_decay=0.5))
        engine.forward_backward(*data(1)[0])
        unused = engine.module.never.weight
        before = unused.detach().clone()
        assert torch.equal(unused.grad, torch.zeros(2, 2))
        if clips:
            torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3)
        assert engine.step().stepped
        assert torch.equal(unused.detach(), before) is not clips
