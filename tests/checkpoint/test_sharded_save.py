"""Checkpoints of an engine: what they hold beside the weights, what is refused, and errors that reach every rank."""

import functools
import json
import math
import threading
import time
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from beside_plain import seeded
from pool import on_ranks, shared_folder
from reference import batches
from small_engines import assert_same_tensors, each_raises, engine_of, gpt_engine, train_step
from torch import nn
from torch.ao.quantization import PerChannelMinMaxObserver
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.utils._python_dispatch import TorchDispatchMode

import paramp
from paramp.base.errors import CheckpointError
from paramp.checkpoint import sharded_save
from paramp.checkpoint.async_save import Saver
from paramp.checkpoint.chunks import whole_chunk
from paramp.checkpoint.convert import inspect
from paramp.checkpoint.safetensors_io import TensorFile


def engine_with(seed=0, make=torch.optim.AdamW, size=6, model=None):
    torch.manual_seed(seed)
    model = model or nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, size))
    return engine_of(model, optimizer=partial(make, lr=0.1))


def matrices_and_vectors(parameters, lr, *, order=1, count=4):
    """AdamW of the first ``count``, in two groups."""
    held = list(parameters)[:count]
    groups = [{"params": [one for one in held if one.ndim > 1]}, {"params": [one for one in held if one.ndim < 2]}]
    groups[1] |= {"lr": lr / 2, "weight_decay": 0.0}
    return torch.optim.AdamW(groups[::order], lr=lr)


def two_optimizers(parameters, lr, *, order=1):
    held = list(parameters)
    return [torch.optim.SGD(part, lr=lr) for part in (held[:2], held[2:])][::order]


def train(engine, *seeds):
    """A step for each of ``seeds``."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed + 10 * engine.context.dp.rank)
        train_step(engine, torch.randn(4, 6, generator=generator))
    return engine


@on_ranks(2, cuda=True)
def test_what_is_saved_beside_the_training_is_what_was_there_when_it_was_asked_for(world):
    """And leaving the context waits for what is being saved. torch's distributed checkpoints save and load it."""
    held, write, threads = threading.Event(), sharded_save.write, {*threading.enumerate()}

    def slow_write(*arguments):
        assert held.wait(60)
        write(*arguments)

    with (
        paramp.launch_from_torch({"precision": "16-naive"}),
        mock.patch.object(state_dict_saver, "save", wraps=state_dict_saver.save) as torchs_save,
        mock.patch.object(state_dict_loader, "load", wraps=state_dict_loader.load) as torchs_load,
    ):
        folder = shared_folder()
        engine = train(engine_with(), 0)
        with mock.patch.object(sharded_save, "write", slow_write):
            engine.save(folder / "saved", wait=False)
            expected = engine.full_state_dict()
            train(engine, 0, 1, 2)
            assert not (folder / "saved").exists()
            held.set()
            engine.finish_saving()
        assert not torch.equal(engine.full_state_dict()["0.weight"], expected["0.weight"])
        other = engine_with(1)
        other.load(folder / "saved")
        assert_same_tensors(other.full_state_dict(), expected)
        assert torchs_save.called
        assert torchs_load.called
        other.save(folder / "last", wait=False)
    assert inspect(folder / "last")["damage"] == []
    assert not [one for one in {*threading.enumerate()} - threads if one.name.startswith("paramp-save")]


class AsOnAGPU(TorchDispatchMode):
    """Copies that may be late are made when their stream is waited for."""

    def __init__(self):
        super().__init__()
        self._due = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten.copy_.default or args[2:] != (True,):
            return function(*args, **(kwargs or {}))
        self._due.append(args[:2])
        return args[0].fill_(math.nan)

    def synchronize(self):
        for target, source in self._due:
            target.copy_(source)


def test_late_copies_to_the_host_have_been_made_when_they_are_written():
    device, values = torch.device("cuda", 0), torch.arange(6.0)
    with AsOnAGPU() as stream, mock.patch.object(torch.cuda, "current_stream", {device: stream}.get):
        (staged,) = Saver(SimpleNamespace(device=device, num_engines=0))._stage([whole_chunk("weight", values)])
        written = staged.slices[0].values.tolist()
    assert written == values.tolist()


