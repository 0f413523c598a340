"""Checkpoints of an engine: what they hold beside the weights, what is refused, and errors that reach every rank."""

import functools
import json
import math
import random
import threading

import numpy as np
import pytest
import torch
from pool import on_ranks, shared_folder
from reference import batches, small_gpt

import paramp
from paramp.base.errors import CheckpointError
from paramp.checkpoint import dcp_storage
from paramp.checkpoint.open_checkpoint import problems


def linear_engine(seed=0, make=torch.optim.AdamW, size=6, model=None):
    torch.manual_seed(seed)
    model = model or torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.Tanh(), torch.nn.Linear(size, size))
    return paramp.initialize(model, make(model.parameters(), lr=0.1), torch.nn.functional.mse_loss)[0]


def step(engine, seed=0):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed + 10 * engine.context.dp.rank))
    engine.forward_backward(x, x)
    engine.step()
    engine.zero_grad()


@on_ranks(2, cuda=True)
def test_what_is_saved_beside_the_training_is_what_was_there_when_it_was_asked_for(world):
    held, write = threading.Event(), dcp_storage.write

    def slow_write(*arguments):
        assert held.wait(60)
        write(*arguments)

    with paramp.launch_from_torch({"precision": "16-naive"}):
        folder = shared_folder()
        engine = linear_engine()
        step(engine)
        dcp_storage.write = slow_write
        try:
            engine.save(folder / "saved", wait=False)
            expected = engine.full_state_dict()
            for seed in range(3):
                step(engine, seed)
            assert not (folder / "saved").exists()
            held.set()
            engine.finish_saving()
        finally:
            dcp_storage.write = write
        assert not torch.equal(engine.full_state_dict()["0.weight"], expected["0.weight"])
        other = linear_engine(1)
        other.load(folder / "saved")
        assert all(torch.equal(value, expected[name]) for name, value in other.full_state_dict().items())


@pytest.mark.parametrize("precision", ["16-naive", "bf16-naive"])
@pytest.mark.parametrize(("saved", "loaded"), [("full", "remainder"), ("remainder", "full")])
def test_masters_are_loaded_into_the_other_way_to_keep_them(saved, loaded, precision, tmp_path):
    with paramp.launch_from_torch({"precision": precision, "masters": saved}):
        engine = linear_engine()
        for seed in range(2):
            step(engine, seed)
        engine.save(tmp_path / "saved")
        expected = engine.full_state_dict()
    with paramp.launch_from_torch({"precision": precision, "masters": loaded}):
        other = linear_engine(1)
        other.load(tmp_path / "saved")
        found = other.full_state_dict()
        for name, value in expected.items():
            lost = 2.0**-16 if loaded == "remainder" else 0.0  # of a unit of the weight
            unit = torch.finfo(other.precision.weights).eps
            torch.testing.assert_close(found[name], value, rtol=lost * unit, atol=0)
            assert not torch.equal(value, value.to(other.precision.weights).float())
        for group, mine in zip(engine.optimizer.param_groups, other.optimizer.param_groups, strict=True):
            for one, two in zip(group["params"], mine["params"], strict=True):
                assert torch.equal(engine.optimizer.state[one]["exp_avg"], other.optimizer.state[two]["exp_avg"])


@on_ranks(2)
def test_leaving_the_context_waits_for_what_is_being_saved(world):
    with paramp.launch_from_torch({}):
        folder = shared_folder()
        linear_engine().save(folder / "saved", wait=False)
    assert problems(folder / "saved") == []


@on_ranks(2, cuda=True)
def test_running_statistics_and_frozen_weights_come_back_on_each_data_rank(world):
    def model():
        layers = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 6))
        layers[0].requires_grad_(False)
        return layers

    with paramp.launch_from_torch({"precision": "O2"}):
        folder = shared_folder()
        engine = linear_engine(model=model())
        for seed in range(3):
            step(engine, seed)
        expected = {name: value.clone() for name, value in engine.module.state_dict().items()}
        means = [torch.empty_like(expected["1.running_mean"]) for _ in range(2)]
        torch.distributed.all_gather(means, expected["1.running_mean"])
        assert not torch.equal(*means)
        engine.save(folder / "saved")
        other = linear_engine(1, model=model())
        other.load(folder / "saved")
        assert all(torch.equal(value, expected[name]) for name, value in other.module.state_dict().items())


@on_ranks(2)
def test_weights_alone_leave_the_rest(world):
    with paramp.launch_from_torch({"parallel": {"zero": 1}}):
        folder = shared_folder()
        engine = linear_engine()
        step(engine)
        engine.save(folder / "saved")
        other = linear_engine(1, make=torch.optim.SGD)
        with pytest.raises(CheckpointError, match="optimizer: got SGD, expected the checkpoint's AdamW"):
            other.load(folder / "saved")
        other.load(folder / "saved", weights_only=True)
        assert other.num_steps == 0
        weights = engine.full_state_dict()
        assert all(torch.equal(value, weights[name]) for name, value in other.full_state_dict().items())


