"""Fabric's strings and what they mean, in the engine and in the plugin for Fabric itself."""

import copy
import os
import sys
import types
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from pool import on_ranks
from reference import whole
from small_mlp import batch, build, tensor_parallel
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainer_runs import INF, MAX_NORM, ROUNDING, SCALE, STEPS, UNITS, check_weights, in_plain_torch, quiet, sgd, spoil

import paramp
from paramp.integrations.multi_optimizer_scaler import SharedGradScaler
from paramp.scaling.loss_scaling_options import LossScaling

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

# What Fabric's document and plugins say: dtype of the weights and their gradients, of what the model is given, and of
# tensors that it makes without a dtype. Outputs come back in fp32; 64-true keeps them in fp64, which Fabric rounds.
FABRIC = {
    **dict.fromkeys(("32-true", 32, "32"), (FP32, FP32, FP32)),
    **dict.fromkeys(("16-mixed", 16, "16"), (FP32, FP16, FP32)),
    **dict.fromkeys(("bf16-mixed", "bf16"), (FP32, BF16, FP32)),
    **dict.fromkeys(("64-true", "64", 64), (FP64, FP64, FP64)),
    "16-true": (FP16, FP16, FP16),
    "bf16-true": (BF16, BF16, BF16),
}


class Recorder(nn.Module):
    """Notes the dtypes of what it is given, of what it makes, and of its product, also where a backward repeats it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = ()

    def forward(self, x):
        return checkpoint(self.record, x, use_reentrant=False)

    def record(self, x):
        made = torch.ones(4)
        self.seen = (x.dtype, made.dtype, self.linear(x).dtype)
        return self.linear(x) + made


def check_dtypes(name, model, call, backward):
    weights, compute, made = FABRIC[name]
    recorder = model.module if isinstance(model.module, Recorder) else model
    assert {parameter.dtype for parameter in recorder.parameters()} == {weights}
    plugin_in_fp32 = compute is FP32 and not isinstance(model, paramp.Engine)
    for dtype in (FP32,) if plugin_in_fp32 else (FP32, FP64):
        output = call(torch.ones(2, 4, dtype=dtype))
        assert recorder.seen == (compute, made, compute)
        assert output.dtype is (FP64 if compute is FP64 else FP32)
    recorder.seen = ()
    backward(output.square().mean())
    assert recorder.seen == (compute, made, compute)
    assert {parameter.grad.dtype for parameter in recorder.parameters()} == {weights}
    assert torch.get_default_dtype() is FP32


def check_stock(name, model, output):
    """What :data:`FABRIC` says, of stock Fabric's ``model``; on CPUs it has no ``16-mixed``."""
    weights, compute, made = FABRIC[name]
    assert (model.linear.weight.dtype, model.seen, output.dtype) == (weights, (compute, made, compute), FP32)


@pytest.mark.parametrize("name", FABRIC)
def test_the_engine_computes_as_fabric_does(name):
    with paramp.launch_from_torch({"precision": name}):
        model = Recorder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = paramp.initialize(model, optimizer, nn.functional.mse_loss)
        check_dtypes(name, engine, engine, engine.backward)


# --------------------------------------------------------------------------------------------- Fabric on two ranks

OVERFLOWS = 3
SCALED = {"mode": "16-mixed", "init_scale": SCALE}


def train(fabric, plugin, model, optimizer, world, data_size):
    """Fabric's loop, with an overflow in the gradients of one rank; the weights and norms afterwards."""
    norms = []
    for step in range(STEPS):
        x, y = batch(step, world.rank if data_size > 1 else 0, data_size)
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(x), y))
        overflow = step == OVERFLOWS
        if overflow and world.rank == 1:
            spoil(next(model.parameters()).grad)
        before = [whole(parameter.detach()).clone() for parameter in model.parameters()]
        norm = fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM, error_if_nonfinite=False)
        norms.append(norm.item() if norm.isfinite() else INF)
        optimizer.step()
        after = [whole(parameter.detach()) for parameter in model.parameters()]
        assert overflow == all(map(torch.equal, before, after))
    assert plugin.num_skipped == 1
    assert plugin.loss_scale == (SCALE / 2 if plugin.mode.scaling else 1.0)
    return dict(model.module.named_parameters()), norms