@on_ranks(2)
def test_the_slices_that_a_rank_has_of_one_tensor_are_copied_apart(world):
    """Three of one size, of a layer whose outputs are q, k and v."""
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}):
        folder = shared_folder()
        models = [nn.Sequential(seeded(nn.Linear, 6, 12, seed=seed)) for seed in (0, 1)]
        first, other = (engine_of(model, plan={"0": "packed_colwise_3"}) for model in models)
        first.save(folder / "saved", wait=False)
        first.finish_saving()
        other.load(folder / "saved")
        assert_same_tensors(other.full_state_dict(), first.full_state_dict())


def test_a_save_waits_for_the_one_before(tmp_path):
    """Whose values are in memory that it takes again."""
    write, order = sharded_save.write, []

    def slow_write(path, *arguments):
        time.sleep(0.3 if path.name == "first" else 0.0)
        write(path, *arguments)
        order.append(path.name)

    with paramp.launch_from_torch({}), mock.patch.object(sharded_save, "write", slow_write):
        engine = train(engine_with(), 0)
        expected = engine.full_state_dict()
        engine.save(tmp_path / "first", wait=False)
        train(engine, 1).save(tmp_path / "second", wait=False)
        engine.finish_saving()
        assert order == ["first", "second"]
        other = engine_with(1)
        other.load(tmp_path / "first")
        assert_same_tensors(other.full_state_dict(), expected)


@on_ranks(2)
def test_two_engines_save_at_once(world):
    """Whose threads are late on different ranks. The end of the context waits for both, also if one fails."""
    write, folder = sharded_save.write, None

    def slow_write(path, *arguments):
        time.sleep(0.3 if path.name in ("ab"[world.rank], "late") else 0.0)
        write(path, *arguments)

    def save_both():
        nonlocal folder
        with paramp.launch_from_torch({}):
            folder, first, second = shared_folder(), engine_with(0), engine_with(1, size=8)
            for _ in range(2):
                first.save(folder / "a", wait=False)
                second.save(folder / "b", wait=False)
            first.save(folder / "late", wait=False)
            second.save(folder / "last", wait=False, then=lambda: [][0])

    with mock.patch.object(sharded_save, "write", slow_write):
        each_raises(CheckpointError, {"the checkpoint was written, but then: IndexError": save_both})
    assert [inspect(folder / name)["damage"] for name in ("a", "b", "late", "last")] == [[]] * 4


@pytest.mark.parametrize("precision", ["16-naive", "bf16-naive"])
@pytest.mark.parametrize(("saved", "loaded"), [("full", "remainder"), ("remainder", "full")])
def test_masters_are_loaded_into_the_other_way_to_keep_them(saved, loaded, precision, tmp_path):
    with paramp.launch_from_torch({"precision": precision, "masters": saved}):
        engine = train(engine_with(), 0, 1)
        engine.save(tmp_path / "saved")
        expected = engine.full_state_dict()
    with paramp.launch_from_torch({"precision": precision, "masters": loaded}):
        other = engine_with(1)
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


# ------------------------------------------------------------------------------------------------ what comes back


class Odd(nn.Module):
    """Untrained tensors whose elements do not lie in order, or are one; statistics, also of a size that the first batch
    gives them; and a frozen layer."""

    def __init__(self, value):
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.observer = PerChannelMinMaxObserver()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.turned = nn.Parameter(torch.full((4, 8), value).cumsum(0).t(), requires_grad=False)
        self.register_buffer("image", torch.full((1, 2, 3, 3), value).cumsum(1).to(memory_format=torch.channels_last))
        self.register_buffer("spread", torch.full((4, 1), value).expand(4, 8))

    def forward(self, x):
        return self.inner(self.norm(self.observer(self.frozen(x))))