@on_ranks(2)
def test_checkpoints_of_other_models_are_refused_everywhere(world):
    with paramp.launch_from_torch({"gradient_accumulation": 2}) as context:
        folder = shared_folder()
        engine = linear_engine()
        engine.save(folder / "saved")
        longer = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4)))
        with pytest.raises(CheckpointError, match=r"1\.bias of the model is missing in the checkpoint, and 3 others"):
            linear_engine(model=longer).load(folder / "saved")
        with pytest.raises(CheckpointError, match=r"2\.bias is in the checkpoint and not in the model, and 1 others"):
            linear_engine(model=torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh())).load(folder / "saved")
        with pytest.raises(CheckpointError, match=r"weight has the shape \(6, 6\) in .*, expected \(8, 8\)"):
            linear_engine(size=8).load(folder / "saved")
        step(engine)
        with pytest.raises(CheckpointError, match="in an accumulation window, after 1 of 2 calls of step"):
            engine.save(folder / "saved")
        odd = type("Odd", (), {"state_dict": lambda self: {"hook": print}, "load_state_dict": print})()
        engine.track("odd", odd)
        step(engine)
        with pytest.raises(CheckpointError, match=r"checkpoint\.tracked\.odd\.hook: got builtin_function_or_method"):
            engine.save(folder / "saved")
        assert context.world_size == 2


class Odd(torch.nn.Module):
    """Untrained tensors whose elements do not lie in order, or are one."""

    def __init__(self, value):
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)
        self.turned = torch.nn.Parameter(torch.full((4, 8), value).cumsum(0).t(), requires_grad=False)
        self.register_buffer("image", torch.full((1, 2, 3, 3), value).cumsum(1).to(memory_format=torch.channels_last))
        self.register_buffer("spread", torch.full((4, 1), value).expand(4, 8))

    def forward(self, x):
        return self.inner(x)


def test_untrained_tensors_of_any_memory_format_come_back(tmp_path):
    with paramp.launch_from_torch({}):
        engine = linear_engine(model=Odd(1.0))
        engine.save(tmp_path / "saved")
        other = linear_engine(model=Odd(2.0))
        other.load(tmp_path / "saved")
        expected, found = engine.module.state_dict(), other.module.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


class CountsItself(torch.optim.SGD):
    """Keeps a number of Python's, on which its steps depend."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                parameter.data.add_(parameter.grad, alpha=-group["lr"] * 0.999 ** state["count"])


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.Rprop, torch.optim.ASGD, CountsItself])
@pytest.mark.parametrize("before", [0, 2])
def test_state_that_does_not_begin_at_zero(tmp_path, make, before):
    """Also into an engine that has other state already."""
    with paramp.launch_from_torch({}):
        engine, other = linear_engine(make=make), linear_engine(1, make=make)
        for seed in range(before):
            step(engine, seed)
        engine.save(tmp_path / "saved")
        for seed in range(3):
            step(other, 5 + seed)
        fresh = linear_engine(2, make=make)
        for loaded in (other, fresh):
            loaded.load(tmp_path / "saved")
        for seed in range(2):
            for one in (engine, other, fresh):
                step(one, seed)
        expected = engine.full_state_dict()
        for one in (other, fresh):
            assert all(torch.equal(value, expected[name]) for name, value in one.full_state_dict().items())


def test_an_optimizers_state_follows_the_dtype_of_another_mode(tmp_path):
    with paramp.launch_from_torch({"precision": "bf16-naive"}):
        engine = linear_engine(make=torch.optim.NAdam)
        step(engine)
        engine.save(tmp_path / "saved")
    with paramp.launch_from_torch({"precision": "bf16-true"}):
        other = linear_engine(make=torch.optim.NAdam)
        other.load(tmp_path / "saved")
        step(other)
        assert other.num_steps == 2


@pytest.mark.parametrize(("saved", "loaded", "scale"), [("16-naive", "O3", 1.0), ("O3", "16-mixed", 65536.0)])
def test_a_scaler_keeps_its_modes_settings(tmp_path, saved, loaded, scale):
    with paramp.launch_from_torch({"precision": saved}):
        linear_engine(make=torch.optim.SGD).save(tmp_path / "saved")
    with paramp.launch_from_torch({"precision": loaded}):
        engine = linear_engine(make=torch.optim.SGD)
        before = engine.scaler.state_dict()
        engine.load(tmp_path / "saved")
        assert engine.scaler.state_dict() == before
        assert engine.scaler.get_scale() == scale


def test_what_an_optimizer_does_not_hold_has_no_state(tmp_path):
    with paramp.launch_from_torch({}):
        engine = linear_engine()
        step(engine)
        engine.save(tmp_path / "saved")
        other = linear_engine(make=lambda parameters, lr: torch.optim.AdamW(list(parameters)[:2], lr=lr))
        other.load(tmp_path / "saved")
        step(other)
        with pytest.raises(CheckpointError, match="got amsgrad=True, expected the checkpoint's False"):
            linear_engine(make=functools.partial(torch.optim.AdamW, amsgrad=True)).load(tmp_path / "saved")


class Extra(torch.nn.Linear):
    def get_extra_state(self):
        return {"steps": 5}

    def set_extra_state(self, state):
        raise AssertionError


def test_a_modules_extra_state_is_refused_rather_than_lost(tmp_path):
    with paramp.launch_from_torch({}), pytest.raises(CheckpointError, match=r"Extra has a get_extra_state\(\)"):
        linear_engine(model=torch.nn.Sequential(Extra(6, 6))).save(tmp_path / "saved")


@on_ranks(2)
def test_what_fails_on_one_rank_fails_on_all(world):
    class Tracked:
        def __init__(self, fails):
            self.fails = fails

        def state_dict(self):
            return {"a": [][0]} if self.fails == "save" else {"a": 1}

        def load_state_dict(self, state):
            if self.fails == "load":
                raise ValueError("not this")

    with paramp.launch_from_torch({}) as context:
        folder = shared_folder()
        engine = linear_engine()
        mine = context.rank == 1
        engine.track("thing", Tracked("save" if mine else ""))
        with pytest.raises(CheckpointError, match="save: IndexError: list index out of range"):
            engine.save(folder / "saved")
        engine.track("thing", Tracked("load" if mine else ""))
        engine.save(folder / "saved")
        with pytest.raises(ValueError if mine else CheckpointError, match="not this"):
            engine.load(folder / "saved")
        with pytest.raises(CheckpointError, match=r"path: got '.*/0' on rank 0 and '.*/1' on rank 1"):
            engine.save(folder / str(context.rank))


class Sometimes(torch.nn.Module):
    """A layer that some steps leave out, so that its weights have been stepped less often than others."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.use = True

    def forward(self, x):
        return self.always(x) + (self.sometimes(x) if self.use else 0.0)


