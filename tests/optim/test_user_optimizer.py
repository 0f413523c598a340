"""The user's optimizer in an engine: what trainers call on it."""

import functools
import itertools
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from beside_plain import assert_weights, plain_step, randn, seeded, train_both
from counting import Operators
from families import cases, family
from lamb import ScheduleFree, ScheduleFreeOfMatrices
from layouts import layouts
from pool import on_ranks
from reference import assert_trained, batches, local, plain_fp32_training, small_gpt
from small_engines import engine_of, everywhere, own_part, sgd, train_step
from small_mixture import PLAN, WIDTH, layers, tokens
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import paramp


class Sharpness(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


REFUSED = {
    "LBFGS evaluates the model in its step": torch.optim.LBFGS,
    "Sharpness evaluates the model in its step": Sharpness,
    "SparseAdam needs sparse gradients": torch.optim.SparseAdam,
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_optimizer_that_evaluates_the_model_or_needs_sparse_gradients_is_refused(message):
    with paramp.launch_from_torch(), pytest.raises(paramp.ConfigError, match=message):
        engine_of(nn.Embedding(4, 2, sparse=True), optimizer=REFUSED[message])


class Moving(torch.optim.SGD):
    def step(this, closure=None):  # under another name than self
        for one in this.param_groups[0]["params"]:
            one.data = one.data - 0.1 * one.grad


class Holding(torch.optim.SGD):
    """Steps what ``hold`` has taken from it at its construction."""

    def __init__(self, parameters, hold, lr=0.1):
        super().__init__(parameters, lr)
        self.held = hold(self)

    @torch.no_grad()
    def step(self, closure=None):
        if isinstance(self.held, torch.optim.Optimizer):
            self.held.step()
            return
        first = next(iter(self.held))
        for one in first["params"] if isinstance(first, dict) else self.held:
            one.add_(one.grad, alpha=-0.1)


HELD = {
    "a list": lambda one: list(one.param_groups[0]["params"]),
    "a dict": lambda one: dict.fromkeys(one.param_groups[0]["params"], 1.0),
    "groups": lambda one: [dict(one.param_groups[0])],
    "another's groups": lambda one: torch.optim.SGD(one.param_groups[0]["params"], lr=0.1),
}
"""What a step in another place than the groups' tensors would lose."""
FOLLOWING = {
    "the same groups": lambda one: list(one.param_groups),
    "an optimizer of the same groups": lambda one: torch.optim.SGD(one.param_groups, lr=0.1),
}
BESIDE = {
    "a list": lambda one: [[tensor.detach().clone() for tensor in group["params"]] for group in one.param_groups],
    "an optimizer's list": lambda one: Holding(one.param_groups, BESIDE["a list"]),
}
"""What a step pairs with the groups' tensors by their position."""
STEPS_OTHERS = ["bf16-naive", {"mode": "16-naive", "init_scale": 64.0}, {"mode": "bf16-true", "grad_dtype": "float32"}]
"""Modes in which an optimizer steps other tensors than the model's parameters."""


@pytest.mark.parametrize("mode", ["32-true", *STEPS_OTHERS], ids=str)
def test_a_step_that_would_be_lost_is_an_error(mode):
    x = randn(4, 4)
    with paramp.launch_from_torch({"precision": mode}):
        engine = engine_of(nn.Sequential(nn.Linear(4, 4)), optimizer=functools.partial(Moving, lr=0.1))
        engine.forward_backward(x, x)
        with pytest.raises(RuntimeError, match=r"the step of Moving gave '0\.weight' other memory.*in place"):
            engine.step()
        for name, hold in (HELD | FOLLOWING).items():
            model, make = nn.Sequential(nn.Linear(4, 4)), functools.partial(Holding, hold=hold)
            if mode == "32-true" or name in FOLLOWING:
                engine = engine_of(model, optimizer=make)
                before = engine.full_state_dict()["0.weight"]
                assert train_step(engine, x).stepped
                assert (engine.full_state_dict()["0.weight"] != before).all()
                if isinstance(engine.optimizer.held, torch.optim.Optimizer):
                    with pytest.raises(RuntimeError, match="belongs to an engine"):
                        engine.optimizer.held.step()
            else:
                with pytest.raises(paramp.ConfigError, match=r"Holding holds '0\.weight' in its attribute 'held'"):
                    engine_of(model, optimizer=make)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        engine = engine_of(model, optimizer=torch.optim.RMSprop(model[0].parameters()))
        assert train_step(engine, x).stepped
        engine.optimizer.add_param_group({"params": [*engine.module[1].parameters()]})
        with pytest.raises(RuntimeError, match="param groups were given other parameters after initialize"):
            train_step(engine, x)
    for hold in FOLLOWING.values():
        model = nn.Sequential(nn.Linear(4, 4))
        model, optimizer, _ = paramp.amp.convert_to_amp(model, Holding(model.parameters(), hold), None, mode)
        before = model.module[0].weight.clone()
        optimizer.backward(model(x).square().sum())
        assert optimizer.step().stepped
        assert (model.module[0].weight != before).any()
        if isinstance(optimizer.held, torch.optim.Optimizer):
            with pytest.raises(RuntimeError, match="the optimizer was converted"):
                optimizer.held.step()
    model = nn.Sequential(nn.Linear(4, 4))
    if mode == "32-true":
        paramp.amp.convert_to_amp(model, Holding(model.parameters(), HELD["a list"]), None, mode)
        model = nn.Sequential(nn.Linear(4, 4))
        paramp.amp.convert_to_amp(model, Holding(model.parameters(), HELD["a list"]), None, "bf16-true")
    if mode == "bf16-naive":
        with pytest.raises(paramp.ConfigError, match=r"Holding holds '0\.weight' in its attribute 'held'"):
            paramp.amp.convert_to_amp(model, Holding(model.parameters(), HELD["a list"]), None, mode)
        assert model[0].weight.dtype is torch.float32  # of which the masters of another call are made


@pytest.mark.parametrize("mode", ["32-true", *STEPS_OTHERS], ids=str)
def test_a_list_beside_groups_that_lose_frozen_parameters_is_an_error(mode):
    for hold, is_frozen in itertools.product(BESIDE.values(), (False, True)):
        for convert in (engine_of, lambda one, optimizer: paramp.amp.convert_to_amp(one, optimizer, None, mode)):
            model = nn.Sequential(nn.Linear(4, 4).requires_grad_(not is_frozen), nn.Linear(4, 4))
            message = r"Holding has a list of a tensor for each parameter, its attribute 'held'.*for frozen ones alone"
            with paramp.launch_from_torch({"precision": mode}), ExitStack() as stack:
                if is_frozen:
                    stack.enter_context(pytest.raises(paramp.ConfigError, match=message))
                convert(model, optimizer=Holding(model.parameters(), hold))


def test_an_attribute_of_torchs_own_optimizers_may_hold_parameters():
    with paramp.launch_from_torch({"precision": "bf16-naive"}):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.RMSprop(model.parameters())
        optimizer.held = [*model.parameters()]
        assert train_step(engine_of(model, optimizer=optimizer), randn(4, 4)).stepped


@on_ranks(2)
def test_parameters_of_one_stage_that_an_optimizer_holds_are_an_error_on_every_rank(world):
    with paramp.launch_from_torch({"parallel": {"pipeline": 2}, "precision": "bf16-naive"}):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), Holding(model[1].parameters(), HELD["a list"])]
        with pytest.raises(paramp.ConfigError, match=r"Holding holds '1\.weight'"):
            engine_of(model, optimizer=optimizers)


