"""Parameters that are replaced after initialize: their values are trained and saved, or it is an error."""

import copy
import functools
import io
import pickle
import weakref
from contextlib import nullcontext

import pytest
import torch
from beside_plain import assert_weights, plain_step, randn
from pool import on_ranks
from reference import assert_trained
from small_engines import assert_same_tensors, engine_of, own_part, run_batch
from torch import nn

import paramp

NAIVE = {"mode": "16-naive", "init_scale": 4.0}


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


class Recurrent(nn.LSTM):
    """Computes with a list of its parameters."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__(4, 4)

    def forward(self, x):
        return super().forward(x)[0]


def new_values(module):
    """For a part of a model or the whole: other values of the same dtypes."""
    generator = torch.Generator().manual_seed(2)
    return {
        name: torch.randn(value.shape, generator=generator).to(value.dtype)
        for name, value in module.state_dict().items()
    }


def assign(module):
    module.load_state_dict(new_values(module), assign=True)


def set_modules(module):
    for name, value in new_values(module).items():
        owner, _, leaf = name.rpartition(".")
        old = module.get_submodule(owner)
        if leaf == "weight":
            setattr(module, owner, nn.Linear(old.in_features, old.out_features, dtype=value.dtype))
        module.get_submodule(owner).register_parameter(leaf, nn.Parameter(value))


def in_place(module):
    module.load_state_dict(new_values(module))


X, Y = randn(4, 4, seed=4), torch.ones(4, 4)
sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def one_step(engine, **options):
    engine.forward_backward(X, Y, **options)
    return engine.step()


def trained(replace, model=net, **config):
    """The whole model after a step, ``replace``, and two more, of which the last is in a loop of calls."""
    with paramp.launch_from_torch(config):
        engine = engine_of(model(), optimizer=sgd)
        for step in range(3):
            if step == 1:
                replace(engine.module)
            if step < 2 or "pipeline" in config.get("parallel", ()):
                assert one_step(engine).stepped
            else:
                engine.backward(engine.criterion(engine(X), Y))
                assert engine.step().stepped
        return engine.full_state_dict()


@pytest.mark.parametrize(("replace", "make"), [(assign, net), (set_modules, net), (assign, Recurrent)])
def test_new_parameters_are_trained_from_their_values(replace, make):
    model = make()
    optimizer = sgd(model.parameters())
    for step in range(3):
        if step == 1:
            in_place(model)
        plain_step(model, optimizer, X, Y)
    assert_trained(trained(replace, make), model.state_dict(), new_values(model), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("precision", ["32-true", NAIVE], ids=str)
def test_new_parameters_between_backward_and_step_are_stepped(precision):
    """With the gradients of the old values."""
    x = torch.ones(3, 4)
    with paramp.launch_from_torch({"precision": precision}, device="cpu"):
        model = net()
        engine = engine_of(model, optimizer=functools.partial(torch.optim.SGD, lr=0.5))
        engine.forward_backward(x, x)
        gradients = {name: one.grad.float() / engine.scaler.get_scale() for name, one in model.named_parameters()}
        assign(model)
        expected = {name: one.detach().float() - 0.5 * gradients[name] for name, one in model.named_parameters()}
        assert engine.step().stepped
        assert_trained(engine.full_state_dict(), expected, new_values(model), atol=1e-6)


@on_ranks(2)
def test_with_masters_zero_and_pipelines(world):
    for precision, masters in ((NAIVE, "full"), ({"mode": "bf16-naive"}, "remainder")):
        for parallel in ({"zero": 1}, {"pipeline": {"size": 2, "microbatches": 2}}):
            options = {"precision": precision, "masters": masters, "parallel": parallel}
            assert_same_tensors(trained(assign, **options), trained(in_place, **options))


def uneven_net():
    """No dim divides by 2, and the middle layer is frozen."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))
    model[2].requires_grad_(False)
    return model


