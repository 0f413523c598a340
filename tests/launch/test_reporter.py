"""What a run writes."""

import contextlib
import json
import math
import mmap
import os
import re
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import train
from commands import ROOT
from disk import files_of_at_most
from pages import read
from pool import on_ranks, shared_folder
from train_app import batch_reader
from train_app.reporter import Reporter, announce_end, check_tensorboard, memory_bytes
from train_app.settings import Job, TrainConfig

import paramp
from paramp.models.gpt import GPT, PRESETS

RECORD = {"step": 1, "loss": 2.5, "grad_norm": math.inf, "loss_scale": 8.0, "skipped": 1, "lr": 0.1}
RECORD |= {"tokens_per_second": 1000.0, "step_seconds": 0.5, "memory_bytes": 3 * 2**20}


def test_a_step_is_one_json_object_with_null_for_non_finite_values(tmp_path, capsys):
    """And a line of text; files of an earlier run are kept, and other ranks write nothing."""
    folder = tmp_path / "new" / "folder"
    for index in range(3):
        with Reporter(TrainConfig(steps=2, log_dir=str(folder)), True) as reporter:
            reporter.say("hello")
            reporter.step(RECORD | {"lr": float(index)})
            reporter.step({**RECORD, "step": 2, "grad_norm": 1.0, "skipped": 0})
    for index, name in enumerate(("metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl")):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        assert lines[0] == {**RECORD, "lr": float(index), "grad_norm": None}
        assert lines[1:] == [{**RECORD, "step": 2, "grad_norm": 1.0, "skipped": 0}]
    log = (folder / "train.log").read_text()
    shown, left = re.subn(r"  0:00 left$", "", capsys.readouterr().out, flags=re.MULTILINE)
    assert shown.endswith(log)
    assert left == 6  # each of the two steps, three times
    assert "hello" in log
    assert "step 1/2  loss 2.5000  scale 8  grad norm inf  skipped 1  1,000 tokens/s  3 MiB" in log
    assert "step 2/2  loss 2.5000  scale 8  grad norm 1.000  skipped 1  1,000 tokens/s  3 MiB" in log
    with Reporter(TrainConfig(steps=2, log_dir=str(tmp_path / "other")), False) as reporter:
        reporter.say("hello")
        reporter.step(RECORD)
    assert not (tmp_path / "other").exists()
    assert capsys.readouterr().out == ""
    job = TrainConfig(steps=2, log_dir=str(tmp_path / "other"))
    full = pytest.raises(paramp.ConfigError, match=r"log: '.*/train\.log' cannot be written to: File too large; make")
    with full, files_of_at_most(2**15), Reporter(job, True) as reporter:
        reporter.say("hello" * 2**13)


def test_a_terminal_gets_a_bar_and_the_time_left(tmp_path, monkeypatch):
    """After the second of six steps, 20 s after the start, 40 s are left."""
    reading, writing = os.openpty()
    termios.tcsetwinsize(writing, (24, 140))
    with open(writing, "w", encoding="utf-8") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", terminal)
        patched.setattr("train_app.reporter.monotonic", iter((0.0, 5.0, 20.0)).__next__)
        patched.setenv("TERM", "xterm-256color")
        patched.setenv("COLUMNS", "140")
        with Reporter(TrainConfig(steps=6, log_dir=str(tmp_path)), True) as reporter:
            for step in (1, 2):
                reporter.step({**RECORD, "step": step, "skipped": 0})
        terminal.flush()
        os.set_blocking(reading, False)
        drawn = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(reading, 4096):
                drawn += part
    os.close(reading)
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.decode()).split("0:25 left")[-1]
    assert "0:40 left  step 2/6  loss 2.5000" in last, last
    assert re.search(r"━{20,}", last), last
    assert "left" not in (tmp_path / "train.log").read_text()


def test_a_run_ends_with_the_command_for_its_page(monkeypatch, tmp_path):
    lines, programs = [], tmp_path / ".venv/bin"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    announce_end(SimpleNamespace(say=lines.append), TrainConfig(log_dir="runs/a b"))
    programs.mkdir(parents=True)
    (programs / "paramp").touch()  # it is installed
    announce_end(SimpleNamespace(say=lines.append), TrainConfig(log_dir="runs/a b"))
    announce_end(SimpleNamespace(say=lines.append), TrainConfig())
    assert lines == [
        "for the page of this run: .venv/bin/python -m paramp report 'runs/a b'",
        "for the page of this run: .venv/bin/paramp report 'runs/a b'",
    ]


