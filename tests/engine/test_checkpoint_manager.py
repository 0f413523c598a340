"""Runs that end before their time, and go on."""

import contextlib
import itertools
import json
import math
import os
import shutil
import signal
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import train
from commands import PYTHON, ROOT, python, succeeded
from families import cases, family
from pool import on_ranks, shared_folder
from small_engines import each_raises, engine_of, everywhere, sgd, train_step
from torch import nn
from train_app.settings import Job, TrainConfig
from victims import TINY, Run

import paramp
from paramp.checkpoint.convert import inspect

SCRIPT = [*TINY, "--precision", "32-true", "--set", "model.num_layers=2"]


def records(folder, name="metrics.jsonl"):
    return list(map(json.loads, (folder / name).read_text().splitlines()))


def losses(folder, name="metrics.jsonl"):
    return {record["step"]: record["loss"] for record in records(folder, name)}


@on_ranks(2)
def test_every_rank_learns_that_one_was_asked_to_stop(world):
    with paramp.launch_from_torch({}) as context:
        for number, asked in itertools.product((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT), range(2)):
            before = signal.getsignal(number)
            with paramp.StopRequest() as stop:
                assert not stop.agreed(context)
                if context.rank == asked:
                    os.kill(os.getpid(), number)
                assert stop.agreed(context)
                assert stop.received == (number if context.rank == asked else None)
            assert signal.getsignal(number) is before


INTERRUPTED = """
import os, signal, types
import paramp
import paramp.engine.signals
now = [0.0]
paramp.engine.signals.time = types.SimpleNamespace(monotonic=lambda: now[0])  # on a busy machine a signal comes late
with paramp.StopRequest() as stop:
    goes_on, report = os.pipe()
    worker = os.fork()  # as a loader forks its workers
    for _ in range(2):  # one Ctrl-C: the launcher passes on what the terminal sent too
        os.kill(os.getpid(), signal.SIGINT)
    if not worker:
        os.write(report, b"worker")
    os.close(report)
    if worker:
        print(stop.received, os.read(goes_on, 9).decode(), flush=True)
        os.kill(worker, signal.SIGTERM)
        print(os.waitpid(worker, 0)[1], flush=True)
    now[0] = 1.1
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", flush=True)
"""


def test_ctrl_c_once_more_ends_a_process_at_once():
    result = python("-c", INTERRUPTED)
    assert (result.returncode, result.stdout) == (-signal.SIGTERM, f"{signal.SIGINT:d} worker\n{signal.SIGTERM:d}\n")
    assert result.stderr.count("paramp: interrupted; this run saves after the current step") == 1


WITH_WORKERS = """
import signal, subprocess
import paramp
import paramp.data.dataloader
from torch.utils.data import DataLoader, get_worker_info

class Samples(list):
    mark = 0
    def __getitem__(self, index):
        return self.mark

class Lazy(DataLoader):
    def __iter__(self):
        yield from super().__iter__()

def init(worker):
    get_worker_info().dataset.mark = 1

if __name__ == "__main__":
    for how, kind, while_it_starts, later in (
        ("spawn", DataLoader, signal.SIGTERM, signal.SIGUSR1),
        ("spawn", DataLoader, signal.SIGINT, 0),
        ("fork", DataLoader, signal.SIGUSR1, signal.SIGTERM),
        ("fork", Lazy, signal.SIGINT, signal.SIGTERM),
    ):
        loader = kind(Samples(range(64)), num_workers=1, multiprocessing_context=how, worker_init_fn=init)
        with paramp.StopRequest() as stop:
            batches = iter(paramp.data.dataloader.shard_loader(loader, 0, 1, 0))
            subprocess.run(["sh", "-c", f"kill -{while_it_starts:d} 0"])
            count = next(batches)
            subprocess.run(["sh", "-c", f"kill -{later:d} 0"])
            print(stop.received, (count + sum(batches)).item())
"""


def test_a_signal_to_all_processes_leaves_a_loader_its_workers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WITH_WORKERS)
    result = succeeded(python(str(script)))
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGINT)
    assert result.stdout == "".join(f"{number:d} 64\n" for number in numbers)


