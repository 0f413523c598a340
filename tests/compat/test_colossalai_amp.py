"""Mixed precision without an engine: convert_to_amp and its three forms, against plain torch loops."""

import copy
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from reference import batches, rank_slice, small_gpt
from torch import nn
from torch.distributed.tensor import DTensor, init_device_mesh

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
from paramp.parallel.tensor.plan import apply_plan, resolve_plan
from paramp.precision.fp16_emulation import emulate_fp16
from paramp.precision.policy import PRESETS

SCALE = 2.0**10
EACH_TYPE = {
    "torch": (AMP_TYPE.TORCH, {"init_scale": SCALE}),
    "naive": (AMP_TYPE.NAIVE, {"initial_scale": SCALE, "hysteresis": 1}),
    "apex O1": (AMP_TYPE.APEX, {"loss_scale": SCALE}),
    "apex O2": (AMP_TYPE.APEX, {"opt_level": "O2", "loss_scale": SCALE}),
}
each_type = pytest.mark.parametrize("name", EACH_TYPE)
WITHOUT_FLOAT8 = [name for name, preset in PRESETS.items() if preset.float8 is None]


def network():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def data(steps, size=16):
    generator = torch.Generator().manual_seed(9)
    for _ in range(steps):
        x = torch.randn(size, 8, generator=generator)
        yield x, x[:, :4].argmax(1)


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, **options)


def converted(mode, config=None, criterion=None):
    model = network()
    return convert_to_amp(model, sgd(model), criterion or nn.CrossEntropyLoss(), mode, config)


def train(model, optimizer, criterion, pairs, clip=0.5):
    for x, y in pairs:
        optimizer.zero_grad()
        optimizer.backward(criterion(model(x), y))
        if clip is not None:
            optimizer.clip_grad_norm(model, clip)
        assert optimizer.step().stepped


def plain_training(steps, clip=0.5):
    model = network()
    optimizer = sgd(model)
    for x, y in data(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return list(model.parameters())


@each_type
def test_a_loop_learns_what_plain_fp32_torch_learns(name):
    """Within what fp16 rounding allows, and no nearer: something is computed in half precision."""
    model, optimizer, criterion = converted(*EACH_TYPE[name])
    start = [parameter.detach().clone() for parameter in network().parameters()]
    train(model, optimizer, criterion, data(20))
    (group,) = optimizer.param_groups
    assert all(stepped.dtype is torch.float32 for stepped in group["params"])
    for stepped, expected, first in zip(group["params"], plain_training(20), start, strict=True):
        way = (expected - first).norm()
        if way > 1e-3:  # the first bias is what batch norm takes away again
            assert 1e-6 < (stepped - expected).norm() / way < 0.02


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
        with emulate_fp16(optimizer._compute.emulate):
            with torch.autocast("cpu", dtype=torch.float16):
                output = reference(x).float()
            scaler.scale(nn.functional.cross_entropy(output, y)).backward()
        scaler.unscale_(plain)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        scaler.step(plain)
        scaler.update()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (mine - theirs).abs().max() < 1e-6  # the clip's norm is summed in another order


@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**14])
@each_type
def test_the_scale_leaves_the_step_as_it_is(name, scale):
    """A power of two: nothing but the exponent changes, as long as nothing overflows or underflows."""
    mode, options = EACH_TYPE[name]
    key = next(key for key in options if "scale" in key)
    model, optimizer, criterion = converted(mode, {**options, key: scale})
    train(model, optimizer, criterion, data(1), clip=None)
    again, other, loss = converted(mode, {**options, key: 2.0**8})
    train(again, other, loss, data(1), clip=None)
    for one, two in zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert (one - two).abs().max() < 1e-5


