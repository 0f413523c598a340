"""Checkpoints: the run that resumes against the run that never stopped, in the same layout and in others."""

import functools

import pytest
import torch
from families import cases, family
from matrix import from_small_scale
from pool import run_on_ranks
from reference import ROUNDING, UNITS_LOSS, batches, rank_slice, small_gpt

import paramp

LAYOUTS = {
    "1": (1, {}),
    "tp4": (4, {"tensor": 4}),
    "pp4": (4, {"pipeline": 4}),
    "pp2·tp2": (4, {"pipeline": 2, "tensor": 2}),
    "dp2·tp2": (4, {"data": 2, "tensor": 2}),
    "dp4": (4, {"data": 4}),
    "dp4 + zero1": (4, {"data": 4, "zero": 1}),
    "dp2·tp2 + zero1": (4, {"data": 2, "tensor": 2, "zero": 1}),
    "pp2·dp2 + zero1": (4, {"pipeline": 2, "data": 2, "zero": 1}),
    "hsdp2x2": (4, {"data": {"replicate": 2, "shard": 2}}),
    "fsdp2·tp2": (4, {"data": {"shard": 2}, "tensor": 2}),
    "fsdp2·pp2": (4, {"data": {"shard": 2}, "pipeline": 2}),
    "pp2·tp2, two stages a rank": (
        4,
        {"pipeline": {"size": 2, "schedule": "interleaved-1f1b", "microbatches": 4}, "tensor": 2},
    ),
}
BEFORE, AFTER = 3, 5


def start(context, *, optimizer=torch.optim.AdamW, model=None, **changes):
    model = model or small_gpt(**changes)
    engine, _, _, scheduler = paramp.initialize(
        model,
        functools.partial(optimizer, lr=1e-2),
        model.loss,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    )
    return engine, scheduler


def train(engine, scheduler, steps, first=0, overflow_at=()):
    """Losses and the norms of the gradients."""
    context, seen = engine.context, []
    for step, (x, y) in enumerate(list(batches(first + steps))[first:], start=first):
        engine.zero_grad()
        x, y = (rank_slice(t, context.dp.rank, context.dp.size) for t in (x, y))
        engine.forward_backward(x, y, return_loss=False)
        if step in overflow_at and context.rank == 0:
            parameter = next(engine.module.parameters())
            getattr(parameter.grad, "_local_tensor", parameter.grad).view(-1)[0] = float("inf")
        result = engine.step()
        scheduler.step()
        seen.append((result.loss, result.grad_norm, result.loss_scale, scheduler.get_last_lr()[0]))
    return seen


def config(layout, precision, **others):
    return {
        "parallel": LAYOUTS[layout][1],
        "precision": from_small_scale(precision),
        "clip_grad_norm": 1.0,
    } | others


def run_and_save(
    world, layout, precision, path, optimizer="AdamW", wait=True, dropout=0.0, masters=None, vocab_size=120
):
    """What a run that saves in the middle goes on with, its weights, scaler and counts in the end; the scaler then."""
    with paramp.launch_from_torch(config(layout, precision, masters=masters)) as context:
        engine, scheduler = start(
            context, optimizer=getattr(torch.optim, optimizer), dropout=dropout, vocab_size=vocab_size
        )
        train(engine, scheduler, BEFORE, overflow_at=(1,))
        engine.save(path, wait=wait)
        saved = engine.scaler.state_dict()
        after = train(engine, scheduler, AFTER, first=BEFORE)
        counts = (engine.num_steps, engine.num_skipped)
        return after, engine.full_state_dict(), engine.scaler.state_dict(), counts, saved


def run_resumed(world, layout, precision, path, optimizer="AdamW", dropout=0.0, masters=None, vocab_size=120):
    """The same of a run that loads."""
    with paramp.launch_from_torch(config(layout, precision, masters=masters)) as context:
        engine, scheduler = start(
            context, optimizer=getattr(torch.optim, optimizer), dropout=dropout, vocab_size=vocab_size
        )
        train(engine, scheduler, 1, first=20)  # what it has done before does not matter
        engine.load(path)
        saved = engine.scaler.state_dict()
        after = train(engine, scheduler, AFTER, first=BEFORE)
        return (
            after,
            engine.full_state_dict(),
            engine.scaler.state_dict(),
            (engine.num_steps, engine.num_skipped),
            saved,
        )