@on_ranks(2)
def test_a_list_beside_groups_that_lose_parameters_of_other_ranks_is_an_error_on_every_rank(world):
    for parallel in ({"pipeline": 2}, {"data": 2, "zero": 1}, {"data": {"shard": 2}}, {"tensor": 2}):
        with paramp.launch_from_torch({"parallel": parallel}):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            plan = {"0": "colwise", "1": "rowwise"} if "tensor" in parallel else None
            with pytest.raises(paramp.ConfigError, match="Holding has a list of a tensor for each parameter"):
                engine_of(model, optimizer=Holding(model.parameters(), BESIDE["a list"]), plan=plan)
    with paramp.launch_from_torch({"parallel": {"pipeline": 2}}):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        engine_of(model, optimizer=[Holding(layer.parameters(), BESIDE["a list"]) for layer in model])


def two_layers():
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))


SHOWN = [(mode, parallel) for mode in ("32-true", STEPS_OTHERS[1]) for parallel in ({}, {"zero": 1}, {"tensor": 2})]
SHOWN += [(STEPS_OTHERS[1], {"data": {"shard": 2}})]


@pytest.mark.parametrize("kind", [ScheduleFree, ScheduleFreeOfMatrices])
@on_ranks(2)
def test_weights_follow_the_train_and_eval_of_an_optimizer(world, kind):
    """A change of weights in between stays, and training goes on as in plain torch."""
    for mode, parallel in SHOWN:
        with paramp.launch_from_torch({"precision": mode, "parallel": parallel}) as context:
            plain, model = two_layers(), two_layers()
            optimizer, given = (kind(one.parameters()) for one in (plain, model))
            given.train()
            engine = engine_of(model, optimizer=given, plan={"0": "colwise", "1": "rowwise"})
            for x in (randn(8, 4, seed=step) for step in range(4)):
                for one in (optimizer, engine.optimizer):
                    one.train()
                plain_step(plain, optimizer, x, x.roll(1))
                assert train_step(engine, *own_part(context, x, x.roll(1))).stepped
                engine.zero_grad()
                with torch.no_grad():
                    for one in (plain, engine.module):
                        local(one[1].bias).add_(0.25)
                trained = plain[0].weight.detach().clone()
                for one in (optimizer, engine.optimizer):
                    one.eval()
                loss = engine.evaluate(*own_part(context, x, x.roll(1))).item()
                assert loss == pytest.approx(F.mse_loss(plain(x), x.roll(1)).item(), rel=2e-3)
                assert_weights(engine.full_state_dict(), plain.state_dict(), atol=2e-3)
                assert engine.check_replicas() == []
            assert (plain[0].weight - trained).abs().max() > 0.02