def test_dtypes_of_weights_inputs_outputs_and_criteria():
    seen = []

    def criterion(output, target):
        seen.append((output.dtype, (output @ output.t()).dtype))
        return nn.functional.cross_entropy(output, target)

    x, y = next(data(1))
    for mode, config, weights, norms, inner in [
        (AMP_TYPE.TORCH, None, torch.float32, torch.float32, torch.float16),
        (AMP_TYPE.NAIVE, None, torch.float16, torch.float16, torch.float32),
        (AMP_TYPE.APEX, None, torch.float32, torch.float32, torch.float16),
        (AMP_TYPE.APEX, {"opt_level": "O2"}, torch.float16, torch.float32, torch.float32),
        (AMP_TYPE.APEX, {"opt_level": "O3"}, torch.float16, torch.float16, torch.float32),
        ("bf16-mixed", None, torch.float32, torch.float32, torch.bfloat16),
        (paramp.Precision.parse("32-true"), None, torch.float32, torch.float32, torch.float32),
    ]:
        model, _, loss = converted(mode, config, criterion)
        assert (model.module[0].weight.dtype, model.module[1].weight.dtype) == (weights, norms)
        given, hidden = [], []
        model.module.register_forward_pre_hook(lambda _, inputs, given=given: given.append(inputs[0]))
        model.module[0].register_forward_hook(lambda _module, _inputs, output, hidden=hidden: hidden.append(output))
        output = model(x)
        is_named = isinstance(mode, AMP_TYPE)
        compute = paramp.Precision.parse({"mode": mode} | (config or {}) if is_named else mode).compute
        assert (given[0].dtype, hidden[0].dtype) == (compute, compute)
        assert output.dtype is torch.float32
        assert loss(output, y).dtype is torch.float32
        assert seen.pop() == (torch.float32, inner)


def test_the_three_forms_have_colossalais_arguments():
    model = network()
    model, optimizer, criterion = convert_to_torch_amp(model, sgd(model), amp_config={"init_scale": 8.0})
    assert (optimizer.loss_scale, criterion) == (8.0, None)
    model = network()
    model, optimizer = convert_to_naive_amp(model, sgd(model), {"min_scale": 2.0})
    assert (optimizer.loss_scale, optimizer.precision.scaling.min_scale) == (2.0**32, 2.0)
    model = network()
    model, optimizer = convert_to_apex_amp(model, sgd(model))
    assert (optimizer.loss_scale, optimizer.precision.autocast) == (2.0**16, True)
    assert optimizer.precision.scaling.max_scale == 2.0**24


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("mode", [*EACH_TYPE, *WITHOUT_FLOAT8, "scaling off"])
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


def test_large_finite_gradients_whose_sum_overflows_are_no_overflow():
    model, optimizer, criterion = converted(AMP_TYPE.NAIVE, {"initial_scale": 1.0})
    x, y = next(data(1))
    optimizer.backward(criterion(model(x), y))
    for parameter in model.parameters():
        parameter.grad.fill_(60_000.0)
    assert optimizer.step().stepped


def test_naive_amp_backs_off_from_the_second_overflow_and_grows_again():
    config = {"initial_scale": 64.0, "growth_interval": 2, "max_scale": 64.0, "log_num_zeros_in_grad": True}
    model, optimizer, criterion = converted(AMP_TYPE.NAIVE, config)
    scales = []
    for bad, (x, y) in zip([True, True, True, False, False, False], data(6), strict=True):
        optimizer.zero_grad()
        optimizer.backward(criterion(model(x), y))
        if bad:
            model.module[3].bias.grad[0] = math.nan
        result = optimizer.step()
        assert result.stepped is not bad
        assert bad or result.num_zeros == sum(int((p.grad == 0).sum()) for p in model.parameters())
        scales.append(optimizer.loss_scale)
    assert scales == [64.0, 32.0, 16.0, 16.0, 32.0, 32.0]


