"""launch/train.py from end to end, on real processes."""

import dataclasses
import json
import os
import re
import runpy
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from commands import ROOT, environment, python, succeeded, torchrun
from families import family, long
from train_app.settings import TrainConfig

import paramp
from paramp.distributed import local_launcher
from paramp.models.gpt import PRESETS, GPTConfig
from paramp.models.moe_gpt import MoEGPTConfig

SMALL = ("--batch-size", "8", "--seq-len", "32", "--steps", "4", "--set", "train.eval_sequences=8")
KEYS = {
    *("step", "loss", "grad_norm", "loss_scale", "skipped", "lr", "tokens_per_second"),
    *("step_seconds", "data_seconds", "memory_bytes", "mfu"),
}
"""What ``metrics.jsonl`` has of every step."""


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def train_here(monkeypatch, capfd):
    """The script's main() in this process: a function that returns its exit code and what it wrote to stderr."""

    def train(*arguments):
        monkeypatch.setattr(sys, "argv", ["launch/train.py", "--steps", "1", *arguments])
        monkeypatch.chdir(ROOT)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = runpy.run_path(str(ROOT / "launch" / "train.py"))["main"]()
        return code, capfd.readouterr().err

    return train


def test_torchrun_with_one_process_starts_the_four_that_the_layout_needs(tmp_path):
    """``torchrun launch/train.py --tp 2 --pp 2``, with the metrics of the same job in one process."""
    job = ["launch/train.py", *SMALL, "--precision", "32-true", "--log-dir"]
    succeeded(python(*job, str(tmp_path / "single")))
    result = succeeded(torchrun(1, *job, str(tmp_path), "--tp", "2", "--pp", "2", "--trace", "2"))
    assert result.stderr == ""  # no library's warning
    assert "the layout needs 4: starting them" in result.stdout
    assert result.stdout.count("parallel.tensor.size = 2") == 1
    steps = records(tmp_path)
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert [record.keys() ^ KEYS for record in steps] == [set(), set(), set(), {"val_loss", "val_seconds"}]
    assert all(0 < record["data_seconds"] < record["step_seconds"] for record in steps)
    assert all(record["mfu"] is None for record in steps)  # no peak is known of a CPU
    for record, expected in zip(steps, records(tmp_path / "single"), strict=True):
        for key in {"loss", "val_loss", "grad_norm", "lr"} & expected.keys():
            assert record[key] == pytest.approx(expected[key], abs=1e-4)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["config"]["parallel.pipeline.size"] == 2
    assert not [key for key in saved["config"] if key.startswith("model.")]
    assert len(saved["run"]["data_sha256"]) == 64
    log = (tmp_path / "train.log").read_text()
    assert "validation loss" in log
    assert re.search(r"1f1b, 2 ranks, .*: bubble \d+\.\d% measured, 33\.3% in theory; .*step-\d+\.json", log)
    trace = json.loads(next((tmp_path / "traces").iterdir()).read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1, 2, 3}


def test_metrics_that_are_not_finite_are_null(tmp_path):
    """From a scale so high that the first steps overflow."""
    config = tmp_path / "run.py"
    config.write_text(
        "from paramp.amp import AMP_TYPE\nfp16 = dict(mode=AMP_TYPE.TORCH, init_scale=2.0**40)\n"
        "train = dict(steps=3, batch_size=8, seq_len=32, eval_sequences=8, peak_tflops=2.0)\n"
    )
    flags = ("--tensorboard", "--trace-overflow", "--histogram", "2", "--log-dir", str(tmp_path))
    result = succeeded(python("launch/train.py", "--config", str(config), *flags))
    assert result.stdout.count("was skipped: backward overflow in ") == 1  # the first of a series
    assert "microbatch 0 on rank 0 (pp 0, dp 0, tp 0, stage 0) at a loss scale of 1.09951e+12" in result.stdout
    assert json.loads((tmp_path / "gradients.json").read_text())["scale"] == 2.0**39
    assert (tmp_path / "gradients.png").is_file()
    assert list((tmp_path / "tensorboard").iterdir())
    first = records(tmp_path)[0]
    assert (first["skipped"], first["grad_norm"], first["loss_scale"]) == (1, None, 2.0**40)
    flops = paramp.models.GPT.preset("tiny").flops_per_token(32)
    assert first["mfu"] == pytest.approx(flops * first["tokens_per_second"] / 2e12)


