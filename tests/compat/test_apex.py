"""paramp.compat.apex.amp against plain torch in fp32, and against what NVIDIA Apex documents."""

import copy
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
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import paramp
from paramp.base.optional_packages import ApexStatus
from paramp.compat.apex import amp
from paramp.compat.apex import optimizers as apex_optimizers
from paramp.compat.apex.amp import AmpError

LEVELS = ("O0", "O1", "O2", "O3")


@pytest.fixture(autouse=True)
def _fresh():
    amp.reset()
    yield
    amp.reset()


START = 2.0**10
"""Where dynamic scales begin here: no gradient overflows with it by itself."""


def prepare(*args, **kwargs):
    return amp.initialize(*args, **{"verbosity": 0, "max_loss_scale": START, **kwargs})


def linear(value=0.5, size=4, **options):
    layer = nn.Linear(size, 1, **options)
    with torch.no_grad():
        layer.weight.fill_(value)
        if layer.bias is not None:
            layer.bias.zero_()
    return layer


def sgd(*models, lr=0.25, **options):
    return torch.optim.SGD([parameter for model in models for parameter in model.parameters()], lr=lr, **options)


def backward(loss, optimizers, break_it=None, **options):
    """One backward under ``scale_loss``; the gradient of ``break_it`` then has a value that is not finite."""
    with amp.scale_loss(loss, optimizers, **options) as scaled_loss:
        scaled_loss.backward()
        if break_it is not None:
            break_it.grad.view(-1)[-1] = float("inf")


def scales():
    return [entry["loss_scale"] for entry in amp.state_dict().values()]


# ------------------------------------------------------------------------------- two losses, models and optimizers


def two_models(seed=0):
    """Weights between 1/2 and 1, so that one unit in the last place of fp16 is 2**-11 for all, and exact in fp16."""
    generator = torch.Generator().manual_seed(seed)
    models = [nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)) for _ in range(2)]
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                size = torch.randint(1024, 2048, parameter.shape, generator=generator) / 2048
                parameter.copy_(size * torch.randint(0, 2, parameter.shape, generator=generator).mul(2).sub(1))
    return models


def two_losses(models, step):
    """One of the first model alone, one that flows through both."""
    generator = torch.Generator().manual_seed(100 + step)
    x, y, z = (torch.randn(4, 6, generator=generator) / 4 for _ in range(3))
    hidden = models[0](x)
    return F.mse_loss(hidden, y), F.mse_loss(models[1](hidden), z)


OVERFLOWS = {2: 1, 4: 0}
"""Step -> the loss whose backward overflows there."""


