"""paramp.compat.apex.amp against plain torch in fp32, and against what NVIDIA Apex documents."""

import copy
import functools
import inspect
import io
import sys
import types
import warnings
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from counting import Collectives
from families import rarely
from pool import on_ranks
from small_mlp import MLP, tensor_parallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from trainer_runs import whole

import paramp
from paramp.base.installed_packages import ApexStatus
from paramp.compat.apex import amp
from paramp.compat.apex import optimizers as apex_optimizers
from paramp.compat.apex.amp import AmpError

LEVELS = ("O0", "O1", "O2", "O3")
FP16, FP32, BF16 = torch.float16, torch.float32, torch.bfloat16
START = 2.0**10
"""Where dynamic scales begin here: no gradient overflows with it by itself."""
ONES = torch.ones(1, 4)
each_level = pytest.mark.parametrize("level", LEVELS)


def initialize(*args, **kwargs):
    return amp.initialize(*args, **{"verbosity": 0, "max_loss_scale": START, **kwargs})


def prepare(*args, **kwargs):
    amp.reset()  # also of what another body left in this rank
    return initialize(*args, **kwargs)


def linear(value=0.5):
    layer = nn.Linear(4, 1)
    with torch.no_grad():
        layer.weight.fill_(value)
        layer.bias.zero_()
    return layer


def sgd(*models, lr=0.25, **options):
    return torch.optim.SGD([parameter for model in models for parameter in model.parameters()], lr=lr, **options)


def prepared(level="O1", value=0.5, lr=0.25, **options):
    """A layer of four weights, and its SGD."""
    model = linear(value)
    return prepare(model, sgd(model, lr=lr), opt_level=level, **options)


def backward(loss, optimizers, break_it=None, **options):
    """One backward under ``scale_loss``; the gradient of ``break_it`` then has a value that is not finite."""
    with amp.scale_loss(loss, optimizers, **options) as scaled_loss:
        scaled_loss.backward()
        if break_it is not None:
            break_it.grad.view(-1)[-1] = float("inf")


def learn(model, optimizer, x=1.0, **options):
    """A backward of the sum of outputs, for which each weight's gradient is ``x``."""
    backward(model(torch.full((1, 4), x)).sum(), optimizer, **options)


def scales():
    return [entry["loss_scale"] for entry in amp.state_dict().values()]


def holds(tensor, value, dtype=FP32):
    return torch.equal(tensor.to(dtype), torch.full_like(tensor, value, dtype=dtype))


# ------------------------------------------------------------------------------- two losses, models and optimizers


def two_models(seed=0):
    """Weights between 1/2 and 1, so that one unit in the last place of fp16 is 2**-11 for all, and exact in fp16."""
    generator = torch.Generator().manual_seed(seed)
    models = [nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)) for _ in range(2)]
    with torch.no_grad():
        for parameter in (parameter for model in models for parameter in model.parameters()):
            size = torch.randint(1024, 2048, parameter.shape, generator=generator) / 2048
            parameter.copy_(size * torch.randint(0, 2, parameter.shape, generator=generator).mul(2).sub(1))
    return models, [sgd(model, lr=lr, momentum=0.5) for model, lr in zip(models, (0.05, 0.1), strict=True)]


OVERFLOWS = {2: 1, 4: 0}
"""Step -> the loss whose backward overflows there: one of the first model alone, or one that flows through both."""


def two_losses_step(models, optimizers, step, with_amp):
    """Without amp, a loss that overflowed takes the step of the optimizers it feeds: both, or the first."""
    generator = torch.Generator().manual_seed(100 + step)
    x, y, z = (torch.randn(4, 6, generator=generator) / 4 for _ in range(3))
    for optimizer in optimizers:
        optimizer.zero_grad()
    hidden, lost = models[0](x), OVERFLOWS.get(step)
    losses, weight = (F.mse_loss(hidden, y), F.mse_loss(models[1](hidden), z)), models[0][0].weight
    if with_amp:
        with amp.scale_loss(losses[0], optimizers[0], loss_id=0) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
            if lost == 0:
                weight.grad[0, 0] = float("nan")
        backward(losses[1], optimizers, loss_id=1, break_it=weight if lost == 1 else None)
    else:
        sum(losses).backward()
    for index, optimizer in enumerate(optimizers):
        if with_amp or lost is None or (lost == 0 and index == 1):
            optimizer.step()


