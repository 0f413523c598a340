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
from small_mlp import batch, build, tensor_parallel
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paramp
from paramp.integrations.shared_scale import SharedScale

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

# What Fabric's document and plugins say: dtype of the weights and their gradients, of what the model is given, and of
# tensors that it makes without a dtype. Outputs come back in fp32; 64-true keeps them in fp64, which Fabric rounds.
FABRIC = {
    "32-true": (FP32, FP32, FP32),
    32: (FP32, FP32, FP32),
    "32": (FP32, FP32, FP32),
    "16-mixed": (FP32, FP16, FP32),
    16: (FP32, FP16, FP32),
    "16": (FP32, FP16, FP32),
    "16-true": (FP16, FP16, FP16),
    "bf16-mixed": (FP32, BF16, FP32),
    "bf16": (FP32, BF16, FP32),
    "bf16-true": (BF16, BF16, BF16),
    "64-true": (FP64, FP64, FP64),
    "64": (FP64, FP64, FP64),
    64: (FP64, FP64, FP64),
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


def test_without_lightning_an_error_names_the_extra(monkeypatch):
    from paramp.integrations import lightning_precision

    lightning_precision._with_lightning.cache_clear()
    for name in [name for name in sys.modules if name.startswith("lightning.fabric")]:
        monkeypatch.delitem(sys.modules, name)  # of another test
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.setitem(sys.modules, "lightning.fabric.plugins.precision.precision", None)
    with pytest.raises(paramp.ConfigError, match=r'lightning cannot be imported .*pip install "paramp\[fabric\]"'):
        paramp.FabricPrecision("16-mixed")
    assert "lightning.fabric" not in sys.modules


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

SCALE, LR, STEPS, OVERFLOWS, MAX_NORM = 1024.0, 0.2, 6, 3, 0.5


def reference():
    """Plain torch in fp32, with the overflowing step left out: the weights and the norms before clipping."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    norms = []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        if step != OVERFLOWS:
            optimizer.step()
        else:
            norms[-1] = None
    return {name: value.detach() for name, value in model.named_parameters()}, norms


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def train(fabric, plugin, model, optimizer, world, data_size):
    """Fabric's loop, with an overflow in the gradients of one rank; the weights and norms afterwards."""
    norms = []
    for step in range(STEPS):
        x, y = batch(step, world.rank if data_size > 1 else 0, data_size)
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(x), y))
        overflow = step == OVERFLOWS
        if overflow and world.rank == 1:
            gradient = next(model.parameters()).grad
            getattr(gradient, "_local_tensor", gradient).view(-1)[0] = float("inf")
        before = [whole(parameter.detach()).clone() for parameter in model.parameters()]
        norm = fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM, error_if_nonfinite=False)
        norms.append(None if overflow else norm.item())
        assert overflow == (not norm.isfinite())
        optimizer.step()
        after = [whole(parameter.detach()) for parameter in model.parameters()]
        assert overflow == all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert plugin.num_skipped == 1
    assert plugin.loss_scale == (SCALE / 2 if plugin.mode.scaling else 1.0)
    return {name: whole(value.detach()) for name, value in model.module.named_parameters()}, norms


def check_training(actual, expected, rounding):
    weights, norms = actual
    assert [norm is None for norm in norms] == [norm is None for norm in expected[1]]
    for a, b in zip(norms, expected[1], strict=True):
        assert a == b or a == pytest.approx(b, rel=24 * rounding)
    for name, start in build().named_parameters():
        way = expected[0][name] - start
        found = weights[name] - start
        assert (found - way).norm() / way.norm() < 24 * rounding, name


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