def check_training(actual, rounding=ROUNDING["fp16"]):
    _, norms, weights = in_plain_torch(overflow=OVERFLOWS)
    assert actual[1] == pytest.approx(norms, rel=UNITS * rounding)
    check_weights(actual[0], weights, dict(build().named_parameters()), rounding)


@dataclass
class Holder:
    x: torch.Tensor


class Named(dict):
    pass


def held(packed):
    return packed.x if isinstance(packed, Holder) else packed["x"]


class WithoutLibrary(types.ModuleType):
    """mpi4py as it is where no MPI is installed."""

    def __getattr__(self, name):
        raise RuntimeError("cannot load MPI library")


def fabric(**options):
    with quiet():  # of Lightning's, about the machine
        from lightning.fabric import Fabric

        return Fabric(accelerator="cpu", **options)


def start(mode, strategy, devices, model):
    with quiet():
        started = fabric(plugins=paramp.FabricPrecision(mode), strategy=strategy, devices=devices)
        started.launch()
        if not isinstance(strategy, str):  # ModelParallelStrategy sets them up one after the other
            model = started.setup_module(model)
            optimizer = started.setup_optimizers(sgd(model.parameters()))
        else:
            model, optimizer = started.setup(model, sgd(model.parameters()))
    return started, started.strategy.precision, model, optimizer


def alone(mode, model):
    return start(mode, "auto", 1, model)


@on_ranks(2)
def test_layouts_train_as_one_process(world):
    """Tensor parallelism in Fabric and of a model that is sharded already, and data parallelism."""
    from torch.distributed.device_mesh import init_device_mesh

    plugin = paramp.FabricPrecision("16-mixed")  # from now on mpi4py without an MPI library is no error
    with quiet():
        from lightning.fabric.plugins.environments import MPIEnvironment
        from lightning.fabric.plugins.precision import Precision
        from lightning.fabric.strategies import ModelParallelStrategy

    assert isinstance(plugin, Precision)
    assert isinstance(plugin, paramp.FabricPrecision)
    assert fabric(precision="16-mixed").strategy.precision.precision == "bf16-mixed"  # stock Fabric on a CPU
    with pytest.raises(ValueError, match=r"`ModelParallelStrategy` does not support .*16-mixed"):
        fabric(precision="16-mixed", strategy=ModelParallelStrategy(tensor_parallel, 1, 2), devices=2)
    for mode, rounding in ((SCALED, ROUNDING["fp16"]), ("bf16-mixed", ROUNDING["bf16"])):
        strategy = ModelParallelStrategy(
            lambda model, mesh: tensor_parallel(model, mesh["tensor_parallel"]),
            data_parallel_size=1,
            tensor_parallel_size=2,
        )
        check_training(train(*start(mode, strategy, 2, build()), world, 1), rounding)

    # A model that is sharded already, in a process that Fabric takes for a single device.
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    setup = alone(SCALED, tensor_parallel(build(), mesh))
    check_training(train(*setup, world, 1))
    state = setup[1].state_dict()
    again = paramp.FabricPrecision(SCALED)
    again.load_state_dict(state)
    assert (again.loss_scale, again.state_dict()) == (SCALE / 2, state)

    check_training(train(*start(SCALED, "ddp", 2, build()), world, 2))  # each rank its half of the batch

    # mpi4py without an MPI library is no MPI, but under mpirun, where each process would train alone.
    with mock.patch.dict(sys.modules, {"mpi4py": WithoutLibrary("mpi4py")}):
        assert MPIEnvironment.detect() is False
        ranks = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
        with mock.patch.dict(os.environ, ranks), pytest.raises(RuntimeError, match="cannot load MPI library"):
            MPIEnvironment.detect()


