"""Every mode on every layout against the same mode in one process.

Each cell trains a small GPT for some steps, of which one overflows on one rank and is skipped on all. Losses and
weights are compared in rounding errors of the mode's dtype (:mod:`reference`); those of one process with plain torch's.
Halving the gradient of one rank goes beyond what is allowed, on every layout of several; by default on those of eight.
The optimizer is SGD, because Adam divides a gradient that is half of what it should be by its own size and so hides the
mistake; the modes that would run Adam in fp16 are trained with it too. What comes out is the table in docs/tested.md.
"""

import dataclasses
import functools

import pytest
import torch
from families import SEED, WHOLE, family
from families import cases as chosen
from matrix import ACROSS, LAYOUTS, MODES, PAGE, PART, check_table, from_small_scale
from pool import World, on_each_device, run_on_ranks
from reference import assert_follows, assert_losses_follow, assert_strays, sgd_in_plain_torch, small_gpt, train_engine

import paramp
from paramp.base.installed_packages import find_torchao
from paramp.models import GPT
from paramp.precision.modes import PRESETS

IS_PART = not (WHOLE or SEED)
OVERFLOW_AT = 4
ADAM_LAYOUT = "pp2·tp2"
FP16_ADAM = {"O3", "16-true"}
ROUNDED = {*FP16_ADAM, "bf16-true"}
"""Modes that round the weights themselves in each step: from ten steps on their ways are long beside that."""
EVERYTHING = [(layout, mode) for layout in LAYOUTS for mode in MODES]
CELLS = chosen("matrix", EVERYTHING, PART, 4)
HALVED_CELLS = [cell for cell in CELLS if LAYOUTS[cell[0]][0] > (4 if IS_PART else 1)]
ADAM = [mode for layout, mode in CELLS if layout == ADAM_LAYOUT and mode in FP16_ADAM]


def steps_of(mode):
    return 6 if IS_PART and mode not in ROUNDED else 10


def runs_here(mode):
    return PRESETS[mode].float8 is None or find_torchao().found


def skip_without_library(mode):
    if not runs_here(mode):
        pytest.skip(f"float8: {find_torchao().reason}")


def modes_of_one_launch(layout, mode):
    """A few: all modes would take eight ranks on two cores longer than a body may."""
    modes = [other for where, other in CELLS if where == layout and runs_here(other)]
    most = 3 if LAYOUTS[layout][0] == 8 else 5
    start = modes.index(mode) // most * most
    return tuple(modes[start : start + most])


def build():
    # Weights so large, and a learning rate so high, that every weight moves by more than half precision rounds off.
    return small_gpt(num_layers=2, init_std=0.2)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), eps=1e-4)


def train_all(world, parallel, modes, halved=(), adam=()):
    """The cells of one layout. One context serves all: launching costs more than a cell."""

    def train(mode, **options):
        context.config = dataclasses.replace(context.config, precision=from_small_scale(mode))
        options |= {"lr": 1.0, "length": 8, "overflow_at": OVERFLOW_AT}
        return train_engine(context, build, GPT.loss, steps_of(mode), **options)

    with paramp.launch_from_torch({"parallel": parallel, "clip_grad_norm": 1.0}, device=world.device) as context:
        cells = {mode: train(mode) for mode in modes}
        cells |= {(mode, "halved"): train(mode, halve_on_rank=world.size - 1) for mode in halved}
        cells |= {(mode, "adam"): train(mode, optimizer=adamw) for mode in adam}
    return cells if world.rank == 0 else None


@functools.cache
def plain_training(dtype, steps):
    """The same in plain torch."""
    return sgd_in_plain_torch(build().to(dtype), GPT.loss, steps, skipped=OVERFLOW_AT, length=8)


@pytest.fixture(scope="module")
def cells():
    """``cells(layout, mode, device)``: what it came to there, and what each mode did in one process; computed once."""

    @functools.cache
    def alone(device):
        return train_all(World(0, 1, device), {}, sorted({mode for _, mode in CELLS if runs_here(mode)}), adam=ADAM)

    @functools.cache
    def compute(layout, modes, device):
        size, parallel = LAYOUTS[layout]
        if size == 1:
            return alone(device), alone(device)
        arguments = {"parallel": parallel, "modes": modes}
        arguments |= {"halved": [mode for mode in modes if (layout, mode) in HALVED_CELLS]}
        arguments |= {"adam": [mode for mode in modes if mode in ADAM]} if layout == ADAM_LAYOUT else {}
        return run_on_ranks(size, __name__, "train_all", arguments, device)[0], alone(device)

    return lambda layout, mode, device: compute(layout, modes_of_one_launch(layout, mode), device)


@pytest.fixture(scope="module")
def green():
    """The cells whose test has passed on the CPU."""
    return set()


def test_the_part_has_every_mode_in_one_process_and_every_mode_and_layout_on_several_ranks():
    assert {mode for layout, mode in PART if layout == "1"} == set(MODES)
    assert set(ACROSS) == set(LAYOUTS) - {"1"}
    assert set(ACROSS.values()) == set(MODES)


@family
@on_each_device
@pytest.mark.parametrize(("layout", "mode"), CELLS)
def test_a_mode_on_a_layout_follows_its_single_process_run(layout, mode, cells, green, device):
    skip_without_library(mode)
    actual, expected = cells(layout, mode, device)
    if layout == "1":
        expected = {mode: plain_training(torch.float64 if mode == "64-true" else torch.float32, steps_of(mode))}
    assert_follows(actual[mode], expected[mode], mode)
    if device == "cpu":
        green.add((mode, layout))


@family
@on_each_device
@pytest.mark.parametrize(("layout", "mode"), HALVED_CELLS)
def test_the_tolerance_rejects_one_ranks_gradient_halved(layout, mode, cells, device):
    skip_without_library(mode)
    actual, expected = cells(layout, mode, device)
    assert_strays(actual[mode, "halved"], expected[mode], mode)


@family
@on_each_device
@pytest.mark.parametrize("mode", ADAM)
def test_adam_in_fp16_follows_too(mode, cells, device):
    """By its losses. Weight by weight, fp16 Adam is no smooth function of its gradients: squares below 2**-24 vanish,
    so that one rounding error can move an update by the ratio of the root of that to eps."""
    actual, expected = cells(ADAM_LAYOUT, mode, device)
    losses, way = actual[mode, "adam"]
    assert all(value.isfinite().all() and value.any() for value in way.values())
    assert_losses_follow(losses, expected[mode, "adam"][0], mode)


@family
def test_the_table_of_the_page_is_what_came_out(green, request):
    """Last in the file, so that the cells have run. ``make matrix``, which runs all of them, writes the table anew."""
    check_table(PAGE, "matrix", "mode", MODES, [*LAYOUTS], green, request.config.getoption("--write-matrix"))