@torch.no_grad()
def show(module):
    return module(X)


@on_ranks(2)
def test_shards_that_were_replaced_are_trained_and_gathered(world):
    """``fully_shard`` has a hook on loads, which would gather the replacements ever after.

    A call of the module itself leaves parameters gathered, which are no replacements.
    """
    target, plain = torch.ones(4, 1), uneven_net()
    optimizer = sgd([one for one in plain.parameters() if one.requires_grad])
    with paramp.launch_from_torch({"parallel": {"data": {"shard": 2}}}) as context:
        engine = engine_of(uneven_net(), optimizer=lambda given: sgd([one for one in given if one.requires_grad]))
        for step in range(4):
            if step == 1:
                for module, options in ((plain, {}), (engine.module, {"assign": True})):
                    values = {name: value * 0.5 + 1.0 for name, value in module.state_dict().items()}
                    module.load_state_dict(values, **options)
            plain_step(plain, optimizer, X, target)
            run_batch(engine, *own_part(context, X, target))
            show(engine.module)
            assert engine.step().stepped
            if step == 2:
                with torch.no_grad():
                    for one in (*plain[2].parameters(), *engine.module[2].parameters()):
                        one.mul_(0.5)  # what is frozen is gathered from its own memory too
        torch.testing.assert_close(show(engine.module), show(plain), atol=1e-6, rtol=1e-6)
        assert_weights(engine.full_state_dict(), plain.state_dict(), atol=1e-6, rtol=1e-6)


def test_a_checkpoint_holds_the_new_values(tmp_path):
    with paramp.launch_from_torch({"precision": NAIVE}):
        model = net()
        model[0].requires_grad_(False)
        engine = engine_of(model, optimizer=sgd(model[2].parameters()))
        one_step(engine)
        assign(engine.module)
        expected = {name: value.float() for name, value in new_values(model).items()}
        engine.save(tmp_path / "checkpoint")
        zeros = {name: torch.zeros_like(value) for name, value in engine.module.state_dict().items()}
        engine.module.load_state_dict(zeros, assign=True)
        engine.load(tmp_path / "checkpoint")
        for found in (engine.full_state_dict(), engine.module.state_dict()):
            assert_same_tensors({name: value.float() for name, value in found.items()}, expected)
        assert not any(frozen.requires_grad for frozen in engine.module[0].parameters())


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


DISAGREE = [
    ("bias", torch.zeros(5).half(), r"'0.bias' was replaced .* shape \(5,\) and torch.float16.* own has shape \(4,\)"),
    ("bias", torch.zeros(4), r"'0.bias' was replaced .* torch.float32, .* torch.float16"),
    ("weight", torch.zeros(4, 4).half(), r"'0.weight' and '1.weight' are one parameter"),
]


@pytest.mark.parametrize(("name", "new", "message"), DISAGREE, ids=str)
def test_what_does_not_agree_is_an_error(name, new, message):
    with paramp.launch_from_torch({"precision": NAIVE}):
        engine = engine_of(tied())
        setattr(engine.module[0], name, nn.Parameter(new))
        with pytest.raises(RuntimeError, match=message):
            engine.forward_backward(X, Y)


def test_another_shape_of_a_frozen_parameter_is_an_error():
    """As transformers gives it to tied embeddings, which stay the same objects."""
    with paramp.launch_from_torch():
        engine = engine_of(nn.Sequential(nn.Embedding(4, 4).requires_grad_(False), nn.Linear(4, 4)))
        engine.module[0].weight.data = torch.ones(6, 4)
        for call in (lambda: engine.forward_backward(torch.full((4,), 5), Y), engine.full_state_dict):
            with pytest.raises(RuntimeError, match=r"'0.weight' got the shape \(6, 4\) after initialize; resize"):
                call()


