"""The learning-rate scheduler follows the steps that were made, also across a checkpoint."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from small_engines import train_step
from torch.optim.lr_scheduler import ExponentialLR

import paramp


def start():
    """Everything is built by callables."""
    engine, _, _, scheduler = paramp.initialize(
        lambda: torch.nn.Linear(4, 4),
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        F.mse_loss,
        lr_scheduler=lambda optimizer: ExponentialLR(optimizer, 0.5),
    )
    return engine, scheduler


def step(engine, scheduler=None, value=1.0):
    result = train_step(engine, torch.full((2, 4), value))
    if scheduler is not None:
        scheduler.step()
    return result


def test_the_scheduler_stands_still_while_the_optimizer_does():
    """In windows that step, overflow, and step."""
    with paramp.launch_from_torch({"precision": "16-mixed", "gradient_accumulation": 2}):
        engine, scheduler = start()
        rates = []
        for value in (1.0, 1.0, math.inf, 1.0, 1.0, 1.0):
            step(engine, scheduler, value)
            rates += scheduler.get_last_lr()
        assert rates == [1.0, 0.5, 0.5, 0.5, 0.5, 0.25]


SCHEDULES = {  # what steps after each batch, and whether that is a mistake
    "torch's": (lambda scheduler, result: scheduler.step(), True),
    "torch's, which waits": (lambda scheduler, result: scheduler.step() if result.stepped else None, False),
    "torch's, at overflows only": (lambda scheduler, result: scheduler.step() if result.overflow else None, False),
    "by hand": (lambda scheduler, result: None, False),
}


@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_does_not_wait_for_skipped_steps_is_warned_of_once(name, kind, recwarn):
    move, is_wrong = SCHEDULES[name]
    with paramp.launch_from_torch({"precision": "16-mixed"}):
        engine, *_ = paramp.initialize(torch.nn.Linear(4, 4), lambda p: torch.optim.SGD(p, lr=kind(0.1)), F.mse_loss)
        scheduler = None if name == "by hand" else ExponentialLR(engine.optimizer, 0.5)
        for value in (0.1, 0.1, math.inf, 0.1, math.inf, 0.1):
            result = step(engine, value=value)
            if scheduler is None:
                engine.optimizer.param_groups[0]["lr"] /= 2
            else:
                move(scheduler, result)
        texts = [str(one.message) for one in recwarn if "the learning rate has changed" in str(one.message)]
        assert len(texts) == is_wrong


@pytest.mark.parametrize("steps_before_load", [0, 5])
@pytest.mark.parametrize("has_followed", [True, False])
def test_the_schedule_goes_on_with_the_steps_of_the_checkpoint(has_followed, steps_before_load, tmp_path):
    """Whatever was done before the load; a step that the scheduler had not followed at the save counts after it."""
    with paramp.launch_from_torch():
        engine, scheduler = start()
        step(engine, scheduler)
        step(engine, scheduler if has_followed else None)
        engine.save(tmp_path / "saved")
        engine, scheduler = start()
        for _ in range(steps_before_load):
            step(engine, scheduler)
        engine.load(tmp_path / "saved")
        assert scheduler.get_last_lr() == [0.25 if has_followed else 0.5]
        for _ in range(2):
            scheduler.step()
            assert scheduler.get_last_lr() == [0.25]
        assert step(engine, scheduler, math.nan).overflow
        assert scheduler.get_last_lr() == [0.25]
        assert step(engine, scheduler).stepped
        assert scheduler.get_last_lr() == [0.125]


def test_the_state_of_a_plain_scheduler_is_loaded_too():
    with paramp.launch_from_torch():
        engine, scheduler = start()
        step(engine)
        plain = ExponentialLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 0.5)
        scheduler.load_state_dict(plain.state_dict() | {"last_epoch": 7})
        scheduler.step()
        assert scheduler.last_epoch == 7  # the engine has not stepped since
        step(engine, scheduler)
        assert copy.copy(scheduler).last_epoch == 8
        scheduler.gamma, scheduler.own = 0.25, 1
        rate = scheduler.get_last_lr()[0]
        step(engine, scheduler)
        assert scheduler.get_last_lr() == [rate / 4]
        assert (scheduler.own, "own" in scheduler.state_dict()) == (1, False)
