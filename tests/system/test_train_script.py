"""launch/train.py from end to end, on real processes."""

import dataclasses
import json
import math
import os
import re
import runpy
import sys
import warnings

import numpy as np
import pytest
import torch
from commands import ROOT, environment, python, torchrun
from families import cases, family

import paramp
from paramp.data.sampling import sample_offsets
from paramp.distributed import local_launcher
from paramp.models.gpt import PRESETS, GPTConfig
from paramp.tools.train_config import configure

SMALL = ("--batch-size", "8", "--seq-len", "32", "--steps", "4", "--set", "train.eval_sequences=8")


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The same job in one process."""
    folder = tmp_path_factory.mktemp("single")
    result = python("launch/train.py", *SMALL, "--precision", "32-true", "--log-dir", str(folder))
    assert result.returncode == 0, result.stderr
    return records(folder)


@pytest.mark.parametrize("text", ["[" * 3000, "9" * 5000, "1\nseed = 2", "'", ""])
def test_a_setting_that_is_not_a_toml_value_is_a_string(text):
    config = configure(["--set", f"OWN={text}"])
    assert text == config.OWN
    assert config.seed == 1024


def test_torchrun_with_one_process_starts_the_four_that_the_layout_needs(tmp_path, single):
    """``torchrun launch/train.py --tp 2 --pp 2``, exactly so, and with metrics."""
    arguments = ["--tp", "2", "--pp", "2", *SMALL, "--precision", "32-true", "--log-dir", str(tmp_path), "--trace", "2"]
    result = torchrun(1, "launch/train.py", *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # no library's warning
    assert "the layout needs 4: starting them" in result.stdout
    assert result.stdout.count("parallel.tensor.size = 2") == 1
    steps = records(tmp_path)
    keys = {
        "step",
        "loss",
        "grad_norm",
        "loss_scale",
        "skipped",
        "lr",
        "tokens_per_second",
        "step_seconds",
        "data_seconds",
        "memory_bytes",
        "mfu",
    }
    assert [set(record) - keys for record in steps] == [set(), set(), set(), {"val_loss", "val_seconds"}]
    assert all(0 < record["data_seconds"] < record["step_seconds"] for record in steps)
    assert all(record["mfu"] is None for record in steps)  # no peak is known of a CPU
    assert all(keys <= set(record) for record in steps)
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    for record, expected in zip(steps, single, strict=True):
        for key in ("loss", "val_loss", "grad_norm", "lr"):
            if key in expected:
                assert record[key] == pytest.approx(expected[key], abs=1e-4)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["config"]["parallel.pipeline.size"] == 2
    assert len(saved["run"]["data_sha256"]) == 64
    log = (tmp_path / "train.log").read_text()
    assert "validation loss" in log
    assert re.search(r"1f1b, 2 ranks, .*: bubble \d+\.\d% measured, 33\.3% in theory; .*trace\.json", log)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1, 2, 3}


def test_four_processes_of_torchrun_in_fp16_with_accumulation_and_zero(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(
        'precision = "bf16-mixed"\ngradient_accumulation = 2\n[parallel]\ntensor = 2\n[train]\nsteps = 9\n'
    )
    result = torchrun(
        4,
        "launch/train.py",
        "--config",
        str(config),
        *SMALL,
        "--precision",
        "16-naive",
        "--zero",
        "1",
        "--set",
        "parallel.data=2",
        "--set",
        "masters=remainder",
        "--log-dir",
        str(tmp_path),
    )
    assert result.returncode == 0, result.stderr
    assert "precision = 16-naive" in result.stdout  # flag over file
    assert "precision.masters = remainder" in result.stdout
    assert "precision.reduce_dtype.dp" not in result.stdout  # the mode's default
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["config"]["precision.reduce_dtype.dp"] == "float16"
    assert "gradient_accumulation = 2" in result.stdout  # file over default
    assert result.stdout.count(" = ") < 30  # not every setting
    steps = records(tmp_path)
    assert len(steps) == 4
    assert all(math.isfinite(record["loss"]) and record["loss_scale"] >= 1 for record in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_metrics_that_are_not_finite_are_null(tmp_path):
    """From a scale so high that the first steps overflow."""
    config = tmp_path / "run.py"
    config.write_text(
        "from paramp.amp import AMP_TYPE\nfp16 = dict(mode=AMP_TYPE.TORCH, init_scale=2.0**40)\n"
        "train = dict(steps=3, batch_size=8, seq_len=32, eval_sequences=8, peak_tflops=2.0)\n"
    )
    flags = ("--tensorboard", "--trace-overflow", "--histogram", "2")
    result = python("launch/train.py", "--config", str(config), "--log-dir", str(tmp_path), *flags)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("was skipped: backward overflow in ") == 1  # the first of a series
    assert "microbatch 0 on rank 0 (pp 0, dp 0, tp 0, stage 0) at a loss scale of 1.09951e+12" in result.stdout
    assert json.loads((tmp_path / "gradients.json").read_text())["scale"] == 2.0**39
    assert (tmp_path / "gradients.png").is_file()
    assert list((tmp_path / "tensorboard").iterdir())
    first = records(tmp_path)[0]
    assert first["skipped"] == 1
    assert first["grad_norm"] is None
    assert first["loss_scale"] == 2.0**40
    assert first["mfu"] == pytest.approx(
        paramp.models.GPT.preset("tiny").flops_per_token(32) * first["tokens_per_second"] / 2e12
    )


# What goes wrong before or in a world of one needs no processes of its own: the script's main() does the same there.
ALONE = {
    "sizes that do not make up the world": (["--dp", "2", "--tp", "0"], "parallel.tensor.size: got 0, expected"),
    "unknown precision": (["--precision", "fp17"], "precision: got 'fp17', expected one of 32-true"),
    "unknown schedule": (["--pp", "2", "--schedule", "2f2b"], "schedule: got '2f2b', expected one of gpipe, 1f1b"),
    "unknown norms": (["--norms", "fast"], "train.norms: got 'fast', expected"),
    "unknown model": (["--model", "tinny"], "model: got 'tinny', expected one of tiny"),
    "data that is not there": (["--data", "stdlob"], "data: got 'stdlob', expected stdlib or the path of"),
    "a file shorter than a sequence": (["--data", "LICENSE", "--seq-len", "9999"], "tokens, of 'LICENSE' held out"),
    "a tokenizer that is not there": (["--data", "LICENSE", "--tokenizer", "none"], "tokenizer: no file 'none'"),
    "TensorBoard without a place": (["--tensorboard"], "log_dir"),
    "a trace without a place": (["--trace", "1"], "train.trace: got 1, expected None, because there is no log_dir"),
    "a histogram after the last step": (["--histogram", "2"], "train.histogram: got 2, expected a step from 1 to 1"),
    "unknown key": (["--set", "parallel.tensr=2"], "parallel.tensr: no such key"),
    "unknown field of the model": (
        ["--set", "model.num_layer=6"],
        "model.num_layer: no such key, expected one of num_layers, num_heads, width, dropout, init_std, max_seq_len, "
        "vocab_size, tied (did you mean 'num_layers'?)",
    ),
    "a field of the model of the wrong type": (
        ["--set", "model.width=wide"],
        "model.width: got 'wide', expected",
    ),
    "no layers": (["--set", "model.num_layers=0"], "model.num_layers: got 0, expected an integer of 1 or more"),
    "a width that the heads do not divide": (
        ["--set", "model.width=130"],
        "model.width: got 130, expected a multiple of num_heads 4",
    ),
    "dropout of everything": (
        ["--set", "model.dropout=1"],
        "model.dropout: got 1.0, expected a number from 0",
    ),
    "a deviation below zero": (
        ["--set", "model.init_std=-1"],
        "model.init_std: got -1.0, expected a finite number of 0",
    ),
    "neither tied nor untied": (["--set", "model.tied=0"], "model.tied: got 0, expected true or false"),
    "a model for shorter sequences": (
        ["--seq-len", "32", "--set", "model.max_seq_len=16"],
        "model.max_seq_len: got 16, expected at least the 32 tokens of train.seq_len",
    ),
    "a model with fewer tokens than the data": (
        ["--set", "model.vocab_size=100"],
        "model.vocab_size: got 100, expected at least the 256 tokens of the data",
    ),
    "a name in place of the model's fields": (["--set", "model=tiny"], "model: got 'tiny', expected a table"),
    "unknown flag": (["--presicion", "32"], "--presicion: no such flag"),
    "a flag's value of the wrong type": (["--tp", "two"], "invalid int value: 'two'"),
    "a configuration file that is not there": (["--config", "none.toml"], "no file 'none.toml'"),
}

TOGETHER = {
    "sizes that do not divide the world": (3, ["--tp", "2"], "tensor 2 x pipeline 1 = 2 does not divide the world"),
    "heads not divisible by tp": (0, ["--tp", "3"], "the model's 4 heads do not divide by it"),
    "batch not divisible": (2, ["--dp", "2", "--batch-size", "7"], "train.batch_size: got 7, expected a multiple of 2"),
    "a stage name that matches nothing": (
        0,
        ["--pp", "2", "--set", 'parallel.pipeline.split=["block.2"]'],
        "split: got 'block.2', expected one of embedding",
    ),
}


def run_here(arguments, monkeypatch, capfd):
    """The script's main() in this process: its exit code and what it wrote to stderr."""
    monkeypatch.setattr(sys, "argv", ["launch/train.py", "--steps", "1", *arguments])
    monkeypatch.chdir(ROOT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = runpy.run_path(str(ROOT / "launch" / "train.py"))["main"]()
    return code, capfd.readouterr().err


@pytest.mark.parametrize("case", ALONE)
def test_bad_input_is_one_clear_message(case, monkeypatch, capfd):
    arguments, message = ALONE[case]
    code, errors = run_here(arguments, monkeypatch, capfd)
    assert code == 2
    assert message in errors
    assert errors.startswith("error: ")
    assert len(errors.strip().splitlines()) == 1, errors


@pytest.mark.parametrize(
    ("norms", "kind"), [("low-precision", paramp.nn.LPLayerNorm), ("fused", paramp.nn.FusedLayerNorm)]
)
def test_the_norms_are_those_of_the_flag(norms, kind, monkeypatch, capfd):
    initialize, modules = paramp.initialize, []

    def noting(*args, **kwargs):
        made = initialize(*args, **kwargs)
        modules.extend(made[0].module.modules())
        return made

    monkeypatch.setattr(paramp, "initialize", noting)
    code, errors = run_here([*SMALL, "--steps", "1", "--precision", "bf16-mixed", "--norms", norms], monkeypatch, capfd)
    assert code == 0, errors
    assert {type(module) for module in modules if isinstance(module, torch.nn.LayerNorm)} == {kind}


def test_every_field_of_the_models_config_can_be_set(tmp_path, monkeypatch, capfd):
    """By ``--set`` and in a file; the file gives what ``--set`` does not."""
    initialize, made = paramp.initialize, []

    def recording(model, *args, **kwargs):
        made.append((model.config, model.head.weight is model.embedding.tokens.weight))
        return initialize(model, *args, **kwargs)

    monkeypatch.setattr(paramp, "initialize", recording)
    wanted = {
        "num_layers": 2,
        "num_heads": 2,
        "width": 32,
        "dropout": 0.1,
        "init_std": 0.03,
        "max_seq_len": 40,
        "vocab_size": 300,
        "tied": False,
    }
    assert wanted.keys() == {field.name for field in dataclasses.fields(GPTConfig)}
    settings = [word for name, value in wanted.items() for word in ("--set", f"model.{name}={json.dumps(value)}")]
    code, errors = run_here([*SMALL, "--steps", "1", "--log-dir", str(tmp_path), *settings], monkeypatch, capfd)
    assert code == 0, errors
    assert made == [(GPTConfig(**wanted), False)]
    saved = json.loads((tmp_path / "config.json").read_text())["config"]
    assert {name: saved[f"model.{name}"] for name in wanted} == wanted
    file = tmp_path / "run.toml"
    file.write_text("[model]\nnum_layers = 1\nwidth = 64\n")
    code, errors = run_here(
        [*SMALL, "--steps", "1", "--config", str(file), "--set", "model.num_layers=3"], monkeypatch, capfd
    )
    assert code == 0, errors
    assert made[1] == (dataclasses.replace(PRESETS["tiny"], num_layers=3, width=64, max_seq_len=32), True)


def test_training_that_diverges_ends_with_the_diagnosis(tmp_path, monkeypatch, capfd):
    config = tmp_path / "run.toml"
    config.write_text('max_skipped_in_a_row = 2\n[precision]\nmode = "16-mixed"\ninit_scale = 1e30\n')
    code, errors = run_here([*SMALL, "--steps", "3", "--config", str(config)], monkeypatch, capfd)
    assert code == 1
    assert errors.startswith(
        "error: training stopped after optimizer step 2, because 2 steps in a row were skipped: backward overflow in "
    )
    assert "Traceback" not in errors


@pytest.mark.parametrize("case", TOGETHER)
def test_bad_input_is_one_clear_message_and_a_failure_of_all_ranks(case):
    processes, arguments, message = TOGETHER[case]
    arguments = ["launch/train.py", "--steps", "1", *arguments]
    result = torchrun(processes, *arguments, timeout=240) if processes else python(*arguments, timeout=90)
    assert result.returncode != 0
    assert result.stderr.count(message) == 1, result.stderr
    assert result.stderr.count("error: ") == 1, result.stderr
    if not processes:  # torchrun adds a report of its own
        assert "Traceback" not in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr


def test_a_token_outside_the_vocabulary_on_one_rank_is_an_error_on_all(tmp_path):
    """It lies in the first window of data rank 1, where the sample at opening does not look."""
    length, seq_len, batch = 10**7, 32, 8
    training = length - length // 20
    start = int(sample_offsets(1024, 1, np.arange(batch), training - seq_len)[batch // 2])
    tokens = np.zeros(length, "<u2")
    tokens[start + 5] = 999
    path = tmp_path / "tokens.bin"
    tokens.tofile(path)
    result = torchrun(2, "launch/train.py", *SMALL, "--data", str(path), timeout=240)
    assert result.returncode != 0
    message = f"error: data: {str(path)!r} at byte {2 * (start + 5)} is 999, expected 0 to 255"
    assert result.stderr.count(message) == 1, result.stderr
    assert result.stderr.count("error: ") == 1, result.stderr


TORCHRUNS = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
MPIRUNS = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
SRUNS = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "node[1-2]"}


def but(variables, **others):
    """``variables`` with some replaced, or, where None, left out."""
    return {name: value for name, value in {**variables, **others}.items() if value is not None}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4"}, "RANK, WORLD_SIZE set, but LOCAL_RANK, MASTER_ADDR, MASTER_PORT missing"),
        (but(TORCHRUNS, MASTER_PORT=None), "but MASTER_PORT missing"),
        (but(TORCHRUNS, RANK="x"), "RANK is 'x', expected an integer"),
        (but(TORCHRUNS, RANK="2"), "RANK is 2, but WORLD_SIZE is 2"),
        (TORCHRUNS | MPIRUNS, "RANK and WORLD_SIZE say rank 0 of 2, but mpirun's OMPI_COMM_WORLD_RANK and"),
        (TORCHRUNS | SRUNS, "but Slurm's SLURM_PROCID and SLURM_NTASKS say rank 0 of 4; unset RANK"),
        (but(MPIRUNS, OMPI_COMM_WORLD_RANK=None), "but OMPI_COMM_WORLD_RANK missing; start with 'mpirun -n N'"),
        (but(SRUNS, SLURM_NTASKS=None), "SLURM_PROCID, SLURM_LOCALID set, but SLURM_NTASKS missing"),
        (but(SRUNS, SLURM_JOB_NODELIST=None), "but SLURM_JOB_NODELIST missing"),
        (MPIRUNS, 'mpi4py cannot be used (import of mpi4py halted; None in sys.modules); pip install "paramp[mpi]"'),
    ],
)
def test_missing_or_contradictory_launcher_variables_are_errors(variables, message, monkeypatch, capfd):
    for name in environment({}).keys() ^ os.environ.keys():
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # as if it was not installed
    monkeypatch.setattr(local_launcher, "SECONDS_FOR_RANK_0", 0.01)
    code, errors = run_here([], monkeypatch, capfd)
    assert code == 2
    assert message in errors
    assert len(errors.strip().splitlines()) == 1, errors