def test_weights_that_were_stepped_less_often_stay_so(tmp_path):
    def go_on(engine):
        for seed in range(3):
            step(engine, seed)
        return engine.full_state_dict()

    with paramp.launch_from_torch({}):
        engine = linear_engine(model=Sometimes())
        for seed, use in enumerate((True, False, False, True)):
            engine.module.use = use
            step(engine, seed)
        engine.save(tmp_path / "saved")
        expected = go_on(engine)
        other = linear_engine(model=Sometimes())
        other.load(tmp_path / "saved")
        assert all(torch.equal(value, expected[name]) for name, value in go_on(other).items())


@on_ranks(2)
def test_random_streams_come_back_in_the_same_layout_only(world):
    """In another one torch's is seeded from the seed and the step, and Python's and NumPy's go on."""

    def draw():
        return torch.rand(()).item(), random.random(), np.random.random()

    folder, drawn = shared_folder(), {}
    for layout in ({"data": 2}, {"pipeline": 2}):
        with paramp.launch_from_torch({"parallel": layout}):
            engine = linear_engine()
            for source in (torch.manual_seed, random.seed, np.random.seed):
                source(world.rank)
            if layout == {"data": 2}:
                engine.save(folder / "saved")
                expected = draw()
                draw()
                engine.load(folder / "saved")
                assert draw() == expected
            else:
                for repeated in range(2):
                    engine.load(folder / "saved")
                    drawn[repeated] = draw()
    first, second = drawn.values()
    random.seed(world.rank)
    np.random.seed(world.rank)
    assert first[1:] == (random.random(), np.random.random())
    assert second[1:] == (random.random(), np.random.random())
    assert first[0] == second[0]


@on_ranks(2)
def test_elements_that_several_ranks_hold_are_written_once(world):
    for name, parallel in enumerate(({"data": 2}, {"data": 2, "zero": 1}, {"tensor": 2}, {"pipeline": 2})):
        with paramp.launch_from_torch({"parallel": parallel, "precision": "16-mixed"}):
            path = shared_folder() / str(name)
            model = small_gpt(num_layers=2)
            engine, *_ = paramp.initialize(model, torch.optim.AdamW(model.parameters()), model.loss)
            engine.forward_backward(*next(batches(1)))
            engine.step()
            engine.save(path)
        header = json.loads((path / "checkpoint.json").read_text())
        names = [name for name in header["tensors"] if not name.startswith("random.")]
        assert any("exp_avg" in name for name in names)
        for name in names:
            stored = header["tensors"][name]
            written = sum(math.prod(sizes) for _, sizes, *_ in stored["chunks"])
            assert written == math.prod(stored["shape"]), (parallel, name)