def reference_step(models, optimizers, step, lost):
    """Both losses in fp32. A loss that overflowed takes the step of the optimizers it feeds: both, or the first."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    sum(two_losses(models, step)).backward()
    for index, optimizer in enumerate(optimizers):
        if lost is None or (lost == 0 and index == 1):
            optimizer.step()


def amp_step(models, optimizers, step, lost):
    for optimizer in optimizers:
        optimizer.zero_grad()
    first, second = two_losses(models, step)
    parameter = models[0][0].weight
    with amp.scale_loss(first, optimizers[0], loss_id=0) as scaled_loss:
        scaled_loss.backward(retain_graph=True)
        if lost == 0:
            parameter.grad[0, 0] = float("nan")
    backward(second, optimizers, loss_id=1, break_it=parameter if lost == 1 else None)
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_two_losses_models_and_optimizers_follow_fp32_with_the_overflowing_steps_left_out(level):
    plain, models = two_models(), two_models()
    plain_optimizers = [sgd(model, lr=lr) for model, lr in zip(plain, (0.05, 0.1), strict=True)]
    optimizers = [sgd(model, lr=lr) for model, lr in zip(models, (0.05, 0.1), strict=True)]
    models, optimizers = prepare(models, optimizers, opt_level=level, num_losses=2)
    start = scales()[0]
    for step in range(7):
        reference_step(plain, plain_optimizers, step, OVERFLOWS.get(step))
        amp_step(models, optimizers, step, OVERFLOWS.get(step))
        # With 4 ulp of fp16 for weights from 1/2 to 1.
        tolerance = 4 * 2.0**-11 if level == "O3" else 1e-3
        for ours, theirs in zip(models, plain, strict=True):
            for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert (one.float() - other).abs().max() <= tolerance, step
        backs_off = level in ("O1", "O2")
        assert scales() == [
            start / 2 if backs_off and step >= 4 else start,
            start / 2 if backs_off and step >= 2 else start,
        ]
    for one, other in zip(plain, two_models(), strict=True):
        assert (one[0].weight - other[0].weight).abs().max() > 0.02  # they have gone far enough to tell


@pytest.mark.parametrize("level", LEVELS)
def test_a_saved_run_goes_on_bit_by_bit(level):
    def make(seed):
        amp.reset()
        models = two_models(seed)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4) for model in models]
        return prepare(models, optimizers, opt_level=level, num_losses=2)

    models, optimizers = make(0)
    for step in range(4):
        amp_step(models, optimizers, step, OVERFLOWS.get(step))
    file = io.BytesIO()
    torch.save([[part.state_dict() for part in (*models, *optimizers)], amp.state_dict()], file)
    for step in range(4, 8):
        amp_step(models, optimizers, step, OVERFLOWS.get(step))
    expected = [part.state_dict() for part in (*models, *optimizers)], amp.state_dict()

    file.seek(0)
    saved, saved_amp = torch.load(file)
    models, optimizers = make(1)
    for part, state in zip((*models, *optimizers), saved, strict=True):
        part.load_state_dict(state)
    amp.load_state_dict(saved_amp)
    for step in range(4, 8):
        amp_step(models, optimizers, step, OVERFLOWS.get(step))
    torch.testing.assert_close([part.state_dict() for part in (*models, *optimizers)], expected[0], rtol=0, atol=0)
    assert amp.state_dict() == expected[1]


# ------------------------------------------------------------------------------------------------ levels, options


def normed():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LayerNorm(8), nn.Linear(8, 2))


FP16, FP32, BF16 = torch.float16, torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("options", "weight", "batch_norm", "layer_norm", "stepped", "scale"),
    [
        ({"opt_level": "O0"}, FP32, FP32, FP32, FP32, 1.0),
        ({}, FP32, FP32, FP32, FP32, START),
        ({"max_loss_scale": 2.0**24}, FP32, FP32, FP32, FP32, 2.0**16),
        ({"opt_level": "O2"}, FP16, FP32, FP16, FP32, START),
        ({"opt_level": "O3"}, FP16, FP16, FP16, FP16, 1.0),
        ({"opt_level": "O0", "loss_scale": "128.0"}, FP32, FP32, FP32, FP32, 128.0),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "False"}, FP16, FP16, FP16, FP32, START),
        ({"opt_level": "O3", "keep_batchnorm_fp32": "True", "loss_scale": 8}, FP16, FP32, FP16, None, 8.0),
        ({"opt_level": "O2", "master_weights": False, "loss_scale": "dynamic"}, FP16, FP32, FP16, None, START),
        ({"opt_level": "O2", "cast_model_type": BF16, "max_loss_scale": 4.0}, BF16, FP32, BF16, FP32, 4.0),
        ({"opt_level": "O3", "cast_model_type": BF16}, BF16, BF16, BF16, BF16, 1.0),
    ],
)
def test_what_a_level_is_made_of(options, weight, batch_norm, layer_norm, stepped, scale):
    model = normed()
    model, optimizer = prepare(model, sgd(model), **options)
    dtypes = [model[index].weight.dtype for index in (0, 1, 2, 3)]
    assert dtypes == [weight, batch_norm, layer_norm, weight]
    assert model[1].running_mean.dtype is batch_norm
    assert scales() == [scale]
    masters = list(amp.master_params(optimizer))
    if stepped is None:
        assert [master is own for master, own in zip(masters, model.parameters(), strict=True)] == [True] * 8
    else:
        assert {master.dtype for master in masters} == {stepped}
    # What goes in is cast, but under O1, and what comes out.
    output = model(torch.randn(4, 4, dtype=torch.float64 if "opt_level" in options else FP32))
    assert output.dtype is FP32
    assert all(value.dtype is FP32 for value in model.state_dict().values() if value.is_floating_point())
    before = [master.detach().clone() for master in masters]
    with amp.scale_loss(model(torch.randn(4, 4)).square().mean(), optimizer) as scaled_loss:
        (scaled_loss * 2.0**-8).backward()
    optimizer.step()
    assert any(not torch.equal(one, two) for one, two in zip(before, masters, strict=True))
    for parameter, value in zip(model.parameters(), masters, strict=True):
        assert torch.equal(parameter, value.to(parameter.dtype))


def test_amp_has_apexs_names_arguments_and_defaults():
    names = "initialize scale_loss disable_casts master_params state_dict load_state_dict _amp_state"
    kinds = ("half", "float", "promote")
    for name in [
        *names.split(),
        *(f"{kind}_function" for kind in kinds),
        *(f"register_{kind}_function" for kind in kinds),
    ]:
        assert hasattr(amp, name), name
    overrides = "cast_model_type patch_torch_functions keep_batchnorm_fp32 master_weights loss_scale cast_model_outputs"
    expected = {"models": inspect.Parameter.empty, "optimizers": None, "enabled": True, "opt_level": "O1"}
    expected |= dict.fromkeys(overrides.split()) | {"num_losses": 1, "verbosity": 1}
    expected |= {"min_loss_scale": None, "max_loss_scale": 2.0**24}
    assert {name: one.default for name, one in inspect.signature(amp.initialize).parameters.items()} == expected
    assert list(inspect.signature(amp.scale_loss).parameters) == [
        *("loss", "optimizers", "loss_id", "model", "delay_unscale", "delay_overflow_check")
    ]


def test_masters_hold_the_weights_from_before_they_were_rounded():
    model = linear(1.0 + 2.0**-20)
    model, optimizer = prepare(model, sgd(model), opt_level="O2")
    weight, _ = amp.master_params(optimizer)
    assert torch.equal(weight, torch.full((1, 4), 1.0 + 2.0**-20))
    assert torch.equal(model.weight, torch.ones(1, 4, dtype=FP16))
    assert torch.equal(model.state_dict()["weight"], weight)
    assert model.state_dict(keep_vars=True)["weight"] is model.weight
    model.load_state_dict({"weight": torch.full((1, 4), 2.0 + 2.0**-20), "bias": torch.zeros(1)})
    assert torch.equal(weight, torch.full((1, 4), 2.0 + 2.0**-20))
    backward(model(torch.ones(1, 4)).sum(), optimizer)
    optimizer.step()
    assert torch.equal(weight, torch.full((1, 4), 1.75 + 2.0**-20))
    assert torch.equal(model.weight, torch.full((1, 4), 1.75, dtype=FP16))


def test_what_is_done_to_half_weights_before_the_first_backward_counts():
    """An initialisation of the user's, or rank 0's weights that DistributedDataParallel hands out."""
    model = linear(1.0 + 2.0**-20)
    model, optimizer = prepare(model, sgd(model), opt_level="O2")
    model.weight.data.fill_(3.0)
    with torch.no_grad():
        model.bias.copy_(model.bias)  # a write of what was there: on other ranks it may not have been
    backward(model(torch.ones(1, 4)).sum(), optimizer)
    optimizer.step()
    assert torch.equal(model.weight, torch.full((1, 4), 2.75, dtype=FP16))

    amp.reset()
    model = linear(1.0 + 2.0**-20)
    model, optimizer = prepare(model, sgd(model), opt_level="O2")
    with torch.no_grad():
        model.weight.copy_(model.weight.clone())
    backward(model(torch.zeros(1, 4)).sum(), optimizer)
    assert torch.equal(next(amp.master_params(optimizer)), torch.ones(1, 4))


class Batch:
    """A batch of the user's own class."""

    def __init__(self, x):
        self.x = x

    def to(self, dtype):
        return Batch(self.x.to(dtype))


