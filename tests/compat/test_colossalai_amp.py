"""Mixed precision without an engine: convert_to_amp and its three forms, against plain torch loops."""

import copy
import functools
import math
import pickle
from contextlib import nullcontext

import pytest
import small_mlp
import torch
import torch.distributed as dist
from counting import Collectives
from families import rarely
from pool import on_ranks
from reference import local, whole
from small_engines import each_raises, everywhere, own_part
from torch import nn
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import paramp
from paramp import ConfigError, DistributedGradScaler
from paramp.compat.colossalai.amp import (
    AMP_TYPE,
    AmpOptimizer,
    convert_to_amp,
    convert_to_apex_amp,
    convert_to_naive_amp,
    convert_to_torch_amp,
)
from paramp.precision.capabilities import has_native_fp16
from paramp.precision.fp16_emulation_cpu import emulate_fp16, is_emulated
from paramp.precision.modes import PRESETS

SCALE = 2.0**10
EACH_TYPE = {
    "torch": (AMP_TYPE.TORCH, {"init_scale": SCALE}),
    "naive": (AMP_TYPE.NAIVE, {"initial_scale": SCALE, "hysteresis": 1}),
    "apex O1": (AMP_TYPE.APEX, {"loss_scale": SCALE}),
    "apex O2": (AMP_TYPE.APEX, {"opt_level": "O2", "loss_scale": SCALE}),
}
NAIVE = AMP_TYPE.NAIVE, {"initial_scale": SCALE}
each_type = pytest.mark.parametrize("name", EACH_TYPE)
IN_FLOAT8 = [name for name, preset in PRESETS.items() if preset.float8]


def network():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def data(steps, size=16):
    generator = torch.Generator().manual_seed(9)
    for _ in range(steps):
        x = torch.randn(size, 8, generator=generator)
        yield x, x[:, :4].argmax(1)


def fresh():
    model = network()
    return model, sgd(model)


def quarters(module):
    return {name: torch.full_like(value, 0.25) for name, value in module.state_dict().items()}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def converted(mode, config=None, criterion=None, *, model=None, optimizer=sgd):
    model = model or network()
    return convert_to_amp(model, optimizer(model), criterion or nn.CrossEntropyLoss(), mode, config)


def train(model, optimizer, criterion, pairs, clip=0.5):
    for x, y in pairs:
        optimizer.zero_grad()
        optimizer.backward(criterion(model(x), y))
        optimizer.clip_grad_norm(model, clip)
        assert optimizer.step().stepped


def plain_training(pairs, model):
    """Plain torch in fp32: where its parameters began and ended."""
    optimizer, start = sgd(model), copy.deepcopy(model)
    for x, y in pairs:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return list(zip(start.parameters(), model.parameters(), strict=True))


def stepped(optimizer):
    (group,) = optimizer.param_groups
    return group["params"]


@pytest.mark.parametrize("scale", [1.0, SCALE, 2.0**14])
@each_type
def test_a_loop_learns_what_plain_fp32_torch_learns(name, scale):
    """Within what fp16 rounding allows, and no nearer: something is computed in half precision."""
    mode, options = EACH_TYPE[name]
    options = {key: scale if "scale" in key else value for key, value in options.items()}
    model, optimizer, criterion = converted(mode, options)
    train(model, optimizer, criterion, data(20))
    assert all(value.dtype is torch.float32 for value in stepped(optimizer))
    for value, (first, expected) in zip(stepped(optimizer), plain_training(data(20), network()), strict=True):
        way = (expected - first).norm()
        if way > 1e-3:  # the first bias is what batch norm takes away again
            assert 1e-6 < (value - expected).norm() / way < 0.02


