"""What a user sees of an error that ends the program: one line of one rank, and the launcher's report."""

import json
import os
import sys

import pytest
from commands import torchrun

import paramp
from paramp.base.errors import ConfigError
from paramp.distributed import error_report
from paramp.distributed.first_failure import mark_as_echo

SCRIPT = """
import sys

import torch

import paramp

before = sys.argv[1] == "before"
with paramp.launch_from_torch({"parallel": {"tensor": 2}, **({"fp16": True} if before else {})}):
    model = torch.nn.Linear(3, 3)
    paramp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan={"no.such": "rowwise"})
"""
ERRORS = {
    "before": ("error: fp16: got True; here, write {'precision': '16-mixed'}", "line 9, in <module>"),
    "after": ("error: plan['no.such']: no module of the model matches", "line 11, in <module>"),
}


@pytest.mark.parametrize("when", ERRORS)
def test_under_torchrun_one_rank_prints_one_line_and_the_report_ends_with_it(tmp_path, when):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = torchrun(2, str(script), when)
    error, line = ERRORS[when]
    assert result.returncode != 0
    lines = result.stderr.splitlines()
    printed = [index for index, text in enumerate(lines) if text.startswith(error)]
    assert len(printed) == 1, result.stderr
    assert f'File "{script}", {line}' in lines[printed[0] - 2]
    assert sum(text.startswith("Traceback") for text in lines) == 1  # torchrun's own
    last, border = [text for text in lines if text.strip()][-2:]
    assert f"traceback : {error}" in last
    assert set(border) == {"="}


@pytest.fixture
def hook(monkeypatch):
    """The hook that a launch installs, with the errors that the one before it gets."""
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    monkeypatch.setattr(error_report, "_previous", [])
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    paramp.launch_from_torch().close()
    return sys.excepthook, seen


def raised(error):
    try:
        raise error
    except Exception as caught:
        return type(caught), caught, caught.__traceback__


def test_other_errors_are_left_to_the_hook_before(hook, capsys):
    hook, seen = hook
    for error in (RuntimeError("x"), ValueError("y"), FileNotFoundError("z")):
        hook(*raised(error))
        assert seen.pop() is error
    echo = RuntimeError("lost")
    mark_as_echo(echo)
    hook(*raised(echo))
    assert seen == []
    assert capsys.readouterr().err == ""


def test_errors_of_forked_processes_are_not_the_ranks(hook, capsys, monkeypatch, tmp_path):
    hook, seen = hook
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(os, "getpid", lambda: 0)
    for error in (RuntimeError("x"), ConfigError("y")):
        hook(*raised(error))
        assert seen.pop() is error
    assert (capsys.readouterr().err, [*tmp_path.iterdir()]) == ("", [])


def test_an_error_of_paramps_is_its_line_and_its_message(hook, capsys, monkeypatch, tmp_path):
    hook, seen = hook
    error = raised(ConfigError("tp: no such key"))
    hook(*error)
    assert seen == [error[1]]  # a logger's hook, which has to know
    printed = capsys.readouterr().err.splitlines()
    assert printed[-1] == "error: tp: no such key"
    assert len(printed) == 3
    assert "test_error_report.py" in printed[0]
    assert printed[1].strip() == "raise error"
    monkeypatch.setenv("PARAMP_TRACEBACK", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    hook(*error)
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == "Traceback (most recent call last):"
    assert printed[-1] == "error: tp: no such key"
    written = json.loads((tmp_path / "error.json").read_text())["message"]
    assert written["extraInfo"]["py_callstack"] == written["message"] == "error: tp: no such key"
    mark_as_echo(error[1])
    hook(*error)  # another rank prints it
    assert capsys.readouterr().err == ""


def test_a_mismatch_that_torch_finds_says_what_to_call():
    with paramp.launch_from_torch() as context:
        explained = context.departures.explained
        found = RuntimeError("Detected mismatch between collectives on ranks. Rank 1 is running collective: ...")
        assert str(explained("step", found)).startswith(
            "step: another rank is in another call, as torch has found; call"
        )
        assert explained("step", RuntimeError("a mistake")) is None
