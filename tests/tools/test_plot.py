"""``paramp plot``: the contents of the figure, and the errors for files that cannot be read."""

import json

import numpy as np

from paramp.tools.cli import main
from paramp.tools.plot import draw, plot
from paramp.tools.read_run import read_run

RECORDS = [
    {"step": 1, "loss": None, "grad_norm": None, "loss_scale": 8.0, "skipped": 1, "tokens_per_second": 10.0},
    {"step": 2, "loss": 4.0, "grad_norm": 2.0, "loss_scale": 4.0, "skipped": 0, "tokens_per_second": 20.0},
    {"step": 3, "loss": 3.0, "grad_norm": 1.0, "loss_scale": 4.0, "skipped": 0, "tokens_per_second": 30.0},
]
RECORDS[1] |= {"val_loss": 3.5, "step_seconds": 2.0, "data_seconds": 0.5}


def folder_of(path, records=RECORDS, tail=""):
    path.mkdir(parents=True, exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return path


def data(line):
    return np.asarray(line.get_xdata(), float).tolist(), np.asarray(line.get_ydata(), float).tolist()


def test_the_four_panels_show_the_numbers(tmp_path):
    figure = draw([read_run(folder_of(tmp_path / "run"))])
    assert figure.get_suptitle() == "run"
    loss, scale, norm, speed, waiting = figure.axes
    training, validation = loss.lines
    assert data(training)[0] == [1, 2, 3]
    np.testing.assert_array_equal(data(training)[1], [np.nan, 4, 3])
    assert data(validation) == ([2], [3.5])
    line, skipped = scale.lines
    assert data(line) == ([1, 2, 3], [8, 4, 4])
    assert data(skipped) == ([1], [8])
    assert scale.get_legend().get_texts()[0].get_text() == "skipped steps (1)"
    assert (scale.get_yscale(), norm.get_yscale()) == ("log", "log")
    np.testing.assert_array_equal(data(norm.lines[0])[1], [np.nan, 2, 1])
    assert data(speed.lines[0])[1] == [10, 20, 30]
    assert data(waiting.lines[0]) == ([2], [25])


def test_incomplete_lines_are_ignored_and_several_runs_are_compared(tmp_path):
    from PIL import Image

    cut_off = folder_of(tmp_path / "a", tail='{"step": 4, "lo')
    (cut_off / "metrics.1.jsonl").write_text("an earlier run")
    assert [record["step"] for record in read_run(cut_off).records] == [1, 2, 3]
    other = folder_of(tmp_path / "b", [{"step": 1, "loss": 2.0}])
    assert plot([cut_off]) == cut_off / "metrics.png"
    out = plot([cut_off, other], tmp_path / "two.png")
    with Image.open(out) as image:
        assert image.format == "PNG"
        assert min(image.size) > 500
    figure = draw([read_run(cut_off), read_run(other)])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_each_of_many_runs_has_a_line_of_its_own(tmp_path):
    """By its colour, and once these are used up by its dashes."""
    norm = draw([read_run(folder_of(tmp_path))] * 24).axes[2]
    looks = [(line.get_color(), line.get_linestyle()) for line in norm.lines]
    assert len(set(looks)) == 24
    assert [style for _, style in looks] == [style for style in ("-", "--", ":", "-.") for _ in range(6)]


def test_user_errors_are_one_line_and_exit_code_2(tmp_path, capsys, monkeypatch):
    good = str(folder_of(tmp_path / "good"))
    (tmp_path / "bare").mkdir()
    cases = [
        ([str(tmp_path / "none")], "no folder"),
        ([str(tmp_path / "bare")], "no metrics.jsonl"),
        ([str(folder_of(tmp_path / "empty", []))], "has no step yet"),
        ([str(folder_of(tmp_path / "text", [], "not json\n"))], "line 1: not JSON: 'not json'"),
        ([str(folder_of(tmp_path / "list", [[1]]))], "line 1: got [1], expected an object"),
        ([f"{good}/metrics.jsonl"], f"is a file; expected the folder of a run, such as {good!r}"),
        ([good, "--out", "picture.doc"], "ends in .png or .svg or .pdf"),
        ([good, "--out", str(tmp_path / "none" / "a.png")], "no folder"),
        ([], "the following arguments are required: DIR"),
    ]
    for arguments, message in cases:
        assert main(["plot", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.startswith("error: ")
        assert error.count("\n") == 1
    damaged = str(folder_of(tmp_path / "word", [{"step": 1, "loss": "low"}, *RECORDS]))
    assert main(["plot", damaged]) == 0
    assert capsys.readouterr().err == "word: left out: step 1, loss: got 'low', expected a number or null\n"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["plot", good]) == 2
    assert 'pip install "paramp[plot]"' in capsys.readouterr().err