def test_torch_amp_is_torchs_autocast_and_scaler_to_the_bit():
    """Also over a growth of the scale: gradients are unscaled with the scale of their backward."""
    options = {"init_scale": SCALE, "growth_interval": 2, "growth_factor": 4.0}
    model, optimizer, criterion = converted(AMP_TYPE.TORCH, options)
    train(model, optimizer, criterion, data(5))
    assert optimizer.loss_scale == SCALE * 16

    reference = network()
    plain, scaler = sgd(reference), torch.amp.GradScaler("cpu", **options)
    for x, y in data(5):
        plain.zero_grad()
        with nullcontext() if has_native_fp16("cpu") else emulate_fp16():
            with torch.autocast("cpu", dtype=torch.float16):
                output = reference(x).float()
            scaler.scale(cross_entropy(output, y)).backward()
        scaler.unscale_(plain)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        scaler.step(plain)
        scaler.update()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (mine - theirs).abs().max() < 1e-6  # the clip's norm is summed in another order


def test_dtypes_of_weights_inputs_outputs_and_criteria():
    full, half, brain = torch.float32, torch.float16, torch.bfloat16
    seen = []

    def criterion(output, target):
        seen.append((output.dtype, (output @ output.t()).dtype))
        return cross_entropy(output, target)

    x, y = next(data(1))
    for mode, config, weights, norms, inner, compute in [
        (AMP_TYPE.TORCH, None, full, full, half, half),
        (AMP_TYPE.NAIVE, None, half, half, full, half),
        (AMP_TYPE.APEX, None, full, full, half, half),
        (AMP_TYPE.APEX, {"opt_level": "O2"}, half, full, full, half),
        (AMP_TYPE.APEX, {"opt_level": "O3"}, half, half, full, half),
        ("bf16-mixed", None, full, full, brain, brain),
        (paramp.Precision.parse("32-true"), None, full, full, full, full),
    ]:
        model, _, loss = converted(mode, config, criterion)
        assert (model.module[0].weight.dtype, model.module[1].weight.dtype) == (weights, norms)
        found = []
        model.module.register_forward_pre_hook(lambda _, inputs, found=found: found.append(inputs[0].dtype))
        model.module[0].register_forward_hook(lambda _, __, output, found=found: found.append(output.dtype))
        output = model(x)
        assert found == [compute, compute]
        assert output.dtype is loss(output, y).dtype is full
        assert seen.pop() == (full, inner)


def test_the_three_forms_have_colossalais_arguments_and_the_projects_scaler():
    model, optimizer, criterion = convert_to_torch_amp(*fresh(), amp_config={"init_scale": 8.0})
    assert (optimizer.loss_scale, criterion) == (8.0, None)
    assert (type(optimizer), type(optimizer.scaler)) == (AmpOptimizer, DistributedGradScaler)
    model, optimizer = convert_to_apex_amp(*fresh())
    assert (optimizer.loss_scale, optimizer.precision.autocast) == (2.0**16, True)
    assert optimizer.precision.scaling.max_scale == 2.0**24
    model, optimizer = convert_to_naive_amp(*fresh(), {"min_scale": 2.0, "log_num_zeros_in_grad": True})
    assert (optimizer.loss_scale, optimizer.precision.scaling.min_scale) == (2.0**32, 2.0)
    optimizer.backward(model(next(data(1))[0])[:, :2].sum() * 2.0**-32)
    assert optimizer.step().num_zeros == sum(int((p.grad == 0).sum()) for p in model.parameters()) > 0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("mode", [*EACH_TYPE, *(name for name in PRESETS if name not in IN_FLOAT8), "scaling off"])
def test_a_gradient_that_is_not_finite_skips_the_step_in_every_mode(mode, value):
    off = (AMP_TYPE.TORCH, {"enabled": False})
    scaled = mode in PRESETS and PRESETS[mode].scaling is not None
    named = (mode, {"init_scale": SCALE}) if scaled else (mode,)
    model, optimizer, criterion = converted(*(off if mode == "scaling off" else EACH_TYPE.get(mode, named)))
    pairs = list(data(2))
    train(model, optimizer, criterion, pairs[:1])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    state = [value["momentum_buffer"].clone() for value in optimizer.state.values()]
    scale = optimizer.loss_scale
    optimizer.zero_grad()
    optimizer.backward(criterion(model(pairs[1][0]), pairs[1][1]))
    next(model.parameters()).grad.view(-1)[3] = value
    assert not optimizer.clip_grad_norm(model, 1.0).isfinite()
    result = optimizer.step()
    assert (result.stepped, result.overflow, result.loss_scale) == (False, True, scale)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    after = [value["momentum_buffer"] for value in optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(after, state, strict=True))
    assert (optimizer.num_steps, optimizer.num_skipped) == (1, 1)
    backs_off = optimizer.precision.scaling is not None and optimizer.precision.scaling.min_scale is None
    assert optimizer.loss_scale == (scale / 2 if backs_off and mode != "scaling off" else scale) or mode == "naive"
    train(model, optimizer, criterion, pairs[1:])


