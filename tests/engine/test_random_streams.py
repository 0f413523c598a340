"""Random streams after a load: each is drawn from, and gives what the run that never stopped draws."""

import json
import random
import sys

import numpy as np
import pytest
import torch
from commands import ROOT, run, succeeded
from families import cases, family
from gpu_cells import on_fake_device
from layouts import layouts
from pool import on_ranks, run_on_ranks, shared_folder
from small_engines import engine_of, train_step
from small_mixture import PLAN, layers
from torch import nn

import paramp
from paramp.checkpoint.open_checkpoint import OpenCheckpoint
from paramp.checkpoint.resharding import read_tensor

LAYOUTS = layouts("1, dp2, tp2, pp2, fsdp2, cp2, dp2 + zero1")
LAYOUTS["pp2, two stages a rank"] = {"pipeline": {"size": 2, "schedule": "interleaved-1f1b", "microbatches": 2}}
PRODUCTS = layouts("pp2·tp2, pp2·dp2, dp2·cp2")
OWN = ("python", "numpy")
STREAMS = (*OWN, "torch", "stages")


class Draws(nn.Module):
    """Records two numbers of the stage's stream at each forward."""

    drawn: list[float] = []  # noqa: RUF012  # of all modules of this process

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        self.drawn += [torch.rand(()).item(), torch.randn(()).item()]
        return x * self.weight


def seed(number):
    """Seed the user's streams of this rank, with a normal number that Python and NumPy have drawn but not returned."""
    for seed_ in (random.seed, np.random.seed, torch.manual_seed):
        seed_(number)
    draw_own()


def draw_own():
    """A number of each stream that the user draws from on this rank."""
    return {
        "python": (random.random(), random.gauss(0, 1)),
        "numpy": (np.random.random(), np.random.standard_normal()),
        "torch": (torch.rand(()).item(), torch.randn(()).item()),
    }


def draw(engine, steps):
    """The same at each of ``steps``, and what the stages of this rank draw in them."""
    found = []
    for _ in range(steps):
        Draws.drawn.clear()
        train_step(engine, torch.ones(4, 4, 4), torch.zeros(4, 4, 4))
        found.append(draw_own() | {"stages": tuple(Draws.drawn)})
    return found


def run_and_save(world, layout, path, load=None, wait=True, config_seed=0):
    """This rank's place, what it draws in three steps, and what its own streams draw before the load.

    It saves to ``path``, before the three steps and again after them. ``load`` is the path of a checkpoint that it
    begins with, after a step, in a process with other streams.
    """
    with paramp.launch_from_torch({"parallel": (LAYOUTS | PRODUCTS)[layout], "seed": config_seed}) as context:
        engine = engine_of(nn.Sequential(*(Draws() for _ in range(4))), plan={})
        start = 10 if load is None else 90
        seed(start + world.rank)
        without = draw_own()
        draw(engine, 2)
        seed(start + world.rank)
        if load is not None:
            engine.load(load)
        engine.save(path, wait=wait)
        place, found = (context.pp.rank, context.batch_axis.rank, context.tp.rank), draw(engine, 3)
        engine.save(f"{path} later")
        return place, found, without


def run_both(world, layout, path, wait):
    saved = run_and_save(world, layout, path, wait=wait)
    return saved[1], run_and_save(world, layout, f"{path} again", load=path)[1]


def on(layout, body, **options):
    ranks = 1 if layout == "1" else 4 if layout in PRODUCTS else 2
    return run_on_ranks(ranks, __name__, body, {"layout": layout} | options)


@pytest.mark.parametrize(("layout", "wait"), [(name, index % 2 == 0) for index, name in enumerate(LAYOUTS)])
def test_every_stream_goes_on_in_the_same_layout(tmp_path, layout, wait):
    ranks = on(layout, "run_both", path=str(tmp_path / "saved"), wait=wait)
    for went_on, resumed in ranks:
        assert resumed == went_on
    drawn = {stream: [tuple(step[stream] for step in steps) for steps, _ in ranks] for stream in STREAMS}
    for stream in (*OWN, "torch"):  # so that no rank has those of another one
        assert len(set(drawn[stream])) == len(ranks)
    assert len(set(drawn["stages"])) == (1 if layout == "tp2" else len(ranks))
    if layout == "pp2, two stages a rank":
        assert all(len(set(step)) == len(step) == 8 for steps in drawn["stages"] for step in steps)