@each_level
def test_two_losses_models_and_optimizers_follow_fp32_and_a_saved_run_goes_on_bit_by_bit(level):
    """Steps that overflow are left out."""

    def state():
        return [part.state_dict() for part in (*models, *optimizers)], amp.state_dict()

    plain, plain_optimizers = two_models()
    models, optimizers = prepare(*two_models(), opt_level=level, num_losses=2)
    start, file = scales()[0], io.BytesIO()
    tolerance = 4 * 2.0**-11 if level == "O3" else 1e-3  # 4 ulp of fp16 for weights from 1/2 to 1
    for step in range(7):
        if step == 3:
            torch.save(state(), file)
        two_losses_step(plain, plain_optimizers, step, False)
        two_losses_step(models, optimizers, step, True)
        for one, other in zip(*(nn.ModuleList(both).parameters() for both in (models, plain)), strict=True):
            assert (one.float() - other).abs().max() <= tolerance, step
        backs_off = level in ("O1", "O2")
        assert scales() == [start / 2 if backs_off and step >= first else start for first in (4, 2)]
    for one, other in zip(plain, two_models()[0], strict=True):
        assert (one[0].weight - other[0].weight).abs().max() > 10 * tolerance  # they have gone far enough to tell

    expected = copy.deepcopy(state())
    models, optimizers = prepare(*two_models(1), opt_level=level, num_losses=2)
    file.seek(0)
    saved, saved_amp = torch.load(file)
    for part, values in zip((*models, *optimizers), saved, strict=True):
        part.load_state_dict(values)
    amp.load_state_dict(saved_amp)
    for step in range(3, 7):
        two_losses_step(models, optimizers, step, True)
    torch.testing.assert_close(state()[0], expected[0], rtol=0, atol=0)
    assert state()[1] == expected[1]


# ------------------------------------------------------------------------------------------------ levels, options


@pytest.mark.parametrize(
    ("options", "weight", "batch_norm", "layer_norm", "stepped", "scale"),
    [
        ({"opt_level": "O0"}, FP32, FP32, FP32, None, 1.0),
        ({}, FP32, FP32, FP32, None, START),
        ({"max_loss_scale": 2.0**24}, FP32, FP32, FP32, None, 2.0**16),
        ({"opt_level": "O2"}, FP16, FP32, FP16, FP32, START),
        ({"opt_level": "O3"}, FP16, FP16, FP16, FP16, 1.0),
        ({"opt_level": "O0", "loss_scale": "128.0"}, FP32, FP32, FP32, None, 128.0),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "False"}, FP16, FP16, FP16, FP32, START),
        ({"opt_level": "O3", "keep_batchnorm_fp32": "True", "loss_scale": 8}, FP16, FP32, FP16, None, 8.0),
        ({"opt_level": "O2", "master_weights": False, "loss_scale": "dynamic"}, FP16, FP32, FP16, None, START),
        ({"opt_level": "O2", "master_weights": "False"}, FP16, FP32, FP16, None, START),
        ({"opt_level": "O1", "patch_torch_functions": "True"}, FP32, FP32, FP32, None, START),
        ({"opt_level": "O2", "cast_model_type": BF16, "max_loss_scale": 4.0}, BF16, FP32, BF16, FP32, 4.0),
        ({"opt_level": "O3", "cast_model_type": BF16}, BF16, BF16, BF16, BF16, 1.0),
    ],
)
def test_what_a_level_is_made_of(options, weight, batch_norm, layer_norm, stepped, scale):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LayerNorm(8), nn.Linear(8, 2))
    model, optimizer = prepare(model, sgd(model), **options)
    assert [layer.weight.dtype for layer in model] == [weight, batch_norm, layer_norm, weight]
    assert model[1].running_mean.dtype is batch_norm
    assert scales() == [scale]
    masters = list(amp.master_params(optimizer))
    if stepped is None:
        assert [master is own for master, own in zip(masters, model.parameters(), strict=True)] == [True] * 8
    else:
        assert {master.dtype for master in masters} == {stepped}
    # What goes in is cast, but under O1, and what comes out.
    given = FP32 if options.get("opt_level", "O1") == "O1" else torch.float64
    assert model(torch.randn(4, 4, dtype=given)).dtype is FP32
    assert all(value.dtype is FP32 for value in model.state_dict().values() if value.is_floating_point())
    before = [master.detach().clone() for master in masters]
    with amp.scale_loss(model(torch.randn(4, 4)).square().mean(), optimizer) as scaled_loss:
        (scaled_loss * 2.0**-8).backward()
    optimizer.step()
    assert any(not torch.equal(one, two) for one, two in zip(before, masters, strict=True))
    for parameter, value in zip(model.parameters(), masters, strict=True):
        assert torch.equal(parameter, value.to(parameter.dtype))


def test_amp_has_apexs_names_arguments_and_defaults():
    kinds = [f"{kind}_function" for kind in ("half", "float", "promote")]
    names = "initialize scale_loss disable_casts master_params state_dict load_state_dict _amp_state"
    for name in (*names.split(), *kinds, *(f"register_{kind}" for kind in kinds)):
        assert hasattr(amp, name), name
    overrides = "cast_model_type patch_torch_functions keep_batchnorm_fp32 master_weights loss_scale cast_model_outputs"
    expected = {"models": inspect.Parameter.empty, "optimizers": None, "enabled": True, "opt_level": "O1"}
    expected |= dict.fromkeys(overrides.split()) | {"num_losses": 1, "verbosity": 1}
    expected |= {"min_loss_scale": None, "max_loss_scale": 2.0**24}
    assert {name: one.default for name, one in inspect.signature(amp.initialize).parameters.items()} == expected
    arguments = "loss optimizers loss_id model delay_unscale delay_overflow_check"
    assert list(inspect.signature(amp.scale_loss).parameters) == arguments.split()