def test_inputs_and_outputs_are_cast_through_containers():
    class Model(nn.Linear):
        def forward(self, batch, pair, ids, scale=None):
            self.seen = [batch.x.dtype, pair["a"][0].dtype, ids.dtype, scale.dtype]
            return {"out": (super().forward(batch.x), ids), "name": "x"}

    model = Model(4, 2)
    assert prepare(model, opt_level="O3", cast_model_outputs=torch.bfloat16) is model
    x = torch.randn(3, 4)
    output = model(Batch(x), {"a": [x, "text"]}, torch.arange(3), scale=x.double())
    assert model.seen == [FP16, FP16, torch.int64, FP16]
    assert [value.dtype for value in output["out"]] == [BF16, torch.int64]
    assert output["name"] == "x"
    assert list(inspect.signature(model.forward).parameters) == ["batch", "pair", "ids", "scale"]


@dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    more: list


class Named(dict):
    pass


@pytest.mark.parametrize(
    "pack", [lambda x: Pair(x, [x]), lambda x: Named(x=x, more=[x]), lambda x: MappingProxyType({"x": x, "more": [x]})]
)
def test_dataclasses_and_mappings_are_cast(pack):
    class Packing(nn.Linear):
        def forward(self, packed):
            x, more = (packed.x, packed.more) if isinstance(packed, Pair) else (packed["x"], packed["more"])
            assert x.dtype is more[0].dtype is torch.float16
            return pack(super().forward(x))

    given = pack(torch.ones(2, 4))
    output = prepare(Packing(4, 4), opt_level="O2")(given)
    assert type(output) is type(given)
    for packed in (given, output):
        x, more = (packed.x, packed.more) if isinstance(packed, Pair) else (packed["x"], packed["more"])
        assert x.dtype is more[0].dtype is torch.float32


