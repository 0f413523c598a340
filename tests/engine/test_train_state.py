"""What a checkpoint brings back beside weights and optimizer: counters, the unit of counts, the scheduler's place."""

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks, shared_folder

import paramp
from paramp.base.errors import CheckpointError
from paramp.engine.checkpoint_manager import Checkpoints, find

NAN = float("nan")


def start(criterion=F.mse_loss, make=torch.nn.Linear, optimizer=torch.optim.SGD):
    torch.manual_seed(0)
    model = make(4, 4)
    return paramp.initialize(
        model,
        optimizer(model.parameters(), lr=0.125),
        criterion,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )


def step(engine, value=1.0):
    x = torch.full((2, 4), value)
    engine.zero_grad()
    engine.forward_backward(x, x)
    return engine.step()


@pytest.mark.parametrize("before", [0, 5])
def test_the_scheduler_goes_on_with_the_steps_of_the_checkpoint(tmp_path, before):
    """Neither ahead of them, with the engine's former steps, nor behind."""
    with paramp.launch_from_torch({}):
        engine, _, _, scheduler = start()
        for _ in range(3):
            step(engine)
            scheduler.step()
        engine.save(tmp_path / "saved")
        engine, _, _, scheduler = start()
        for _ in range(before):
            step(engine)
            scheduler.step()
        engine.load(tmp_path / "saved")
        assert scheduler.get_last_lr() == [0.125 / 8]
        assert step(engine, NAN).overflow
        scheduler.step()
        assert scheduler.get_last_lr() == [0.125 / 8]
        assert step(engine).stepped
        scheduler.step()
        assert scheduler.get_last_lr() == [0.125 / 16]


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
        engine, *_ = start()
        step(engine)
        for _ in range(before):
            assert step(engine, NAN).overflow
        engine.save(tmp_path / "saved")
        engine, *_ = start()
        engine.load(tmp_path / "saved")
        assert (engine.num_steps, engine.num_skipped, engine.num_skipped_in_a_row) == (1, before, before)
        for _ in range(left - 1):
            assert step(engine, NAN).overflow
        with pytest.raises(paramp.TrainingDiverged):
            step(engine, NAN)


def test_the_unit_of_counts_is_that_of_the_checkpoint(tmp_path):
    """It scales the gradients until the step, and so decides where half precision overflows."""

    def total(output, target):
        return F.mse_loss(output, target, reduction="sum"), target.numel()

    def gradient(engine, rows):
        x = torch.ones(rows, 4)
        engine.zero_grad()
        engine.forward_backward(x, 2 * x)
        return engine.module.weight.grad.clone()

    with paramp.launch_from_torch({"precision": {"mode": "16-naive", "init_scale": 256.0}}):
        engine, *_ = start(total)
        gradient(engine, 2)
        engine.step()
        engine.save(tmp_path / "saved")
        expected = gradient(engine, 64)
        assert expected.isfinite().all()
        other, *_ = start(total)
        other.load(tmp_path / "saved")
        assert torch.equal(gradient(other, 64), expected)


