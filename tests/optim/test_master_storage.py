"""Masters follow weights that are changed in place between steps, however they are stored."""

import pytest
import torch
from pool import on_ranks
from reference import assert_trained
from torch import nn

import paramp
from paramp.base import sizes
from paramp.compat.apex import amp

OPTIMIZERS = {
    "fused": lambda parameters: torch.optim.SGD(parameters, lr=2.0**-12),
    "own step": lambda parameters: torch.optim.SGD(parameters, lr=2.0**-12, foreach=True),
}


def clamp(weight):
    weight.data.clamp_(-0.125, 0.125)


def overwrite(weight):
    with torch.no_grad():
        weight.copy_(torch.full_like(weight, 0.4375))


def prune(weight):
    weight.data.mul_(torch.arange(weight.numel()).view(weight.shape) % 2)


EDITS = [clamp, overwrite, prune]


def loss(output, target):
    """Whose gradient is 1 in each weight of a linear layer given ones."""
    return output.sum() + 0 * target.sum()


def edited(config, make, edit):
    """The masters after a step, ``edit`` of the weights and another step; those expected; and the weights."""
    with paramp.launch_from_torch(config):
        torch.manual_seed(3)
        model = nn.Linear(28, 16)  # 448 elements and 64 for its bias: three blocks, and no padding behind them
        engine, *_ = paramp.initialize(model, make(model.parameters()), loss)
        x, y = torch.ones(1, 28), torch.ones(1, 16)
        engine.forward_backward(x, y)
        engine.step()
        before = {name: value.clone() for name, value in engine.full_state_dict().items()}
        expected = {}
        for name, weight in engine.named_parameters():
            old = weight.detach().clone()
            edit(weight)
            master = torch.where(weight == old, before[name], weight.float())
            followed = engine.full_state_dict()[name]  # as saved
            torch.testing.assert_close(followed, master, **tolerance(config))
            expected[name] = followed - 2.0**-12
        engine.forward_backward(x, y)
        assert engine.step().stepped
        after = {name: weight.detach().clone() for name, weight in engine.named_parameters()}
        return engine.full_state_dict(), expected, after


def tolerance(config):
    """Remainders belong to any weight, so that an edit is followed to half a unit of the weight in its last place."""
    unit = 2.0**-8 if config["precision"]["mode"].startswith("bf16") else 2.0**-11
    return {"rtol": unit if config["masters"] == "remainder" else 0, "atol": 1e-7}


def check_edits(config, optimizers, edits=EDITS):
    for make in optimizers:
        for edit in edits:
            masters, expected, weights = edited(config, make, edit)
            start = {name: value + 2.0**-12 for name, value in expected.items()}
            assert_trained(masters, expected, start, atol=1e-7, what=edit.__name__)
            for name, master in masters.items():
                assert torch.equal(weights[name], master.to(weights[name].dtype)), name


@pytest.mark.parametrize("masters", ["full", "remainder"])
@pytest.mark.parametrize("mode", ["16-naive", "bf16-naive"])
def test_a_weight_changed_in_place_is_stepped_from_there(mode, masters):
    precision = {"mode": mode} | ({"init_scale": 4.0} if mode == "16-naive" else {})
    makes = [OPTIMIZERS["fused"]] if masters == "remainder" else OPTIMIZERS.values()
    check_edits({"precision": precision, "masters": masters}, makes)