def test_o1_computes_as_autocast_and_widens_norms():
    seen = {}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            hidden = self.layer(x)
            seen["layer"], seen["softmax"] = hidden.dtype, hidden.softmax(-1).dtype
            return hidden

    model = prepare(Model(), opt_level="O1")
    assert model(torch.randn(2, 4)).dtype is FP32
    assert seen == {"layer": FP16, "softmax": FP32}
    with amp.disable_casts():
        model(torch.randn(2, 4))
    assert seen["layer"] is FP32
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.layer.weight.zero_()
        copied.layer.bias.zero_()
    assert not copied(torch.randn(2, 4)).any()
    assert model(torch.randn(2, 4)).any()


def test_ties_hooks_and_attributes_outlive_the_cast():
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    first.weight.of_mine = "yes"
    first.weight.register_hook(lambda gradient: gradient * 2)
    optimizer = sgd(first)
    start = first.weight.detach().clone()
    (first, second), optimizer = prepare([first, second], optimizer, opt_level="O2")
    assert first.weight is second.weight
    assert first.weight.of_mine == "yes"
    backward((first(torch.eye(4)) + second(torch.eye(4))).sum(), optimizer)
    (master,) = amp.master_params(optimizer)
    assert torch.equal(master.grad, torch.full((4, 4), 4.0))
    optimizer.step()
    assert torch.equal(master, start - 1.0)


def test_what_is_returned_has_the_structure_of_what_was_given():
    one, two = linear(), linear()
    for models, optimizers in ((one, sgd(one)), ([one, two], sgd(one)), (one, [sgd(one)]), ([one], [sgd(one)])):
        amp.reset()
        assert prepare(models, optimizers, opt_level="O0") == (models, optimizers)
    amp.reset()
    assert prepare([one, two], opt_level="O0") == [one, two]


def test_disabled_everything_is_as_without_amp():
    model = linear()
    optimizer = sgd(model)
    assert prepare(model, optimizer, enabled=False, opt_level="O2") == (model, optimizer)
    loss = model(torch.ones(1, 4)).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    assert model.weight.dtype is FP32
    assert amp.state_dict() == {}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 1}})


# --------------------------------------------------------------------------------------------- gradients and scales


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("delay", [False, True])
def test_accumulation_adds_gradients_up(level, delay):
    model = linear()
    model, optimizer = prepare(model, sgd(model), opt_level=level)
    for _ in range(2):  # the second window must not see the first
        optimizer.zero_grad()
        for count in range(3):
            backward(model(torch.full((1, 4), 2.0**count)).sum(), optimizer, delay_unscale=delay and count < 2)
        assert [master.grad.flatten()[0] for master in amp.master_params(optimizer)] == [7.0, 3.0]
    optimizer.step()
    assert torch.equal(model.weight.float(), torch.full((1, 4), 0.5 - 0.25 * 7))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_delayed_gradients_of_another_scale_do_not_mix(level):
    model = linear()
    model, optimizer = prepare(model, sgd(model), opt_level=level, num_losses=2)
    amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": 2.0 ** (4 + i), "unskipped": 0} for i in range(2)})
    backward(model(torch.ones(1, 4)).sum(), optimizer, delay_unscale=True)
    with pytest.raises(AmpError, match="still scaled"):
        optimizer.step()
    backward(model(torch.full((1, 4), 2.0)).sum(), optimizer, loss_id=1)
    assert torch.equal(next(amp.master_params(optimizer)).grad, torch.full((1, 4), 3.0))
    backward(model(torch.ones(1, 4)).sum(), optimizer, delay_unscale=True)
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(model.weight.float(), torch.full((1, 4), 0.5))


def test_gradients_are_clipped_where_apex_says():
    model = linear()
    model, optimizer = prepare(model, sgd(model, lr=1.0), opt_level="O2")
    backward(model(torch.full((1, 4), 2.0)).sum(), optimizer)
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    assert norm.item() == pytest.approx(17**0.5)
    optimizer.step()
    torch.testing.assert_close(model.weight.float(), torch.full((1, 4), 0.5 - 2 / 17**0.5), rtol=0, atol=2e-4)