def classify(model, optimizer, fabric=None):
    """The example image_classifier, with Fabric on two ranks, or in plain torch: weights, and the losses of epochs."""
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*map(batch, range(4)), strict=True)))
    loader = DataLoader(data, batch_size=16 if fabric is None else 8)
    if fabric is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    else:
        loader = fabric.setup_dataloaders(loader)
    scheduler, losses = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5), []
    for _ in range(2):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward() if fabric is None else fabric.backward(loss)
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            total = sum(nn.functional.mse_loss(model(x), y, reduction="sum") for x, y in loader)
        if fabric is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch's, about Lightning's code
                total = fabric.all_gather(total).sum()
        losses.append(float(total))
    if fabric is None:
        return list(model.parameters()), losses
    with tempfile.TemporaryDirectory() as folder:
        fabric.save(f"{folder}/model.pt", model.state_dict())
    return list(model.module.parameters()), losses


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

    expected = reference()

    def start(mode, strategy, devices, model):
        plugin = paramp.FabricPrecision(mode)
        assert isinstance(plugin, Precision)
        assert isinstance(plugin, paramp.FabricPrecision)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Lightning's, about the machine
            fabric = Fabric(plugins=plugin, strategy=strategy, accelerator="cpu", devices=devices)
            fabric.launch()
            optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
            if isinstance(strategy, ModelParallelStrategy):
                model = fabric.setup_module(model)
                optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9))
            else:
                model, optimizer = fabric.setup(model, optimizer)
        return fabric, plugin, model, optimizer

    scaled = {"mode": "16-mixed", "init_scale": SCALE}

    def parallelize(model, mesh):
        return tensor_parallel(model, mesh["tensor_parallel"])

    for mode, rounding in ((scaled, 2.0**-11), ("bf16-mixed", 2.0**-8)):
        strategy = ModelParallelStrategy(parallelize, data_parallel_size=1, tensor_parallel_size=2)
        setup = start(mode, strategy, 2, build())
        check_training(train(*setup, world, 1), expected, rounding)

    # A model that is sharded already, in a process that Fabric takes for a single device.
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    setup = start(scaled, "auto", 1, tensor_parallel(build(), mesh))
    check_training(train(*setup, world, 1), expected, 2.0**-11)
    state = setup[1].state_dict()
    again = paramp.FabricPrecision(scaled)
    again.load_state_dict(state)
    assert again.loss_scale == SCALE / 2
    assert again.state_dict() == state

    # Data parallel: each rank its half of the batch.
    setup = start(scaled, "ddp", 2, build())
    check_training(train(*setup, world, 2), expected, 2.0**-11)
    fabric, _, model, optimizer = start(scaled, "ddp", 2, build())
    weights, losses = classify(model, optimizer, fabric)
    expected_weights, expected_losses = classify(build(), None)
    assert losses == pytest.approx(expected_losses, rel=1e-3)
    first, found, wanted = (
        torch.cat([value.detach().flatten() for value in values])
        for values in (build().parameters(), weights, expected_weights)
    )
    assert 0 < (found - wanted).norm() / (wanted - first).norm() < 24 * 2.0**-11

    # mpi4py without an MPI library is no MPI, but under mpirun, where each process would train alone.
    with mock.patch.dict(sys.modules, {"mpi4py": WithoutLibrary("mpi4py")}):
        assert MPIEnvironment.detect() is False
        ranks = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
        with mock.patch.dict(os.environ, ranks), pytest.raises(RuntimeError, match="cannot load MPI library"):
            MPIEnvironment.detect()

    for name in FABRIC:
        fabric, _, model, _ = start(name, "auto", 1, Recorder())
        check_dtypes(name, model, model, fabric.backward)
        with fabric.init_module():
            assert nn.Linear(2, 2).weight.dtype is FABRIC[name][0]

    # Without autocast and scaling, stock Fabric takes a plain backward, and in fp32 it passes inputs on as they are.
    for name in ("32-true", "16-true", "bf16-true", "64-true"):
        gradients = []
        for plugged in (False, True):
            torch.manual_seed(0)
            if plugged:
                fabric, plugin, model, optimizer = start(name, "auto", 1, Recorder())
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
            model.linear.weight.grad[0, 0] = float("inf")
            with pytest.raises(RuntimeError, match="non-finite"):  # by Fabric's default
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
            fabric.clip_gradients(model, optimizer, clip_val=1.0)
            optimizer.step()
            assert plugin.num_skipped == count
            optimizer.zero_grad()
    for mode in (scaled, "bf16-mixed"):
        fabric, plugin, model, optimizer = start(mode, "auto", 1, Recorder())
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
    fabric, plugin, fast, fast_optimizer = start(scaled, "auto", 1, nn.Linear(2, 1))
    slow = nn.Linear(2, 1)
    slow, slow_optimizer = fabric.setup(slow, torch.optim.SGD(slow.parameters(), lr=LR))
    x = torch.ones(1, 2)
    fabric.backward((slow(x) + fast(x)).sum())
    fast.weight.grad.fill_(float("inf"))
    fast_optimizer.step()
    fast_optimizer.zero_grad()
    fabric.backward(slow(x).sum())
    plugin.unscale_gradients(slow_optimizer.optimizer)
    assert plugin.loss_scale == SCALE / 2
    assert slow.weight.grad.tolist() == [[2.0, 2.0]]

    # Two optimizers of one backward are unscaled with one scale, also where the first has made it move.
    model = build()
    fabric, plugin, model, optimizer = start(scaled, "auto", 1, model)
    second = fabric.setup_optimizers(torch.optim.SGD([model.down.bias], lr=LR))
    fabric.backward(nn.functional.mse_loss(model(batch(0)[0]), batch(0)[1]))
    plugin.scaler.set_growth_interval(1)
    optimizer.step()
    plugin.unscale_gradients(second.optimizer)
    assert plugin.loss_scale == SCALE * 2
    fabric.clip_gradients(model, optimizer, clip_val=1e-3)
    assert max(parameter.grad.abs().max() for parameter in model.parameters()) <= 1e-3

    rounding = {"mode": "bf16-true", "rounding": "stochastic"}
    refused = (
        ("O2", "steps fp32 masters"),
        ("16-naive", "masters"),
        ("fp8-mixed", "float8 ones"),
        (rounding, "rounding"),
        ({"mode": "32-true", "optimizer_state": "bf16"}, "optimizer_state"),
    )
    for mode, message in refused:
        with pytest.raises(paramp.ConfigError, match=message):
            paramp.FabricPrecision(mode)