def run_both(world, layout, path, wait=True, **options):
    """One body, as torch's decisions about sharding are kept until its end."""
    options |= {"layout": layout, "path": path}
    return run_and_save(world, wait=wait, **options), run_resumed(world, **options)


def on(layout, body, **kwargs):
    return run_on_ranks(LAYOUTS[layout][0], __name__, body, {"layout": layout} | kwargs)[0]


SAME = [
    ("1", {"precision": "32-true", "wait": False}),
    ("pp2·tp2", {"precision": "16-naive"}),
    ("pp2·tp2", {"precision": "16-mixed", "dropout": 0.2, "wait": False}),
    ("pp2·tp2, two stages a rank", {"precision": "bf16-mixed"}),
    ("dp2·tp2", {"precision": "16-naive", "optimizer": "RAdam"}),
    ("dp2·tp2 + zero1", {"precision": "16-naive", "masters": "remainder"}),
    ("pp2·dp2 + zero1", {"precision": "16-mixed", "dropout": 0.2}),
    ("dp4 + zero1", {"precision": "bf16-naive", "masters": "remainder"}),
    ("1", {"precision": "16-true", "optimizer": "SGD"}),
    ("hsdp2x2", {"precision": "16-mixed", "dropout": 0.2}),
    ("fsdp2·tp2", {"precision": "16-naive", "wait": False}),
    ("fsdp2·pp2", {"precision": "bf16-true", "dropout": 0.2}),
]


REPEATED = [SAME[1], SAME[3], SAME[5], SAME[6], SAME[-3], SAME[-1]]
"""Whose layout and whose options other tests have, too; ``saved`` has a run like the first of them."""


@family
@pytest.mark.parametrize(
    ("layout", "options"), cases("resumed", SAME, [case for case in SAME if case not in REPEATED], 1)
)
def test_a_resumed_run_goes_on_bit_by_bit(tmp_path, layout, options):
    path = str(tmp_path / "saved")
    went_on, resumed = on(layout, "run_both", path=path, **options)
    assert resumed[0] == went_on[0]
    assert all(torch.equal(value, resumed[1][name]) for name, value in went_on[1].items())
    assert resumed[2:4] == went_on[2:4]
    assert resumed[3] == (BEFORE + AFTER - 1, 1)


TARGETS = ["1", "tp4", "pp4", "dp2·tp2", "dp4", "dp4 + zero1", "dp2·tp2 + zero1", "pp2·tp2, two stages a rank"]
TARGETS += ["hsdp2x2", "fsdp2·tp2", "fsdp2·pp2"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of pp2·tp2 in 16-naive, and what the run that saved it went on with."""
    path = str(tmp_path_factory.mktemp("saved") / "checkpoint")
    return path, on("pp2·tp2", "run_and_save", precision="16-naive", path=path)


@family
@pytest.mark.parametrize(
    "layout", cases("resharded", TARGETS, {"1", "pp4", "dp2·tp2", "dp4 + zero1", "pp2·tp2, two stages a rank"}, 1)
)
def test_any_layout_goes_on_from_what_another_saved(saved, layout):
    path, went_on = saved
    resumed = on(layout, "run_resumed", precision="16-naive", path=path)
    assert resumed[4] == went_on[4]
    for (loss, norm, *exact), (expected, expected_norm, *expected_exact) in zip(resumed[0], went_on[0], strict=True):
        assert abs(loss - expected) / expected < UNITS_LOSS * ROUNDING[torch.float16]
        assert norm == pytest.approx(expected_norm, rel=0.02)
        assert exact == expected_exact


def test_a_tied_weight_is_written_by_one_of_its_stages(tmp_path):
    """Under ZeRO the stages partition their copies at different places."""
    path = str(tmp_path / "saved")
    options = {"precision": "16-naive", "path": path, "vocab_size": 1200}
    went_on, resumed = on("pp2·dp2 + zero1", "run_both", **options)
    assert resumed[0] == went_on[0]
    resharded = on("tp4", "run_resumed", **options)
    assert [loss for loss, *_ in resharded[0]] == pytest.approx([loss for loss, *_ in went_on[0]], rel=0.01)