@pytest.mark.parametrize("zero_grad", ["optimizer", "optimizer to zero", "model"])
def test_zero_grad_clears_half_and_master_gradients(zero_grad):
    model = linear()
    model, optimizer = prepare(model, sgd(model), opt_level="O2")
    for step in range(3):
        backward(model(torch.ones(1, 4)).sum(), optimizer)
        optimizer.step()
        if zero_grad == "model":
            model.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=zero_grad == "optimizer")
        for parameter in (*model.parameters(), *amp.master_params(optimizer)):
            assert parameter.grad is None or not parameter.grad.any()
        assert torch.equal(model.weight.float(), torch.full((1, 4), 0.5 - 0.25 * (step + 1)))


@pytest.mark.parametrize("options", [{"opt_level": "O0"}, {"opt_level": "O3", "loss_scale": 16.0}, {"opt_level": "O2"}])
def test_an_overflow_skips_one_step_and_says_so(options, capsys):
    model = linear()
    model, optimizer = amp.initialize(model, sgd(model), max_loss_scale=START, **options)
    printed = capsys.readouterr().out
    assert f"opt_level {options['opt_level']}" in printed
    assert ("overrides of loss_scale" in printed) == ("loss_scale" in options)
    (scale,) = scales()
    backward(model(torch.ones(1, 4)).sum(), optimizer, break_it=model.weight)
    assert scales() == [scale / 2 if options["opt_level"] == "O2" else scale]
    assert not capsys.readouterr().out
    optimizer.step()
    what = "reducing loss scale to 512.0" if options["opt_level"] == "O2" else f"keeping loss scale {scale}"
    assert capsys.readouterr().out == f"Gradient overflow.  Skipping step, loss scaler 0 {what}\n"
    assert torch.equal(model.weight.float(), torch.full((1, 4), 0.5))
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 0
    optimizer.zero_grad()
    backward(model(torch.ones(1, 4)).sum(), optimizer)
    optimizer.step()
    assert torch.equal(model.weight.float(), torch.full((1, 4), 0.25))
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1


def test_a_delayed_check_comes_with_the_next_loss_or_with_the_step():
    model, other = linear(), linear()
    models, optimizers = prepare([model, other], [sgd(model), sgd(other)], opt_level="O1")
    losses = [lambda model=model: model(torch.ones(1, 4)).sum() for model in models]
    backward(losses[0](), optimizers[0], break_it=model.weight, delay_overflow_check=True)
    assert scales() == [START]
    backward(losses[1](), optimizers[1])
    assert scales() == [START / 2]
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.weight, other.weight)  # one check for both
    backward(losses[0](), optimizers[0], break_it=model.weight, delay_overflow_check=True)
    optimizers[0].step()
    assert scales() == [START / 4]
    assert torch.equal(model.weight, torch.full((1, 4), 0.5))


def test_the_scale_grows_after_2000_good_backwards_and_within_its_limits():
    model = linear()
    model, optimizer = prepare(model, sgd(model), min_loss_scale=8.0, max_loss_scale=32.0)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 16.0, "unskipped": 1999}})
    found = []
    for broken in (False, True, True, True):
        optimizer.zero_grad()
        backward(model(torch.ones(1, 4)).sum(), optimizer, break_it=model.weight if broken else None)
        found += scales()
    assert found == [32.0, 16.0, 8.0, 8.0]
    scaler = amp._amp_state.loss_scalers[0]
    assert scaler.loss_scale() == scaler._loss_scale == 8.0
    scaler._loss_scale = 32.0  # scripts of Apex's set them too
    scaler._unskipped = 5
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 32.0, "unskipped": 5}


def test_a_backward_that_fails_leaves_what_was_there():
    model = linear()
    model, optimizer = prepare(model, sgd(model), opt_level="O2")
    backward(model(torch.ones(1, 4)).sum(), optimizer)
    with pytest.raises(AttributeError):
        backward(model(torch.ones(1, 4)).sum(), optimizer, break_it=torch.ones(1))  # which has no gradient
    backward(model(torch.ones(1, 4)).sum(), optimizer)
    assert torch.equal(next(amp.master_params(optimizer)).grad, torch.full((1, 4), 2.0))


