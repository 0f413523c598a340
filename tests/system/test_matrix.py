"""Every mode on every layout against the same mode in one process.

Each cell trains a small GPT for ten steps, of which one overflows on one rank and is skipped on all. Losses and weights
are compared in rounding errors of the mode's dtype (:mod:`reference`). The optimizer is SGD, because Adam divides a
gradient that is half of what it should be by its own size and so hides the mistake; the modes that would run Adam in
fp16 are trained with it too. What comes out is the table in the README.
"""

import dataclasses
import functools

import pytest
import torch
from matrix import LAYOUTS, MODES, README, from_small_scale, replace_table, table
from pool import World, on_each_device, run_on_ranks
from reference import assert_follows, assert_losses_follow, assert_strays, batches, rounding, small_gpt, train_engine

import paramp
from paramp.models import GPT

STEPS = 10
OVERFLOW_AT = 4
HALVED_LAYOUT = "pp2"
ADAM_LAYOUT = "pp2·tp2"
BATCHES = [tuple(MODES[start : start + 5]) for start in range(0, len(MODES), 5)]
"""Modes that one launch serves: all of them would take eight ranks on two cores longer than a body may."""
FP16_ADAM = {"O3", "16-true"}


def build():
    # Weights so large, and a learning rate so high, that every weight moves by more than half precision rounds off.
    return small_gpt(num_layers=2, init_std=0.2)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), eps=1e-4)


def train_all(world, parallel, modes, halved=(), adam=()):
    """The cells of one layout. One context serves all: launching costs more than a cell."""

    def train(mode, **options):
        context.config = dataclasses.replace(context.config, precision=from_small_scale(mode))
        return train_engine(context, build, GPT.loss, STEPS, lr=1.0, length=8, overflow_at=OVERFLOW_AT, **options)

    with paramp.launch_from_torch({"parallel": parallel, "clip_grad_norm": 1.0}, device=world.device) as context:
        cells = {mode: train(mode) for mode in modes}
        cells |= {(mode, "halved"): train(mode, halve_on_rank=world.size - 1) for mode in halved}
        cells |= {(mode, "adam"): train(mode, optimizer=adamw) for mode in adam}
    return cells if world.rank == 0 else None


UNITS_FROM_FP32 = 1.0


@functools.cache
def plain_losses():
    """The same training in plain fp32 torch."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    losses = []
    for step, (x, y) in enumerate(batches(STEPS, length=8)):
        optimizer.zero_grad()
        loss = GPT.loss(model(x), y)
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step != OVERFLOW_AT:
            optimizer.step()
    return losses


@pytest.fixture(scope="module")
def cells():
    """``cells(layout, mode, device)``: what it came to there, and what each mode did in one process; computed once."""

    @functools.cache
    def alone(device):
        return train_all(World(0, 1, device), {}, MODES, adam=sorted(FP16_ADAM))

    @functools.cache
    def compute(layout, modes, device):
        size, parallel = LAYOUTS[layout]
        if size == 1:
            return alone(device), alone(device)
        arguments = {"parallel": parallel, "modes": modes}
        arguments |= {"halved": modes} if layout == HALVED_LAYOUT else {}
        arguments |= {"adam": [mode for mode in modes if mode in FP16_ADAM]} if layout == ADAM_LAYOUT else {}
        return run_on_ranks(size, __name__, "train_all", arguments, device)[0], alone(device)

    def batch_of(layout, mode, device):
        batch = next(batch for batch in BATCHES if mode in batch)
        return compute(layout, batch, device)

    return batch_of


@pytest.fixture(scope="module")
def green():
    """The cells whose test has passed on the CPU."""
    return set()


@on_each_device
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mode_on_a_layout_follows_its_single_process_run(layout, mode, cells, green, device):
    actual, expected = cells(layout, mode, device)
    if layout == "1":
        losses, expected = actual[mode][0], plain_losses()
        apart = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True)) / rounding(mode)
        assert apart <= UNITS_FROM_FP32 or rounding(mode) < 2.0**-11, f"losses {apart:.2f} units from fp32's"
        assert losses == pytest.approx(expected, rel=1e-2)
    else:
        assert_follows(actual[mode], expected[mode], mode)
    if device == "cpu":
        green.add((mode, layout))


@on_each_device
@pytest.mark.parametrize("mode", MODES)
def test_the_tolerance_rejects_one_ranks_gradient_halved(mode, cells, device):
    actual, expected = cells(HALVED_LAYOUT, mode, device)
    assert_strays(actual[mode, "halved"], expected[mode], mode)


@on_each_device
@pytest.mark.parametrize("mode", sorted(FP16_ADAM))
def test_adam_in_fp16_follows_too(mode, cells, device):
    """By its losses. Weight by weight, fp16 Adam is no smooth function of its gradients: squares below 2**-24 vanish,
    so that one rounding error can move an update by the ratio of the root of that to eps."""
    actual, expected = cells(ADAM_LAYOUT, mode, device)
    losses, way = actual[mode, "adam"]
    assert all(value.isfinite().all() and value.any() for value in way.values())
    assert_losses_follow(losses, expected[mode, "adam"][0], mode)


def test_the_readmes_table_is_what_came_out(green, request):
    """Last in the file, so that the cells have run. ``make matrix`` writes the table anew."""
    if len(request.session.items) < len(LAYOUTS) * len(MODES):
        pytest.skip("only some of the cells were asked for")
    text = README.read_text(encoding="utf-8")
    expected = replace_table(text, "matrix", table("mode", MODES, list(LAYOUTS), green))
    if request.config.getoption("--write-matrix"):
        README.write_text(expected, encoding="utf-8")
    assert expected == README.read_text(encoding="utf-8"), "run `make matrix`, which writes the table anew"