@on_ranks(2)
def test_the_times_of_a_step_are_those_of_its_batch_and_its_tokens_those_of_all_ranks(world):
    """By a clock that only its readers move, 1 s each; a batch takes it 100 s further on the second rank, an evaluation
    1000 s."""
    now, evaluate, folder = [0.0], train.held_out_loss, shared_folder() / "log"
    read_batch = batch_reader.training_windows

    def read_clock():
        now[0] += 1.0
        return now[0]

    def evaluate_slowly(*given):
        now[0] += 1000.0
        return evaluate(*given)

    def read_slowly(*given):
        now[0] += 100.0 * world.rank
        return read_batch(*given)

    job = TrainConfig(data=str(ROOT / "LICENSE"), seq_len=8, batch_size=4, steps=2, log_dir=str(folder))
    job = replace(job, eval_every=1, eval_sequences=2, peak_tflops=2.0)
    flops = GPT(replace(PRESETS["tiny"], num_layers=1, max_seq_len=8)).flops_per_token(8)
    clock = mock.patch.object(time, "perf_counter", read_clock)
    slow = mock.patch.object(train, "held_out_loss", evaluate_slowly)
    waiting = mock.patch.object(batch_reader, "training_windows", read_slowly)
    with paramp.launch_from_torch({}) as context, clock, slow, waiting:
        assert train.train(context, Job(train=job, model={"num_layers": 1})) == 0
    if world.rank > 0:  # the first rank writes
        return
    for record in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        assert record["mfu"] == pytest.approx(flops * record["tokens_per_second"] / (2 * 2e12))
        assert record["step_seconds"] < 100.0 < record["data_seconds"] < 110.0  # of the second rank
        assert record["val_seconds"] > 1000.0
        assert record["tokens_per_second"] == pytest.approx(4 * 8 / record["step_seconds"])


@on_ranks(2)
def test_a_log_folder_that_cannot_be_written_to_is_an_error_on_every_rank_before_the_run(world):
    log_dir = None if world.rank else str(ROOT / "LICENSE" / "log")  # which hosts may be given alone
    job = TrainConfig(data=str(ROOT / "LICENSE"), seq_len=8, batch_size=4, log_dir=log_dir)
    error = pytest.raises(paramp.ConfigError, match=r"train\.log_dir: .*LICENSE/log' cannot be written to: Not a dir")
    with paramp.launch_from_torch({}) as context, error:
        train.train(context, Job(train=job, model={"num_layers": 1}))


def test_memory_bytes_is_the_peak_of_this_process():
    """A GPU's is that of its allocator."""
    before = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    with mmap.mmap(-1, 2**26) as fresh:  # a tensor's memory may be what an earlier tensor left
        fresh.write(bytes(2**26))
    assert before + 2**25 <= memory_bytes(torch.device("cpu")) < 2**40
    with mock.patch.object(torch.cuda, "max_memory_allocated", {torch.device("cuda", 1): 7}.get):
        assert memory_bytes(torch.device("cuda", 1)) == 7


def test_tensorboard_gets_every_finite_scalar(tmp_path):
    """Of the third step those of all keys that the page lists."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    table = read("docs/watching.md").partition("| key | meaning |")[2].partition("\n\n")[0]
    keys = [key for row in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", row.split("|")[1])]
    numbers = {key: number / 4 for number, key in enumerate(keys)} | {"skipped": 1, "step": 3}
    with Reporter(TrainConfig(steps=3, log_dir=str(tmp_path), tensorboard=True), True) as reporter:
        reporter.step({**RECORD, "mfu": None})
        reporter.step({**RECORD, "step": 2, "loss": math.nan, "grad_norm": 1.5, "val_loss": 2.0})
        reporter.step(numbers)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = {tag: events.Tensors(tag) for tag in events.Tags()["tensors"]}
    assert [event.step for event in tags["speed/mfu"]] == [3]
    assert [event.step for event in tags["train/loss"]] == [1, 3]
    assert [event.step for event in tags["train/grad_norm"]] == [2, 3]
    assert [event.step for event in tags["val/loss"]] == [2, 3]
    written = [events[-1].tensor_proto.double_val[0] for events in tags.values()]
    assert sorted(written) == sorted(number for key, number in numbers.items() if key != "step")
    assert tags["memory/peak_bytes"][0].tensor_proto.double_val[0] == RECORD["memory_bytes"]


def test_a_missing_tensorboard_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(paramp.ConfigError, match="no log_dir"):
        TrainConfig(tensorboard=True)
    monkeypatch.setattr("train_app.reporter.importlib.util.find_spec", lambda name: None)
    with pytest.raises(paramp.ConfigError, match=r"pip install .paramp\[tensorboard\]"):
        check_tensorboard()