@each_type
def test_backwards_add_up_until_the_step_and_zero_grad_drops_them(name):
    pairs = list(data(2))
    model, optimizer, criterion = converted(*EACH_TYPE[name])

    def gradients(*pairs):
        for x, y in pairs:
            optimizer.backward(criterion(model(x), y))
        return [parameter.grad.clone() for parameter in model.parameters()]

    first = gradients(pairs[0])
    optimizer.clip_grad_norm(model, 1.0)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in [*model.parameters(), *stepped(optimizer)])
    second = gradients(pairs[1])
    optimizer.zero_grad(set_to_none=False)
    assert all(not parameter.grad.any() for parameter in model.parameters())
    for summed, one, other in zip(gradients(*pairs), first, second, strict=True):
        assert torch.allclose(summed, one + other, rtol=2e-2, atol=SCALE * 1e-4)
    optimizer.step()
    gradients(pairs[1])  # without a zero_grad
    assert model.module[3].weight.grad.abs().max() < SCALE  # one backward's, not unscaled and scaled ones mixed


@each_type
def test_state_resumes_to_the_bit_in_either_order(name):
    pairs = list(data(6))

    def new():
        return converted(EACH_TYPE[name][0], EACH_TYPE[name][1] | ({} if "apex" in name else {"growth_interval": 4}))

    model, optimizer, criterion = new()
    train(model, optimizer, criterion, pairs[:3])
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, criterion, pairs[3:])
    for weights_first in (True, False):
        again, resumed, loss = new()
        if weights_first:
            again.load_state_dict(saved)
        resumed.load_state_dict(copy.deepcopy(state))  # torch's optimizers take tensors up as they are
        for key, master in state["masters"].items():
            weight = again.module.get_parameter(key)
            assert torch.equal(weight, master.to(weight.dtype))
        if not weights_first:
            again.load_state_dict(saved)
        train(again, resumed, loss, pairs[3:])
        assert resumed.loss_scale == optimizer.loss_scale
        found, expected = [*again.parameters(), *stepped(resumed)], [*model.parameters(), *stepped(optimizer)]
        assert all(map(torch.equal, found, expected))


def test_masters_follow_weights_that_are_loaded_into_one_layer():
    """A copy's hooks are of no master."""
    model, optimizer, criterion = converted(*NAIVE)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model.module)))
    copied.load_state_dict({name: torch.zeros_like(value) for name, value in copied.state_dict().items()})
    before = model.module[3].weight.detach().clone()
    model.module[0].load_state_dict(quarters(model.module[0]))
    train(model, optimizer, criterion, data(1))
    assert (model.module[0].weight - 0.25).abs().max() < 0.05
    assert 0 < (model.module[3].weight - before).abs().max() < 0.05
    model.module[0].load_state_dict(quarters(model.module[0]))
    assert optimizer.state_dict()["masters"]["0.weight"].half().unique().tolist() == [0.25]
    stepped(optimizer)[0].data.fill_(0.5)
    train(model, optimizer, criterion, data(1))
    assert (model.module[0].weight - 0.5).abs().max() < 0.05


@pytest.mark.parametrize("name", ["32-true", "naive"])
def test_replaced_parameters_are_put_back_and_refuse_the_loss_that_missed_them(name):
    model, optimizer, criterion = converted(*(NAIVE if name == "naive" else (name,)))
    own = model.module[0].weight
    model.load_state_dict(quarters(model), assign=True)
    assert model.module[0].weight is not own
    ((x, y),) = data(1)
    with pytest.raises(RuntimeError, match=r"'0\.weight', .* was replaced after convert_to_amp"):
        optimizer.backward(criterion(model(x), y))
    train(model, optimizer, criterion, [(x, y)])
    assert model.module[0].weight is own
    assert 0 < (own - 0.25).abs().max() < 0.05