@each_type
def test_zero_grad_drops_the_gradients_of_weights_and_masters(name):
    model, optimizer, criterion = converted(*EACH_TYPE[name])
    x, y = next(data(1))
    optimizer.backward(criterion(model(x), y))
    optimizer.clip_grad_norm(model, 1.0)
    optimizer.zero_grad()
    held = [*model.parameters(), *optimizer.param_groups[0]["params"]]
    assert all(parameter.grad is None for parameter in held)
    optimizer.backward(criterion(model(x), y))
    optimizer.zero_grad(set_to_none=False)
    assert all(not parameter.grad.any() for parameter in model.parameters())


@each_type
def test_backwards_add_up_until_the_step_and_no_further(name):
    pairs = list(data(2))
    model, optimizer, criterion = converted(*EACH_TYPE[name])
    for x, y in pairs:
        optimizer.backward(criterion(model(x), y))
    total = [parameter.grad.clone() for parameter in model.parameters()]
    one, other = (converted(*EACH_TYPE[name]) for _ in range(2))
    for (net, own, loss), (x, y) in zip((one, other), pairs, strict=True):
        own.backward(loss(net(x), y))
    for summed, a, b in zip(total, one[0].parameters(), other[0].parameters(), strict=True):
        assert torch.allclose(summed, a.grad + b.grad, rtol=2e-2, atol=SCALE * 1e-4)
    optimizer.step()
    optimizer.backward(criterion(model(pairs[0][0]), pairs[0][1]))  # without a zero_grad
    weights = model.module[3].weight
    assert weights.grad.abs().max() < SCALE  # one backward's, not unscaled ones and scaled ones mixed


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
        for mine, theirs in zip(
            [*again.parameters(), *resumed.param_groups[0]["params"]],
            [*model.parameters(), *optimizer.param_groups[0]["params"]],
            strict=True,
        ):
            assert torch.equal(mine, theirs)


def test_masters_follow_weights_that_are_loaded():
    model, optimizer, criterion = converted(AMP_TYPE.NAIVE, {"initial_scale": SCALE})
    other = {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
    model.load_state_dict(other)
    train(model, optimizer, criterion, data(1))
    assert (model.module[0].weight - 0.25).abs().max() < 0.05


@pytest.mark.parametrize("name", ["32-true", AMP_TYPE.NAIVE])
def test_replaced_parameters_are_put_back_and_refuse_the_loss_that_missed_them(name):
    model, optimizer, criterion = converted(name, {"initial_scale": SCALE} if name is AMP_TYPE.NAIVE else None)
    own = model.module[0].weight
    state = {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert model.module[0].weight is not own
    (batch,) = data(1)
    with pytest.raises(RuntimeError, match=r"'0\.weight', .* was replaced after convert_to_amp"):
        optimizer.backward(criterion(model(batch[0]), batch[1]))
    train(model, optimizer, criterion, [batch])
    assert model.module[0].weight is own
    assert 0 < (own - 0.25).abs().max() < 0.05


def test_masters_follow_weights_of_a_part_that_is_loaded():
    model, optimizer, criterion = converted(AMP_TYPE.NAIVE, {"initial_scale": SCALE})
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model.module)))  # its hooks are of no master
    copied.load_state_dict({name: torch.zeros_like(value) for name, value in copied.state_dict().items()})
    before = model.module[3].weight.detach().clone()
    part = model.module[0]
    part.load_state_dict({name: torch.full_like(value, 0.25) for name, value in part.state_dict().items()})
    train(model, optimizer, criterion, data(1))
    assert (part.weight - 0.25).abs().max() < 0.05
    assert 0 < (model.module[3].weight - before).abs().max() < 0.05


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_optimizers_are_not_copied(duplicate):
    model, optimizer, criterion = converted("32-true")
    with pytest.raises(TypeError, match=r"cannot be copied or pickled.* save its state_dict"):
        duplicate(optimizer)
    train(model, optimizer, criterion, data(1))