@on_ranks(2)
def test_what_does_not_agree_on_one_stage_is_an_error_on_all(world):
    with paramp.launch_from_torch({"parallel": {"pipeline": {"size": 2, "microbatches": 2}}}):
        engine = engine_of(net())
        one_step(engine)  # before the first one stages try out what they exchange, and would fail in that
        layer = engine.module.get_submodule("0" if world.rank == 0 else "2")
        for return_loss in (True, False):
            layer.bias = nn.Parameter(torch.zeros(len(layer.weight) + world.rank))
            with pytest.raises(RuntimeError, match=r"'2.bias' was replaced .* shape \(5,\)"):
                one_step(engine, return_loss=return_loss)
            engine.zero_grad()
        layer.bias = nn.Parameter(torch.zeros(len(layer.weight)))
        own = layer.weight.data
        layer.weight.data = torch.ones(len(own) + world.rank, own.shape[1])
        with pytest.raises(RuntimeError, match=r"'2.weight' got the shape \(5, 6\)"):
            one_step(engine)
        layer.weight.data = own
        engine.zero_grad()
        assert one_step(engine).stepped


def test_tied_parameters_stay_tied():
    with paramp.launch_from_torch():
        model = tied()
        engine = engine_of(model)
        values = {**new_values(model), "1.weight": new_values(model)["0.weight"]}
        model.load_state_dict(values, assign=True)
        assert one_step(engine).stepped
        assert model[0].weight is model[1].weight
        assert not torch.equal(model[0].weight, values["0.weight"])


@pytest.mark.parametrize("parallel", [{"data": {"shard": 2}}, {"tensor": 2}], ids=["fsdp2", "tp2"])
@on_ranks(2)
def test_what_torch_refuses_of_a_sharded_module_and_what_serves_instead(world, parallel):
    """As docs/troubleshooting.md says, of DTensors in the middle of a buffer."""
    with paramp.launch_from_torch({"parallel": parallel}):
        engine = engine_of(net(), plan={"0": "colwise", "2": "rowwise"} if "tensor" in parallel else None)
        for call in (copy.deepcopy, lambda state: torch.save(state, io.BytesIO())):
            with pytest.raises(RuntimeError, match=r"Attempted to .* an invalid python storage"):
                call(engine.module.state_dict())
            call({name: value.clone() for name, value in engine.module.state_dict().items()})
            call(engine.full_state_dict())
        for cast in (lambda: engine.module.to("cpu"), engine.module.half, engine.module.double):
            with pytest.raises(RuntimeError, match=r"_apply\(\): Couldn't swap"):
                cast()
        if "data" in parallel:
            with pytest.raises(pickle.PicklingError):
                torch.save(engine.module, io.BytesIO())


REPLACING = {"fsdp2": ({"data": {"shard": 2}}, "cpu"), "tp2": ({"tensor": 2}, "cpu"), "meta": ({"data": 2}, "meta")}


@pytest.mark.parametrize("layout", REPLACING)
@on_ranks(2)
def test_a_use_of_parameters_from_before_initialize_that_it_has_replaced_is_an_error(world, layout):
    """Also after one was caught. Their memory is not kept."""
    parallel, device = REPLACING[layout]
    with paramp.launch_from_torch({"parallel": parallel}):
        with torch.device(device):
            model = net()
        held, other = model[2].weight, weakref.ref(model[0].weight)
        engine = engine_of(model, plan={"0": "colwise", "2": "rowwise"} if layout == "tp2" else None)
        assert other() is None
        for use, problem in (
            (lambda: None, None),
            (lambda: None, None),
            (lambda: held.sum().backward(), "has a gradient"),
            (lambda: held.requires_grad_(False), "was changed"),
            (lambda: held.requires_grad_(), None),
            (lambda: held.detach().mul_(0.5), "was changed"),
        ):
            use()
            message = rf"'2\.weight' of the model that initialize was given {problem}"
            with pytest.raises(RuntimeError, match=message) if problem else nullcontext():
                assert one_step(engine).stepped
            engine.zero_grad()
