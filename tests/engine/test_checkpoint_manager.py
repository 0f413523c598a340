"""Runs that end before their time, and go on."""

import json
import math
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from commands import PYTHON, python
from families import WHOLE as WHOLE_FAMILY
from pool import on_ranks
from victims import TINY, Run, torchrun_command

import paramp
from paramp.base.errors import ConfigError
from paramp.checkpoint.open_checkpoint import problems
from paramp.distributed.rendezvous import free_port
from paramp.engine.checkpoint_manager import accumulation_for

SCRIPT = [*TINY, "--precision", "32-true"]


def losses(folder, name="metrics.jsonl"):
    return {record["step"]: record["loss"] for record in map(json.loads, (folder / name).read_text().splitlines())}


@pytest.mark.parametrize(
    ("batch", "microbatches", "ranks", "before", "expected"),
    [
        (32, 1, 2, (1, 4), 2),
        (32, 1, 4, (2, 2), 1),
        (32, 2, 1, (1, 4), 4),
        (24, 1, 3, (1, 4), 2),  # 4/3 would not do, so parts are smaller
        (24, 1, 4, (2, 3), 2),
        (32, 1, 2, (3, 2), 4),
        (32, 1, 2, (4, 2), 4),
    ],
)
def test_accumulation_keeps_the_global_batch(batch, microbatches, ranks, before, expected):
    accumulation = accumulation_for(batch, microbatches, ranks, before)
    assert accumulation == expected
    per_call = batch / (accumulation * ranks * microbatches)
    assert per_call == int(per_call)
    assert per_call <= batch / (before[0] * before[1] * microbatches)


@pytest.mark.parametrize(("batch", "ranks"), [(32, 3), (2, 4)])
def test_a_batch_that_does_not_divide_is_refused(batch, ranks):
    with pytest.raises(ConfigError, match=rf"train.batch_size: got {batch}, which does not divide over {ranks} data"):
        accumulation_for(batch, 1, ranks, (1, 2))


@on_ranks(2)
def test_every_rank_learns_that_one_was_asked_to_stop(world):
    with paramp.launch_from_torch({}) as context:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            before = signal.getsignal(number)
            with paramp.StopRequest() as stop:
                assert not stop.agreed(context)
                if context.rank == 1:
                    os.kill(os.getpid(), number)
                assert stop.agreed(context)
                assert stop.received == (number if context.rank == 1 else None)
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


def test_ctrl_c_saves_and_says_how_to_resume(tmp_path):
    folder = tmp_path / "checkpoints"
    options = ["--checkpoint-dir", str(folder), "--checkpoint-every", "2", "--steps", "100000"]
    with Run([PYTHON, *SCRIPT, *options], tmp_path / "out") as run:
        assert run.wait_for((folder / "step-00000002").exists), run.log.read_text()
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 130, run.log.read_text()
        text = run.log.read_text()
    stopped = max(folder.iterdir())
    assert "(Ctrl-C once more: stop at once)" in text
    assert f"saved {stopped}" in text
    assert "by signal 2; --resume auto continues from there" in text
    assert not problems(stopped)


@on_ranks(2)
def test_the_best_checkpoint_is_kept(world, tmp_path):
    """Also by the process that resumes, and although it is older than those that are deleted."""
    x = torch.ones(2, 1)

    def names():
        torch.distributed.barrier()
        return sorted(path.name for path in folder.iterdir())

    with paramp.launch_from_torch({}):
        folders = [tmp_path]
        torch.distributed.broadcast_object_list(folders)
        folder = folders[0] / "run"
        model = torch.nn.Linear(1, 1)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss)
        for keep_best, metrics, best in (
            ("min", {1: 3.0, 2: 1.0, 3: None, 4: math.nan, 5: 1.0, 6: 2.0}, 2),
            ("min", {7: 1.5, 8: 0.5, 9: 0.9, 10: 0.7}, 8),
            ("max", {11: 0.4, 12: 0.8, 13: None, 14: 0.8}, 12),
        ):
            checkpoints = paramp.Checkpoints(folder, every=3, keep_last=2, keep_best=keep_best)
            assert checkpoints.newest() == (folder / f"step-{min(metrics) - 1:08d}" if min(metrics) > 1 else None)
            for step, metric in metrics.items():
                engine.forward_backward(x, x)
                engine.step()
                assert checkpoints.due(step, metric) == (step in (1, 2, 8, 12) or step % 3 == 0)
                checkpoints.save(engine, step, metric=metric)
            engine.finish_saving()
            last = max(metrics)
            assert names() == ["best.json", *(f"step-{step:08d}" for step in sorted({best, last - 1, last}))]
            assert paramp.Checkpoints(folder).best() == folder / f"step-{best:08d}"
        with pytest.raises(ConfigError, match=r"keep_best: got 'lowest', expected \"min\", \"max\" or None"):
            paramp.Checkpoints(folder, keep_best="lowest")