@on_ranks(2)
def test_streams_go_on_where_data_ranks_share_experts(world):
    folder, drawn = shared_folder(), []
    for number, parallel in enumerate(({"data": 2}, {"expert": 2}, {"data": 2})):
        with paramp.launch_from_torch({"parallel": parallel}):
            engine = engine_of(layers(), plan=PLAN)
            seed(100 * number + world.rank)
            if number:
                engine.load(folder / str(number - 1))
            engine.save(folder / str(number))
        drawn.append(draw_own())
        with OpenCheckpoint(folder / "0") as first, OpenCheckpoint(folder / str(number)) as found:
            names = [name for name in first.header.tensors if name.startswith("random.")]
            assert names
            assert all(torch.equal(read_tensor(first, name), read_tensor(found, name)) for name in names)
    assert drawn[1:] == drawn[:1] * 2


GOES_ON = {
    ("tp2", "1"): {0: 0},
    ("1", "tp2"): {0: 0},
    ("dp2", "1"): {0: 0},
    ("1", "dp2"): {0: 0},
    ("dp2", "fsdp2"): {0: 0, 1: 1},
    ("pp2", "1"): {},
    ("pp2", "pp2, two stages a rank"): {},
    ("tp2", "pp2"): {},
    ("pp2", "pp2·tp2"): {0: 0},
    ("pp2·tp2", "pp2·dp2"): {0: 0},
    ("pp2·dp2", "pp2"): {0: 0},
    ("dp2", "dp2 + zero1"): {0: 0, 1: 1},
    ("cp2", "dp2"): {},
    ("cp2", "dp2·cp2"): {0: 0, 1: 1},
    ("dp2·cp2", "dp2"): {},
}
"""Layouts that save and load, and whose stages' streams go on there: by data and context rank, that of before."""
PART = [("1", "tp2"), ("dp2", "fsdp2"), ("pp2", "pp2, two stages a rank"), ("pp2·tp2", "pp2·dp2")]


@family
@pytest.mark.parametrize(("before", "after"), cases("random streams", list(GOES_ON), PART, 1))
def test_the_streams_in_another_layout(tmp_path, before, after):
    """As docs/checkpoints.md promises: dropout's go on where there are such, torch's begin anew, the user's stay.

    Those that begin anew depend on the steps made, or a run that is resumed twice would draw the same numbers again.
    """
    path, other = str(tmp_path / "saved"), str(tmp_path / "other")
    saved = on(before, "run_and_save", path=path)
    ranks, again, later = (on(after, "run_and_save", path=other, load=load) for load in (path, path, f"{path} later"))
    same = (before, after) == ("dp2", "fsdp2")  # every rank holds what it held
    goes_on = {place[:2]: steps for place, steps, _ in saved if place[2] == 0}  # of a stage and a data rank
    for rank, (place, resumed, without) in enumerate(ranks):
        stream = (place[0], GOES_ON[before, after].get(place[1]))
        expected = [step["stages"] for step in goes_on.get(stream, [])]
        found = [step["stages"] for step in resumed]
        if expected:
            assert found == expected
        else:
            drawn = {number for _, steps, _ in saved for step in steps for number in step["stages"]}
            assert drawn.isdisjoint(number for step in found for number in step)
        went_on = saved[rank][1][0] if same else without
        assert {stream: resumed[0][stream] for stream in OWN} == {stream: went_on[stream] for stream in OWN}
        assert resumed == again[rank][1]
        assert not [stream for stream in ("torch", "stages") if later[rank][1][0][stream] == resumed[0][stream]]
    numbers = {steps[0]["torch"] for _, steps, _ in ranks}
    seeded = {steps[0]["torch"] for _, steps, _ in on(after, "run_and_save", path=other, load=path, config_seed=1)}
    assert numbers == seeded if same else numbers.isdisjoint(seeded)
    if same:
        assert numbers == {steps[0]["torch"] for _, steps, _ in saved}
    else:  # the same on every rank, so that shuffled loaders agree
        assert len(numbers) == 1
        assert numbers.isdisjoint([*(without["torch"] for *_, without in ranks), *(s[0]["torch"] for _, s, _ in saved)])
    stages = {place[:2]: tuple(step["stages"] for step in steps) for place, steps, _ in ranks}
    assert len(set(stages.values())) == len(stages)


@on_fake_device
def test_the_streams_of_a_gpu_go_on(tmp_path):
    """The device's default generator and that of its stage; the CPU's beside them."""
    script = str(ROOT / "tests/support/scripts/streams_of_a_gpu.py")
    result = succeeded(run([sys.executable, script, str(tmp_path)], PYTHONPATH=f"{ROOT}:{ROOT / 'tests/support'}"))
    went_on, resumed, (first, again, unchanged) = json.loads(result.stdout)
    assert resumed == went_on
    assert first == again  # also the GPU's, with which the fake device draws other numbers than the CPU
    assert unchanged == [True, True]
    numbers = [number for step in went_on for pair in step for number in pair]
    assert len(set(numbers)) == len(numbers) == 8