def test_masters_hold_the_weights_from_before_they_were_rounded():
    near_one = 1.0 + 2.0**-20
    model, optimizer = prepared("O2", near_one)
    weight, _ = amp.master_params(optimizer)
    assert holds(weight, near_one)
    assert holds(model.weight, 1.0)
    assert torch.equal(model.state_dict()["weight"], weight)
    assert model.state_dict(keep_vars=True)["weight"] is model.weight
    model.load_state_dict({"weight": torch.full((1, 4), 2.0 + 2.0**-20), "bias": torch.zeros(1)})
    assert holds(weight, 2.0 + 2.0**-20)
    learn(model, optimizer)
    optimizer.step()
    assert holds(weight, 1.75 + 2.0**-20)
    assert holds(model.weight, 1.75)
    optimizer.zero_grad()
    model.load_state_dict({"weight": torch.full((1, 4), 2.0 + 2.0**-20), "bias": torch.zeros(1)})
    weight.data.add_(1.0)
    optimizer.step()
    assert holds(weight, 3.0 + 2.0**-20)

    # What is done to half weights before the first backward counts: an initialisation of the user's, or rank 0's
    # weights that DistributedDataParallel hands out. On rank 0 they are what was there, so such a write counts too.
    model, optimizer = prepared("O2", near_one)
    model.weight.data.fill_(3.0)
    with torch.no_grad():
        model.bias.copy_(model.bias)
    learn(model, optimizer)
    assert holds(next(amp.master_params(optimizer)), 3.0)
    next(amp.master_params(optimizer)).data.sub_(0.5)
    optimizer.step()
    assert holds(model.weight, 2.25)
    model, optimizer = prepared("O2", near_one)
    with torch.no_grad():
        model.weight.copy_(model.weight.clone())
    learn(model, optimizer, 0.0)
    assert holds(next(amp.master_params(optimizer)), 1.0)
    with torch.no_grad():
        model.weight.fill_(2.0)
    optimizer.step()
    assert holds(model.weight, 2.0)


class Batch:
    """A batch of the user's own class."""

    def __init__(self, x):
        self.x = x

    def to(self, dtype):
        return Batch(self.x.to(dtype))


@dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    more: list


class Named(dict):
    pass


def test_inputs_and_outputs_are_cast_through_containers():
    class Model(nn.Linear):
        def forward(self, batch, pair, *mappings, scale=None):
            assert {one.dtype for one in (batch.x, pair.more[0], scale, *(one["x"][0] for one in mappings))} == {FP16}
            return {"out": [super().forward(batch.x), torch.arange(3), "text"], "pair": pair, "mappings": mappings}

    model, x = Model(4, 2), torch.randn(3, 4)
    assert prepare(model, opt_level="O3", cast_model_outputs=BF16) is model
    pair, mappings = Pair(x, [x]), (Named(x=[x]), MappingProxyType({"x": [x]}))
    output = model(Batch(x), pair, *mappings, scale=x.double())
    assert [getattr(one, "dtype", one) for one in output["out"]] == [BF16, torch.int64, "text"]
    assert [type(one) for one in (output["pair"], *output["mappings"])] == [Pair, Named, MappingProxyType]
    assert {output["pair"].x.dtype, output["pair"].more[0].dtype} == {BF16}
    assert {one["x"][0].dtype for one in output["mappings"]} == {BF16}
    assert pair.more[0].dtype is mappings[0]["x"][0].dtype is FP32  # what was given is as it was
    assert list(inspect.signature(model.forward).parameters) == ["batch", "pair", "mappings", "scale"]


def test_o1_computes_as_autocast_and_widens_norms():
    class Model(nn.Linear):
        def forward(self, x):
            hidden = super().forward(x)
            self.seen = hidden.dtype, hidden.softmax(-1).dtype
            return hidden

    model, x = prepare(Model(4, 4), opt_level="O1"), torch.randn(2, 4)
    assert model(x).dtype is FP32
    assert model.seen == (FP16, FP32)
    with amp.disable_casts():
        model(x)
    assert model.seen == (FP32, FP32)
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data.zero_()
    assert not copied(x).any()
    assert model(x).any()
    model = prepare(Model(4, 4), opt_level="O1", patch_torch_functions="False")
    model(x)
    assert model.seen == (FP32, FP32)


def test_ties_hooks_and_attributes_outlive_the_cast():
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    first.weight.of_mine = "yes"
    first.weight.register_hook(lambda gradient: gradient * 2)
    start = first.weight.detach().clone()
    (first, second), optimizer = prepare([first, second], sgd(first), opt_level="O2")
    assert first.weight is second.weight
    assert first.weight.of_mine == "yes"
    backward((first(torch.eye(4)) + second(torch.eye(4))).sum(), optimizer)
    (master,) = amp.master_params(optimizer)
    assert holds(master.grad, 4.0)
    optimizer.step()
    assert torch.equal(master, start - 1.0)


