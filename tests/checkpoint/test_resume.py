"""Checkpoints: the run that resumes against the run that never stopped, in the same layout and in others."""

import functools

import pytest
import torch
from families import cases, family
from layouts import sized_layouts
from matrix import from_small_scale
from pool import run_on_ranks
from reference import ROUNDING, UNITS_LOSS, batches, local, small_gpt
from small_engines import assert_same_tensors, engine_of, own_part, train_step
from torch import nn

import paramp

TWO_STAGES = {"size": 2, "schedule": "interleaved-1f1b", "microbatches": 4}
LAYOUTS = sized_layouts("1, tp4, pp4, pp2·tp2, dp2·tp2, dp4 + zero1, dp2·tp2 + zero1, pp2·dp2 + zero1")
LAYOUTS |= sized_layouts("hsdp2x2, fsdp2·tp2, cp2·tp2, fsdp2·pp2")
LAYOUTS["pp2·tp2, two stages a rank"] = 4, {"pipeline": TWO_STAGES, "tensor": 2}
BEFORE, AFTER = 3, 5


def train(engine, scheduler, steps, first=0, overflow_at=None):
    """Losses, the norms of the gradients, scales and learning rates."""
    seen = []
    for step, batch in enumerate(list(batches(first + steps))[first:], start=first):
        engine.forward_backward(*own_part(engine.context, *batch), return_loss=False)
        if step == overflow_at and engine.context.rank == 0:
            local(next(engine.module.parameters()).grad).view(-1)[0] = float("inf")
        result = engine.step()
        scheduler.step()
        seen.append((result.loss, result.grad_norm, result.loss_scale, scheduler.get_last_lr()[0]))
    return seen


def run(world, layout, path, precision, load, wait=True, optimizer="AdamW", masters=None, **changes):
    """What follows a save in the middle of a run, or with ``load`` a load: steps, weights, scaler and counts.

    Last, the scaler at the save or after the load.
    """
    config = {"precision": from_small_scale(precision), "clip_grad_norm": 1.0, "masters": masters}
    with paramp.launch_from_torch({"parallel": LAYOUTS[layout][1], **config}):
        model = small_gpt(**changes)
        engine, _, _, scheduler = paramp.initialize(
            model,
            functools.partial(getattr(torch.optim, optimizer), lr=1e-2),
            model.loss,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        )
        if load:
            train(engine, scheduler, 1, first=20)  # what it has done before does not matter
            engine.load(path)
        else:
            train(engine, scheduler, BEFORE, overflow_at=1)
            engine.save(path, wait=wait)
        scaler = engine.scaler.state_dict()
        after = train(engine, scheduler, AFTER, first=BEFORE)
        counts = (engine.num_steps, engine.num_skipped)
        return after, engine.full_state_dict(), engine.scaler.state_dict(), counts, scaler


def run_both(world, **options):
    """One body, as torch's decisions about sharding are kept until its end."""
    return run(world, load=False, **options), run(world, load=True, **options)


def on(layout, body, path, **options):
    options |= {"layout": layout, "path": str(path / "saved")}
    return run_on_ranks(LAYOUTS[layout][0], __name__, body, options)[0]


RESUMED = [
    ("1", {"precision": "32-true", "wait": False}),
    ("pp2·tp2", {"precision": "16-mixed", "dropout": 0.2, "wait": False}),
    ("1", {"precision": "16-true", "optimizer": "SGD"}),
    ("fsdp2·tp2", {"precision": "16-naive", "wait": False}),
    ("dp2·tp2", {"precision": "16-naive", "optimizer": "RAdam"}),
    ("dp4 + zero1", {"precision": "bf16-naive", "masters": "remainder"}),
    ("dp2·tp2 + zero1", {"precision": "16-naive", "masters": "remainder"}),
    ("hsdp2x2", {"precision": "16-mixed", "dropout": 0.2}),
    ("fsdp2·pp2", {"precision": "bf16-true", "dropout": 0.2}),
    ("cp2·tp2", {"precision": "16-mixed", "dropout": 0.2}),
]


@family
@pytest.mark.parametrize(("layout", "options"), cases("resumed", RESUMED, RESUMED[1:3], 1))
def test_a_resumed_run_goes_on_bit_by_bit(tmp_path, layout, options):
    went_on, resumed = on(layout, "run_both", tmp_path, **options)
    assert resumed[0] == went_on[0]
    assert_same_tensors(resumed[1], went_on[1])
    assert resumed[2:4] == went_on[2:4]
    assert resumed[3] == (BEFORE + AFTER - 1, 1)


class Counting(torch.optim.SGD):
    """It counts its steps in an attribute, and so does the optimizer in it."""

    def __init__(self, parameters, option=1.0, outer=True):
        super().__init__(parameters, lr=0.1)
        self.count, self.option, self.is_set_up = 0, option, False
        self.inner = Counting(self.param_groups, option, outer=False) if outer else None

    def step(self, closure=None):
        self.count, self.is_set_up = self.count + 1, True
        if self.inner:
            self.inner.step()
        else:
            super().step()


def test_what_an_optimizer_counts_in_an_attribute_goes_on(tmp_path):
    """Its options stay as the run has them, and flags of what a process has set up."""
    with paramp.launch_from_torch():
        engine = engine_of(nn.Linear(4, 4), optimizer=Counting)
        engine.save(tmp_path / "0")
        for _ in range(3):
            assert train_step(engine, torch.ones(2, 4)).stepped
        engine.save(tmp_path / "3")
        engine = engine_of(nn.Linear(4, 4), optimizer=Counting)
        engine.optimizer.option = engine.optimizer.inner.option = 2.0
        engine.load(tmp_path / "3")
        assert engine.optimizer.option == 2.0
        engine = engine_of(nn.Linear(4, 4), optimizer=functools.partial(Counting, option=2.0))
        for steps in (3, 0):
            engine.load(tmp_path / str(steps))
            for one in (engine.optimizer, engine.optimizer.inner):
                assert (one.count, one.option, one.is_set_up) == (steps, 2.0, False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a checkpoint of pp2·tp2 in 16-naive, and what the run that saved it went on with."""
    path = tmp_path_factory.mktemp("saved")
    return path, on("pp2·tp2", "run", path, precision="16-naive", load=False)


TARGETS = [layout for layout in LAYOUTS if layout not in ("pp2·tp2", "pp2·dp2 + zero1")]
PART = {"dp4 + zero1"}


@family
@pytest.mark.parametrize("layout", cases("resharded", TARGETS, PART, 1))
def test_any_layout_goes_on_from_what_another_saved(saved, layout):
    path, went_on = saved
    resumed = on(layout, "run", path, precision="16-naive", load=True)
    assert resumed[4] == went_on[4]
    tolerance = UNITS_LOSS * ROUNDING[torch.float16]
    assert abs(went_on[0][-1][0] / went_on[0][0][0] - 1) >= 10 * tolerance
    for (loss, norm, *exact), (expected, expected_norm, *expected_exact) in zip(resumed[0], went_on[0], strict=True):
        assert abs(loss - expected) / expected < tolerance
        assert norm == pytest.approx(expected_norm, rel=0.02)
        assert exact == expected_exact