def test_sparse_gradients_are_unscaled_too():
    model = nn.Embedding(5, 2, sparse=True)
    start = model.weight.detach().clone()
    model, optimizer = prepare(model, sgd(model), opt_level="O2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of sparse invariants
        for _ in range(2):
            backward(model(torch.tensor([1, 1, 3])).sum(), optimizer)
        optimizer.step()
    expected = start.clone()
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
        backward(head(torch.full((1, 4), 0.25)).sum(), optimizer)
        optimizer.step()
    assert torch.equal(head.weight.float(), torch.full((1, 4), 0.25 - 2.0**-13))


def test_an_optimizer_that_has_stepped_before_keeps_its_state():
    for level in ("O2", "O3"):
        amp.reset()
        model = linear()
        optimizer = sgd(model, momentum=0.5)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model, optimizer = prepare(model, optimizer, opt_level=level)
        backward(model(torch.ones(1, 4)).sum(), optimizer)
        optimizer.step()
        assert torch.equal(model.weight.float(), torch.full((1, 4), 0.5 - 0.25 - 0.25 * 1.5))


@pytest.mark.parametrize("before", [True, False])
def test_schedulers_made_before_and_after_initialize_work_and_do_not_warn(before):
    model = linear()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if before else None
    model, optimizer = prepare(model, optimizer, opt_level="O2")
    scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for broken in (True, False):
        optimizer.zero_grad()
        backward(model(torch.ones(1, 4)).sum(), optimizer, break_it=model.weight if broken else None)
        optimizer.step()
        scheduler.step()
    assert torch.equal(model.weight.float(), torch.full((1, 4), 0.5 - 0.125))


def test_fused_optimizers_are_torchs_where_apex_is_not(monkeypatch):
    model = linear()
    assert type(apex_optimizers.FusedAdam(model.parameters(), weight_decay=0.1)) is torch.optim.AdamW
    assert type(apex_optimizers.FusedAdam(model.parameters(), adam_w_mode=False)) is torch.optim.Adam
    assert type(apex_optimizers.FusedSGD(model.parameters(), lr=0.1, momentum=0.9)) is torch.optim.SGD
    apexs = {"materialize_master_grads": False, "set_grad_none": True, "wd_after_momentum": True}
    assert type(apex_optimizers.FusedSGD(model.parameters(), lr=0.1, **apexs)) is torch.optim.SGD
    with pytest.raises(ValueError, match="wd_after_momentum: got True"):
        apex_optimizers.FusedSGD(model.parameters(), lr=0.1, weight_decay=0.1, **apexs)
    with pytest.raises(ValueError, match="bias_correction: got False"):
        apex_optimizers.FusedAdam(model.parameters(), bias_correction=False)
    with pytest.raises(ValueError, match="amsgrad"):
        apex_optimizers.FusedAdam(model.parameters(), amsgrad=True)


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
            prepare(model, sgd(model), opt_level="O1")
        output = model(given)[0]
        (output.data if packed else output).square().sum().backward()
        gradients.append(model.weight_ih_l0.grad.clone())
        model.zero_grad()
    torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2)
    assert not torch.equal(*gradients)


# ----------------------------------------------------------------------------------------------- the user's functions


def test_functions_get_the_precision_that_they_were_marked_with():
    def dtypes(x, y=None):
        return (x @ x.T).dtype, None if y is None else y.dtype

    half, wide, promoted = (
        decorate(dtypes) for decorate in (amp.half_function, amp.float_function, amp.promote_function)
    )
    x = torch.randn(2, 2)
    assert half(x) == (FP32, None)  # nothing before initialize
    prepare(linear(), opt_level="O1")
    assert half(x, y=x.half()) == (FP16, FP16)
    with torch.autocast("cpu", dtype=FP16):
        assert wide(x.half(), y=x) == (FP32, FP32)
    assert promoted(x.half(), y=x) == (FP32, FP32)
    assert promoted(x.half(), y=x.half()) == (FP16, FP16)
    with amp.disable_casts():
        assert half(x) == (FP32, None)
    amp.reset()
    prepare(linear(), opt_level="O2")
    assert half(x) == (FP32, None)


def test_registered_functions_are_replaced_until_reset():
    class Module:
        name = staticmethod(lambda x: x.dtype)

    original = Module.name
    amp.register_half_function(Module, "name")
    with pytest.raises(AmpError, match="no function named 'other'"):
        amp.register_float_function(Module, "other")
    prepare(linear(), opt_level="O1")
    assert Module.name(torch.ones(1)) is FP16
    amp.reset()
    assert Module.name is original


# ------------------------------------------------------------------------------------------------------------ errors


