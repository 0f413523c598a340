"""Fabric's strings and what they mean, in the engine and in the plugin for Fabric itself."""

import os
import sys
import tempfile
import types
import warnings
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from pool import on_ranks
from reference import whole
from small_mlp import batch, build, tensor_parallel
from torch import nn
from torch.utils.data import DataLoader
from trainer_runs import (
    INF,
    LR,
    MAX_NORM,
    ROUNDING,
    SCALE,
    STEPS,
    UNITS,
    check_classifier,
    check_weights,
    classifier,
    in_batches,
    in_plain_torch,
    plain_epochs,
    samples,
    sgd,
    spoil,
)

import paramp
from paramp.integrations.shared_scale import SharedScale

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
    """Notes the dtypes of what it is given, of what it makes, and whether it is given integers as they are."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = ()

    def forward(self, x):
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
    backward(output.square().mean())
    assert {parameter.grad.dtype for parameter in recorder.parameters()} == {weights}
    assert torch.get_default_dtype() is FP32


@pytest.mark.parametrize("name", FABRIC)
def test_the_engine_computes_as_fabric_does(name):
    with paramp.launch_from_torch({"precision": name}):
        model = Recorder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = paramp.initialize(model, optimizer, nn.functional.mse_loss)
        check_dtypes(name, engine, engine, engine.backward)


def test_a_scale_that_is_read_before_there_is_a_model_moves_to_its_device(monkeypatch):
    state = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 5, "_growth_tracker": 3}
    models = set()
    shared = SharedScale(paramp.Precision.parse("16-mixed"), models)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)  # else the scaler would take the first GPU for all
        assert shared.scaler.get_scale() == 2.0**16
        shared.load_state_dict(state)
        assert shared.scaler.scale_tensor().device.type == "cpu"
    early = shared.scaler
    early.set_growth_interval(7)
    models.add(nn.Linear(2, 2))
    with monkeypatch.context() as patch:
        patch.setattr(early, "scale_tensor", lambda: torch.empty((), device="meta"))  # as if it had to move
        placed = shared.scaler
    assert placed is not early
    assert placed is shared.scaler
    assert placed.state_dict() == early.state_dict()
    assert shared.state_dict().items() >= (state | {"growth_interval": 7}).items()


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


def image_classifier(fabric, model, optimizer):
    """The example of that name: weights, and the losses of epochs."""
    loader = fabric.setup_dataloaders(DataLoader(samples(), batch_size=4))
    scheduler, losses = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5), []
    for _ in range(2):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's, about Lightning's code
            total = sum(nn.functional.cross_entropy(model(x), y, reduction="sum") for x, y in loader)
            losses.append(float(fabric.all_gather(total).sum()))
    with tempfile.TemporaryDirectory() as folder:
        fabric.save(f"{folder}/model.pt", model.state_dict())
    return model.state_dict(), losses


@on_ranks(2)
def test_fabric_with_the_plugin(world):
    """One body, as lightning takes long to import: two strategies of tensor parallelism, DDP, and each string."""
    from torch.distributed.device_mesh import init_device_mesh

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lightning.fabric import Fabric
        from lightning.fabric.plugins.environments import MPIEnvironment
        from lightning.fabric.plugins.precision import Precision
        from lightning.fabric.strategies import ModelParallelStrategy

    def start(mode, strategy, devices, model):
        plugin = paramp.FabricPrecision(mode)
        assert isinstance(plugin, Precision)
        assert isinstance(plugin, paramp.FabricPrecision)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Lightning's, about the machine
            fabric = Fabric(plugins=plugin, strategy=strategy, accelerator="cpu", devices=devices)
            fabric.launch()
            if isinstance(strategy, ModelParallelStrategy):
                model = fabric.setup_module(model)
                optimizer = fabric.setup_optimizers(sgd(model.parameters()))
            else:
                model, optimizer = fabric.setup(model, sgd(model.parameters()))
        return fabric, plugin, model, optimizer

    def alone(mode, model):
        return start(mode, "auto", 1, model)

    def parallelize(model, mesh):
        return tensor_parallel(model, mesh["tensor_parallel"])

    for mode, rounding in ((SCALED, ROUNDING["fp16"]), ("bf16-mixed", ROUNDING["bf16"])):
        strategy = ModelParallelStrategy(parallelize, data_parallel_size=1, tensor_parallel_size=2)
        check_training(train(*start(mode, strategy, 2, build()), world, 1), rounding)

    # A model that is sharded already, in a process that Fabric takes for a single device.
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    setup = alone(SCALED, tensor_parallel(build(), mesh))
    check_training(train(*setup, world, 1))
    state = setup[1].state_dict()
    again = paramp.FabricPrecision(SCALED)
    again.load_state_dict(state)
    assert again.loss_scale == SCALE / 2
    assert again.state_dict() == state

    # Data parallel: each rank its half of the batch.
    check_training(train(*start(SCALED, "ddp", 2, build()), world, 2))
    fabric, _, *trained = start(SCALED, "ddp", 2, classifier())
    weights, losses = image_classifier(fabric, *trained)
    x, y = samples().tensors
    expected = []
    for model, _ in plain_epochs([in_batches(8)] * 2, rates=[LR, LR / 2]):
        expected.append(nn.functional.cross_entropy(model(x), y, reduction="sum").item())
    assert losses == pytest.approx(expected, rel=1e-3)
    check_classifier(weights, model)

    # mpi4py without an MPI library is no MPI, but under mpirun, where each process would train alone.
    with mock.patch.dict(sys.modules, {"mpi4py": WithoutLibrary("mpi4py")}):
        assert MPIEnvironment.detect() is False
        ranks = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
        with mock.patch.dict(os.environ, ranks), pytest.raises(RuntimeError, match="cannot load MPI library"):
            MPIEnvironment.detect()

    for name in FABRIC:
        fabric, _, model, _ = alone(name, Recorder())
        check_dtypes(name, model, model, fabric.backward)
        with fabric.init_module():
            assert nn.Linear(2, 2).weight.dtype is FABRIC[name][0]

    # Without autocast and scaling, stock Fabric takes a plain backward, and in fp32 it passes inputs on as they are.
    for name in ("32-true", "16-true", "bf16-true", "64-true"):
        gradients = []
        for plugged in (False, True):
            torch.manual_seed(0)
            if plugged:
                fabric, plugin, model, optimizer = alone(name, Recorder())
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    stock = Fabric(precision=name, accelerator="cpu", devices=1)
                    model = stock.setup(Recorder())
            model(torch.ones(2, 4)).square().mean().backward()
            gradients.append(model.linear.weight.grad)
            if name == "32-true":
                with pytest.raises(RuntimeError, match="same dtype"):
                    model(torch.ones(2, 4, dtype=FP64))
        torch.testing.assert_close(*gradients)
        optimizer.step()
        assert plugin.num_skipped == 0
        model.linear.weight.grad.fill_(float("nan"))
        optimizer.step()
        assert plugin.num_skipped == 1
        assert model.linear.weight.isfinite().all()
        optimizer.zero_grad()
        optimizer.step()  # without gradients there is nothing to do, and nothing to complain of
        for count in (2, 3):  # clipping does not make an overflow finite
            model(torch.ones(2, 4)).square().mean().backward()
            model.linear.weight.grad[0, 0] = INF
            with pytest.raises(RuntimeError, match="non-finite"):  # by Fabric's default
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
            fabric.clip_gradients(model, optimizer, clip_val=1.0)
            optimizer.step()
            assert plugin.num_skipped == count
            optimizer.zero_grad()
    for mode in (SCALED, "bf16-mixed"):
        fabric, plugin, model, optimizer = alone(mode, Recorder())
        with pytest.raises(RuntimeError, match=r"requires you to call `fabric\.backward"):
            model(torch.ones(2, 4)).sum().backward()

    # Mappings and dataclasses are cast, as by Lightning's own plugins.
    plugin = paramp.FabricPrecision("16-true")
    for pack in (Holder, Named):
        given = pack(x=torch.ones(2))
        cast = plugin.convert_input(given)
        assert type(cast) is pack
        assert held(cast).dtype is FP16
        assert held(plugin.convert_output(cast)).dtype is FP32

    # A buffer that modules share stays shared.
    shared = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    for layer in shared:
        layer.register_buffer("one", shared[0].one if layer is shared[1] else torch.ones(2))
    plugin.convert_module(shared)
    assert shared[0].one is shared[1].one
    assert shared[0].one.dtype is FP16

    # An optimizer that adds up several backwards, while another makes the scale move.
    fabric, plugin, fast, fast_optimizer = alone(SCALED, nn.Linear(2, 1))
    slow = nn.Linear(2, 1)
    slow, slow_optimizer = fabric.setup(slow, sgd(slow.parameters()))
    x = torch.ones(1, 2)
    fabric.backward((slow(x) + fast(x)).sum())
    fast.weight.grad.fill_(INF)
    fast_optimizer.step()
    fast_optimizer.zero_grad()
    fabric.backward(slow(x).sum())
    plugin.unscale_gradients(slow_optimizer.optimizer)
    assert plugin.loss_scale == SCALE / 2
    assert slow.weight.grad.tolist() == [[2.0, 2.0]]

    for mode, message in (
        ("O2", "steps fp32 masters"),
        ("16-naive", "masters"),
        ("fp8-mixed", "float8 ones"),
        ({"mode": "bf16-true", "rounding": "stochastic"}, "rounding"),
        ({"mode": "32-true", "optimizer_state": "bf16"}, "optimizer_state"),
    ):
        with pytest.raises(paramp.ConfigError, match=message):
            paramp.FabricPrecision(mode)