class Repeated(nn.Module):
    """Its forward is repeated in the backward, and notes how it computes."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.seen = nn.Linear(4, 4), nn.LayerNorm(4), []

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False)

    def run(self, x):
        self.seen.append((torch.get_default_dtype(), self.norm(x).dtype, is_emulated()))
        return self.linear(x).tanh()


@pytest.mark.parametrize("mode", ["bf16-true", "64-true", "16-mixed"])
def test_a_forward_that_the_backward_repeats_computes_as_before(mode):
    """Also in the rerun of a diagnosis, which is not told of the mode."""
    block, x = Repeated(), torch.ones(2, 4)
    model, optimizer, criterion = converted(mode, None, nn.MSELoss(), model=nn.Sequential(block))

    def loss(x):
        return criterion(model(x), -x)

    for backward in (
        lambda: optimizer.backward(loss(x)),
        lambda: optimizer.backward_by_grad(loss(x), None),
        lambda: paramp.trace_overflow(model, loss, [x], scale=1.0),
    ):
        block.seen.clear()
        backward()
        assert len(block.seen) == 2
        assert len({*block.seen}) == 1


def test_a_part_without_parameters_computes_in_the_mode():
    """Outside of a launch, with nothing that says on which device."""
    nothing = torch.optim.SGD([{"params": []}], lr=0.1)
    part, *_ = converted(*NAIVE, model=nn.Tanh(), optimizer=lambda _: nothing)
    ((x, _),) = data(1)
    assert torch.equal(part(x), x.half().tanh().float())


def test_masters_are_made_of_the_weights_before_they_are_rounded_and_state_for_the_masters():
    made = converted(*NAIVE, optimizer=lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05))
    for master, weight, original in zip(stepped(made[1]), made[0].parameters(), network().parameters(), strict=True):
        assert torch.equal(master, original)
        assert torch.equal(weight, original.half())
    train(*made, data(3))
    assert all(state["sum"].dtype is torch.float32 for state in made[1].state.values())


def test_schedulers_take_either_optimizer_and_groups_keep_their_options():
    model = network()
    own = torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[3].parameters()}], lr=0.1)
    before = torch.optim.lr_scheduler.StepLR(own, 1, gamma=0.5)
    model, optimizer, criterion = converted(*NAIVE, model=model, optimizer=lambda _: own)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert isinstance(optimizer, torch.optim.Optimizer)
    train(model, optimizer, criterion, data(1))
    before.step()
    after.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.025]
    assert optimizer.param_groups is own.param_groups


def test_what_is_refused():
    model = network()
    with torch.device("meta"):
        empty = network()
    refused = {
        "hysteresis: no such option": {"config": {"hysteresis": 2}},
        "precision: got 'half'": {"mode": "half"},
        "amp_config: got 3": {"config": 3},
        "amp_config: its mode": {"config": {"mode": AMP_TYPE.NAIVE}},
        "model: got function": {"model": network},
        "optimizer: got function": {"optimizer": sgd},
        "criterion: got 3": {"criterion": 3},
        "not a parameter of the model": {"optimizer": sgd(network())},
        "LBFGS": {"optimizer": torch.optim.LBFGS(model.parameters())},
        "wrapped in DataParallel": {"model": nn.DataParallel(model)},
        "meta device": {"model": empty, "optimizer": sgd(empty), "mode": AMP_TYPE.NAIVE},
        **{f"'{name}' replaces layers of the model; use it with": {"mode": name} for name in IN_FLOAT8},
    }
    given = {"model": model, "optimizer": sgd(model), "criterion": None, "mode": AMP_TYPE.TORCH, "config": None}
    calls = {match: functools.partial(convert_to_amp, *(given | one).values()) for match, one in refused.items()}
    each_raises(ConfigError, calls)
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    amp, optimizer, _ = converted(AMP_TYPE.TORCH, model=model)
    for again in ((amp, sgd(network())), (network(), optimizer), (model, sgd(model))):
        each_raises(ConfigError, {"converted already": lambda pair=again: convert_to_torch_amp(*pair)})
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.* save its state_dict"):
            duplicate(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    del optimizer
    converted(AMP_TYPE.TORCH, model=model)


def test_what_a_loop_may_do_wrong():
    own = sgd(model := network())
    criterion = nn.CrossEntropyLoss(reduction="none")
    model, optimizer, criterion = converted(AMP_TYPE.TORCH, None, criterion, model=model, optimizer=lambda _: own)
    (x, y) = next(data(1))
    backward, clip = optimizer.backward, optimizer.clip_grad_norm
    each_raises(RuntimeError, {"no parameter has a gradient": optimizer.step})
    assert optimizer.scaler._get_growth_tracker() == optimizer.num_steps == 0
    each_raises(ValueError, {r"loss: got a tensor of shape \(16,\)": lambda: backward(criterion(model(x), y))})
    backward(criterion(model(x), y).mean())
    for value in (0, 0.0, -1.0, math.nan):
        each_raises(ValueError, {"max_norm: got .*above 0": lambda value=value: clip(model, value)})
    assert all(parameter.grad.any() for parameter in model.parameters() if parameter.ndim == 2)
    clip(model, 1.0)
    refused = {
        "unscaled already": lambda: backward(criterion(model(x), y).mean()),
        r"call step\(\) of the one that convert_to_amp returned": own.step,
    }
    each_raises(RuntimeError, refused)
    optimizer.step()
    refused = {
        "no backward since the last step": optimizer.step,
        "closure": lambda: optimizer.step(lambda: 0.0),
        "before convert_to_amp": lambda: optimizer.add_param_group({"params": []}),
    }
    each_raises(RuntimeError, refused)
    wrong = optimizer.state_dict() | {"masters": {"0.weight": torch.zeros(1)}}
    refused = {
        "no 'masters'": lambda: optimizer.load_state_dict({"optimizer": {}, "scaler": {}}),
        r"masters: '0\.weight'": lambda: optimizer.load_state_dict(wrong),
    }
    each_raises(ValueError, refused)
    encoder, first, _ = converted(AMP_TYPE.TORCH, model=nn.Linear(8, 8))
    decoder, second, criterion = converted(AMP_TYPE.TORCH)
    first.backward(criterion(decoder(encoder(x)), y))
    first.step()
    each_raises(RuntimeError, {r"may lack its loss scale.*convert one module whose forward calls them": second.step})
    second.zero_grad()
    for _ in range(2):  # also with the gradients of a step
        scaled = second.scaler.scale(criterion(decoder(x), y).mean())
        second.zero_grad()
        scaled.backward()
        assert second.step().stepped
    second.zero_grad()
    second.scaler.scale(criterion(decoder(x), y)).backward()
    assert second.step().stepped
    model, optimizer, criterion = converted(*NAIVE)
    optimizer.register_step_post_hook(lambda *_: nn.init.zeros_(model.module[3].weight))
    with pytest.raises(RuntimeError, match=r"'3\.weight' was changed in its step\(\), as by a step hook"):
        train(model, optimizer, criterion, data(1))


def test_gradients_that_a_script_changes():
    ((x, y),) = data(1)
    changes = (
        lambda one: one.grad.zero_(),
        lambda one: setattr(one, "grad", one.grad * 0),
        lambda one: setattr(one, "grad", None),
    )
    for name in ("torch", "naive"):
        model, optimizer, criterion = converted(*EACH_TYPE[name])
        weight = model.module[0].weight
        for change in changes:
            before = weight.detach().clone()
            optimizer.backward(criterion(model(x), y))
            optimizer.clip_grad_norm(model, 1.0)
            change(weight)
            if name == "naive" and weight.grad is not None:
                with pytest.raises(RuntimeError, match=r"'0\.weight' was changed after clip_grad_norm had copied it"):
                    optimizer.step()
                optimizer.zero_grad()
            else:
                assert optimizer.step().stepped
                assert (weight.grad is None) == torch.equal(weight, before)  # the others decay
        optimizer.backward(criterion(model(x), y))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.warns(UserWarning, match=r"all gradients were changed.* \(1024\): .* optimizer\.clip_grad_norm"):
            optimizer.step()
    optimizer.zero_grad()
    for one in model.parameters():
        one.grad_dtype = torch.float32
    train(model, optimizer, criterion, [(x, y)])  # masters' gradients are no copies


@on_ranks(2)
def test_a_stage_whose_backward_is_not_the_optimizers_has_the_scale_of_the_last_one(world):
    """As in a pipeline of torch's: the last rank alone scales a loss."""
    model, optimizer, criterion = converted(AMP_TYPE.TORCH, None, nn.MSELoss(), model=nn.Linear(4, 4))
    output = model(torch.ones(2, 4))
    if world.rank:
        optimizer.backward(0.01 * criterion(output, torch.ones(2, 4)))
    else:
        torch.autograd.backward(output, torch.full_like(output, 0.01 * optimizer.scaler.get_scale()))
    with Collectives() as inside:
        assert optimizer.step().stepped
    assert inside.counts == {"allreduce": 1}
    output = model(torch.ones(2, 4))
    optimizer.zero_grad()
    output.sum().backward()
    before = copy.deepcopy(model.module.state_dict())
    with pytest.raises(RuntimeError, match="may lack its loss scale"):
        optimizer.step()
    torch.testing.assert_close(model.module.state_dict(), before, rtol=0, atol=0)