def wrapped_in_ddp(model):
    class DistributedDataParallel(nn.Module):  # Apex's own has this name as well
        pass

    return DistributedDataParallel()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (None, {"opt_level": "02"}, "opt_level: got '02', expected one of O0, O1, O2, O3"),
        (None, {"opt_level": "O1", "keep_batchnorm_fp32": True}, "keep_batchnorm_fp32: got True with opt_level 'O1'"),
        (None, {"opt_level": "O1", "master_weights": True}, "master_weights: got True"),
        (None, {"opt_level": "O1", "cast_model_type": torch.float16}, "cast_model_type: got torch.float16"),
        (None, {"opt_level": "O2", "patch_torch_functions": True}, "patch_torch_functions: got True"),
        (None, {"loss_scale": "large"}, "loss_scale: got 'large'"),
        (None, {"loss_scale": 0}, "loss_scale: got 0"),
        (None, {"num_losses": 0}, "num_losses: got 0"),
        (None, {"num_losses": "2"}, "num_losses: got '2'"),
        (None, {"verbosity": -1}, "verbosity: got -1"),
        (None, {"cast_model_outputs": torch.int64}, "cast_model_outputs: got torch.int64"),
        (nn.Linear.half, {"opt_level": "O1"}, "parameter weight is torch.float16, expected torch.float32"),
        (nn.Linear.bfloat16, {"opt_level": "O2"}, "parameter weight is torch.bfloat16"),
        (wrapped_in_ddp, {}, "in DistributedDataParallel; wrap the model that amp.initialize returns"),
        (lambda model: "model", {}, "models: got str"),
    ],
)
def test_what_initialize_refuses(change, options, message):
    model = linear()
    optimizer = sgd(model)
    with pytest.raises(AmpError, match=message.replace("(", r"\(")) as caught:
        prepare(change(model) if change else model, optimizer, **options)
    assert isinstance(caught.value, (RuntimeError, paramp.ConfigError))
    with pytest.raises(RuntimeError, match="not initialized"):
        amp.state_dict()
    prepare(linear(), opt_level="O2")  # nothing is left of it


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_backward_that_never_reaches_the_masters_is_refused(set_to_none):
    layer = linear()
    layer, optimizer = prepare(layer, sgd(layer), opt_level="O2")
    x = torch.ones(2, 4)
    layer(x).sum().backward()
    with pytest.raises(AmpError, match=r"masters have none.*amp\.scale_loss"):
        optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    optimizer.step()
    backward(layer(x).sum(), optimizer)
    optimizer.step()
    optimizer.step()  # of the same gradients, which are spent
    optimizer.zero_grad(set_to_none=set_to_none)
    layer(x).sum().backward()
    with pytest.raises(AmpError, match="masters have none"):
        optimizer.step()


def test_misuse_is_refused():
    model = linear()
    optimizer = sgd(model)
    loss = model(torch.ones(1, 4)).sum()
    with pytest.raises(RuntimeError, match=r"amp\.scale_loss: amp is not initialized"):
        backward(loss, optimizer)
    with pytest.raises(AmpError, match="optimizers: got Linear"):
        prepare(model, model)
    with pytest.raises(AmpError, match="optimizers: got str"):
        prepare(model, ["adam"])
    model, optimizer = prepare(model, optimizer, num_losses=2)
    with pytest.raises(AmpError, match="it was called before"):
        prepare(linear())
    with pytest.raises(AmpError, match="got loss_id 2, expected an integer from 0 to 1"):
        backward(loss, optimizer, loss_id=2)
    with pytest.raises(AmpError, match=r"SGD, which amp\.initialize did not return"):
        backward(loss, sgd(linear()))
    with pytest.raises(AmpError, match=r"got a loss 3\.0"):
        backward(3.0, optimizer)
    with pytest.raises(AmpError, match="closure"):
        optimizer.step(lambda: loss)
    with pytest.raises(AmpError, match="unexpected 'scale'"):
        amp.load_state_dict({"scale": 3.0})
    with pytest.warns(UserWarning, match="got 1 loss scalers, but num_losses is 2"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 5}})
    assert scales() == [4.0, START]
    amp.reset()
    with pytest.raises(AmpError, match=r"was passed to amp\.initialize before"):
        prepare(model, optimizer)


def test_half_precision_adam_with_a_small_eps_warns():
    model = linear()
    with pytest.warns(UserWarning, match=r"optimizer: eps 1e-08 is below"):
        prepare(model, torch.optim.Adam(model.parameters()), opt_level="O3")
    amp.reset()
    model = linear()
    prepare(model, torch.optim.Adam(model.parameters()), opt_level="O2")


def test_a_parameter_replaced_after_initialize_is_noticed():
    model = linear()
    model, optimizer = prepare(model, sgd(model), opt_level="O2")
    model.weight = nn.Parameter(model.weight.detach().clone())
    with pytest.raises(AmpError, match=r"apply tensor parallelism .* before amp\.initialize"):
        backward(model(torch.ones(1, 4)).sum(), optimizer)