def test_masters_are_made_of_the_weights_before_they_are_rounded():
    expected = [parameter.detach().clone() for parameter in network().parameters()]
    model, optimizer, _ = converted(AMP_TYPE.NAIVE)
    for master, weight, original in zip(optimizer.param_groups[0]["params"], model.parameters(), expected, strict=True):
        assert torch.equal(master, original)
        assert torch.equal(weight, original.half())


def test_schedulers_take_either_optimizer_and_groups_keep_their_options():
    model = network()
    own = torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[3].parameters()}], lr=0.1)
    before = torch.optim.lr_scheduler.StepLR(own, 1, gamma=0.5)
    model, optimizer, criterion = convert_to_amp(
        model, own, nn.CrossEntropyLoss(), AMP_TYPE.NAIVE, {"initial_scale": 8.0}
    )
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert isinstance(optimizer, torch.optim.Optimizer)
    train(model, optimizer, criterion, data(1))
    before.step()
    after.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.025]
    assert optimizer.param_groups is own.param_groups


def test_optimizers_state_made_in_a_constructor_is_made_for_the_masters():
    model = network()
    adagrad = torch.optim.Adagrad(model.parameters(), lr=0.05)
    model, optimizer, criterion = convert_to_amp(
        model, adagrad, nn.CrossEntropyLoss(), AMP_TYPE.NAIVE, {"initial_scale": SCALE}
    )
    train(model, optimizer, criterion, data(3))
    assert all(state["sum"].dtype is torch.float32 for state in optimizer.state.values())


def test_what_is_refused():
    model = network()
    cross_entropy = nn.CrossEntropyLoss()

    def refused(match, *arguments):
        with pytest.raises(ConfigError, match=match):
            convert_to_amp(*arguments)
        assert all(parameter.dtype is torch.float32 for parameter in model.parameters())

    refused(
        "no such option of AMP_TYPE.TORCH.*hysteresis|hysteresis: no such option",
        model,
        sgd(model),
        None,
        AMP_TYPE.TORCH,
        {"hysteresis": 2},
    )
    refused("init_scale: got 0", model, sgd(model), None, AMP_TYPE.TORCH, {"init_scale": 0.0})
    refused("opt_level: got 'O4'", model, sgd(model), None, AMP_TYPE.APEX, {"opt_level": "O4"})
    refused("precision: got 'half'", model, sgd(model), None, "half")
    refused("amp_config: got 3", model, sgd(model), None, AMP_TYPE.TORCH, 3)
    refused("amp_config: its mode", model, sgd(model), None, AMP_TYPE.TORCH, {"mode": AMP_TYPE.NAIVE})
    refused("model: got function", network, sgd(model), None, AMP_TYPE.TORCH)
    refused("optimizer: got function", model, sgd, None, AMP_TYPE.TORCH)
    refused("criterion: got 3", model, sgd(model), 3, AMP_TYPE.TORCH)
    refused("not a parameter of the model", model, sgd(network()), None, AMP_TYPE.TORCH)
    refused("LBFGS", model, torch.optim.LBFGS(model.parameters()), None, AMP_TYPE.TORCH)
    refused("wrapped in DataParallel", nn.DataParallel(model), sgd(model), None, AMP_TYPE.TORCH)
    for name in PRESETS.keys() - WITHOUT_FLOAT8:
        refused("replaces layers of the model; use it with paramp.initialize", model, sgd(model), None, name)
    with torch.device("meta"):
        empty = network()
    refused("meta device", empty, sgd(empty), None, AMP_TYPE.NAIVE)
    amp, optimizer, _ = convert_to_amp(model, sgd(model), cross_entropy, AMP_TYPE.TORCH)
    refused("converted already", amp, sgd(network()), None, AMP_TYPE.TORCH)
    refused("converted already", network(), optimizer, None, AMP_TYPE.TORCH)


