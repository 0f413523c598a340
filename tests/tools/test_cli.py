"""The commands' help, and the console script."""

import re
import tomllib

import pytest
from commands import COLD, ROOT, python
from train_app.settings import FLAGS, configure

from paramp import Config
from paramp.base.errors import ConfigError
from paramp.tools import cli

COMMANDS = ("run", "doctor", "report", "plot", "verify", "inspect", "export", "import")


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_explains_each_flag_and_gives_its_default(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run = (lambda: configure(["--help"])) if command is None else lambda: cli.main([command, "--help"])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 0
    text = capsys.readouterr().out
    flags = re.findall(r"^  (--[\w-]+)( \[?[A-Z][A-Z:=]*\]?)?  +(.*)$", text, re.MULTILINE)
    assert len(flags) == len(re.findall(r"^  --", text, re.MULTILINE)), text
    for flag, _, explained in flags:
        required = flag == "--to"
        assert required or re.fullmatch(r".{3,} \(default: .+\)", explained), (flag, explained)
        assert "sets " not in explained
    if command is None:
        assert {flag for flag, *_ in flags} == {*(flag.name for flag in FLAGS), "--config", "--set"}
        for group in ("layout", "pipeline", "precision", "model and data", "optimization", "checkpoints", "diagnosis"):
            assert f"\n{group}:\n" in text
        assert "model.num_layers" in text
        assert re.search(r"--precision MODE .*\n? *\(default: 16-mixed\)", text)
        assert re.search(r"--steps N .*\(default: 300\)", text)


def test_without_a_command_help_names_every_command_before_torch_loads():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts["paramp"] == "paramp.tools.cli:main"
    seen = "import sys; from paramp.tools.cli import main; main([]); print([x for x in sys.modules if 'torch' in x])"
    result = python("-c", seen, PYTHONPATH=str(ROOT), **COLD)
    assert (result.returncode, result.stderr) == (0, "")
    assert "usage: paramp [-h] [--version] COMMAND" in result.stdout
    assert tuple(re.findall(r"^    (\w+)  ", result.stdout, re.MULTILINE)) == COMMANDS
    assert result.stdout.endswith("\n[]\n")


def test_the_flags_of_sharding_set_what_its_page_says():
    page = (ROOT / "docs" / "sharded.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(dict\(.*\))` \| `(--.*?)` \|", page, re.MULTILINE)
    assert len(rows) == 6
    for settings, flags in rows:
        assert configure(flags.split())[0].parallel == Config(parallel=eval(settings)).parallel


def test_flags_set_their_configuration_keys():
    layout = ["--tp", "2", "--cp", "2", "--sequence-parallel"]
    config, job = configure([*layout, "--emulate-fp16", "on", "--lr", "1", "--set", "train.lr=2"])
    assert configure(["--optimizer-state", "bf16"])[0].precision.optimizer_state == "bf16"
    for how in ("full", "selective", 2):
        assert configure(["--activation-checkpointing", str(how)])[0].activation_checkpointing == how
    parallel = config.parallel
    assert (parallel.tensor.size, parallel.context.size, parallel.sequence_parallel) == (2, 2, True)
    assert config.emulate_fp16 is True
    assert job.train.lr == 2.0  # --set over the flag
    with pytest.raises(ConfigError, match="argument --emulate-fp16: invalid choice: 'x'"):
        configure(["--emulate-fp16", "x"])
    for words, name in (("rain.seq_len=2", "train"), ("modle.num_layers=2", "model")):
        with pytest.raises(ConfigError, match=rf"no such table \(did you mean '{name}'\?\)"):
            configure(["--set", words])