@pytest.mark.parametrize("mode", ["32-true", "bf16-naive"])
def test_converted_weights_follow_the_train_and_eval_of_an_optimizer_in_another(mode):
    plain, model = two_layers(), two_layers()
    optimizer, given = (Holding(one.parameters(), lambda it: ScheduleFree(it.param_groups)) for one in (plain, model))
    model, converted, _ = paramp.amp.convert_to_amp(model, given, None, mode)
    for x in (randn(8, 4, seed=step) for step in range(4)):
        for one in (optimizer, converted):
            one.held.train()
        plain_step(plain, optimizer, x, x.roll(1))
        converted.backward(F.mse_loss(model(x).float(), x.roll(1)))
        assert converted.step().stepped
        trained = plain[0].weight.detach().clone()
        for one in (optimizer, converted):
            one.held.eval()
        weights = {name: value.float() for name, value in model.module.state_dict().items()}
        assert_weights(weights, plain.state_dict(), atol=3e-3)
    assert (plain[0].weight - trained).abs().max() > 0.02


OWN_STEPS = {
    "rmsprop": ({}, torch.optim.RMSprop),
    "adamw": ({}, functools.partial(torch.optim.AdamW, foreach=True)),
    "sgd": ({}, functools.partial(sgd, dampening=0.5, momentum=0.5)),
    "muon": ({"data": {"shard": 2}}, torch.optim.Muon),
}


