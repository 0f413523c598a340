"""Parameters that are replaced after initialize: their values are trained and saved, or it is an error."""

import functools

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks
from reference import assert_trained
from torch import nn

import paramp

NAIVE = {"mode": "16-naive", "init_scale": 4.0}


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def new_values(module):
    """For a part of a model or the whole: other values of the same dtypes."""
    generator = torch.Generator().manual_seed(2)
    return {
        name: torch.randn(value.shape, generator=generator).to(value.dtype)
        for name, value in module.state_dict().items()
    }


def assign(module):
    module.load_state_dict(new_values(module), assign=True)


def set_parameters(module):
    for name, value in new_values(module).items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(value))


def set_modules(module):
    for name, value in new_values(module).items():
        owner, _, leaf = name.rpartition(".")
        old = module.get_submodule(owner)
        if leaf == "weight":
            setattr(module, owner, nn.Linear(old.in_features, old.out_features, dtype=value.dtype))
        module.get_submodule(owner).register_parameter(leaf, nn.Parameter(value))


def in_place(module):
    module.load_state_dict(new_values(module))


X, Y = torch.randn(4, 4, generator=torch.Generator().manual_seed(4)), torch.ones(4, 4)


def trained(replace, precision, *, loop="forward_backward", parallel=None, masters=None):
    """The whole model after a step, ``replace``, and two more."""
    with paramp.launch_from_torch({"precision": precision, "parallel": parallel or {}, "masters": masters}):
        model = net()
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), F.mse_loss)
        for step in range(3):
            if step == 1:
                replace(engine.module)
            if loop == "forward_backward":
                engine.forward_backward(X, Y)
            else:
                engine.backward(engine.criterion(engine(X), Y))
            assert engine.step().stepped
            engine.zero_grad()
        return engine.full_state_dict()


@pytest.mark.parametrize("loop", ["forward_backward", "engine(x)"])
@pytest.mark.parametrize("replace", [assign, set_parameters, set_modules])
def test_new_parameters_are_trained_from_their_values(replace, loop):
    actual = trained(replace, "32-true", loop=loop)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        if step == 1:
            in_place(model)
        optimizer.zero_grad()
        F.mse_loss(model(X), Y).backward()
        optimizer.step()
    assert_trained(actual, model.state_dict(), new_values(model), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("precision", ["32-true", NAIVE], ids=str)
def test_new_parameters_between_backward_and_step_are_stepped(precision):
    """With the gradients of the old values."""
    x = torch.ones(3, 4)
    with paramp.launch_from_torch({"precision": precision}, device="cpu"):
        model = net()
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.5), F.mse_loss)
        engine.forward_backward(x, x)
        gradients = {name: one.grad.float() / 4.0 ** (precision is NAIVE) for name, one in model.named_parameters()}
        gradients = {name: one.clone() for name, one in gradients.items()}
        assign(model)
        expected = {name: one.detach().float() - 0.5 * gradients[name] for name, one in model.named_parameters()}
        assert engine.step().stepped
        assert_trained(engine.full_state_dict(), expected, new_values(model), atol=1e-6)


@on_ranks(2)
def test_with_masters_zero_and_pipelines(world):
    for precision, masters in ((NAIVE, "full"), ({"mode": "bf16-naive"}, "remainder")):
        for parallel in ({"zero": 1}, {"pipeline": {"size": 2, "microbatches": 2}}):
            options = {"precision": precision, "masters": masters, "parallel": parallel}
            actual, expected = trained(assign, **options), trained(in_place, **options)
            assert all(torch.equal(value, expected[name]) for name, value in actual.items())