def test_an_exception_on_one_rank_ends_all_with_its_message_once():
    culprit = "2"
    result = python(
        "tests/support/scripts/one_rank_fails.py", "--tp", "2", "--pp", "2", *SMALL, timeout=240, CULPRIT=culprit
    )
    assert result.returncode != 0
    assert result.stderr.count("RuntimeError: disk on fire") == 1, result.stderr
    assert result.stderr.count("Traceback") == 1, result.stderr
    assert f"error: rank {culprit} failed" in result.stderr


OTHER_AXES = {"fsdp2": [], "fsdp2-tp2": ["--tp", "2"], "fsdp2-pp2": ["--pp", "2"]}


@family
@pytest.mark.parametrize("layout", cases("exceptions of shards", list(OTHER_AXES), ["fsdp2"], 2))
def test_an_exception_on_one_rank_of_shards_ends_all_with_its_message_once(layout):
    """The others wait for it in a collective of the model."""
    other = OTHER_AXES[layout]
    script, culprit = "tests/support/scripts/one_rank_fails.py", "1"
    result = python(script, "--fsdp", "2", *other, *SMALL, timeout=240, CULPRIT=culprit)
    assert result.returncode != 0
    assert result.stderr.count("RuntimeError: disk on fire") == 1, result.stderr
    assert result.stderr.count("Traceback") == 1, result.stderr
    assert f"error: rank {culprit} failed" in result.stderr


def test_an_exception_on_one_rank_ends_a_users_script_under_torchrun():
    result = torchrun(2, "tests/support/scripts/own_loop.py", timeout=240)
    assert result.returncode != 0
    assert result.stderr.count("ValueError: my own mistake") == 1, result.stderr
    assert "Connection" not in result.stderr, result.stderr


def test_the_error_of_a_rank_that_fails_after_the_others_ended_is_printed():
    result = python("tests/support/scripts/fails_after_the_others_are_done.py", timeout=240)
    assert result.returncode != 0
    assert result.stderr.count("ValueError: disk full on rank 1") == 1, result.stderr