@on_ranks(2, cuda=True)
def test_untrained_tensors_come_back_on_each_data_rank(world):
    with paramp.launch_from_torch({"precision": "O2"}):
        folder = shared_folder()
        engine = train(engine_with(model=Odd(1.0)), 0, 1, 2)
        expected = {name: value.clone() for name, value in engine.module.state_dict().items()}
        means = [torch.empty_like(expected["norm.running_mean"]) for _ in range(2)]
        torch.distributed.all_gather(means, expected["norm.running_mean"])
        assert not torch.equal(*means)
        engine.save(folder / "saved")
        other = engine_with(1, model=Odd(2.0))
        other.module.spread = other.module.spread.new_full((4, 1), 2.0).expand(4, 8)  # which cannot be written to
        other.load(folder / "saved")
        assert_same_tensors(other.module.state_dict(), expected)


class CountsItself(torch.optim.SGD):
    """Keeps a number of Python's, on which its steps depend."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                parameter.data.add_(parameter.grad, alpha=-group["lr"] * 0.999 ** state["count"])


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.Rprop, torch.optim.ASGD, CountsItself, "sometimes"])
@pytest.mark.parametrize("before", [0, 2])
def test_state_that_does_not_begin_at_zero(tmp_path, make, before):
    """Also into an engine that has other state already, and of weights that were stepped less often than others."""
    with paramp.launch_from_torch({}):

        def start(seed):
            return engine_with(seed, model=Sometimes()) if make == "sometimes" else engine_with(seed, make)

        engine = train(start(0), *range(before))
        engine.save(tmp_path / "saved")
        others = train(start(1), 5, 6, 7), start(2)
        expected = train(engine, 0, 1).full_state_dict()
        for other in others:
            other.load(tmp_path / "saved")
            assert_same_tensors(train(other, 0, 1).full_state_dict(), expected)


class Sometimes(nn.Module):
    """A layer that every second step leaves out, so that its weights have been stepped less often than others."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return self.always(x) + (self.sometimes(x) if self.count.item() % 2 else 0.0)


FIXED = {"mode": "16-mixed", "init_scale": 8.0, "min_scale": 8.0, "max_scale": 8.0}


@pytest.mark.parametrize(
    ("saved", "loaded", "scale"),
    [
        *(("16-naive", "O3", 1.0), ("O3", "16-mixed", 65536.0), (FIXED, "16-mixed", 65536.0), ("16-mixed", FIXED, 8.0)),
        ("16-mixed", {"mode": "16-naive", "init_scale": 1024.0, "max_scale": 1024.0}, 1024.0),
        (FIXED | {"max_scale": 16.0}, {"mode": "16-naive", "init_scale": 64.0, "min_scale": 64.0}, 64.0),
    ],
)
def test_a_scaler_keeps_its_modes_settings(tmp_path, saved, loaded, scale):
    with paramp.launch_from_torch({"precision": saved}):
        engine_with(make=torch.optim.SGD).save(tmp_path / "saved")
    with paramp.launch_from_torch({"precision": loaded}):
        engine = engine_with(make=torch.optim.SGD)
        before = engine.scaler.state_dict()
        engine.load(tmp_path / "saved")
        assert engine.scaler.state_dict() == before
        assert engine.scaler.get_scale() == scale


@on_ranks(2)
def test_elements_that_several_ranks_hold_are_written_once(world):
    for name, parallel in enumerate(({"data": 2}, {"data": 2, "zero": 1}, {"tensor": 2}, {"pipeline": 2})):
        with paramp.launch_from_torch({"parallel": parallel, "precision": "16-mixed"}):
            path = shared_folder() / str(name)
            engine = gpt_engine(num_layers=2)
            train_step(engine, *next(batches(1)))
            engine.save(path)
        header = json.loads((path / "checkpoint.json").read_text())
        names = [name for name in header["tensors"] if not name.startswith("random.")]
        assert any("exp_avg" in name for name in names)
        for name in names:
            stored = header["tensors"][name]
            written = sum(math.prod(sizes) for _, sizes, *_ in stored["chunks"])
            assert written == math.prod(stored["shape"]), (parallel, name)
        in_files = [shape for file in path.glob("*.safetensors") for _, shape in TensorFile(file).shapes.values()]
        in_header = [sizes for stored in header["tensors"].values() for _, sizes, *_ in stored["chunks"]]
        assert sum(map(math.prod, in_files)) == sum(map(math.prod, in_header)), parallel


# ----------------------------------------------------------------------------------------------- what is refused


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"steps": 5}

    def set_extra_state(self, state):
        raise AssertionError


