"""What a checkpoint brings back beside weights and optimizer, and tensors that are unusual in one."""

import functools
import math

import pytest
import torch
from beside_plain import seeded
from pool import on_ranks, shared_folder
from small_engines import assert_same_tensors, engine_of, sgd, train_step
from torch import nn

import paramp


def start(make=nn.Linear, **options):
    return engine_of(seeded(make, 4, 4), **options)


def step(engine, value=1.0):
    return train_step(engine, torch.full((2, 4), value))


@pytest.mark.parametrize(
    ("scaling", "most", "before", "left"),
    [
        ({"init_scale": 4.0, "min_scale": 4.0, "max_scale": 4.0}, 5, 2, 3),
        ({"init_scale": 1.0, "min_scale": 1.0, "hysteresis": 1}, 50, 1, 1),  # the second at the floor is one too many
    ],
)
def test_skipped_steps_count_on_from_those_of_the_checkpoint(tmp_path, scaling, most, before, left):
    config = {"precision": {"mode": "16-naive"} | scaling, "max_skipped_in_a_row": most}
    with paramp.launch_from_torch(config):
        engine = start()
        step(engine)
        for _ in range(before):
            assert step(engine, math.nan).overflow
        engine.save(tmp_path / "saved")
        engine = start()
        engine.load(tmp_path / "saved")
        assert (engine.num_steps, engine.num_skipped, engine.num_skipped_in_a_row) == (1, before, before)
        for _ in range(left - 1):
            assert step(engine, math.nan).overflow
        with pytest.raises(paramp.TrainingDiverged):
            step(engine, math.nan)