# What goes wrong before or in a world of one needs no processes of its own: the script's main() does the same there.
ALONE = [
    ("--dp 2 --tp 0", "parallel.tensor.size: got 0, expected"),
    ("--norms fast", "train.norms: got 'fast', expected"),
    ("--data LICENSE --seq-len 9999", "tokens, of 'LICENSE' held out"),
    ("--tensorboard", "log_dir"),
    ("--log-dir=", "train.log_dir: got '', expected a path"),
    ("--histogram 2", "train.histogram: got 2, expected a step from 1 to 1"),
    ("--set model.num_layer=6", "model.num_layer: no such key, expected one of num_layers, num_heads, width, "),
    ("--set model.width=wide", "model.width: got 'wide', expected"),
    ("--set model.num_layers=0", "model.num_layers: got 0, expected an integer of 1 or more"),
    ("--set model.width=130", "model.width: got 130, expected a multiple of num_heads 4"),
    ("--set model.dropout=1", "model.dropout: got 1.0, expected a number from 0"),
    ("--set model.init_std=-1", "model.init_std: got -1.0, expected a finite number of 0"),
    ("--set model.tied=0", "model.tied: got 0, expected true or false"),
    ("--seq-len 32 --set model.max_seq_len=16", "got 16, expected at least the 32 tokens of train.seq_len"),
    ("--set model.vocab_size=100", "model.vocab_size: got 100, expected at least the 256 tokens of the data"),
    ("--set model=tiny", "model: got 'tiny', expected a table"),
    ("--tp two", "invalid int value: 'two'"),
]
TORCHRUNS = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
MPIRUNS = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
SRUNS = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "node[1-2]"}


def without(variables, name):
    return {other: value for other, value in variables.items() if other != name}


LAUNCHERS = [
    ({"RANK": "0", "WORLD_SIZE": "4"}, "RANK, WORLD_SIZE set, but LOCAL_RANK, MASTER_ADDR, MASTER_PORT missing"),
    (without(TORCHRUNS, "MASTER_PORT"), "but MASTER_PORT missing"),
    (TORCHRUNS | {"RANK": "x"}, "RANK is 'x', expected an integer"),
    (TORCHRUNS | {"RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2"),
    (TORCHRUNS | MPIRUNS, "RANK and WORLD_SIZE say rank 0 of 2, but mpirun's OMPI_COMM_WORLD_RANK and"),
    (TORCHRUNS | SRUNS, "but Slurm's SLURM_PROCID and SLURM_NTASKS say rank 0 of 4; unset RANK"),
    (without(MPIRUNS, "OMPI_COMM_WORLD_RANK"), "but OMPI_COMM_WORLD_RANK missing; start with 'mpirun -n N'"),
    (without(SRUNS, "SLURM_NTASKS"), "SLURM_PROCID, SLURM_LOCALID set, but SLURM_NTASKS missing"),
    (without(SRUNS, "SLURM_JOB_NODELIST"), "but SLURM_JOB_NODELIST missing"),
    (MPIRUNS, 'mpi4py cannot be used (import of mpi4py halted; None in sys.modules); pip install "paramp[mpi]"'),
]
"""Variables of launchers that are missing or contradict each other."""


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [*((arguments, {}, message) for arguments, message in ALONE), *(("", *case) for case in LAUNCHERS)],
)
def test_bad_input_is_one_clear_message(arguments, variables, message, monkeypatch, train_here):
    for name in environment({}).keys() ^ os.environ.keys():
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # as if it was not installed
    monkeypatch.setenv("PARAMP_LAUNCH_TIMEOUT", "5")  # what is not refused fails, instead of waiting for other ranks
    monkeypatch.setattr(local_launcher, "SECONDS_FOR_RANK_0", 0.01)
    code, errors = train_here(*arguments.split())
    assert code == 2
    assert message in errors
    assert errors.startswith("error: ")
    assert len(errors.strip().splitlines()) == 1, errors


@pytest.mark.parametrize(
    ("processes", "arguments", "message"),
    [
        (3, "--tp 2", "tensor 2 x pipeline 1 = 2 does not divide the world"),
        (0, "--tp 3", "the model's 4 heads do not divide by it"),
        (2, "--dp 2 --batch-size 7", "train.batch_size: got 7, expected a multiple of 2"),
    ],
)
def test_bad_input_is_one_clear_message_and_a_failure_of_all_ranks(processes, arguments, message):
    command = ["launch/train.py", "--steps", "1", *arguments.split()]
    result = torchrun(processes, *command, timeout=240) if processes else python(*command, timeout=90)
    assert result.returncode != 0
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    assert message in errors[0]
    if not processes:  # torchrun adds a report of its own, which has the error too
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr


def test_every_field_of_the_models_config_can_be_set(tmp_path, train_here, monkeypatch):
    """By ``--set`` and in a file; the file gives what ``--set`` does not. And the norms are those of the flag."""
    initialize, made = paramp.initialize, []

    def recording(model, *args, **kwargs):
        result = initialize(model, *args, **kwargs)
        norms = {type(one) for one in result[0].module.modules() if isinstance(one, torch.nn.LayerNorm)}
        made.append((model.config, model.head.weight is model.embedding.tokens.weight, norms))
        return result

    monkeypatch.setattr(paramp, "initialize", recording)
    wanted = {"num_layers": 2, "num_heads": 2, "width": 32, "dropout": 0.1, "init_std": 0.03}
    wanted |= {"max_seq_len": 40, "vocab_size": 300, "tied": False}
    assert wanted.keys() == {field.name for field in dataclasses.fields(GPTConfig)}
    settings = [word for name, value in wanted.items() for word in ("--set", f"model.{name}={json.dumps(value)}")]
    settings += ["--precision", "bf16-mixed", "--norms", "low-precision"]
    code, errors = train_here(*SMALL, "--steps", "1", "--log-dir", str(tmp_path), *settings)
    assert code == 0, errors
    saved = json.loads((tmp_path / "config.json").read_text())["config"]
    assert {name: saved[f"model.{name}"] for name in wanted} == wanted
    assert {f"train.{field.name}" for field in dataclasses.fields(TrainConfig)} <= saved.keys()  # the defaults too
    named = {part for key in saved for part in key.split(".")}
    assert {field.name for field in dataclasses.fields(paramp.Config)} - named == {"user"}
    file = tmp_path / "run.toml"
    file.write_text("[model]\nnum_layers = 1\nwidth = 64\n")
    settings = ["--config", str(file), "--set", "model.num_layers=3", "--norms", "fused"]
    code, errors = train_here(*SMALL, "--steps", "1", *settings)
    assert code == 0, errors
    changed = dataclasses.replace(PRESETS["tiny"], num_layers=3, width=64, max_seq_len=32)
    kinds = {paramp.nn.LPLayerNorm}, {paramp.nn.FusedLayerNorm}
    assert made == [(GPTConfig(**wanted), False, kinds[0]), (changed, True, kinds[1])]
    mixture = {"num_experts": 3, "experts_per_token": 1, "expert_width": 16, "balance_weight": 0.5, "z_weight": 0.25}
    mixture["bias_rate"] = 2.0**-8
    assert mixture.keys() == {field.name for field in dataclasses.fields(MoEGPTConfig)} - wanted.keys()
    settings = [word for name, value in mixture.items() for word in ("--set", f"model.{name}={value}")]
    code, errors = train_here(*SMALL, "--steps", "1", "--model", "tiny-moe", *settings)
    assert code == 0, errors
    assert {name: getattr(made[-1][0], name) for name in mixture} == mixture


@pytest.mark.parametrize(
    ("layout", "culprit"),
    [
        ("--tp 2 --pp 2", 2),
        *(pytest.param(f"--fsdp 2 {other}", 1, marks=[family, long]) for other in ("", "--tp 2", "--pp 2")),
    ],
)
def test_an_exception_on_one_rank_ends_all_with_its_message_once(layout, culprit):
    """The others wait for it in a collective, under FSDP one of the model."""
    script = "tests/support/scripts/one_rank_fails.py"
    result = python(script, *layout.split(), *SMALL, timeout=240, CULPRIT=str(culprit))
    assert result.returncode != 0
    assert result.stderr.count("RuntimeError: disk on fire") == 1, result.stderr
    assert result.stderr.count("Traceback") == 1, result.stderr
    assert f"error: rank {culprit} failed" in result.stderr


def test_an_exception_in_a_users_script_is_printed_once():
    """Under torchrun, whose report has its message too; and of a rank that fails after the others have ended."""
    with ThreadPoolExecutor(1) as runs:  # beside the others, in which a rank has some seconds to end
        late = runs.submit(python, "tests/support/scripts/fails_after_the_others_are_done.py", timeout=240)
        script = "tests/support/scripts/own_loop.py"
        results = [torchrun(2, script, culprit, timeout=240) for culprit in "10"]
    for result in results:
        assert result.returncode != 0
        text, _, of_torchrun = result.stderr.partition("ChildFailedError")
        assert [part.count("ValueError: my own mistake") for part in (text, of_torchrun)] == [1, 1], result.stderr
        assert "Connection" not in result.stderr, result.stderr
    result = late.result()
    assert result.returncode != 0
    assert result.stderr.count("ValueError: disk full on rank 1") == 1, result.stderr
