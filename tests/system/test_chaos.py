"""Ranks killed at random moments, also while they save: every run ends with the weights of the one left in peace.

``make test`` makes a short such run of two ranks, ``make test-sample`` one of four, ``make test-all`` twenty long ones;
also some that go on in another layout.
"""

import functools
import os
import random

import pytest
from commands import COLD
from families import WHOLE, cases, family
from victims import TINY, Run, torchrun_command, weights_at

pytestmark = pytest.mark.real_sizes  # what is tested are files and processes
LAYOUTS = {
    "pp2-tp2": (4, ["--tp", "2", "--pp", "2"]),
    "dp2-tp2": (4, ["--tp", "2", "--dp", "2"]),
    "dp2": (2, ["--dp", "2"]),
}
STEPS, EVERY = (24, 3) if WHOLE else (8, 2)
START = COLD if WHOLE else {}
SHORT = [] if WHOLE else ["--data", "README.md", "--batch-size", "4", "--set", "model.num_layers=2"]
SLICES = [] if WHOLE else ["--set", "reproducible.slices=2"]
OF_FOUR = [(layout, number) for number in range(10) for layout in ("pp2-tp2", "dp2-tp2")]
RUNS = cases("chaos", [*OF_FOUR, ("dp2", 0)], [("dp2", 0)], 1)


def command(layout, folder):
    processes, layout = LAYOUTS[layout]
    options = [*SHORT, "--steps", str(STEPS), "--checkpoint-every", str(EVERY), "--checkpoint-dir", str(folder)]
    return torchrun_command(processes, *TINY, *layout, *options, restarts=3)


@pytest.fixture(scope="module")
def in_peace(tmp_path_factory):
    """``in_peace(command, place)``: what a run ends with that nobody disturbs."""

    @functools.cache
    def end(command, place):
        folder = tmp_path_factory.mktemp(place)
        with Run(command(place, folder / "checkpoints"), folder / "log", **START) as run:
            assert run.finish() == 0, run.log.read_text()
        return weights_at(folder / "checkpoints" / f"step-{STEPS:08d}")

    return end


@family
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("layout", "number"), RUNS)
def test_a_killed_run_ends_with_the_same_weights(tmp_path, in_peace, layout, number):
    chance = random.Random(f"{layout} {number}")
    processes, _ = LAYOUTS[layout]
    folder, victim = tmp_path / "checkpoints", chance.randrange(processes)
    saves = chance.randrange(1, STEPS // EVERY - 2)
    during_a_save = number % 2 == (layout == "dp2-tp2")  # in half of the runs

    def reached():
        return (folder / f"step-{(saves - 1) * EVERY:08d}").exists() or saves == 1

    with Run(command(layout, folder), tmp_path / "log", **START) as run:
        assert run.wait_for(lambda: len(run.ranks()) == processes and reached()), run.log.read_text()
        if during_a_save:
            ranks = run.ranks()
            assert run.wait_for(lambda: any(folder.glob("*.partial-*")), pause=0.0005), run.log.read_text()
            os.kill(ranks[victim], 9)
        else:
            run.wait_for(lambda: False, seconds=chance.uniform(0.0, 0.5))
            assert run.kill(victim)
        assert run.finish() == 0, run.log.read_text()
    assert weights_at(folder / f"step-{STEPS:08d}") == in_peace(command, layout)


PLACES = {
    "1": (1, []),
    "tp2": (2, ["--tp", "2"]),
    "dp2-zero1": (2, ["--dp", "2", "--zero", "1"]),
    "fsdp2": (2, ["--fsdp", "2"]),
    "dp2-tp2": LAYOUTS["dp2-tp2"],
    "pp2-tp2": LAYOUTS["pp2-tp2"],
}
MOVES = [("dp2-tp2", "pp2-tp2"), ("pp2-tp2", "1"), ("dp2-zero1", "tp2"), ("tp2", "fsdp2"), ("tp2", "1")]


def reproducible(place, folder):
    processes, options = PLACES[place]
    options = [*options, "--reproducible", *SLICES, "--checkpoint-every", str(EVERY), "--checkpoint-dir", str(folder)]
    return torchrun_command(processes, *TINY, *SHORT, *options, "--steps", str(STEPS))


@family
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("before", "after"), cases("chaos, other layouts", MOVES, [("tp2", "1")], 1))
def test_a_killed_run_goes_on_in_another_layout_with_the_same_bits(tmp_path, in_peace, before, after):
    folder = tmp_path / "checkpoints"
    with Run(reproducible(before, folder), tmp_path / "log", **START) as run:
        assert run.wait_for((folder / f"step-{EVERY:08d}").exists), run.log.read_text()
        assert run.kill(PLACES[before][0] - 1)
        assert run.finish() != 0, run.log.read_text()
    assert not (folder / f"step-{STEPS:08d}").exists()
    with Run(reproducible(after, folder), tmp_path / "log of the other", **START) as run:
        assert run.finish() == 0, run.log.read_text()
        assert f"resumed from {folder}" in run.log.read_text()
    states = weights_at(folder / f"step-{STEPS:08d}"), in_peace(reproducible, "1")
    # Weights, masters and optimizer state; random streams are of the layout, and not drawn from.
    ended, expected = ({k: v for k, v in state.items() if not k.startswith("random.")} for state in states)
    assert ended.keys() == expected.keys()
    assert [name for name, value in expected.items() if ended[name] != value] == []