@on_ranks(2)
def test_the_plugin_computes_as_fabric_does(world):
    for name in FABRIC:
        started, _, model, _ = alone(name, Recorder())
        check_dtypes(name, model, model, started.backward)
        with started.init_module():
            assert nn.Linear(2, 2).weight.dtype is FABRIC[name][0]

    # Without autocast and scaling, stock Fabric takes a plain backward, and in fp32 it passes inputs on as they are.
    for name in ("32-true", "16-true", "bf16-true", "64-true"):
        gradients = []
        for setup in (lambda name: alone(name, Recorder())[2], lambda name: fabric(precision=name).setup(Recorder())):
            torch.manual_seed(0)
            with quiet():
                model = setup(name)
            model(torch.ones(2, 4)).square().mean().backward()
            gradients.append(model.linear.weight.grad)
            if name == "32-true":
                with pytest.raises(RuntimeError, match="same dtype"):
                    model(torch.ones(2, 4, dtype=FP64))
        torch.testing.assert_close(*gradients)
        check_stock(name, model, model(torch.ones(2, 4)))
    model = fabric(precision="bf16-mixed").setup(Recorder())
    check_stock("bf16-mixed", model, model(torch.ones(2, 4)))
    for mode in (SCALED, "bf16-mixed"):
        _, _, model, _ = alone(mode, Recorder())
        with pytest.raises(RuntimeError, match=r"requires you to call `fabric\.backward"):
            model(torch.ones(2, 4)).sum().backward()

    # Mappings and dataclasses are cast, as by Lightning's own plugins.
    plugin = paramp.FabricPrecision("16-true")
    for pack in (Holder, Named):
        cast = plugin.convert_input(pack(x=torch.ones(2)))
        assert type(cast) is pack
        assert held(cast).dtype is FP16
        assert held(plugin.convert_output(cast)).dtype is FP32

    # Adam's eps rounds to 0 in fp16: the first step of an optimizer says so.
    started, _, model, _ = alone("16-true", Recorder())
    adam = started.setup_optimizers(torch.optim.Adam(model.parameters()))
    started.backward(model(torch.ones(2, 4)).sum())
    with pytest.warns(UserWarning, match="optimizer: eps 1e-08 is below"):
        adam.step()
    adam.step()

    # A buffer that modules share stays shared.
    shared = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    for layer in shared:
        layer.register_buffer("one", shared[0].one if layer is shared[1] else torch.ones(2))
    plugin.convert_module(shared)
    assert shared[0].one is shared[1].one
    assert shared[0].one.dtype is FP16


@on_ranks(2)
def test_a_gradient_that_is_not_finite_skips_the_step_in_every_mode(world):
    """Also after clipping, which does not make it finite."""
    for name in ("32-true", "16-true", "bf16-true", "64-true", "bf16-mixed", "O3"):
        started, plugin, model, optimizer = alone(name, Recorder())
        optimizer.step()  # without gradients there is nothing to do, and nothing to complain of
        for count, clips in enumerate((False, True, True), 1):
            started.backward(model(torch.ones(2, 4)).square().mean())
            model.linear.weight.grad[0, 0] = INF
            if clips:
                with pytest.raises(RuntimeError, match="non-finite"):  # by Fabric's default
                    started.clip_gradients(model, optimizer, max_norm=1.0)
                started.clip_gradients(model, optimizer, clip_val=1.0)
            optimizer.step()
            assert plugin.num_skipped == count
            assert model.linear.weight.isfinite().all()
            optimizer.zero_grad()