@on_ranks(2)
def test_an_optimizers_own_step_comes_after_one_read_of_a_flag(world):
    """What torch's optimizers then read themselves, such as step before on a CPU, is theirs."""
    for name, (parallel, make) in OWN_STEPS.items():
        with paramp.launch_from_torch({"parallel": parallel}):
            engine = engine_of(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), optimizer=make)
            updates, before = engine._optimizer_step.updates, []

            def counted(*given, update=updates[0], optimizer=engine.optimizer, before=before):
                handle = optimizer.register_step_pre_hook(lambda *_: before.append([one for one, _ in inside.calls]))
                with Operators() as inside:
                    update(*given)
                handle.remove()

            updates[0] = counted
            assert train_step(engine, torch.ones(2, 4), torch.zeros(2, 4)).stepped
            assert [one.count(torch.ops.aten._local_scalar_dense.default) for one in before] == [1], name
            engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 4))]})
            with pytest.raises(RuntimeError, match="param groups were given other parameters after initialize"):
                train_step(engine, torch.ones(2, 4), torch.zeros(2, 4))


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_hooks_of_every_optimizer_run_in_a_step(register):
    calls = []
    handle = register(lambda optimizer, *_: calls.append(type(optimizer)))
    try:
        with paramp.launch_from_torch():
            assert train_step(engine_of(nn.Linear(4, 4)), torch.ones(2, 4), torch.zeros(2, 4)).stepped
    finally:
        handle.remove()
    assert len(calls) == 1


@on_ranks(2)
def test_hooks_on_one_rank_alone_and_those_of_torch(world):
    def make(parameters):
        optimizer = sgd(parameters)
        if world.rank:
            optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    def watch(*_):
        pass

    watch.__module__ = "torch.profiler"
    handle = register_optimizer_step_post_hook(watch)
    with paramp.launch_from_torch({"parallel": {"data": 2}}):
        with pytest.raises(paramp.ConfigError, match=r"rank 0 has step hooks of optimizer\[0\] = False, but rank 1"):
            engine_of(nn.Linear(4, 4), optimizer=make)
        calls = [update.calls_optimizer for update in engine_of(nn.Linear(4, 4))._optimizer_step.updates]
    handle.remove()
    assert calls == [False]


TAKEN = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
TAKEN -= {"Optimizer", "LBFGS", "SparseAdam"}


@pytest.mark.parametrize("name", sorted(TAKEN))
def test_every_other_optimizer_of_torch_trains_as_in_plain_torch(name):
    def build():  # Muon takes no bias
        return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))

    make = functools.partial(getattr(torch.optim, name), lr=0.01)
    with paramp.launch_from_torch() as context:
        engine, given = engine_of(seeded(build), optimizer=make), [randn(8, 6, seed=step) for step in range(4)]
        train_both(context, engine, seeded(build), [(x, x[:, :3]) for x in given], optimizer=make, rtol=1e-5)


class Beginning(torch.optim.SGD):
    """SGD whose constructor, of other arguments than its ``defaults``, makes momenta and a count of its own."""

    def __init__(self, parameters, rate=0.05, start=torch.zeros_like):
        super().__init__(parameters, lr=2 * rate, momentum=0.9, foreach=False)
        self.state["calls"] = 0
        for one in self.param_groups[0]["params"]:
            self.state[one] = {"step": torch.tensor(0.0), "momentum_buffer": start(one.detach())}

    def step(self, closure=None):
        self.state["calls"] += 1
        return super().step(closure)


