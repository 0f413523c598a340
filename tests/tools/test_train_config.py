"""What a run logs before its first step."""

from pathlib import Path
from types import SimpleNamespace

import torch
from counting import Collectives
from pool import on_ranks

import paramp
from paramp.tools.train_config import announce, announce_resume, configure
from paramp.tools.train_data import max_over_ranks


def lines_of(function, arguments, *others):
    """What ``function`` says of a run in one process with the ``arguments`` of the train script."""
    context = SimpleNamespace(is_main=True, config=configure(arguments), world_size=1)
    context.batch_axis, context.device, lines = SimpleNamespace(size=1), torch.device("cpu"), []
    function(SimpleNamespace(say=lines.append), context, *others)
    return lines


def test_only_settings_that_differ_from_the_default_are_logged():
    counts = {"sha256": "0", "num_files": 1, "vocab_size": 256, "unit": "byte"}
    corpus = SimpleNamespace(**counts, training=[1, 2], held_out=[3], notes=["a note"])
    for arguments, changed in (
        ("", "none"),
        ("--precision 16-mixed --steps 300", "none"),
        ("--tp 2 --set model.num_layers=3", "parallel.tensor.size = 2, model.num_layers = 3"),
        ("--precision 16-naive", "precision = 16-naive"),
    ):
        first, facts, note = lines_of(announce, arguments.split(), corpus, 7)
        assert first == f"settings other than the default: {changed}"
        assert facts.endswith("data_vocab_size = 256, data_bytes = 3, parameters = 7")
        assert note == "a note"


def test_a_run_that_is_finished_says_where_its_checkpoint_is():
    found = Path("runs/a/step-00000020")
    for step in (19, 20):
        values = {"config": {"train.lr": 0.25}, "tracked": {"position": {"step": step}}}
        arguments = ["--steps", "20", "--lr", "0.5"]
        resumed, kept, *done = lines_of(announce_resume, arguments, found, SimpleNamespace(values=values))
        assert resumed == f"resumed from {found}, after step {step}"
        assert kept == "train.lr = 0.25 from the checkpoint's optimizer is kept; 0.5 is not used"
        assert done == [f"all 20 steps are done, and {found} has them; for more, raise --steps"] * (step >= 20)


@on_ranks(2)
def test_the_largest_numbers_of_all_ranks_take_one_all_reduce(world):
    with paramp.launch_from_torch({}) as context, Collectives() as collectives:
        assert max_over_ranks(context, world.rank, -world.rank, 3) == [1, 0, 3]
    assert (collectives.counts, collectives.elements) == ({"allreduce": 1}, [3])
