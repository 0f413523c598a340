"""What a run logs before its first step."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from counting import Collectives
from pool import on_ranks
from train import agree, train
from train_app.batch_reader import DataPosition, keep_global_batch, max_over_ranks
from train_app.reporter import announce, announce_resume, facts_of
from train_app.settings import Job, TrainConfig, configure

import paramp
from paramp.config.files import load
from paramp.engine.checkpoint_manager import accumulation_for


@on_ranks(2)
def test_ranks_with_different_settings_are_told_which(world):
    different = TrainConfig(data=f"/data/{world.rank}", steps=10 + world.rank)  # a path may differ
    message = r"^train\.steps: rank 0 has 10, but rank 1 has 11; give every rank"
    with (
        paramp.launch_from_torch({"parallel": {"data": 2}}, device=world.device) as context,
        pytest.raises(paramp.ConfigError, match=message),
    ):
        train(context, Job(train=different))


def test_only_settings_that_differ_from_the_default_are_logged():
    counts = {"sha256": "0", "num_files": 1, "vocab_size": 256, "unit": "byte"}
    corpus = SimpleNamespace(**counts, training=[1, 2], held_out=[3], notes=["a note"])
    for arguments, changed in (
        ("", "none"),
        ("--precision 16-mixed --steps 300", "none"),
        ("--tp 2 --set model.num_layers=3", "parallel.tensor.size = 2, model.num_layers = 3"),
        ("--precision 16-naive", "precision = 16-naive"),
    ):
        config, job = configure(arguments.split())
        axis, lines = SimpleNamespace(size=1), []
        context = SimpleNamespace(is_main=True, config=config, world_size=1, dp=axis, device="cpu")
        reporter = SimpleNamespace(say=lines.append)
        announce(reporter, context, job, facts_of(context, corpus, 7), corpus.notes)
        first, facts, note = lines
        assert first == f"settings other than the default: {changed}"
        assert facts.endswith("data_vocab_size = 256, data_bytes = 3, parameters = 7")
        assert note == "a note"


def test_a_run_that_is_finished_says_where_its_checkpoint_is():
    found = Path("runs/a/step-00000020")
    for step in (19, 20):
        _, job = configure(["--steps", "20", "--lr", "0.5"])
        lines = []
        announce_resume(SimpleNamespace(say=lines.append), job.train, found, {"step": step, "lr": 0.25})
        resumed, kept, *done = lines
        assert resumed == f"resumed from {found}, after step {step}"
        assert kept == "train.lr = 0.25 from the checkpoint's optimizer is kept; 0.5 is not used"
        assert done == [f"all 20 steps are done, and {found} has them; for more, raise --steps"] * (step >= 20)


def test_a_run_that_is_resumed_twice_knows_what_its_optimizer_was_made_with():
    corpus, state = SimpleNamespace(identity=dict, difference=lambda data: None), {}
    for lr in (0.1, 0.2, 0.3):
        position = DataPosition(TrainConfig(lr=lr), corpus, 1)
        if state:
            position.load_state_dict(state)
        state = position.state_dict()
        assert (state["lr"], state["weight_decay"]) == (0.1, TrainConfig().weight_decay)


def test_accumulation_keeps_the_global_batch():
    """The number of samples of a call does not grow; data ranks and accumulation of before, and accumulation now."""
    for batch, microbatches, ranks, before, expected in (
        (32, 1, 2, (1, 4), 2),
        (32, 1, 4, (2, 2), 1),
        (32, 2, 1, (1, 4), 4),
        (24, 1, 3, (1, 4), 2),  # 4/3 would not do, so parts are smaller
        (24, 1, 4, (2, 3), 2),
        (32, 1, 2, (3, 2), 4),
        (32, 1, 2, (4, 2), 4),
        (8, 4, 1, (4, 1), 2),  # of more microbatches than before, with one sample each
    ):
        assert accumulation_for(batch, microbatches, ranks, before) == expected
    for batch, ranks in ((32, 3), (2, 4)):
        message = rf"train.batch_size: got {batch}, which does not divide over {ranks} data"
        context = SimpleNamespace(config=load({}), dp=SimpleNamespace(size=ranks))
        values = {"layout": {"dp": 2}, "config": {"gradient_accumulation": 1}}
        header = SimpleNamespace(values=values | {"tracked": {"position": {"accumulation": 1}}})
        with pytest.raises(paramp.ConfigError, match=message):
            keep_global_batch(context, TrainConfig(batch_size=batch), header)


@on_ranks(2)
def test_the_largest_numbers_of_all_ranks_take_one_all_reduce(world):
    with paramp.launch_from_torch({}) as context, Collectives() as collectives:
        assert max_over_ranks(context, world.rank, -world.rank, 3) == [1, 0, 3]
    assert (collectives.counts, collectives.elements) == ({"allreduce": 1}, [3])
    with paramp.launch_from_torch({}) as context, Collectives() as collectives:
        run = SimpleNamespace(engine=SimpleNamespace(context=context), batches=SimpleNamespace(failure=None))
        record = {"memory_bytes": 10 + world.rank, "data_seconds": 2.0 - world.rank}
        assert agree(run, record, SimpleNamespace(received=None)) == (0, False)
    assert record == {"memory_bytes": 11, "data_seconds": 2.0}
    assert (collectives.counts, collectives.elements) == ({"allreduce": 1}, [4])