def test_what_is_returned_has_the_structure_of_what_was_given():
    one, two = linear(), linear()
    for models, optimizers in ((one, sgd(one)), ([one, two], sgd(one)), (one, [sgd(one)]), ([one], [sgd(one)])):
        assert prepare(models, optimizers, opt_level="O0") == (models, optimizers)
    assert prepare([one, two], opt_level="O0") == [one, two]
    assert amp._amp_state.opt_properties.cast_model_type is FP32

    optimizer = sgd(one)
    assert prepare(one, optimizer, enabled=False, opt_level="O2") == (one, optimizer)  # all is as without amp
    loss = one(ONES).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    assert (one.weight.dtype, amp.state_dict(), amp._amp_state.opt_properties) == (FP32, {}, None)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 1}})


# --------------------------------------------------------------------------------------------- gradients and scales


@each_level
@pytest.mark.parametrize("delay", [False, True])
def test_accumulation_adds_gradients_up(level, delay):
    model, optimizer = prepared(level)
    keep = functools.partial(model.zero_grad, set_to_none=False)
    for clear in (optimizer.zero_grad, optimizer.zero_grad, model.zero_grad, keep):  # a window must not see the last
        clear()
        for count in range(3):
            learn(model, optimizer, 2.0**count, delay_unscale=delay and count < 2)
        assert [master.grad.flatten()[0] for master in amp.master_params(optimizer)] == [7.0, 3.0]
    optimizer.step()
    assert holds(model.weight, 0.5 - 0.25 * 7)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_delayed_gradients_of_another_scale_do_not_mix(level):
    model, optimizer = prepared(level, num_losses=2)
    amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": 2.0 ** (4 + i), "unskipped": 0} for i in range(2)})
    learn(model, optimizer, delay_unscale=True)
    with pytest.raises(AmpError, match="still scaled"):
        optimizer.step()
    learn(model, optimizer, 2.0, loss_id=1)
    assert holds(next(amp.master_params(optimizer)).grad, 3.0)
    learn(model, optimizer, delay_unscale=True)
    optimizer.zero_grad()
    optimizer.step()
    assert holds(model.weight, 0.5)


@pytest.mark.parametrize("zero_grad", ["optimizer", "optimizer to zero", "model"])
def test_zero_grad_clears_half_and_master_gradients_and_clipping_is_where_apex_says(zero_grad):
    model, optimizer = prepared("O2")
    for step in range(3):
        learn(model, optimizer)
        optimizer.step()
        if zero_grad == "model":
            model.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=zero_grad == "optimizer")
        for parameter in (*model.parameters(), *amp.master_params(optimizer)):
            assert parameter.grad is None or not parameter.grad.any()
        assert holds(model.weight, 0.5 - 0.25 * (step + 1))
    learn(model, optimizer, 2.0)
    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    assert norm.item() == pytest.approx(17**0.5)
    optimizer.step()
    expected = torch.full((1, 4), -0.25 - 0.5 / 17**0.5)
    torch.testing.assert_close(model.weight.float(), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("options", [{"opt_level": "O0"}, {"opt_level": "O3", "loss_scale": 16.0}, {"opt_level": "O2"}])
def test_an_overflow_skips_one_step_and_says_so(options, capsys):
    level, model = options["opt_level"], linear()
    model, optimizer = amp.initialize(model, sgd(model), max_loss_scale=START, **options)
    printed = capsys.readouterr().out
    assert f"opt_level {level}" in printed
    assert ("overrides of loss_scale" in printed) == ("loss_scale" in options)
    (scale,) = scales()
    learn(model, optimizer, break_it=model.weight)
    assert scales() == [scale / 2 if level == "O2" else scale]
    assert not capsys.readouterr().out
    optimizer.step()
    what = "reducing loss scale to 512.0" if level == "O2" else f"keeping loss scale {scale}"
    assert capsys.readouterr().out == f"Gradient overflow.  Skipping step, loss scaler 0 {what}\n"
    for unskipped, weight in enumerate((0.5, 0.25)):
        assert holds(model.weight, weight)
        assert amp.state_dict()["loss_scaler0"]["unskipped"] == unskipped
        optimizer.zero_grad()
        learn(model, optimizer)
        optimizer.step()


def test_a_delayed_check_comes_with_the_next_loss_or_with_the_step():
    models = [linear(), linear()]
    models, optimizers = prepare(models, [sgd(model) for model in models])
    learn(models[0], optimizers[0], break_it=models[0].weight, delay_overflow_check=True)
    assert scales() == [START]
    learn(models[1], optimizers[1])
    assert scales() == [START / 2]
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(models[0].weight, models[1].weight)  # one check for both
    learn(models[0], optimizers[0], break_it=models[0].weight, delay_overflow_check=True)
    optimizers[0].step()
    assert scales() == [START / 4]
    assert holds(models[0].weight, 0.5)


def test_the_scale_grows_after_2000_good_backwards_and_within_its_limits():
    model, optimizer = prepared(min_loss_scale=8.0, max_loss_scale=32.0)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 16.0, "unskipped": 1999}})
    found = []
    for broken in (False, True, True, True):
        optimizer.zero_grad()
        learn(model, optimizer, break_it=model.weight if broken else None)
        found += scales()
    assert found == [32.0, 16.0, 8.0, 8.0]
    scaler = amp._amp_state.loss_scalers[0]
    assert scaler.loss_scale() == scaler._loss_scale == 8.0
    scaler._loss_scale, scaler._unskipped = 32.0, 5  # scripts of Apex's set them too
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 32.0, "unskipped": 5}