@on_ranks(2)
def test_an_engine_saves_where_its_loaders_are(world):
    import tempfile

    numbers = torch.utils.data.TensorDataset(torch.arange(24.0)[:, None], torch.zeros(24, 1))

    def start():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(numbers, batch_size=2, shuffle=True)
        engine, loader, _, _ = paramp.initialize(model, optimizer, torch.nn.functional.mse_loss, loader)
        return engine, loader

    def read(loader, count=100):
        return [x.flatten().tolist() for _, (x, _) in zip(range(count), loader, strict=False)]

    with paramp.launch_from_torch({}), tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        torch.distributed.broadcast_object_list(folders)
        engine, loader = start()
        given = read(loader, 2)
        engine.save(folders[0] + "/saved")
        rest = read(start()[1])
        engine, loader = start()
        engine.load(folders[0] + "/saved")
        assert given + read(loader) == rest


@pytest.mark.parametrize("stopped_at", [0, 1, 5, 6, 8, 12], ids=lambda count: f"after-{count}-batches")
@pytest.mark.parametrize("iterable", [False, True])
@on_ranks(2)
def test_a_loop_over_epochs_resumes_in_the_middle_of_one(world, stopped_at, iterable, tmp_path):
    """Two epochs of six batches on each rank, of which none is read twice and none is left out."""
    samples = list(zip(torch.arange(24.0)[:, None], torch.zeros(24, 1), strict=True))

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(samples)

    def start():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dataset = Stream() if iterable else samples
        loader = torch.utils.data.DataLoader(dataset, batch_size=2, shuffle=None if iterable else True)
        engine, loader, _, _ = paramp.initialize(model, optimizer, torch.nn.functional.mse_loss, loader)
        return engine, loader

    def train(engine, loader, path=None):
        found = []
        if path is not None and stopped_at == 0:
            engine.save(path)
            return found
        for epoch in range(loader.epoch, 2):
            assert loader.epoch == epoch
            for x, _ in loader:
                assert loader.epoch == epoch
                found.append((epoch, x.flatten().tolist()))
                if path is not None and len(found) == stopped_at:
                    engine.save(path)
                    return found
        assert loader.epoch == 2
        return found

    with paramp.launch_from_torch({}):
        folders = [str(tmp_path / "saved")]
        torch.distributed.broadcast_object_list(folders)
        whole = train(*start())
        assert len(whole) == 12
        before = train(*start(), folders[0])
        assert len(before) == stopped_at
        engine, loader = start()
        engine.load(folders[0])
        assert loader.epoch == min(1, max(0, stopped_at - 1) // 6)
        assert before + train(engine, loader) == whole


STEPS = 20
COMMAND = [*SCRIPT, "--batch-size", "16", "--steps", str(STEPS), "--checkpoint-every", "9"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of one process that nobody disturbs, and its losses."""
    folder = tmp_path_factory.mktemp("whole")
    result = python(*COMMAND, "--checkpoint-dir", str(folder / "checkpoints"), "--log-dir", str(folder / "log"))
    assert result.returncode == 0, result.stderr
    return folder, losses(folder / "log")


def test_a_run_goes_on_from_the_newest_whole_checkpoint(whole, tmp_path):
    folder, log = tmp_path / "checkpoints", tmp_path / "log"
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    with (folder / "step-00000020" / "rank-00000.safetensors").open("r+b") as file:
        file.truncate(1000)
    command = [*COMMAND, "--checkpoint-dir", str(folder)]
    result = python(*command, "--log-dir", str(log))
    assert result.returncode == 0, result.stderr
    assert "resume: skipped: " in result.stdout
    assert "rank-00000.safetensors' has 1000 bytes, expected" in result.stdout
    assert f"resumed from {folder / 'step-00000018'}, after step 18" in result.stdout
    assert losses(log) == whole[1]
    assert losses(log, "metrics.1.jsonl") == whole[1]
    assert not problems(folder / "step-00000020")
    assert (log / "train.log").read_text().count("step 20/20") == 2
    other = python(*command, "--data", "LICENSE")
    assert other.returncode == 2
    assert "train.data: 'LICENSE' differs from the data of the saved run (" in other.stderr


def test_the_script_keeps_the_checkpoint_with_the_lowest_loss(tmp_path):
    """The loss rises again, because the learning rate is far too high."""
    folder, log = tmp_path / "checkpoints", tmp_path / "log"
    options = ["--steps", "8", "--lr", "1.0", "--checkpoint-dir", str(folder), "--log-dir", str(log)]
    keep = ["--set", "train.checkpoint_keep_best=true", "--set", "train.checkpoint_keep_last=1"]
    result = python(*SCRIPT, *options, *keep, "--set", "train.eval_every=1")
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    best = min(records, key=lambda record: record["val_loss"])
    assert best["step"] < 7
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["best.json", f"step-{best['step']:08d}", "step-00000008"]
    assert json.loads((folder / "best.json").read_text()) == {
        "step": best["step"],
        "metric": best["val_loss"],
        "checkpoint": names[1],
    }


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_with_fewer_ranks(whole, tmp_path):
    """SIGTERM to the script that has started its ranks; then one data rank in place of two."""
    folder = tmp_path / "checkpoints"
    options = ["--checkpoint-dir", str(folder), "--log-dir", str(tmp_path / "log")]
    with Run([PYTHON, *COMMAND, *options, "--dp", "2", "--checkpoint-every", "2"], tmp_path / "out") as run:
        assert run.wait_for((folder / "step-00000002").exists), run.log.read_text()
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 143, run.log.read_text()
        text = run.log.read_text()
    stopped = max(folder.iterdir())
    assert f"saved {stopped}" in text
    assert "by signal 15; --resume auto continues from there" in text
    assert not problems(stopped)
    result = python(*COMMAND, *options)
    assert result.returncode == 0, result.stderr
    assert "1 data ranks, before 2: gradient_accumulation = 2 keeps the global batch of 16" in result.stdout
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
    assert not problems(saved)
    assert text.count("error: ") == 1, text
    assert repr(str(data)) in text
    assert "at byte" in text


@pytest.mark.skipif(not WHOLE_FAMILY, reason="one of make test-all, because it takes half a minute")
def test_a_lost_machine_leaves_a_smaller_run_that_goes_on(tmp_path):
    """torchrun with ``--nnodes 1:2``: two launchers of a rank each, of which one is killed with its rank."""
    folder = tmp_path / "checkpoints"
    arguments = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"]
    arguments += ["--rdzv-id", "test"]
    arguments += [*SCRIPT, "--steps", "40", "--seq-len", "128", "--batch-size", "16"]
    arguments += ["--checkpoint-dir", str(folder), "--checkpoint-every", "5", "--log-dir", str(tmp_path / "log")]

    def launcher(is_host):
        conf = f"last_call_timeout=2,is_host={is_host}"
        return torchrun_command(1, "--rdzv-conf", conf, *arguments, restarts=3)

    with Run(launcher(1), tmp_path / "one") as one:
        with Run(launcher(0), tmp_path / "two") as two:
            assert one.wait_for((folder / "step-00000005").exists), one.log.read_text()
            two.end()
        assert one.finish() == 0, one.log.read_text()
        text = one.log.read_text()
    assert "data_size = 2" in text
    assert "data_size = 1" in text
    assert "gradient_accumulation = 2 keeps the global batch of 16" in text
    assert len(losses(tmp_path / "log")) == 40
