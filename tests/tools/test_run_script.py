"""``paramp run``: the ranks of a user's own script, their layout, and how they end."""

import json
import os
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
from commands import PYTHON, ROOT, python, start, succeeded
from pages import read

import paramp
from paramp.config.layout_of_run_command import VARIABLE, load_in_layout
from paramp.distributed import local_launcher
from paramp.tools import cli
from paramp.tools.run_script import split_arguments

RUN = ("-m", "paramp", "run")
SCRIPT = """
import os, signal, sys, time, torch, paramp
with paramp.launch_from_torch({"parallel": {"pipeline": {"microbatches": 4}}}) as context:
    what = sys.argv[1]
    if what == "sizes":
        sizes = [axis.size for axis in (context.pp, context.dp, context.tp)]
        given = [*sizes, context.config.parallel.pipeline.microbatches, *sys.argv[2:]]
        os.write(1, ("|".join(map(str, given)) + "\\n").encode())  # in one piece: two ranks write to one pipe
    if what == "exit":
        sys.exit(7)
    if what == "1" and context.rank == 1:
        os._exit(1)
    if what == "abort" and context.rank == 1:
        os.abort()
    if what == "fail" and context.rank == 1:
        raise ValueError("my own mistake")
    if what == "die" and context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()
    os.write(1, b"ready\\n")
    while what == "wait":
        time.sleep(0.05)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "my_script.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize(
    ("given", "flags", "script"),
    [
        ("s.py --tp 2 --pp 2 --lr 1 data", "--tp 2 --pp 2", "s.py --lr 1 data"),
        ("--tp=2 s.py -x --sequence-parallel y --help", "--tp=2 --sequence-parallel", "s.py -x y --help"),
        ("--dp 2 -m my.module -m 3 --zero 1", "--dp 2 --zero 1", "-m my.module -m 3"),
        ("--tp 2 s.py a -- --tp 4 -- b", "--tp 2", "s.py a --tp 4 -- b"),
        ("--help", "--help", ""),
        ("s.py --tp", "--tp", "s.py"),
    ],
)
def test_the_flags_of_run_and_the_scripts_arguments(given, flags, script):
    assert split_arguments(given.split()) == (flags.split(), script.split())


@pytest.mark.parametrize("module", [False, True])
def test_each_rank_runs_the_script_in_the_layout_of_the_flags(script, module, tmp_path):
    what = ("-m", "my_script") if module else (script,)
    command = [*RUN, "--tp", "2", *what, "sizes", "--lr", "1", "--dp", "1", "--", "--dp", "9"]
    result = succeeded(python(*command, PYTHONPATH=f"{ROOT}:{tmp_path}"))
    assert result.stdout.count("1|1|2|4|--lr|1|--dp|9\n") == 2
    assert result.stderr == ""


def test_the_exit_code_is_the_scripts_and_the_error_of_the_rank_that_failed_comes_last(script):
    def ended(what):
        return python(*RUN, script, "--tp", "2", what)

    exited = ended("exit")
    with ThreadPoolExecutor(4) as runs:  # at once: the rank that is left has 5 s to end
        silent, aborted, failed, killed = runs.map(ended, ("1", "abort", "fail", "die"))
    assert exited.returncode == 7
    assert re.fullmatch(r"error: rank [01] ended with exit code 7\n", exited.stderr), exited.stderr
    assert silent.returncode == 1  # without a word, as other libraries end a process
    assert silent.stderr.strip().splitlines()[-1] == "error: rank 1 ended with exit code 1", silent.stderr
    assert re.search("error: rank 1 was ended by SIGABRT; if gloo .*DETAIL, .*\\n$", aborted.stderr), aborted.stderr
    assert failed.returncode == 1
    assert failed.stderr.count("Traceback") == 1, failed.stderr
    assert failed.stderr.strip().endswith("ValueError: my own mistake"), failed.stderr
    assert killed.returncode == 128 + signal.SIGKILL
    assert killed.stderr.strip().splitlines()[-1] == "error: rank 1 was ended by SIGKILL", killed.stderr


@pytest.mark.parametrize(("send", "number"), [(os.killpg, signal.SIGINT), (os.kill, signal.SIGUSR1)])
def test_an_interrupt_ends_all_ranks(script, send, number):
    with start([PYTHON, *RUN, script, "--tp", "2", "wait"], streams=subprocess.PIPE) as process:
        assert process.stdout.readline() == process.stdout.readline() == "ready\n"
        send(process.pid, number)
        process.communicate(timeout=60)  # the pipe closes when the last rank has ended
        assert process.returncode == 128 + number


def test_ranks_that_are_to_end_are_asked_at_once_and_killed_after_the_time_to_stop(monkeypatch):
    done = []
    rank = SimpleNamespace(poll=lambda: None, send_signal=done.append, wait=done.append)
    monkeypatch.setattr(local_launcher.time, "monotonic", lambda: 0.0)
    local_launcher._end([rank], to_stop=30.0)
    assert done == [0.0, signal.SIGTERM, 30.0, signal.SIGKILL, 5.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tpp 2 s.py", "--tpp: no such flag, expected one of --tp, .*did you mean '--tp'"),
        ("--tp 2", "run: got no script"),
        ("-m", "run: got no script"),
        ("none.py --tp 2", "no file 'none.py'"),
        ("docs --tp 2", "run: 'docs' is a folder without __main__.py; expected a script"),
        ("README.md --tp 0", r"parallel.tensor.size: got 0, expected an integer of 1 or more"),
        ("README.md --tp", "argument --tp: expected one argument"),
    ],
)
def test_bad_input_is_one_message(arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(["run", *arguments.split()]) == 2
    assert re.fullmatch(f"error: .*{message}.*\\n", capsys.readouterr().err)


ASKED = {"parallel.tensor.size": 2, "parallel.data.replicate": 4}


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"parallel": {"tensor": 1, "data": "auto"}},
        {"parallel": {"tensor": {"size": 2, "mode": "1d"}, "data": 4}},
        {"parallel": {"data": {"replicate": 4}}},
        paramp.Config(),
        paramp.Config(parallel={"tensor": 2}),
    ],
)
def test_the_command_lines_layout_fills_what_the_configuration_leaves_open(config, monkeypatch):
    monkeypatch.setenv(VARIABLE, json.dumps(ASKED))
    parallel = load_in_layout(config).parallel
    assert (parallel.tensor.size, parallel.data_axes.replicate, parallel.data_size(8)) == (2, 4, 4)


def test_it_fills_keys_that_need_each_other_and_files(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, json.dumps({"parallel.pipeline.size": 2, "parallel.data.shard": 2}))
    path = tmp_path / "run.toml"
    path.write_text('clip_grad_norm = 2.0\n[parallel.pipeline]\nsplit = ["blocks.4"]\n[parallel.data]\nprefetch = 1\n')
    config = load_in_layout(path)
    assert (config.parallel.pipeline.split, config.parallel.pipeline.size) == (("blocks.4",), 2)
    assert (config.parallel.data_axes.prefetch, config.parallel.shard, config.clip_grad_norm) == (1, 2, 2.0)
    monkeypatch.setenv(VARIABLE, "")
    assert load_in_layout({}).parallel.shard == 1


@pytest.mark.parametrize(
    ("flags", "ranks", "layout"),
    [("--fsdp 4", 4, (4, 4, 0)), ("--fsdp 2 --replicate 2", 4, (4, 2, 0)), ("--dp 2 --zero 1", 2, (2, 1, 1))],
)
def test_the_flags_of_the_readme_are_the_layouts_that_it_names(flags, ranks, layout, monkeypatch):
    """With a script that leaves the layout open: the data ranks, those that share shards, and the stage of ZeRO."""
    assert f" (`{flags}`)" in read("README.md")
    monkeypatch.chdir(ROOT)
    with mock.patch("paramp.distributed.local_launcher.start_processes", return_value=0) as started:
        assert cli.main(["run", "examples/own_model.py", *flags.split()]) == 0
    _, started_ranks, variable = started.call_args.args
    monkeypatch.setenv(VARIABLE, variable)
    parallel = load_in_layout({}).parallel
    assert started_ranks == ranks
    assert (parallel.data_size(ranks), parallel.shard, parallel.zero) == layout


@pytest.mark.parametrize(
    ("config", "key", "before", "asked"),
    [
        ({"parallel": {"tensor": 4}}, "parallel.tensor.size", 4, 2),
        ({"parallel": {"data": 2}}, "parallel.data.replicate", 2, 4),
        (paramp.Config(parallel={"tensor": {"size": 4}}), "parallel.tensor.size", 4, 2),
    ],
)
def test_a_configuration_that_says_otherwise_is_an_error(config, key, before, asked, monkeypatch):
    monkeypatch.setenv(VARIABLE, json.dumps(ASKED))
    with pytest.raises(paramp.ConfigError, match=f"{key}: got {before} in the .* and {asked} on the command line"):
        paramp.launch_from_torch(config, device="cpu")


@pytest.mark.parametrize("text", ["x", "[1]", '{"precision": "16-mixed"}'])
def test_another_text_in_the_variable_is_an_error(text, monkeypatch):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(paramp.ConfigError, match=f"{VARIABLE}: got"):
        load_in_layout({})