def test_a_backward_that_fails_leaves_what_was_there():
    model, optimizer = prepared("O2")
    learn(model, optimizer)
    with pytest.raises(AttributeError):
        learn(model, optimizer, break_it=torch.ones(1))  # which has no gradient
    learn(model, optimizer)
    assert holds(next(amp.master_params(optimizer)).grad, 2.0)


def test_sparse_gradients_are_unscaled_too():
    model = nn.Embedding(5, 2, sparse=True)
    expected = model.weight.detach().clone()
    model, optimizer = prepare(model, sgd(model), opt_level="O2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of sparse invariants
        for _ in range(2):
            backward(model(torch.tensor([1, 1, 3])).sum(), optimizer)
        optimizer.step()
    expected[1] -= 1.0
    expected[3] -= 0.5
    torch.testing.assert_close(next(amp.master_params(optimizer)), expected)


# ------------------------------------------------------------------------------------------------------- optimizers


def test_parameters_added_after_initialize_are_stepped_through_masters():
    body, head = linear(), linear(0.25)
    (body, head), optimizer = prepare([body, head], sgd(body), opt_level="O2")
    optimizer.add_param_group({"params": head.parameters(), "lr": 2.0**-12})
    assert [parameter.dtype for parameter in amp.master_params(optimizer)] == [FP32] * 4
    for _ in range(2):  # each too small for fp16 weights of 0.25
        optimizer.zero_grad()
        learn(head, optimizer, 0.25)
        optimizer.step()
    assert holds(head.weight, 0.25 - 2.0**-13)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("before", [True, False])
def test_optimizers_keep_their_state_and_schedulers_made_before_or_after_work_and_do_not_warn(level, before):
    model = linear()
    optimizer = sgd(model, momentum=0.5)
    model(ONES).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if before else None
    model, optimizer = prepare(model, optimizer, opt_level=level)
    scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for broken in (True, False):
        optimizer.zero_grad()
        learn(model, optimizer, break_it=model.weight if broken else None)
        optimizer.step()
        scheduler.step()
    assert holds(model.weight, 0.5 - 0.25 - 0.125 * 1.5)


def test_fused_optimizers_are_torchs_where_apex_is_not():
    apexs = {"materialize_master_grads": False, "set_grad_none": True, "wd_after_momentum": True}
    for name, options, expected in (
        ("FusedAdam", {"weight_decay": 0.1}, torch.optim.AdamW),
        ("FusedAdam", {"adam_w_mode": False}, torch.optim.Adam),
        ("FusedSGD", {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD),
        ("FusedSGD", {"lr": 0.1, **apexs}, torch.optim.SGD),
        ("FusedSGD", {"lr": 0.1, "weight_decay": 0.1, **apexs}, "wd_after_momentum: got True"),
        ("FusedAdam", {"bias_correction": False}, "bias_correction: got False"),
        ("FusedAdam", {"amsgrad": True}, "amsgrad"),
    ):
        make = getattr(apex_optimizers, name)
        if isinstance(expected, str):
            with pytest.raises(ValueError, match=expected):
                make(linear().parameters(), **options)
        else:
            assert type(make(linear().parameters(), **options)) is expected


def test_fused_optimizers_are_apexs_where_its_kernels_are(monkeypatch):
    made = types.ModuleType("apex.optimizers")
    for name in ("FusedAdam", "FusedSGD", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad"):
        setattr(made, name, lambda *args, name=name, **options: (name, args, options))
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", made)
    status = ApexStatus(kind="real", fused_optimizers=True)
    monkeypatch.setattr(apex_optimizers, "find_apex", lambda: status)
    name, args, options = apex_optimizers.FusedAdam("params", bias_correction=False, weight_decay=0.1)
    assert (name, args, options["bias_correction"], options["weight_decay"]) == ("FusedAdam", ("params",), False, 0.1)
    name, _, options = apex_optimizers.FusedSGD("params", lr=0.1, weight_decay=0.1, wd_after_momentum=True)
    assert (name, options["wd_after_momentum"], options["weight_decay"]) == ("FusedSGD", True, 0.1)
    for name in ("FusedLAMB", "FusedNovoGrad", "FusedAdagrad"):
        assert getattr(apex_optimizers, name) is getattr(made, name)


@pytest.mark.parametrize("packed", [False, True])
def test_the_backward_of_an_lstm_may_run_outside_scale_loss(packed):
    torch.manual_seed(0)
    model, x = nn.LSTM(8, 8, num_layers=2, bidirectional=True, batch_first=True), torch.randn(2, 3, 8)
    given = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True) if packed else x
    gradients = []
    for cast in (False, True):
        if cast:
            prepare(model, sgd(model))
        output = model(given)[0]
        (output.data if packed else output).square().sum().backward()
        gradients.append(model.weight_ih_l0.grad.clone())
        model.zero_grad()
    torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2)
    assert not torch.equal(*gradients)


# ----------------------------------------------------------------------------------------------- the user's functions


def test_functions_get_the_precision_that_they_were_marked_with_until_reset():
    def dtypes(x, y=None):
        return (x @ x.T).dtype, None if y is None else y.dtype

    class Module:
        name = staticmethod(dtypes)

    half, wide, promoted = amp.half_function(dtypes), amp.float_function(dtypes), amp.promote_function(dtypes)
    x = torch.randn(2, 2)
    assert half(x) == (FP32, None)  # nothing before initialize
    amp.register_half_function(Module, "name")
    with pytest.raises(AmpError, match="no function named 'other'"):
        amp.register_float_function(Module, "other")
    model = linear()
    initialize(model, sgd(model), opt_level="O1")
    assert half(x, y=x.half()) == Module.name(x, y=x.half()) == (FP16, FP16)
    with torch.autocast("cpu", dtype=FP16):
        assert wide(x.half(), y=x) == (FP32, FP32)
    assert promoted(x.half(), y=x) == (FP32, FP32)
    assert promoted(x.half(), y=x.half()) == (FP16, FP16)
    with amp.disable_casts():
        assert half(x) == (FP32, None)
    amp.reset()
    assert Module.name is dtypes
    prepared("O2")
    assert half(x) == (FP32, None)


# ------------------------------------------------------------------------------------------------------------ errors


def wrapped_in_ddp(model):
    class DistributedDataParallel(nn.Module):  # Apex's own has this name as well
        pass

    return DistributedDataParallel()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (None, {"opt_level": "02"}, "opt_level: got '02', expected one of O0, O1, O2, O3"),
        (None, {"opt_level": "O1", "master_weights": True}, "master_weights: got True"),
        (None, {"opt_level": "O1", "cast_model_type": FP16}, "cast_model_type: got torch.float16"),
        (None, {"opt_level": "O2", "patch_torch_functions": True}, "patch_torch_functions: got True"),
        (None, {"loss_scale": 0}, "loss_scale: got 0"),
        (None, {"num_losses": 0}, "num_losses: got 0"),
        (None, {"num_losses": "2"}, "num_losses: got '2'"),
        (None, {"verbosity": -1}, "verbosity: got -1"),
        (None, {"cast_model_outputs": torch.int64}, "cast_model_outputs: got torch.int64"),
        (None, {"optimizers": linear()}, "optimizers: got Linear"),
        (None, {"optimizers": ["adam"]}, "optimizers: got str"),
        (nn.Linear.half, {"opt_level": "O1"}, "parameter weight is torch.float16, expected torch.float32"),
        (nn.Linear.bfloat16, {"opt_level": "O2"}, "parameter weight is torch.bfloat16"),
        (wrapped_in_ddp, {}, "in DistributedDataParallel; wrap the model that amp.initialize returns"),
        (lambda model: "model", {}, "models: got str"),
    ],
)
def test_what_initialize_refuses(change, options, message):
    model = linear()
    options = {"optimizers": sgd(model)} | options
    with pytest.raises(AmpError, match=message) as caught:
        initialize(change(model) if change else model, **options)
    assert isinstance(caught.value, (RuntimeError, paramp.ConfigError))
    with pytest.raises(RuntimeError, match="not initialized"):
        amp.state_dict()
    initialize(linear(), opt_level="O2")  # nothing is left of it


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_backward_that_never_reaches_the_masters_is_refused(set_to_none):
    model, optimizer = prepared("O2")
    model(ONES).sum().backward()
    with pytest.raises(AmpError, match=r"masters have none.*amp\.scale_loss"):
        optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    optimizer.step()
    learn(model, optimizer)
    optimizer.step()
    with pytest.raises(AmpError, match="no backward since the last step"):  # whose gradients are spent
        optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    optimizer.step()
    learn(model, optimizer, float("inf"))
    optimizer.step()
    with pytest.raises(AmpError, match="no backward since the last step"):
        optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    model(ONES).sum().backward()
    with pytest.raises(AmpError, match="masters have none"):
        optimizer.step()