class Tracked:
    def __init__(self, state=None, error=None):
        self.state, self.error = state, error

    def state_dict(self):
        return {"a": [][0]} if self.error == "save" else self.state

    def load_state_dict(self, state):
        if self.error == "load":
            raise ValueError("not this")


@on_ranks(2)
def test_what_cannot_be_saved_or_loaded_is_an_error_on_every_rank(world):
    with paramp.launch_from_torch({"gradient_accumulation": 2}):
        path, mine = shared_folder() / "saved", world.rank == 1
        engine = engine_with()
        engine.save(path)

        engine_with(make=matrices_and_vectors).save(path.with_name("groups"))
        engine_with(make=two_optimizers).save(path.with_name("optimizers"))

        def load(name=path.name, **options):
            return lambda: engine_with(**options).load(path.with_name(name))

        def save_with(tracked, **options):
            engine.track("thing", tracked, replace=True)
            return engine.save(path, **options)

        def save_without_memory():
            with mock.patch.object(Saver, "_copied", side_effect=MemoryError("full")) if mine else nullcontext():
                save_with(Tracked({}), wait=False)

        def save_in_a_window():
            train(engine, 0)
            try:
                engine.save(path)
            finally:
                train(engine, 0)

        longer = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        shorter = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        extra, amsgrad = nn.Sequential(Extra(6, 6)), functools.partial(torch.optim.AdamW, amsgrad=True)
        swapped, swapped_optimizers = (partial(make, order=-1) for make in (matrices_and_vectors, two_optimizers))
        each_raises(
            CheckpointError,
            {
                r"1\.bias of the model is missing in the checkpoint, and 3 others": load(model=longer),
                r"2\.bias is in the checkpoint and not in the model, and 1 others": load(model=shorter),
                r"weight has the shape \(6, 6\) in .*, expected \(8, 8\)": load(size=8),
                "optimizer: got SGD, expected the checkpoint's AdamW": load(make=torch.optim.SGD),
                "got amsgrad=True, expected the checkpoint's False": load(make=amsgrad),
                r"got 0\.weight in param group 1, expected param group 0 as in": load("groups", make=swapped),
                r"0\.weight in param group 0 of optimizer 1, expected param group 0 of optimizer 0 as": (
                    load("optimizers", make=swapped_optimizers)
                ),
                r"Extra has a get_extra_state\(\)": lambda: engine_with(model=extra).save(path),
                "in an accumulation window, after 1 of 2 calls of step": save_in_a_window,
                r"path: got '.*/0' on rank 0 and '.*/1' on rank 1": lambda: engine.save(path.parent / str(world.rank)),
                r"checkpoint\.tracked\.thing\.hook: got builtin_f": lambda: save_with(Tracked({"hook": print})),
                "save: IndexError: list index out": lambda: save_with(Tracked({}, "save" if mine else None)),
                "save: IndexError: list .* of": lambda: save_with(Tracked({}, "save" if mine else None), wait=False),
                "save: MemoryError: full": save_without_memory,
            },
        )
        save_with(Tracked({"a": 1}, "load" if mine else None), wait=False)
        each_raises(ValueError if mine else CheckpointError, {"not this": lambda: engine.load(path)})


@on_ranks(2)
def test_an_optimizer_that_holds_fewer_parameters_leaves_the_rest(world):
    """Those that it holds are in the groups of the checkpoint."""
    with paramp.launch_from_torch({"parallel": {"zero": 1}}):
        folder = shared_folder()
        engine = train(engine_with(make=matrices_and_vectors), 0)
        engine.save(folder / "saved")
        saved = {name: value.clone() for name, value in engine.full_state_dict().items()}
        part = engine_with(make=partial(matrices_and_vectors, count=2))
        part.load(folder / "saved")
        assert train(part, 1).num_steps == 2
        actual, went_on, (held, rest) = part.full_state_dict(), train(engine, 1).full_state_dict(), ("0.", "2.")
        for name in saved:  # AdamW's second step differs with other moments
            expected = went_on if name.startswith(held) else saved
            assert torch.equal(actual[name], expected[name]), name
        assert not any(torch.equal(went_on[name], saved[name]) for name in saved if name.startswith(rest))