# -------------------------------------------------------------------------------------------------------- many ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("level", LEVELS)
@on_ranks(4)
def test_tensor_parallelism_before_initialize_equals_one_process(world, level):
    """DTensor and plain parameters in one optimizer; one rank's overflow makes all ranks skip, and nothing else."""

    def run(parallel):
        amp.reset()
        torch.manual_seed(0)
        model = Block()
        if parallel:
            mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
            parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        model, optimizer = prepare(model, sgd(model, lr=0.1, momentum=0.5), opt_level=level)
        reached = []
        for step in range(5):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            with amp.scale_loss(F.mse_loss(model(x), x.roll(1, 1)), optimizer) as scaled_loss:
                scaled_loss.backward()
                if step == 2:
                    gradient = model.up.weight.grad
                    if not parallel:
                        gradient[-1, -1] = float("nan")
                    elif world.rank == 3:
                        gradient.to_local()[-1, -1] = float("nan")
            optimizer.step()
            reached.append([whole(value).clone() for value in model.state_dict().values()])
        reached.append([whole(value) for value in amp.master_params(optimizer)])
        return reached, amp.state_dict()

    alone, alone_amp = run(False)
    spread, spread_amp = run(True)
    assert spread_amp == alone_amp
    for one, other in zip(alone, spread, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-5 if level == "O0" else 2e-3, check_dtype=False)
    assert all(torch.equal(one, other) for one, other in zip(spread[1], spread[2], strict=True))
    assert not torch.equal(alone[4][2], alone[0][2])
    everywhere = [torch.empty_like(spread[4][0]) for _ in range(4)]
    dist.all_gather(everywhere, spread[4][0].contiguous())
    assert all(torch.equal(values, everywhere[0]) for values in everywhere)
    amp.reset()


@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_each_scale_loss_sends_one_flag_and_nothing_else_is_sent(world, level):
    amp.reset()
    with Collectives() as before:
        models = [linear(), linear()]
        models, optimizers = prepare(models, [sgd(model) for model in models], opt_level=level, num_losses=2)
    assert not before.counts
    for broken in (False, True):
        first, second = (model(torch.ones(2, 4)).sum() for model in models)
        weight = models[0].weight if broken and world.rank == 1 else None
        for number, (loss, of, spoiled) in enumerate(((first, optimizers[:1], weight), (second, optimizers, None))):
            with Collectives() as inside:
                backward(loss, of, spoiled, loss_id=number)
            assert (inside.counts, inside.elements) == ({"allreduce": 1}, [1])
        with Collectives() as after:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert not after.counts
    amp.reset()


@on_ranks(4)
def test_gradients_in_other_placements_than_their_parameters_are_brought_to_them(world):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(model.weight)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    amp.reset()
    model, optimizer = prepare(model, sgd(model), opt_level="O2")
    scale = scales()[0]
    for rank, place in ((None, 0), (2, 1)):
        optimizer.zero_grad()
        with amp.scale_loss(None, optimizer) as scaled_loss:
            assert scaled_loss is None
            full = torch.full((4, 4), scale / 2).half()
            if rank is not None and world.rank == rank:
                full[place] = float("inf")  # in a part that this rank does not keep
            model.weight.grad = DTensor.from_local(full, mesh, [Replicate()], run_check=False)
        optimizer.step()
        assert torch.equal(whole(model.weight), torch.full((4, 4), -0.125, dtype=FP16))
    assert scales() == [scale / 2]
    amp.reset()


@pytest.mark.parametrize("level", ["O1", "O2"])
@on_ranks(4)
def test_a_pipeline_by_hand_skips_together(world, level):
    """Two replicas of two stages. The first stage has no loss; it passes None and the gradient that it received."""
    torch.manual_seed(0)
    amp.reset()
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    plain = copy.deepcopy(nn.Sequential(*stages))
    plain_optimizer = sgd(plain)
    mine, other = world.rank % 2, world.rank ^ 1
    model, optimizer = prepare(stages[mine], sgd(stages[mine]), opt_level=level)
    for step in range(4):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        if mine == 0:
            sent = model(x)
            dist.send(sent.detach(), other)
            with amp.scale_loss(None, optimizer):
                received = torch.empty_like(sent)
                dist.recv(received, other)
                sent.backward(received)
                if step == 1 and world.rank == 0:
                    model.bias.grad[0] = float("inf")
        else:
            got = torch.empty(4, 4)
            dist.recv(got, other)
            got.requires_grad_()
            with amp.scale_loss(model(got).square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
                dist.send(got.grad, other)
        optimizer.step()
        plain_optimizer.zero_grad()
        plain(x).square().mean().backward()
        if step != 1:
            plain_optimizer.step()
        for ours, theirs in zip(amp.master_params(optimizer), plain[mine].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
    assert scales() == [START / 2]
    amp.reset()