def test_misuse_is_refused():
    model = linear()
    optimizer = sgd(model)
    loss = model(ONES).sum()
    with pytest.raises(RuntimeError, match=r"amp\.scale_loss: amp is not initialized"):
        backward(loss, optimizer)
    model, optimizer = prepare(model, optimizer, num_losses=2)
    for misuse, message in (
        (lambda: initialize(linear()), "it was called before"),
        (lambda: backward(loss, optimizer, loss_id=2), "got loss_id 2, expected an integer from 0 to 1"),
        (lambda: backward(loss, sgd(linear())), r"SGD, which amp\.initialize did not return"),
        (lambda: backward(3.0, optimizer), r"got a loss 3\.0"),
        (lambda: optimizer.step(lambda: loss), "closure"),
        (lambda: amp.load_state_dict({"scale": {"loss_scale": 4.0, "unskipped": 5}}), "unexpected 'scale'"),
        (lambda: amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0}}), "unexpected 'loss_scaler0'"),
    ):
        with pytest.raises(AmpError, match=message):
            misuse()
    with pytest.warns(UserWarning, match="got 1 loss scalers, but num_losses is 2"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 5}})
    assert scales() == [4.0, START]
    with pytest.raises(AmpError, match=r"was passed to amp\.initialize before"):
        prepare(model, optimizer)
    model, optimizer = prepared("O2")
    model.weight = nn.Parameter(model.weight.detach().clone())
    with pytest.raises(AmpError, match=r"apply tensor parallelism .* before amp\.initialize"):
        learn(model, optimizer)
    for level in LEVELS:
        model, optimizer = prepared(level)
        learn(model, optimizer)
        with pytest.raises(AmpError, match="load_state_dict: assign=True replaces weight, which an optimizer"):
            model.load_state_dict(model.state_dict(), assign=True)
        model.load_state_dict(model.state_dict(keep_vars=True), assign=True)
        model.later = nn.Parameter(torch.ones(2, 4))
        optimizer.add_param_group({"params": [model.later]})
        learn(model, optimizer)
        for name, shape in (("later", r"\(2, 4\)"), ("weight", r"\(1, 4\)")):
            setattr(model, name, nn.Parameter(getattr(model, name).detach().clone()))
            with pytest.raises(AmpError, match=rf"of shape {shape} was replaced in its model by one that no optimizer"):
                learn(model, optimizer)
            optimizer.add_param_group({"params": [getattr(model, name)]})
            learn(model, optimizer)
    model, optimizer = prepared("O2")
    learn(model, optimizer)
    optimizer.register_step_post_hook(lambda *_: nn.init.zeros_(model.weight))
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(1, 4\) was changed in its step\(\)"):
        optimizer.step()
    for change in (lambda one: one.grad.mul_(2.0), lambda one: setattr(one, "grad", one.grad * 2.0)):
        for lost in (learn, lambda _, optimizer: optimizer.step()):
            model, optimizer = prepared("O2")
            learn(model, optimizer)
            change(model.weight)
            with pytest.raises(AmpError, match=r"of shape \(1, 4\) was changed after amp\.scale_loss had moved it"):
                lost(model, optimizer)
    optimizer.zero_grad()
    learn(model, optimizer)
    model.bias.grad = None
    optimizer.step()
    assert holds(model.bias, 0.0)
    model = linear()
    model, pair = prepare(model, [sgd(model), sgd(model)], opt_level="O2")
    learn(model, pair)
    pair[0].step()
    with pytest.raises(AmpError, match=r"a parameter of shape \(1, 4\) is in another optimizer too"):
        pair[1].step()
    learn(model, pair[1])
    pair[1].step()
    assert holds(model.weight, 0.0)
    model = linear()
    with pytest.warns(UserWarning, match=r"optimizer: eps 1e-08 is below"):
        prepare(model, torch.optim.Adam(model.parameters()), opt_level="O3")
    model, optimizer = prepared("O2")
    learn(model, optimizer)
    model.zero_grad()
    for master in amp.master_params(optimizer):
        master.grad = torch.ones_like(master)
    optimizer.step()
    assert holds(model.weight, 0.25)


