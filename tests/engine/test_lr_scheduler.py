"""The learning-rate scheduler across a checkpoint."""

import copy

import pytest
import torch

import paramp


def start():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine, _, _, scheduler = paramp.initialize(model, optimizer, torch.nn.functional.mse_loss, lr_scheduler=schedule)
    return engine, scheduler


def train_step(engine):
    x = torch.ones(2, 4)
    engine.forward_backward(x, x)
    engine.step()
    engine.zero_grad()


@pytest.mark.parametrize("steps_before_load", [0, 3])
@pytest.mark.parametrize("has_stepped", [True, False])
def test_a_step_before_the_save_counts_after_the_load_if_the_scheduler_had_not_followed_it(
    has_stepped, steps_before_load, tmp_path
):
    with paramp.launch_from_torch():
        engine, scheduler = start()
        train_step(engine)
        if not has_stepped:
            scheduler.step()
        engine.save(tmp_path / "saved")
        engine, scheduler = start()
        for _ in range(steps_before_load):  # what it has done before does not matter
            train_step(engine)
        engine.load(tmp_path / "saved")
        assert scheduler.get_last_lr() == [1.0 if has_stepped else 0.5]
        scheduler.step()
        assert scheduler.get_last_lr() == [0.5]
        scheduler.step()
        assert scheduler.get_last_lr() == [0.5]


def test_the_state_of_a_plain_scheduler_is_loaded_too():
    with paramp.launch_from_torch():
        engine, scheduler = start()
        train_step(engine)
        plain = torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 0.5)
        scheduler.load_state_dict(plain.state_dict() | {"last_epoch": 7})
        scheduler.step()
        assert scheduler.last_epoch == 7  # the engine has not stepped since
        train_step(engine)
        scheduler.step()
        assert scheduler.last_epoch == 8


def test_a_copy_has_the_attributes_of_the_wrapped_scheduler():
    with paramp.launch_from_torch():
        _, scheduler = start()
        assert copy.copy(scheduler).get_last_lr() == [1.0]