@pytest.mark.parametrize("mode", ["32-true", "bf16-naive"])
def test_state_that_a_constructor_makes_is_taken_over(mode, tmp_path):
    model, x = nn.Linear(4, 4), randn(4, 4)
    with paramp.launch_from_torch({"precision": mode}):
        engine = engine_of(model, optimizer=functools.partial(Beginning, start=torch.ones_like))
        (weight, *_), state = engine.optimizer.param_groups[0]["params"], engine.optimizer.state
        assert (state[weight]["momentum_buffer"] == 1).all()
        assert (state[weight]["momentum_buffer"].dtype, state[weight]["step"].item()) == (weight.dtype, 0)
        train_step(engine, x)
        engine.save(tmp_path / "saved")
        engine = engine_of(nn.Linear(4, 4), optimizer=Beginning)
        engine.load(tmp_path / "saved")
        assert engine.optimizer.state["calls"] == 1
        for copies in (torch.clone, lambda one: [one.clone()]):  # which differ if replicas get the values of a rank
            with pytest.raises(paramp.ConfigError, match=r"Beginning made the state 'momentum_buffer'.*defaults"):
                engine_of(nn.Linear(4, 4), optimizer=functools.partial(Beginning, start=copies))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_learning_rate_may_be_an_array_of_numpy(kind):
    with paramp.launch_from_torch():
        engine = engine_of(nn.Linear(4, 4), optimizer=functools.partial(kind, lr=0.1))
        engine.optimizer.param_groups[0]["lr"] = np.array(0.1)
        assert train_step(engine, randn(4, 4)).stepped


LAYOUTS = layouts("pp2·tp2, dp2·tp2 + sp, dp2·tp2 + zero1, pp2·dp2 + zero1, fsdp4, hsdp2x2")
LAYOUTS |= layouts("fsdp2·tp2, fsdp2·pp2, cp2·tp2")
PART = ["fsdp2·pp2"]


@family
@pytest.mark.parametrize("layout", cases("own steps", list(LAYOUTS), PART, 1))
@on_ranks(4)
def test_torchs_steps_get_plain_local_tensors_in_every_layout(world, layout):
    """Such as foreach=True and fused=True need; and every rank has the whole model of the masters, in fp32."""
    expected = plain_fp32_training(3, num_layers=2)[1]
    for option, precision in itertools.product(("foreach", "fused"), ("32-true", "16-naive")):
        mode = {"mode": "16-naive", "init_scale": 1024.0} if precision == "16-naive" else precision
        config = {"parallel": LAYOUTS[layout], "precision": mode, "clip_grad_norm": 1.0}
        with paramp.launch_from_torch(config) as context:
            model = small_gpt(num_layers=2)
            engine = engine_of(model, model.loss, functools.partial(torch.optim.AdamW, lr=1e-3, **{option: True}))
            for batch in batches(3):
                assert train_step(engine, *own_part(context, *batch)).stepped
            stepped = [one for group in engine.optimizer.param_groups for one in group["params"]]
            assert stepped
            assert not any(isinstance(one, DTensor) for one in stepped)
            state = engine.full_state_dict()
            assert all(value.dtype is torch.float32 for value in state.values())
            if precision == "32-true":
                assert_trained(state, expected, small_gpt(num_layers=2).state_dict(), atol=2e-5)
            else:  # what a half-precision weight cannot hold
                assert any((value.half().float() != value).any() for value in state.values())
            sums = everywhere({name: value.double().sum().item() for name, value in state.items()})
            assert all(one == sums[0] for one in sums)


@on_ranks(2)
def test_torchs_steps_get_plain_local_tensors_of_experts_too(world):
    for option in ("foreach", "fused"):
        with paramp.launch_from_torch({"parallel": {"expert": 2}}) as context:
            make = functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-4, **{option: True})
            engine = engine_of(layers(), optimizer=make, plan=PLAN)
            assert not any(
                isinstance(one, DTensor) for group in engine.optimizer.param_groups for one in group["params"]
            )
            given = [(tokens(seed=step), torch.zeros(16, WIDTH)) for step in range(3)]
            train_both(context, engine, layers(), given, optimizer=make, atol=1e-5)