def test_a_loss_of_another_optimizer_adds_nothing_to_the_gradients_of_masters():
    """As of a generator through its discriminator, before the discriminator's step."""
    models = [linear(0.5), linear(0.5)]
    models, (first, second) = prepare(models, [sgd(one, lr=0.25) for one in models], opt_level="O2")
    learn(models[0], first)
    backward(models[0](models[1](torch.ones(1, 4)).expand(1, 4)).sum(), second)
    first.step()
    assert holds(models[0].weight, 0.25)


# -------------------------------------------------------------------------------------------------------- many ranks


@pytest.mark.parametrize("level", ["O1", "O2"])
@on_ranks(2)
def test_a_backward_that_fails_on_one_rank_after_delayed_ones_is_a_step_on_none(world, level):
    model, optimizer = prepared(level)
    learn(model, optimizer, delay_unscale=True)
    if world.rank:
        with pytest.raises(AttributeError):
            learn(model, optimizer, break_it=torch.ones(1), delay_unscale=True)
    learn(model, optimizer)
    for _ in range(2 * world.rank):
        with pytest.raises(AmpError, match=r"a backward failed, .* call optimizer\.zero_grad"):
            optimizer.step()
    if world.rank == 0:
        optimizer.step()
    assert holds(model.weight, 0.5)
    optimizer.zero_grad()
    learn(model, optimizer)
    optimizer.step()
    assert holds(model.weight, 0.25)


