"""The benchmarks run; what they measure is not tested."""

import json
import runpy

import pytest
from commands import ROOT

from paramp.models import ViT
from paramp.precision import PRESETS


def test_the_table_of_amp_methods_has_a_row_or_a_reason_for_every_mode(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    main = runpy.run_path(str(ROOT / "benchmarks/amp_table.py"))["main"]
    path = tmp_path / "table.json"
    main(["--batch-size", "2", "--rounds", "1", "--device", "cpu", "--json", str(path)])
    result = json.loads(path.read_text())
    rows = {row["row"]: row for row in result["rows"]}
    printed = capsys.readouterr().out
    for name in (*rows, *result["cannot_run"]):
        assert name in printed
    assert {row["mode"] for row in result["rows"]} | {"O1"} >= set(PRESETS) - {
        name.split("(")[-1].rstrip(")") for name in result["cannot_run"]
    }
    documented = ["FP32 training", "AMP_TYPE.TORCH", "AMP_TYPE.NAIVE", "AMP_TYPE.APEX O1"]
    assert all(any(row.startswith(name) for row in rows) for name in documented)
    assert {"plain torch, fp32", "plain torch, autocast fp16", "plain torch, autocast bf16"} <= rows.keys()
    # AdamW: weights, gradients and two moments of 4 bytes, or weights and gradients of 2 and 12 bytes of masters
    full, naive = (rows[name]["memory_bytes"] for name in ("FP32 training (32-true)", "AMP_TYPE.NAIVE (16-naive)"))
    num_parameters = sum(parameter.numel() for parameter in ViT.preset("tiny").parameters())
    assert full > 16 * num_parameters
    assert naive > 16 * num_parameters
    assert rows["16-true"]["memory_bytes"] < full / 1.8


def amp_table(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return runpy.run_path(str(ROOT / "benchmarks/amp_table.py"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "16-mixd"], "got '16-mixd', expected one of 32-true, 64-true, "),
        (["--modes", "16-mixd"], "(did you mean '16-mixed'?)"),
        (["--rounds", "0"], "--rounds: got 0, expected 1 or more"),
        (["--batch-size", "0"], "--batch-size: got 0, expected 1 or more"),
        (["--image-size", "0"], "--image-size: got 0, expected 1 or more"),
        (["--image-size", "9"], "image_size: got 9, expected a multiple of patch_size 2"),
        (["--json", "no/such/table.json"], "--json: no folder 'no/such'; make it first"),
        (["--json", "."], "--json: '.' is a folder, expected a file"),
        (["--preset", "tny"], "(did you mean 'tiny'?)"),
    ],
)
def test_what_the_table_refuses_before_it_runs_anything(arguments, message, monkeypatch, capsys):
    table = amp_table(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        table["main"](arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_table_takes_aliases_and_the_size_of_images(monkeypatch, tmp_path):
    table = amp_table(monkeypatch)
    path = tmp_path / "table.json"
    options = ["--rounds", "1", "--batch-size", "2", "--device", "cpu", "--json", str(path)]
    table["main"]([*options, "--modes", "fp32", "O1", "--image-size", "4"])
    result = json.loads(path.read_text())
    assert result["model"] == "vit tiny, 4 x 4"
    assert {row["mode"] for row in result["rows"] if "plain" not in row["row"]} == {"32-true", "O1"}


def test_a_table_without_a_row_says_why_once(monkeypatch):
    table = amp_table(monkeypatch)
    with pytest.raises(SystemExit, match=r"^no row can run:\nConfigError: .*\nsomething else$") as ended:
        table["main"].__globals__["run"](
            {"a": ("nonsense", print), "b": ("nonsense", print), "c": ("32-true", "something else")},
            {},
            lambda: ViT.preset("tiny"),
            (2, 1, 8, 8),
            10,
            1,
            "cpu",
        )
    assert str(ended.value).count("nonsense") == 1