def test_what_a_loop_may_do_wrong():
    own = sgd(model := network())
    model, optimizer, criterion = convert_to_amp(model, own, nn.CrossEntropyLoss(reduction="none"), AMP_TYPE.TORCH)
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        optimizer.step()
    assert optimizer.scaler._get_growth_tracker() == optimizer.num_steps == 0
    x, y = next(data(1))
    with pytest.raises(ValueError, match=r"loss: got a tensor of shape \(16,\)"):
        optimizer.backward(criterion(model(x), y))
    optimizer.backward(criterion(model(x), y).mean())
    for value in (0, 0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=r"max_norm: got .*above 0"):
            optimizer.clip_grad_norm(model, value)
    assert all(parameter.grad.any() for parameter in model.parameters() if parameter.ndim == 2)
    optimizer.clip_grad_norm(model, 1.0)
    with pytest.raises(RuntimeError, match="unscaled already"):
        optimizer.backward(criterion(model(x), y).mean())
    with pytest.raises(RuntimeError, match="call step\\(\\) of the one that convert_to_amp returned"):
        own.step()
    optimizer.step()
    with pytest.raises(RuntimeError, match="no backward since the last step"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(RuntimeError, match="before convert_to_amp"):
        optimizer.add_param_group({"params": []})
    with pytest.raises(ValueError, match="no 'masters'"):
        optimizer.load_state_dict({"optimizer": {}, "scaler": {}})
    with pytest.raises(ValueError, match=r"masters: '0\.weight'"):
        optimizer.load_state_dict(optimizer.state_dict() | {"masters": {"0.weight": torch.zeros(1)}})


def tensor_parallel_gpt(mesh, context=None):
    model = small_gpt(num_layers=2)
    plan = model.tensor_parallel_plan(mesh.size(), False)
    apply_plan(model, resolve_plan(plan, [name for name, _ in model.named_modules(remove_duplicate=False)]), mesh)
    return model


def run_gpt(model, mode, config, steps, spoil=None):
    """Losses, norms and stepped of ``steps`` steps of a loop; ``spoil(step)`` may change gradients."""
    loss = model.loss
    model, optimizer, criterion = convert_to_amp(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss, mode, config
    )
    results = []
    for step, (x, y) in enumerate(batches(steps)):
        optimizer.zero_grad()
        value = criterion(model(x), y)
        optimizer.backward(value)
        if spoil is not None:
            spoil(step, model)
        norm = optimizer.clip_grad_norm(model, 1.0).item()
        results.append((value.item(), norm, optimizer.step().stepped, optimizer.loss_scale))
    return results, optimizer


@pytest.mark.parametrize("launched", [True, False])
@pytest.mark.parametrize("name", ["torch", "naive"])
@on_ranks(4)
def test_tensor_parallel_models_train_as_on_one_rank_and_agree_on_an_overflow(world, name, launched):
    """dp2 x tp2 DTensors, every data rank with the whole batch; launched, or with a mesh of the user's own."""
    mode, config = EACH_TYPE[name]
    with paramp.launch_from_torch({}):  # whole replicas, each with the whole batch
        reference, _ = run_gpt(small_gpt(num_layers=2), mode, config, 2)
    context = paramp.launch_from_torch({"parallel": {"tensor": 2}}) if launched else None
    mesh = context.mesh if context else init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def spoil(step, model):
        if step == 2 and world.rank == 3:
            gradient = next(p.grad for p in model.parameters() if isinstance(p, DTensor))
            gradient.to_local().view(-1)[0] = math.inf

    if context is None:  # nothing says who holds plain parameters
        model = tensor_parallel_gpt(mesh["tp"])
        model, optimizer, criterion = convert_to_amp(
            model, torch.optim.SGD(model.parameters(), lr=0.1), model.loss, mode, config
        )
        x, y = next(batches(1))
        optimizer.backward(criterion(model(x), y))
        with pytest.raises(ValueError, match=r"or paramp\.launch_from_torch\(config\) first"):
            optimizer.clip_grad_norm(model, 1.0)
        if world.rank == 1:
            model.module.norm.weight.grad.view(-1)[0] = math.nan
        assert optimizer.step().overflow
        return
    results, optimizer = run_gpt(tensor_parallel_gpt(mesh["tp"]), mode, config, 4, spoil)
    everyone = [None] * 4
    dist.all_gather_object(everyone, results)
    assert [stepped for _, _, stepped, _ in results] == [True, True, False, True]
    for losses in everyone:
        assert [row[2:] for row in losses] == [row[2:] for row in results]
    assert [scale for *_, scale in results] == [SCALE, SCALE, SCALE / 2, SCALE / 2]
    for (loss, norm, _, _), (expected, expected_norm, *_) in zip(results[:2], reference[:2], strict=True):
        assert abs(loss - expected) < 4e-3 * expected
        assert abs(norm - expected_norm) < 1e-2 * expected_norm
    halves = [p for p in optimizer.param_groups[0]["params"] if isinstance(p, DTensor)]
    assert not halves  # what is stepped is plain and local


@pytest.mark.parametrize("name", ["torch", "naive"])
@on_ranks(2)
def test_data_parallel_around_the_converted_model(world, name):
    """DistributedDataParallel averages, convert_to_amp scales, agrees and clips: the whole batch on one rank."""
    mode, config = EACH_TYPE[name]

    def network():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    reference = network()
    plain = sgd(reference)
    pairs = list(data(6))
    for x, y in pairs:
        plain.zero_grad()
        nn.functional.cross_entropy(reference(x), y).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        plain.step()
    start = [parameter.detach().clone() for parameter in network().parameters()]
    with paramp.launch_from_torch({}) as context:
        model = network()
        with pytest.raises(ConfigError, match="wrapped in DistributedDataParallel"):
            convert_to_amp(nn.parallel.DistributedDataParallel(network()), sgd(model), None, mode)
        model, optimizer, criterion = convert_to_amp(model, sgd(model), nn.CrossEntropyLoss(), mode, config)
        model = nn.parallel.DistributedDataParallel(model)
        mine = [tuple(rank_slice(t, context.dp.rank, 2) for t in pair) for pair in pairs]
        train(model, optimizer, criterion, mine)
        for stepped, expected, first in zip(
            optimizer.param_groups[0]["params"], reference.parameters(), start, strict=True
        ):
            assert (stepped - expected).norm() < 0.02 * (expected - first).norm()


@on_ranks(2)
def test_a_pipeline_of_ones_own_agrees_across_its_stages(world):
    """Two stages and one send: the scale travels with the gradient, an overflow in the first skips both."""
    with paramp.launch_from_torch({"parallel": {"pipeline": 2}}) as context:
        first = context.is_first_stage
        torch.manual_seed(1)
        stages = [nn.Linear(8, 16), nn.Linear(16, 4)]
        stage = stages[context.pp.rank]
        model, optimizer = convert_to_naive_amp(stage, sgd(stage), {"initial_scale": SCALE, "hysteresis": 1})
        for step, (x, y) in enumerate(data(3)):
            optimizer.zero_grad()
            if first:
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
                optimizer.backward(nn.functional.cross_entropy(output, y))
                dist.send(hidden.grad, 0)
            norm = optimizer.clip_grad_norm(model, 1e9)
            squares = torch.stack([p.grad.float().div(optimizer.loss_scale).square().sum() for p in model.parameters()])
            total = squares.sum()
            dist.all_reduce(total)
            if step != 1:
                assert abs(norm - total.sqrt()) < 1e-3 * norm
            assert optimizer.step().stepped is (step != 1)
            assert optimizer.loss_scale == (SCALE if step == 0 else SCALE / 2)


def test_it_is_one_wrapper_with_the_projects_scaler():
    _, optimizer, _ = converted(AMP_TYPE.TORCH)
    assert isinstance(optimizer, AmpOptimizer)
    assert isinstance(optimizer.scaler, DistributedGradScaler)