class Moving(torch.optim.SGD):
    def step(self, closure=None):
        for one in self.param_groups[0]["params"]:
            one.data = one.data - 0.1 * one.grad


@on_ranks(2)
def test_what_would_miss_the_memory_of_dtensors_is_an_error(world):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def step(mode, kind, edit=lambda weight: None, *, drop=False):
        model = small_mlp.tensor_parallel(small_mlp.build(), mesh)
        options = {"model": model, "optimizer": lambda model: kind(model.parameters(), lr=0.1)}
        model, optimizer, criterion = converted(mode, None, nn.MSELoss(), **options)
        x, y = small_mlp.batch(0)
        optimizer.backward(criterion(model(x), y))
        edit(model.module.up.weight)
        before = whole(model.module.up.weight).detach().clone()
        if drop:
            optimizer.clip_grad_norm(model, 1.0)
            model.module.up.weight.grad = None
        optimizer.step()
        assert torch.equal(whole(model.module.up.weight), before) == drop

    def replace(weight):
        weight.data = weight.detach() * 0.5

    step("bf16-true", torch.optim.SGD)
    step("bf16-naive", Moving)
    with paramp.ParallelContext.from_mesh(mesh):
        step("bf16-true", torch.optim.SGD, drop=True)
    refused = {
        r"the step of Moving gave 'up\.weight' other memory": lambda: step("bf16-true", Moving),
        r"'up\.weight' was moved after convert_to_amp": lambda: step("bf16-true", torch.optim.SGD, replace),
        r"'up\.weight' was moved after convert_to_amp \(": lambda: step(
            "bf16-naive", torch.optim.SGD, replace
        ),  # beside a master
    }
    each_raises(RuntimeError, refused)
    model = small_mlp.tensor_parallel(small_mlp.build(), mesh)
    matrices = torch.optim.Muon([one for one in model.parameters() if one.ndim == 2])
    with pytest.raises(ConfigError, match="Muon needs whole matrices"):
        convert_to_amp(model, matrices, None, "bf16-naive")
    assert {one.dtype for one in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", rarely(EACH_TYPE, "naive", "apex O2"))
@on_ranks(4)
def test_tensor_parallel_models_train_as_on_one_rank_and_agree_on_an_overflow(world, name):
    """DTensors and plain parameters; one rank's overflow makes all ranks skip, and nothing else."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))

    def run(parallel):
        model = small_mlp.build()
        if parallel:
            small_mlp.tensor_parallel(model, mesh)
        made = functools.partial(torch.optim.SGD, lr=0.2, momentum=0.9)
        options = {"model": model, "optimizer": lambda model: made(model.parameters())}
        model, optimizer, criterion = converted(*EACH_TYPE[name], nn.MSELoss(), **options)
        results = []
        for step in range(5):
            optimizer.zero_grad()
            x, y = small_mlp.batch(step)
            loss = criterion(model(x), y)
            optimizer.backward(loss)
            if step == 2 and (world.rank == 3 or not parallel):
                local(model.module.up.weight.grad)[-1, -1] = math.inf
            results.append((loss.item(), optimizer.step().stepped, optimizer.loss_scale))
        assert not any(isinstance(value, DTensor) for value in stepped(optimizer)) or not optimizer.precision.masters
        return model, optimizer, results

    alone, _, expected = run(False)
    model, optimizer, results = run(True)
    assert everywhere(results) == [results] * 4
    assert [row[1:] for row in results] == [row[1:] for row in expected]
    assert [stepped for _, stepped, _ in results] == [step != 2 for step in range(5)]
    assert [row[0] for row in results] == pytest.approx([row[0] for row in expected], rel=4e-3)
    for own, value in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(own.detach()), value.detach(), rtol=0, atol=2e-3)
    assert (alone.module.up.weight - small_mlp.build().up.weight).abs().max() > 2e-2
    with pytest.raises(ValueError, match=r"or paramp\.launch_from_torch\(config\) first"):
        optimizer.clip_grad_norm(model, 1.0)  # nothing says who holds plain parameters


@pytest.mark.parametrize("name", ["torch", "naive"])
@on_ranks(2)
def test_data_parallel_around_the_converted_model(world, name):
    """DistributedDataParallel averages, convert_to_amp scales, agrees and clips: the whole batch on one rank."""

    def build():
        return nn.Sequential(*(layer for layer in network() if not isinstance(layer, nn.BatchNorm1d)))

    with paramp.launch_from_torch({}) as context:
        with pytest.raises(ConfigError, match="wrapped in DistributedDataParallel"):
            converted(AMP_TYPE.TORCH, model=nn.parallel.DistributedDataParallel(build()))
        model = build()
        for parameter in model.parameters():
            parameter.data.mul_(1 + context.rank)  # DistributedDataParallel broadcasts those of rank 0
        model, optimizer, criterion = converted(*EACH_TYPE[name], model=model)
        mine = [own_part(context, *pair) for pair in data(6)]
        train(nn.parallel.DistributedDataParallel(model), optimizer, criterion, mine)
        for value, (first, expected) in zip(stepped(optimizer), plain_training(data(6), build()), strict=True):
            assert (value - expected).norm() < 0.02 * (expected - first).norm()
            assert all(torch.equal(value, other) for other in everywhere(value))


@on_ranks(2)
def test_a_pipeline_of_ones_own_agrees_across_its_stages(world):
    """Two stages and one send: the scale travels with the gradient, an overflow in the first skips both."""
    with paramp.launch_from_torch({"parallel": {"pipeline": 2}}) as context:
        torch.manual_seed(1)
        stage = [nn.Linear(8, 16), nn.Linear(16, 4)][context.pp.rank]
        model, optimizer = convert_to_naive_amp(stage, sgd(stage), {"initial_scale": SCALE, "hysteresis": 1})
        for step, (x, y) in enumerate(data(3)):
            optimizer.zero_grad()
            if context.is_first_stage:
                output = model(x)
                assert output.dtype is torch.float16  # on its way to the next stage
                dist.send(output.detach(), 1)
                gradient = torch.empty_like(output)
                dist.recv(gradient, 1)
                optimizer.backward_by_grad(output, gradient)
                if step == 1:
                    model.module.weight.grad[0, 0] = math.inf
            else:
                hidden = torch.empty(16, 16, dtype=torch.float16)
                dist.recv(hidden, 0)
                output = model(hidden.requires_grad_())
                assert output.dtype is torch.float32
                optimizer.backward(cross_entropy(output, y))
                dist.send(hidden.grad, 0)
            norm = optimizer.clip_grad_norm(model, 1e9)
            total = sum(p.grad.float().div(optimizer.loss_scale).square().sum() for p in model.parameters())
            dist.all_reduce(total)
            assert step == 1 or abs(norm - total.sqrt()) < 1e-3 * norm
            assert optimizer.step().stepped is (step != 1)
            assert optimizer.loss_scale == (SCALE if step == 0 else SCALE / 2)