class Empty(nn.Linear):
    """A layer with a parameter and buffers without elements, as of an adapter of rank 0."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.adapter = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.zeros(4, 0), requires_grad=False)
        self.register_buffer("seen", torch.zeros(0, dtype=torch.int64))

    def forward(self, x):
        return super().forward(x) + self.adapter.sum()


def two_layers(first=Empty):
    return start(lambda *sizes: nn.Sequential(first(*sizes), nn.Linear(*sizes)), optimizer=torch.optim.AdamW)


@on_ranks(2)
def test_tensors_without_elements_are_saved_and_loaded(world):
    layouts = {"data": 2}, {"data": 2, "zero": 1}, {"pipeline": 2}
    for index, parallel in enumerate(layouts):
        precision = {"mode": "16-naive", "init_scale": 256.0}
        with paramp.launch_from_torch({"parallel": parallel, "precision": precision, "masters": "remainder"}):
            folder = shared_folder()
            engine, other = two_layers(), two_layers()
            assert step(engine).stepped
            engine.save(folder / "saved")
            other.load(folder / "saved")
            assert torch.equal(other.full_state_dict()["1.weight"], engine.full_state_dict()["1.weight"])
            assert step(other).stepped
        with paramp.launch_from_torch({"parallel": layouts[index - 1]}):
            two_layers().load(folder / "saved")
            message = r"0\.adapter is in the checkpoint and not in .*, and 2 others"
            with pytest.raises(paramp.CheckpointError, match=message):
                two_layers(nn.Linear).load(folder / "saved")


@on_ranks(2)
def test_a_tensor_that_a_hook_adds_is_refused_at_the_save(world):
    """What could not be put back; buffers whose saved values a hook makes anew come back."""

    def add(module, state, prefix, metadata):
        state[f"{prefix}fingerprint"] = torch.ones(2)

    def widen(module, state, prefix, metadata):
        state[f"{prefix}running_mean"] = state[f"{prefix}running_mean"].double()

    def normed():
        engine = start(lambda *sizes: nn.Sequential(nn.Linear(*sizes), nn.BatchNorm1d(4)))
        engine.module[1].register_state_dict_post_hook(widen)
        return engine

    with paramp.launch_from_torch({}):
        folder = shared_folder()
        engine, other = normed(), normed()
        step(engine)
        engine.save(folder / "saved")
        other.load(folder / "saved")
        assert torch.equal(other.module[1].running_mean, engine.module[1].running_mean)
        assert engine.module[1].running_mean.any()
        if world.rank == 1:
            engine.module[0].register_state_dict_post_hook(add)
        with pytest.raises(paramp.CheckpointError, match=r"0\.fingerprint: state_dict\(\) has a tensor of that name"):
            engine.save(folder / "refused")
        engine.load(folder / "saved")
        assert not (folder / "refused").exists()


class Tied(nn.Module):
    """Two layers of one weight, registered in either order, so that it is first found under one name or the other."""

    def __init__(self, names, tied=True):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(4, 4, bias=False))
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x):
        return self.a(x) + self.b(x)


@pytest.mark.parametrize("optimizer", [functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.AdamW])
def test_a_tied_parameter_is_found_under_any_of_its_names(tmp_path, optimizer):
    with paramp.launch_from_torch({"ema": {"decay": 0.5}}):
        models = (functools.partial(Tied, names, tied) for names, tied in (("ab", True), ("ba", True), ("ab", False)))
        engine, other, untied = (start(lambda *_, make=make: make(), optimizer=optimizer) for make in models)
        for one, path in (engine, tmp_path / "saved"), (untied, tmp_path / "untied"):
            step(one)
            one.save(path)
        other.load(tmp_path / "saved", weights_only=True)
        assert torch.equal(engine.module.a.weight, other.module.a.weight)
        other.load(tmp_path / "saved")
        for _ in range(2):
            for one in (engine, other):
                step(one, 2.0)
            assert torch.equal(engine.module.a.weight, other.module.a.weight)
        assert_same_tensors(other.ema.full_state_dict(), engine.ema.full_state_dict())
        with pytest.raises(paramp.CheckpointError, match=r"^b\.weight and a\.weight are two parameters in the checkp"):
            other.load(tmp_path / "untied")
        assert torch.equal(engine.module.a.weight, other.module.a.weight)
        other.load(tmp_path / "untied", weights_only=True)
        assert torch.equal(other.module.a.weight, untied.module.b.weight)


def test_a_load_drops_the_gradients_of_a_window_that_was_begun(tmp_path):
    norms = []
    for begins in (False, True):
        with paramp.launch_from_torch({"gradient_accumulation": 2}):
            engine = start()
            engine.save(tmp_path / "saved")
            if begins:
                step(engine, 9.0)
            engine.load(tmp_path / "saved")
            norms.append([step(engine, value).grad_norm for value in (2.0, 3.0)])
    assert norms[0] == norms[1]


def test_a_name_is_that_of_one_tracked_thing(tmp_path):
    loader = torch.utils.data.DataLoader(torch.zeros(4, 1))
    with paramp.launch_from_torch({}):
        schedule = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
        engine, *_, scheduler = paramp.initialize(nn.Linear(4, 4), sgd, None, loader, loader, lr_scheduler=schedule)
        engine.track("mine", scheduler)
        for name in ("lr_scheduler", "train_dataloader", "test_dataloader", "mine"):
            with pytest.raises(paramp.ConfigError, match=f"track: the name '{name}' is that of the .* tracked already"):
                engine.track(name, engine.optimizer)
        engine.track("mine", scheduler)
        engine.track("mine", engine.optimizer, replace=True)
        engine.save(tmp_path / "saved")
    with paramp.launch_from_torch({}):
        engine = engine_of(nn.Linear(4, 4))
        engine.track("mnie", engine.optimizer)
        with pytest.warns(UserWarning, match="no state of 'mnie', which stays as it is; it has .*, 'mine'"):
            engine.load(tmp_path / "saved")
    for weights_only in (False, True):  # what is tracked after a load is restored, once
        with paramp.launch_from_torch({}):
            engine = engine_of(nn.Linear(4, 4))
            things = [sgd(nn.Linear(4, 4).parameters(), lr=lr) for lr in (2.0, 3.0)]
            engine.load(tmp_path / "saved", weights_only=weights_only)
            for thing in things:
                engine.track("mine", thing, replace=True)
            rates = [thing.param_groups[0]["lr"] for thing in things]
            assert rates == [2.0 if weights_only else engine.optimizer.param_groups[0]["lr"], 3.0]