@on_ranks(2)
def test_the_best_checkpoint_is_kept(world):
    """Also by the process that resumes, and although it is older than those that are deleted."""
    x = torch.ones(2, 1)
    with paramp.launch_from_torch({}):
        folder = shared_folder() / "run"
        engine = engine_of(nn.Linear(1, 1))
        for keep_best, metrics, best in (
            ("min", {1: 3.0, 2: 1.0, 3: None, 4: math.nan, 5: 1.0, 6: 2.0}, 2),
            ("min", {7: None, 8: None, 9: 1.5}, 2),
            ("min", {10: 1.5, 11: 0.5, 12: 0.9, 13: 0.7}, 11),
            ("max", {14: 0.4, 15: 0.8, 16: None, 17: 0.8}, 15),
        ):
            checkpoints = paramp.Checkpoints(str(folder), every=3, keep_last=2, keep_best=keep_best)
            assert checkpoints.newest() == (folder / f"step-{min(metrics) - 1:08d}" if min(metrics) > 1 else None)
            for step, metric in metrics.items():
                train_step(engine, x)
                assert checkpoints.due(step, metric) == (step in (1, 2, 11, 15) or step % 3 == 0)
                checkpoints.save(engine, np.int64(step), metric=metric)
            engine.finish_saving()
            torch.distributed.barrier()
            kept = {f"step-{step:08d}" for step in (best, max(metrics) - 1, max(metrics))}
            assert {path.name for path in folder.iterdir()} == {"best.json", *kept}
            assert paramp.Checkpoints(folder).best() == folder / f"step-{best:08d}"
        with pytest.raises(paramp.ConfigError, match=r"keep_best: got 'lowest', expected \"min\", \"max\" or None"):
            paramp.Checkpoints(folder, keep_best="lowest")


@pytest.mark.parametrize(("wait", "saves"), [(False, False), (False, True), (True, True)])
def test_a_save_fails_in_the_next_call_or_if_it_waits_at_once(tmp_path, wait, saves):
    """The best checkpoint before it is kept, and a metric between the two is the best so far."""
    obstacle = tmp_path / "best.json.partial"  # so that the best checkpoint cannot be recorded
    with paramp.launch_from_torch({}):
        engine, checkpoints = engine_of(nn.Linear(1, 1)), paramp.Checkpoints(tmp_path, keep_last=1, keep_best="min")
        checkpoints.save(engine, 1, metric=2.0, wait=True)
        obstacle.mkdir()
        failed = pytest.raises(paramp.CheckpointError, match="the checkpoint was written, but then: IsADirectoryError")
        with failed if wait else contextlib.nullcontext():
            checkpoints.save(engine, 2, metric=1.0, wait=wait)
        with contextlib.nullcontext() if wait else failed:
            checkpoints.save(engine, 3) if saves else engine.finish_saving()
        obstacle.rmdir()
        assert checkpoints.due(4, 1.5)
        checkpoints.save(engine, 4, wait=True)
        assert checkpoints.best() == tmp_path / "step-00000001"
        assert checkpoints.due(5, 1.5)


def test_folders_with_other_names_are_no_checkpoints(tmp_path):
    """And a file of the user's in one is not deleted with it."""
    other = tmp_path / "step-2"
    other.mkdir()
    with paramp.launch_from_torch({}):
        engine, checkpoints = engine_of(nn.Linear(1, 1)), paramp.Checkpoints(tmp_path, keep_last=1)
        for step in (1, 2):
            saved = checkpoints.save(engine, step, wait=True)
        assert {*tmp_path.iterdir()} == {other, saved}
        assert checkpoints.newest() == saved
        (saved / "notes.txt").write_text("mine")
        newer = [checkpoints.save(engine, step, wait=True) for step in (3, 4)]
        assert {*tmp_path.iterdir()} == {other, saved, newer[1]}
        assert [path.name for path in saved.iterdir()] == ["notes.txt"]
        assert paramp.Checkpoints(tmp_path).newest() == newer[1]
    for name, value in (("keep_last", 0), ("keep_last", None), ("every", 0), ("every", True), ("keep_every", 0.5)):
        with pytest.raises(paramp.ConfigError, match=f"{name}: got {value}, expected an integer of 1 or more"):
            paramp.Checkpoints(tmp_path, **{name: value})
    assert paramp.Checkpoints(tmp_path, every=np.int64(2)).due(4)
    each_raises(
        RuntimeError,
        {
            r"call paramp\.launch_from_torch": checkpoints.newest,
            r"call paramp\.launch": lambda: paramp.Checkpoints(tmp_path, keep_best="min").due(1, 0.5),
            "was closed, and its process groups are": lambda: checkpoints.save(engine, 3),
            "was closed, and its process groups": lambda: engine.load(saved),
        },
    )


