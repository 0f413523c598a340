"""Every mode on every layout with an expert axis against the same mode in one process, as in test_matrix.py.

Each cell trains a small MoEGPT for ten steps, of which one overflows on one rank and is skipped. Where a rounding error
decides which experts a token gets, two runs are no longer one training. So the routing is replayed: it depends on a
token's place in its sequence only. Then the balance of each microbatch of a pipeline is that of the batch, too. What
routers choose themselves is compared in models/test_moe_gpt.py.
"""

import dataclasses
import functools

import pytest
import torch
from families import cases, family
from matrix import MODES, PAGE, check_table, from_small_scale
from pool import World, run_on_ranks
from reference import assert_follows, assert_strays, sgd_in_plain_torch, small_moe, train_engine
from test_matrix import skip_without_library
from torch.overrides import TorchFunctionMode

import paramp
from paramp.distributed.token_positions import sequence_length, token_positions
from paramp.models import MoEGPT
from paramp.precision.modes import PRESETS

STEPS, LENGTH = 10, 8
OVERFLOW_AT = 4
LAYOUTS = {
    "1": (1, {}),
    "ep2": (2, {"expert": 2}),
    "ep4": (4, {"expert": 4}),
    "ep2·tp2": (4, {"expert": 2, "tensor": 2}),
    "ep2·pp2": (4, {"expert": 2, "pipeline": 2}),
    "dp2·ep2 + zero1": (4, {"data": 4, "expert": 2, "zero": 1}),
    "fsdp2·ep2": (4, {"data": {"shard": 4}, "expert": 2}),
    "cp2·ep2": (4, {"context": 2, "expert": 2}),
    "fsdp2·cp2·ep2": (4, {"data": {"shard": 2}, "context": 2, "expert": 2}),
}
EVERYTHING = [(layout, mode) for layout in LAYOUTS for mode in MODES]
PART = [("1", "16-mixed"), ("fsdp2·cp2·ep2", "bf16-naive")]
CELLS = cases("expert matrix", EVERYTHING, PART, 4)
UNITS_LOSS = 2.0
"""Allowed difference of a loss, in rounding errors of half precision; up to 1.5 are measured."""
UNITS_WAYS = {"32-true": 48, "64-true": 48}
"""Allowed distance of a weight's way; up to 33 are measured. A gradient of half the size is 10**6 away."""


class ByPlace(TorchFunctionMode):
    """``topk`` chooses experts by the place of a token in its sequence; some of them more often than others."""

    CHOSEN = torch.rand(LENGTH, 4, generator=torch.Generator().manual_seed(2)).mul(torch.arange(1, 5)).topk(2).indices

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "topk":
            return result
        places = token_positions(LENGTH // sequence_length(1))
        index = self.CHOSEN[places].repeat(len(args[0]) // len(places), 1)
        return type(result)((args[0].gather(-1, index), index))


def rate(mode):
    """The learning rate of SGD. At 1.0 float8's errors, 6 % of each number, grow from step to step."""
    return 0.6 if PRESETS[mode].float8 else 1.0


def train(world, parallel, mode, halved=False):
    """What a cell came to: losses, and how far each weight has gone; with ``halved`` also with a gradient of half."""
    with paramp.launch_from_torch({"parallel": parallel, "clip_grad_norm": 1.0}) as context, ByPlace():
        context.config = dataclasses.replace(context.config, precision=from_small_scale(mode))
        found = [
            train_engine(
                context,
                small_moe,
                MoEGPT.loss,
                STEPS,
                lr=rate(mode),
                length=LENGTH,
                overflow_at=OVERFLOW_AT,
                halve_on_rank=on_rank,
            )
            for on_rank in (None, world.size - 1)[: 1 + halved]
        ]
    return found if world.rank == 0 else None


@functools.cache
def alone(mode):
    return train(World(0, 1, "cpu"), {}, mode)[0]


@functools.cache
def plain_training(dtype, lr):
    """The same in plain torch."""
    with ByPlace():
        model = small_moe().to(dtype)
        return sgd_in_plain_torch(model, MoEGPT.loss, STEPS, skipped=OVERFLOW_AT, length=LENGTH, lr=lr)


@pytest.fixture(scope="module")
def green():
    """The cells whose test has passed."""
    return set()


@family
@pytest.mark.parametrize(("layout", "mode"), CELLS)
def test_a_mode_with_experts_follows_its_single_process_run(layout, mode, green):
    """And one rank's gradient of half the size is beyond the tolerance."""
    skip_without_library(mode)
    size, parallel = LAYOUTS[layout]
    if size == 1:
        expected = plain_training(torch.float64 if mode == "64-true" else torch.float32, rate(mode))
        assert_follows(alone(mode), expected, mode, units=UNITS_LOSS)
    else:
        given = {"parallel": parallel, "mode": mode, "halved": True}
        found, halved = run_on_ranks(size, __name__, "train", given)[0]
        assert_follows(found, alone(mode), mode, units=UNITS_LOSS, ways=UNITS_WAYS.get(mode))
        assert_strays(halved, alone(mode), mode)
    green.add((mode, layout))


@family
def test_the_table_of_experts_is_what_came_out(green, request):
    """Last in the file, so that the cells have run. ``make matrix``, which runs all of them, writes the table anew."""
    check_table(PAGE, "experts", "mode", MODES, [*LAYOUTS], green, request.config.getoption("--write-matrix"))