def uneven_net():
    """No dim divides by 2, and the middle layer is frozen."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))
    model[2].requires_grad_(False)
    return model


@on_ranks(2)
def test_shards_that_were_replaced_are_trained_and_gathered(world):
    """``fully_shard`` has a hook on loads, which would gather the replacements ever after."""
    target = torch.ones(4, 1)

    def steps(run, model, replace):
        for step in range(4):
            if step == 1:
                replace(1.0)
            run()
            if step == 2:
                with torch.no_grad():
                    for one in model[2].parameters():
                        one.mul_(0.5)  # what is frozen is gathered from its own memory too

    def replace(engine, factor):
        values = {name: value * 0.5 + factor for name, value in engine.module.state_dict().items()}
        engine.module.load_state_dict(values, assign=True)

    plain = uneven_net()
    optimizer = torch.optim.SGD([one for one in plain.parameters() if one.requires_grad], lr=0.1, momentum=0.9)

    def plain_step():
        optimizer.zero_grad()
        F.mse_loss(plain(X), target).backward()
        optimizer.step()

    def in_plain(factor):
        plain.load_state_dict({name: value * 0.5 + factor for name, value in plain.state_dict().items()})

    steps(plain_step, plain, in_plain)
    with paramp.launch_from_torch({"parallel": {"data": {"shard": 2}}}):
        model = uneven_net()
        sgd = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1, momentum=0.9)
        engine, *_ = paramp.initialize(model, sgd, F.mse_loss)

        def engine_step():
            engine.forward_backward(X.chunk(2)[world.rank], target.chunk(2)[world.rank])
            assert engine.step().stepped
            engine.zero_grad()

        steps(engine_step, engine.module, functools.partial(replace, engine))
        actual = engine.full_state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(actual[name], value, atol=1e-6, rtol=1e-6, msg=name)


def test_a_checkpoint_holds_the_new_values(tmp_path):
    with paramp.launch_from_torch({"precision": NAIVE}):
        model = net()
        for frozen in model[0].parameters():
            frozen.requires_grad_(False)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model[2].parameters(), lr=0.1), F.mse_loss)
        engine.forward_backward(X, Y)
        engine.step()
        assign(engine.module)
        expected = {name: value.float() for name, value in new_values(model).items()}
        engine.save(tmp_path / "checkpoint")
        in_place_again = {name: torch.zeros_like(value) for name, value in engine.module.state_dict().items()}
        engine.module.load_state_dict(in_place_again, assign=True)
        engine.load(tmp_path / "checkpoint")
        for found in (engine.full_state_dict(), engine.module.state_dict()):
            assert all(torch.equal(value.float(), expected[name]) for name, value in found.items())
        assert not any(frozen.requires_grad for frozen in engine.module[0].parameters())


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("name", "new", "message"),
    [
        ("0.bias", torch.zeros(5), r"'0.bias' was replaced .* shape \(5,\) and torch.float16.* own has shape \(4,\)"),
        ("0.bias", torch.zeros(4), r"'0.bias' was replaced .* torch.float32, .* torch.float16"),
        ("0.weight", torch.zeros(4, 4), r"'0.weight' and '1.weight' are one parameter"),
    ],
)
def test_what_does_not_agree_is_an_error(name, new, message):
    with paramp.launch_from_torch({"precision": NAIVE}):
        model = tied()
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        set_parameter = nn.Parameter(new if "float32" in message else new.half())
        owner, _, leaf = name.rpartition(".")
        setattr(engine.module.get_submodule(owner), leaf, set_parameter)
        with pytest.raises(RuntimeError, match=message):
            engine.forward_backward(X, Y)


def one_step(engine, **options):
    engine.forward_backward(X, Y, **options)
    return engine.step()


@on_ranks(2)
def test_what_does_not_agree_on_one_stage_is_an_error_on_all(world):
    with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 2, "microbatches": 2}}}):
        model = net()
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        one_step(engine)  # before the first one stages try out what they exchange, and would fail in that
        layer = engine.module.get_submodule("0" if world.rank == 0 else "2")
        for return_loss in (True, False):
            layer.bias = nn.Parameter(torch.zeros(len(layer.weight) + world.rank))
            with pytest.raises(RuntimeError, match=r"'2.bias' was replaced .* shape \(5,\)"):
                one_step(engine, return_loss=return_loss)
            engine.zero_grad()
        layer.bias = nn.Parameter(torch.zeros(len(layer.weight)))
        assert one_step(engine).stepped


def test_tied_parameters_stay_tied():
    with paramp.launch_from_torch():
        model = tied()
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss)
        values = {**new_values(model), "1.weight": new_values(model)["0.weight"]}
        model.load_state_dict(values, assign=True)
        engine.forward_backward(X, Y)
        assert engine.step().stepped
        assert model[0].weight is model[1].weight
        assert not torch.equal(model[0].weight, values["0.weight"])