@pytest.mark.parametrize("mode", ["16-naive", "bf16-naive"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_step_follows_every_element_of_every_buffer(make, mode, monkeypatch):
    """Of two, each of three blocks without padding behind them."""
    monkeypatch.setattr(sizes, "BUCKET", 512)
    precision = {"mode": mode} | ({"init_scale": 4.0} if mode == "16-naive" else {})
    with paramp.launch_from_torch({"precision": precision}):
        model = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Linear(16, 32, bias=False))
        engine, *_ = paramp.initialize(model, OPTIMIZERS[make](model.parameters()), loss)
        assert [buffer.own_size for buffer in engine._weights.buffers] == [512, 512]
        for _ in range(2):
            for weight in engine.parameters():
                overwrite(weight)
            engine.forward_backward(torch.ones(1, 32), torch.ones(1, 32))
            scale = engine.scaler.get_scale()
            expected = {name: 0.4375 - 2.0**-12 * one.grad.float() / scale for name, one in engine.named_parameters()}
            assert engine.step().stepped
            engine.zero_grad()
            for name, master in engine.full_state_dict().items():
                torch.testing.assert_close(master, expected[name], atol=1e-7, rtol=0, msg=name)


@on_ranks(2)
def test_edits_under_zero(world):
    for mode, masters in (("16-naive", "full"), ("bf16-naive", "remainder")):
        precision = {"mode": mode} | ({"init_scale": 4.0} if mode == "16-naive" else {})
        makes = [OPTIMIZERS["fused"]] if masters == "remainder" else OPTIMIZERS.values()
        check_edits({"precision": precision, "masters": masters, "parallel": {"zero": 1}}, makes, [clamp])


@pytest.mark.parametrize("masters", ["full", "remainder"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_weight_keeps_its_bits_after_an_edit_and_a_skipped_step(dtype, masters):
    """Subnormal numbers, zeros of both signs, infinities; with what masters were stored for other weights."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[~values.isnan()]
    storage = paramp.optim.master_storage.MASTER_STORAGE[masters if masters == "remainder" else True](
        torch.zeros_like(values)
    )
    everything = slice(None)
    before = torch.randn(len(values), generator=torch.Generator().manual_seed(0)) * values.float().nan_to_num(0, 1, 1)
    storage.write(everything, before)
    untouched = values.isinf()  # an element is followed where others are not
    storage.weights.copy_(torch.where(untouched, storage.weights, values))
    edited = storage.weights.clone()
    storage.write(everything, storage.read(everything))  # what a skipped step does
    assert torch.equal(storage.weights.view(torch.int16), edited.view(torch.int16))
    torch.testing.assert_close(storage.read(everything)[untouched], before[untouched])


def test_masters_of_converted_models_follow_too():
    for convert in ("convert_to_amp", "apex"):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
        if convert == "apex":
            model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=4.0, verbosity=0)
        else:
            model, optimizer, _ = paramp.amp.convert_to_amp(
                model, optimizer, None, {"mode": "16-naive", "init_scale": 4.0}
            )
        for _ in range(2):
            value = model(torch.ones(1, 4)).float().sum()
            if convert == "apex":
                with amp.scale_loss(value, optimizer) as scaled:
                    scaled.backward()
            else:
                optimizer.backward(value)
            for parameter in model.parameters():
                parameter.data.fill_(0.25)
            optimizer.step()
            optimizer.zero_grad()
        weights = [parameter.detach().float() for parameter in model.parameters()]
        assert all(torch.equal(weight, torch.full_like(weight, 0.25 - 2.0**-12)) for weight in weights)


def test_masters_add_up_steps_that_fp16_rounds_away():
    """The numbers of docs/masters.md."""
    one = torch.ones((), dtype=torch.float16)
    assert one + 1e-4 == one
    assert (torch.nextafter(one, 2 * one) - one).item() == pytest.approx(1e-3, rel=0.03)
    for mode, expected in (("O3", 1.0), ("16-naive", 1 - 20 * 1e-4)):
        with paramp.launch_from_torch({"precision": {"mode": mode, "init_scale": 4.0}}):
            model = nn.Linear(1, 1, bias=False)
            nn.init.ones_(model.weight)
            engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=1e-4), loss)
            for _ in range(20):
                engine.forward_backward(torch.ones(1, 1), torch.ones(1, 1))
                assert engine.step().stepped
                engine.zero_grad()
            assert engine.full_state_dict()["weight"].item() == pytest.approx(expected, abs=1e-6), mode
            assert (engine.module.weight.item() < 1) == (mode == "16-naive")