@pytest.mark.parametrize("level", rarely(LEVELS, "O1", "O2"))
@on_ranks(4)
def test_tensor_parallelism_before_initialize_equals_one_process(world, level):
    """DTensor and plain parameters in one optimizer; one rank's overflow makes all ranks skip, and nothing else."""

    def run(parallel):
        torch.manual_seed(0)
        model = MLP()
        if parallel:
            tensor_parallel(model, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))
            with pytest.raises(AmpError, match=r"SGD\(foreach=True\) has plain parameters and DTensors"):
                prepare(model, sgd(model, lr=0.1, foreach=True), opt_level=level)
        model, optimizer = prepare(model, sgd(model, lr=0.1, momentum=0.5), opt_level=level)
        reached = []
        for step in range(5):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            with amp.scale_loss(F.mse_loss(model(x), x.roll(1, 1)), optimizer) as scaled_loss:
                scaled_loss.backward()
                if step == 2 and (world.rank == 3 or not parallel):
                    gradient = model.up.weight.grad
                    (gradient.to_local() if parallel else gradient)[-1, -1] = float("nan")
            optimizer.step()
            reached.append([whole(value).clone() for value in model.state_dict().values()])
        reached.append([whole(value) for value in amp.master_params(optimizer)])
        return reached, amp.state_dict()

    alone, alone_amp = run(False)
    spread, spread_amp = run(True)
    assert spread_amp == alone_amp
    tolerance = 1e-5 if level == "O0" else 2e-3
    for one, other in zip(alone, spread, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=tolerance, check_dtype=False)
    assert all(torch.equal(one, other) for one, other in zip(spread[1], spread[2], strict=True))
    assert (alone[4][0] - alone[0][0]).abs().max() > 10 * tolerance
    everywhere = [torch.empty_like(spread[4][0]) for _ in range(4)]
    dist.all_gather(everywhere, spread[4][0].contiguous())
    assert all(torch.equal(values, everywhere[0]) for values in everywhere)


@each_level
@on_ranks(2)
def test_each_scale_loss_sends_one_flag_and_nothing_else_is_sent(world, level):
    with Collectives() as before:
        models = [linear(), linear()]
        models, optimizers = prepare(models, [sgd(model) for model in models], opt_level=level, num_losses=2)
    assert not before.counts
    for broken in (False, True):
        first, second = (model(torch.ones(2, 4)).sum() for model in models)
        weight = models[0].weight if broken and world.rank == 1 else None
        for delay in ("delay_unscale", "delay_overflow_check"):
            with Collectives() as delayed:
                learn(models[0], optimizers[0], **{delay: True})
            assert not delayed.counts
        for number, (loss, of, spoiled) in enumerate(((first, optimizers[:1], weight), (second, optimizers, None))):
            with Collectives() as inside:
                backward(loss, of, spoiled, loss_id=number)
            assert (inside.counts, inside.elements) == ({"allreduce": 1}, [1])
        with Collectives() as after:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert not after.counts


@pytest.mark.parametrize("level", ["O1", "O2"])
@on_ranks(2)
def test_a_pipeline_by_hand_skips_together(world, level):
    """The first stage has no loss; it passes None and the gradient that it received, which is scaled already."""
    stage = linear() if world.rank else nn.Linear(4, 4, bias=False)
    if world.rank == 0:
        nn.init.eye_(stage.weight)
    model, optimizer = prepare(stage, sgd(stage, lr=0.125), opt_level=level)
    for step in range(3):
        optimizer.zero_grad()
        if world.rank == 0:
            sent = model(ONES)
            dist.send(sent.detach(), 1)
            with amp.scale_loss(None, optimizer) as scaled_loss:
                assert scaled_loss is None
                received = torch.empty_like(sent)
                dist.recv(received, 1)
                sent.backward(received)
                if step == 1:
                    model.weight.grad[0, 0] = float("inf")
        else:
            got = torch.empty(1, 4)
            dist.recv(got, 0)
            got.requires_grad_()
            with amp.scale_loss(model(got).sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
                dist.send(got.grad, 0)
        optimizer.step()
        # By hand: each row of the first stage moves by 1/8 of the second's weight, and that by 1/8 of what it is sent.
        if step < 2:
            master = next(amp.master_params(optimizer))
            first = torch.eye(4) - 0.125 * 0.5
            assert torch.equal(master, torch.full((1, 4), 0.375) if world.rank else first)
    second = torch.full((1, 4), 0.375) - 0.125 * (1 - 4 * 0.0625)
    first = torch.eye(4) - 0.0625 - 0.125 * 0.375
    assert torch.equal(next(amp.master_params(optimizer)), second if world.rank else first)
    assert scales() == [START / 2]