@pytest.mark.parametrize("stopped_at", [0, 1, 5, 6, 8, 12], ids=lambda count: f"after-{count}-batches")
@on_ranks(2)
def test_a_loop_over_epochs_resumes_in_the_middle_of_one(world, stopped_at):
    """Two epochs of six batches on each rank, of which none is read twice and none is left out.

    An evaluation on the first batches of another loader begins at its start, as without the stop.
    """
    samples = list(zip(torch.arange(24.0)[:, None], torch.zeros(24, 1), strict=True))

    def start(**options):
        loader = torch.utils.data.DataLoader(samples, batch_size=2, shuffle=True)
        return paramp.initialize(nn.Linear(1, 1), sgd, nn.functional.mse_loss, loader, loader, **options)[:3]

    def read(loader):
        for epoch in range(loader.epoch, 2):
            for x, _ in loader:
                assert loader.epoch == epoch
                yield epoch, x.flatten().tolist()
        assert loader.epoch == 2

    def evaluate(test):
        return [x.flatten().tolist() for x, _ in itertools.islice(test, 3)]

    with paramp.launch_from_torch({}):
        folder, (engine, loader, test) = shared_folder(), start()
        before = list(itertools.islice(read(loader), stopped_at))
        assert evaluate(test) != evaluate(test)
        engine.save(folder / "saved")
        evaluated = evaluate(test)
        engine, loader, test = start()
        engine.load(folder / "saved")
        assert evaluate(test) == evaluated
        assert loader.epoch == min(1, max(0, stopped_at - 1) // 6)
        whole = list(read(start()[1]))
        assert len(whole) == 12
        assert before + list(read(loader)) == whole
    expected = everywhere(whole[stopped_at:])
    with paramp.launch_from_torch({"parallel": {"tensor": 2}}):  # one data rank, which reads what is left of both
        engine, loader, _ = start(plan={})
        engine.load(folder / "saved")
        left = list(read(loader))
        for epoch in (0, 1):
            both = [number for rank in expected for place, numbers in rank if place == epoch for number in numbers]
            assert sorted(both) == sorted(number for place, numbers in left if place == epoch for number in numbers)


STEPS = 20
COMMAND = [*SCRIPT, "--batch-size", "16", "--steps", str(STEPS), "--checkpoint-every", "9"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of one process that nobody disturbs, and its losses."""
    folder = tmp_path_factory.mktemp("whole")
    succeeded(python(*COMMAND, "--checkpoint-dir", str(folder / "checkpoints"), "--log-dir", str(folder / "log")))
    return folder, losses(folder / "log")


def test_a_run_goes_on_from_the_newest_whole_checkpoint(whole, tmp_path):
    folder, log = tmp_path / "checkpoints", tmp_path / "log"
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    with (folder / "step-00000020" / "rank-00000.safetensors").open("r+b") as file:
        file.truncate(1000)
    command = [*COMMAND, "--checkpoint-dir", str(folder)]
    result = succeeded(python(*command, "--log-dir", str(log)))
    assert "resume: skipped: " in result.stdout
    assert "rank-00000.safetensors' has 1000 bytes, expected" in result.stdout
    assert f"resumed from {folder / 'step-00000018'}, after step 18" in result.stdout
    assert losses(log) == whole[1]
    assert losses(log, "metrics.1.jsonl") == whole[1]
    assert not inspect(folder / "step-00000020")["damage"]
    assert (log / "train.log").read_text().count("step 20/20") == 2
    other = python(*command, "--data", "LICENSE")
    assert other.returncode == 2
    assert "train.data: 'LICENSE' differs from the data of the saved run (" in other.stderr


def test_the_script_keeps_the_checkpoint_with_the_lowest_loss(tmp_path):
    """The loss rises again, because the learning rate is far too high. One of each six steps is kept, too."""
    folder, log, loss = tmp_path / "checkpoints", tmp_path / "log", ["--lr", "1.0", "--set", "train.eval_every=1"]
    options = ["--steps", "8", "--checkpoint-dir", str(folder), "--checkpoint-every", "3", "--log-dir", str(log)]
    keep = [f"checkpoint_{one}" for one in ("keep_best=true", "keep_last=1", "keep_every=6")]
    succeeded(python(*SCRIPT, *loss, *options, *(word for one in keep for word in ("--set", f"train.{one}"))))
    best = min(records(log), key=lambda record: record["val_loss"])
    assert best["step"] < 6
    name, sixth = f"step-{best['step']:08d}", folder / "step-00000006"
    assert sorted(path.name for path in folder.iterdir()) == ["best.json", name, sixth.name, "step-00000008"]
    again = succeeded(python(*SCRIPT, *loss, "--steps", "8", "--resume", str(sixth)))
    assert f"resumed from {sixth}, after step 6" in again.stdout
    expected = {"step": best["step"], "metric": best["val_loss"], "checkpoint": name}
    assert json.loads((folder / "best.json").read_text()) == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@on_ranks(2)
def test_a_signal_to_one_rank_ends_all_after_that_step_with_its_code(world, number):
    def interrupted(run, step):
        if (step, world.rank) == (2, 1):
            os.kill(os.getpid(), number)
        return train_step_of_the_script(run, step)

    folder, train_step_of_the_script = shared_folder() / "run", train.train_step
    options = {"checkpoint_dir": str(folder), "log_dir": str(folder.with_name("log")), "resume": "auto"}
    options |= {"data": str(ROOT / "LICENSE"), "seq_len": 8, "batch_size": 2, "eval_sequences": 2, "eval_every": 2}
    with paramp.launch_from_torch({}) as context, mock.patch.object(train, "train_step", interrupted):
        job = Job(train=TrainConfig(steps=4, **options), model={"num_layers": 1})
        assert train.train(context, job) == 128 + number
    (saved,) = folder.iterdir()
    assert saved.name == "step-00000002"
    assert not inspect(saved)["damage"]
    with paramp.launch_from_torch({}) as context:  # the evaluation is made, and the schedule is that of three steps
        assert train.train(context, replace(job, train=TrainConfig(steps=3, **options))) == 0
    if world.rank == 0:
        lines = records(folder.with_name("log"))
        assert [(line["step"], "loss" in line, "val_loss" in line) for line in lines] == [
            *((1, True, False), (2, True, False), (2, False, True), (3, True, True))
        ]
        assert lines[-1]["lr"] == job.train.lr * train.learning_rate_factor(2, 3)


STOPPED = [(signal.SIGTERM, 143, 2), (signal.SIGINT, 130, 1)]


@family
@pytest.mark.parametrize(("number", "code", "ranks"), cases("asked to stop", STOPPED, STOPPED[:1], 1))
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_with_fewer_ranks(whole, tmp_path, number, code, ranks):
    """SIGTERM to the script that has started its ranks, then one data rank in place of two; Ctrl-C to one process."""
    folder = tmp_path / "checkpoints"
    options = ["--checkpoint-dir", str(folder), "--log-dir", str(tmp_path / "log")]
    with Run([PYTHON, *COMMAND, *options, "--dp", str(ranks), "--checkpoint-every", "2"], tmp_path / "out") as run:
        assert run.wait_for((folder / "step-00000002").exists), run.log.read_text()
        run.process.send_signal(number)
        assert run.finish() == code, run.log.read_text()
        text = run.log.read_text()
    stopped = max(folder.iterdir())
    assert f"saved {stopped}" in text
    assert f"by signal {number:d}; --resume auto continues from there" in text
    assert ("(Ctrl-C once more: stop at once)" in text) == (number == signal.SIGINT)
    assert not inspect(stopped)["damage"]
    result = succeeded(python(*COMMAND, *options))
    message = "1 data ranks, before 2: gradient_accumulation = 2 keeps the global batch of 16"
    assert (message in result.stdout) == (ranks == 2)
    assert f"resumed from {stopped}" in result.stdout
    assert losses(tmp_path / "log") == pytest.approx(whole[1], abs=1e-4)


def test_data_that_gets_lost_is_an_error_after_a_checkpoint(tmp_path):
    data, folder = tmp_path / "train.bin", tmp_path / "checkpoints"
    np.random.default_rng(0).integers(0, 256, 2**16).astype(np.uint16).tofile(data)
    options = ["--checkpoint-dir", str(folder), "--steps", "100000", "--data", str(data), "--checkpoint-every", "1000"]
    with Run([PYTHON, *SCRIPT, *options, "--dp", "2"], tmp_path / "out") as run:
        assert run.wait_for(lambda: "10/100000" in run.log.read_text()), run.log.read_text()
        with data.open("r+b") as file:
            file.truncate(2**12)
        code = run.finish()
        text = run.log.read_text()
    assert code == 2, text
    (saved,) = folder.iterdir()
    assert f"saved {saved}" in text
    assert not inspect(saved)["damage"]
    assert text.count("error: ") == 1, text
    assert repr(str(data)) in text
    assert "at byte" in text