class Empty(torch.nn.Linear):
    """A layer with a parameter and buffers without elements, as of an adapter of rank 0."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.adapter = torch.nn.Parameter(torch.zeros(0, 4))
        self.frozen = torch.nn.Parameter(torch.zeros(4, 0), requires_grad=False)
        self.register_buffer("seen", torch.zeros(0, dtype=torch.int64))

    def forward(self, x):
        return super().forward(x) + self.adapter.sum()


def two_layers(first):
    return lambda *sizes: torch.nn.Sequential(first(*sizes), torch.nn.Linear(*sizes))


@on_ranks(2)
def test_tensors_without_elements_are_saved_and_loaded(world):
    layouts = {"data": 2}, {"data": 2, "zero": 1}, {"pipeline": 2}
    for index, parallel in enumerate(layouts):
        precision = {"mode": "16-naive", "init_scale": 256.0}
        with paramp.launch_from_torch({"parallel": parallel, "precision": precision, "masters": "remainder"}):
            folder = shared_folder()
            engine, *_ = start(make=two_layers(Empty), optimizer=torch.optim.AdamW)
            assert step(engine).stepped
            engine.save(folder / "saved")
            other, *_ = start(make=two_layers(Empty), optimizer=torch.optim.AdamW)
            other.load(folder / "saved")
            assert torch.equal(other.full_state_dict()["1.weight"], engine.full_state_dict()["1.weight"])
            assert step(other).stepped
        with paramp.launch_from_torch({"parallel": layouts[index - 1]}):
            other, *_ = start(make=two_layers(Empty), optimizer=torch.optim.AdamW)
            other.load(folder / "saved")
            full, *_ = start(make=two_layers(torch.nn.Linear), optimizer=torch.optim.AdamW)
            with pytest.raises(CheckpointError, match=r"0\.adapter is in the checkpoint and not in .*, and 2 others"):
                full.load(folder / "saved")


@on_ranks(2)
def test_a_tensor_that_a_hook_adds_is_refused_at_the_save(world):
    """What could not be put back; buffers whose saved values a hook makes anew come back."""

    def add(module, state, prefix, metadata):
        state[f"{prefix}fingerprint"] = torch.ones(2)

    def widen(module, state, prefix, metadata):
        state[f"{prefix}running_mean"] = state[f"{prefix}running_mean"].double()

    def make(*sizes):
        return torch.nn.Sequential(torch.nn.Linear(*sizes), torch.nn.BatchNorm1d(sizes[1]))

    with paramp.launch_from_torch({}) as context:
        folder = shared_folder()
        engine, *_ = start(make=make)
        step(engine)
        engine.module[1].register_state_dict_post_hook(widen)
        engine.save(folder / "saved")
        other, *_ = start(make=make)
        other.module[1].register_state_dict_post_hook(widen)
        other.load(folder / "saved")
        assert torch.equal(other.module[1].running_mean, engine.module[1].running_mean)
        assert engine.module[1].running_mean.any()
        if context.rank == 1:
            engine.module[0].register_state_dict_post_hook(add)
        with pytest.raises(CheckpointError, match=r"0\.fingerprint: state_dict\(\) has a tensor of that name"):
            engine.save(folder / "refused")
        engine.load(folder / "saved")
        assert not (folder / "refused").exists()


def test_the_folder_of_a_run_may_be_given_as_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with paramp.launch_from_torch({}):
        engine, *_ = start()
        checkpoints = Checkpoints("runs/a", every=1, keep_last=1)
        for number in (1, 2):
            checkpoints.save(engine, number, wait=True)
        newest = find("auto", "runs/a")
        assert newest is not None
        engine.load(newest)
    assert [path.name for path in (tmp_path / "runs" / "a").iterdir()] == ["step-00000002"]


class Tied(torch.nn.Module):
    """Two layers of one weight, registered in either order, so that it is first found under one name or the other."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            setattr(self, name, torch.nn.Linear(4, 4, bias=False))
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.a(x) + self.b(x)


def test_a_tied_parameter_is_found_under_any_of_its_names(tmp_path):
    weights = []
    with paramp.launch_from_torch({}):
        for names in ("ab", "ba"):
            engine, *_ = start(make=lambda *_, names=names: Tied(names))
            if names == "ba":
                engine.load(tmp_path / "saved", weights_only=True)
            else:
                step(engine)
                engine.save(tmp_path / "saved")
            weights.append(engine.module.a.weight.detach().clone())
    assert torch.equal(*weights)


def test_a_load_drops_the_gradients_of_a_window_that_was_begun(tmp_path):
    norms = []
    for begins in (False, True):
        with paramp.launch_from_torch({"gradient_accumulation": 2}):
            engine, *_ = start()
            engine.save(tmp_path / "saved")
            if begins:
                engine.forward_backward(torch.ones(2, 4), torch.zeros(2, 4))
                engine.step()
            engine.load(tmp_path / "saved")
            for value in (2.0, 3.0):
                engine.forward_backward(torch.full((2, 4), value), torch.zeros(2, 4))
                result = engine.step()
            norms.append(result.grad_norm)
    assert norms[0] == norms[1]