@on_ranks(2)
def test_two_optimizers_of_one_backward_are_unscaled_with_its_scale(world):
    """The scale changes once for each backward: it grows, or falls if the second optimizer alone is skipped."""
    started = fabric(plugins=paramp.FabricPrecision(SCALED | {"growth_interval": 1}), devices=1)
    model = nn.Linear(2, 2)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    model, *optimizers = started.setup(model, *(torch.optim.SGD([one], lr=1.0) for one in model.parameters()))
    plugin, made, scale = started.strategy.precision, [0, 0], SCALE
    for overflow in (False, True, False, False):
        started.backward(model(torch.ones(1, 2)).sum())
        if overflow and world.rank == 1:
            spoil(model.bias.grad)
        for optimizer, factor in zip(optimizers, (1, 2), strict=True):
            assert plugin.loss_scale == factor * scale  # also if it is read between
            started.clip_gradients(model, optimizer, clip_val=2.0)
            optimizer.step()
            optimizer.zero_grad()
        made = [made[0] + 1, made[1] + (not overflow)]
        for parameter, first, count in zip(model.parameters(), start, made, strict=True):
            torch.testing.assert_close(parameter.detach(), first - count, rtol=0, atol=2.0**-10)
        scale *= 0.5 if overflow else 2
        assert plugin.loss_scale == scale
    assert plugin.num_skipped == 1
    # Another has the parameters of both, and steps twice.
    both, before = started.setup_optimizers(torch.optim.SGD(model.parameters(), lr=1.0)), copy.deepcopy(model)
    started.backward(model(torch.ones(1, 2)).sum())
    for optimizer in (optimizers[0], both, both):
        optimizer.step()
    for count, name in ((3, "weight"), (2, "bias")):
        assert torch.equal(model.get_parameter(name), before.get_parameter(name) - count)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("O2", "steps fp32 masters"),
        ("16-naive", "masters"),
        ("fp8-mixed", "float8 ones"),
        ({"mode": "bf16-true", "rounding": "stochastic"}, "rounding"),
        ({"mode": "32-true", "optimizer_state": "bf16"}, "optimizer_state"),
    ],
)
def test_what_the_plugin_refuses(mode, message):
    with pytest.raises(paramp.ConfigError, match=message):
        paramp.FabricPrecision(mode)


def test_an_engine_of_deepspeed_is_refused_before_its_backward():
    """Its package is missing: a module whose class has that name stands for what its strategy makes of a model."""
    from lightning.fabric import Fabric, strategies

    for name in ("16-mixed", "32-true"):
        plugin = paramp.FabricPrecision(name)
        strategies.DeepSpeedStrategy.precision.fset(mock.Mock(), plugin)  # takes it
        fabric = Fabric(plugins=plugin, accelerator="cpu", devices=1)
        model = fabric.setup(type("DeepSpeedEngine", (nn.Linear,), {})(2, 2))
        with pytest.raises(paramp.ConfigError, match="FabricPrecision: strategy: got DeepSpeedStrategy, which scales"):
            fabric.backward(model(torch.ones(1, 2)).sum(), model=model)
        assert model.weight.grad is None


def test_disabled_loss_scaling_skips_a_gradient_that_is_not_finite():
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), SharedGradScaler(LossScaling(enabled=False), [])
    weight.grad = torch.tensor([1.0, INF])
    scaler.step(optimizer)
    assert (scaler.num_skipped, scaler.get_scale(), scaler.state_dict()) == (1, 1.0, {})
    assert weight.tolist() == [1.0, 1.0]
    plugin = paramp.FabricPrecision(SCALED)  # in a run that goes on from one without a scale
    plugin.load_state_dict(paramp.FabricPrecision("bf16-mixed").state_dict())
    assert plugin.loss_scale == SCALE


def test_of_another_mode_the_scale_is_taken_over_if_both_change_it():
    plugin, fixed = paramp.FabricPrecision(SCALED), paramp.FabricPrecision("O3")
    begun, of_fixed = plugin.state_dict(), fixed.state_dict()
    plugin.load_state_dict(of_fixed)
    fixed.load_state_dict(begun)
    assert (plugin.state_dict(), fixed.state_dict()) == (begun, of_fixed)
    fixed.scaler.update(4.0)
    again = paramp.FabricPrecision("O3")
    again.load_state_dict(fixed.state_dict())
    assert again.loss_scale == 4.0
    naive = SharedGradScaler(paramp.Precision.parse("16-naive").scaling, [])
    naive.commit(torch.tensor(1.0))
    counted = naive.state_dict()
    plugin.load_state_dict(counted)
    assert plugin.state_dict() == begun | {"scale": counted["scale"], "_overflow_tracker": 1}
    plugin.load_state_dict(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5).state_dict())
    assert plugin.state_dict() == begun | {"scale": 8.0}


def test_a_scale_that_is_set_takes_the_place_of_what_the_steps_before_make_of_it():
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), SharedGradScaler(LossScaling(init_scale=8.0), [])
    scaler.scale(weight.sum() * INF).backward()
    scaler.step(optimizer)
    scaler.update()  # no effect yet
    scaler.update(2.0)
    assert scaler.get_scale() == 2.0
