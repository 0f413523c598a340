"""``paramp report``: what the page of a run says, and that it needs nothing else."""

import html.parser
import importlib.util
import json
import math
import re

import numpy as np
import pytest
from families import family, long

from paramp.tools import metrics
from paramp.tools.cli import main
from paramp.tools.read_run import LoggedRun, read_run
from paramp.tools.report import run_page, step_panels
from paramp.tools.report.buckets import changes, in_buckets, width_of
from paramp.tools.report.gradient_panel import gradient_panel
from paramp.tools.report.run_page import page_of, report
from paramp.tools.report.step_panels import StepAxis, loss_panel, norm_panel, scale_panel
from paramp.tools.report.tables import differences, duration, head, launches, overflows, replicas_text
from paramp.tools.report.timeline_panel import timeline_panels

SPAN = {"ph": "X", "cat": "forward", "pid": 1, "tid": 1, "name": "forward 0"}
SPAN |= {"ts": 5000.0, "dur": 2000.0, "args": {"stage": 1, "microbatch": 0, "call": 0}}
TRACE = [
    {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "rank 0 (pp 0)"}},
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "rank 1 (pp 1)"}},
    SPAN | {"pid": 0, "tid": 0, "ts": 3000.0, "args": {"stage": 0, "microbatch": 0, "call": 0}},
    SPAN,
    SPAN | {"cat": "step", "tid": -1, "ts": 8000.0, "args": {"stage": None, "microbatch": None, "call": 0}},
]
LAUNCH = {"event": "launch", "time": "2026-01-01T10:00:00+00:00", "resumed_at": None, "world_size": 4}
LAUNCH |= {"layout": {"pp": 2, "dp": 1, "tp": 2, "zero": 1}, "mode": "16-mixed", "settings": {"lr": 0.1, "net": "<b>a"}}
LAUNCH |= {"machine": {"versions": {"torch": "2.x", "numpy": None}, "device": "cpu", "modes": {}}}
OVERFLOW = {"event": "overflow", "step": 2, "scale": 2.0**16, "module": "blocks.1.up", "parameter": "blocks.1.up.<w>"}
OVERFLOW |= {
    "rank": 3,
    "stage": 1,
    "axes": {"pp": 1, "tp": 1},
    "microbatch": 0,
    "message": "backward overflow\n  in <w>",
}
HISTOGRAM = {"event": "histogram", "step": 1, "counts": {"-30": 1.0, "2": 2.0}, "zeros": 1.0, "non_finite": 0.0}
HISTOGRAM |= {"scale": 8.0, "dtype": "float16"}
DRIFT = {"kind": "weight", "parameter": "head", "ranks": [1], "others": [0, 2], "message": "the weight differs"}
EVENTS = [
    LAUNCH,
    HISTOGRAM,
    OVERFLOW,
    {"event": "replicas", "step": 2, "differences": []},
    {"event": "trace", "step": 2, "file": "traces/step-2.json", "title": "1f1b", "bubble": 0.25},
    {"event": "end", "time": "2026-01-01T11:30:00+00:00", "step": 3, "error": "RuntimeError: <em>lost"},
    LAUNCH | {"resumed_at": 3, "layout": {"pp": 1, "dp": 1, "tp": 1}, "world_size": 1},
    HISTOGRAM | {"step": 4, "non_finite": 4.0},
    {"event": "replicas", "step": 4, "differences": [DRIFT]},
]
RECORDS = [
    {"step": 1, "loss": 4.0, "grad_norm": 2.0, "loss_scale": 2.0**16, "skipped": 0, "accuracy": 0.5, "phase": "warm"},
    {"step": 2, "loss": None, "grad_norm": None, "loss_scale": 2.0**16, "skipped": 1, "accuracy": 0.5, "phase": "warm"},
    {"step": 3, "loss": 3.0, "grad_norm": 1.0, "loss_scale": 2.0**15, "skipped": 0, "accuracy": 0.6, "val_loss": 3.5},
    {"step": 4, "loss": 2.0, "grad_norm": 1.0, "loss_scale": 2.0**15, "skipped": 0, "accuracy": 0.7},
]
RUN = LoggedRun("run <one>", RECORDS, EVENTS)


def folder_of(path, records=RECORDS, events=EVENTS):
    (path / "traces").mkdir(parents=True, exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    (path / "traces" / "step-2.json").write_text(json.dumps({"traceEvents": TRACE}))
    return path


def columns(figure, name):
    """The column ``name`` of each renderer of ``figure`` that has it, as lists."""
    sources = [renderer.data_source.data for renderer in figure.renderers if hasattr(renderer, "data_source")]
    return [list(data[name]) for data in sources if name in data]


class Text(html.parser.HTMLParser):
    """The text of a page, its tags, and what it loads."""

    def __init__(self, page):
        super().__init__()
        self.words, self.tags, self.loads, self._inside = [], [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self._inside = tag
        self.tags.append(tag)
        self.loads += [value for name, value in attributes if name in ("src", "href", "srcset", "action", "data")]

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in ("script", "style"):
            self.words.append(data)
        if self._inside == "style":
            self.loads += re.findall(r"@import|url\([^)]*\)", data)


def test_buckets_keep_extremes_and_count_what_is_not_finite():
    """Against arithmetic by hand."""
    steps = np.array([1.0, 2, 3, 4, 5, 6, 9])
    values = np.array([4.0, math.nan, 8, 100, 1, 1, math.inf])
    found = in_buckets(steps, values, 1, 3)
    for name, expected in {
        "first": [1, 4, 9],
        "last": [3, 6, 9],
        "low": [4, 1, math.nan],
        "mean": [6, 34, math.nan],
        "high": [8, 100, math.nan],
        "missing": [1, 0, 1],
    }.items():
        np.testing.assert_array_equal(getattr(found, name), expected)
    shuffled = in_buckets(steps[::-1], values[::-1], 1, 3)
    np.testing.assert_array_equal(shuffled.mean, found.mean)
    assert not len(in_buckets(np.empty(0), np.empty(0), 1, 3).mean)
    assert [width_of(1, last) for last in (1, 1000, 1001, 100_000)] == [1, 1, 2, 100]
    x, y = changes(np.arange(7.0), np.array([8.0, 8, 8, 4, math.nan, 4, 8]))
    assert (x.tolist(), y.tolist()) == ([0, 2, 3, 5, 6], [8, 8, 4, 4, 8])


def test_every_skipped_step_is_marked_and_named(monkeypatch):
    axis = StepAxis.of(RUN)
    panel = scale_panel(axis)
    assert [entry.label for entry in panel.legend] == ["loss scale", "skipped steps (1)", "resumed"]
    for name, expected in {
        "what": "step 2 skipped",
        "parameter": "blocks.1.up.<w>",
        "place": "rank 3, stage 1 (pp 1, tp 1)",
        "scale": "65,536",
        "y": 16.0,
    }.items():
        assert columns(panel.figure, name)[-1] == [expected]
    texts = [one.text for one in panel.figure.center if hasattr(one, "text")]
    assert texts == ["blocks.1.up.<w>"]
    long_name = [*RUN.events[:2], OVERFLOW | {"parameter": "blocks.2.attention.qkv.weight"}]
    figure = scale_panel(StepAxis.of(LoggedRun("long name", RECORDS, long_name))).figure
    assert [one.text for one in figure.center if hasattr(one, "text")] == ["…2.attention.qkv.weight"]
    spans = [one.location for one in loss_panel(axis).figure.center if hasattr(one, "location")]
    assert spans == [3.5]
    # so many that they are marked by buckets: none is lost
    records = [RECORDS[0] | {"step": step, "skipped": int(step % 3 == 0)} for step in range(1, 3001)]
    monkeypatch.setattr(step_panels, "MOST_MARKS", 100)
    (marks,) = columns(scale_panel(StepAxis.of(LoggedRun("many", records))).figure, "what")
    counts = [re.match(r"(\d+) steps skipped|step \d+", text) for text in marks]
    assert sum(int(count[1] or 1) for count in counts) == 1000


def test_what_is_not_finite_is_a_mark_and_a_long_series_has_its_spikes():
    legend = [entry.label for entry in norm_panel(StepAxis.of(RUN)).legend]
    assert legend == ["gradient norm", "not finite", "resumed"]
    assert columns(loss_panel(StepAxis.of(RUN)).figure, "count") == [[1.0]]
    records = [{"step": step, "loss": 1.0} for step in range(1, 2001)]
    records[1000]["loss"], records[1500]["loss"] = 177.0, None
    figure = loss_panel(StepAxis.of(LoggedRun("long", records))).figure
    assert max(columns(figure, "high")[0]) == 177
    assert (columns(figure, "first")[-1], columns(figure, "last")[-1]) == ([1501], [1502])
    assert len(columns(figure, "mean")[0]) == 1000
    negative = loss_panel(StepAxis.of(LoggedRun("negative", [*records, {"step": 2001, "loss": -1.0}]))).figure
    assert [type(one.y_scale).__name__ for one in (figure, negative)] == ["LogScale", "LinearScale"]


def test_histograms_are_fractions_beside_the_limits_of_fp16():
    figure = gradient_panel(StepAxis.of(RUN)).figure
    (bottom,), (fraction,), (left,) = (columns(figure, name) for name in ("bottom", "fraction", "left"))
    assert list(zip(left, bottom, fraction, strict=True)) == [
        *((-0.5, -30, 0.25), (-0.5, 2, 0.5), (-0.5, -32, 0.25)),  # zeros two rows below
        *((2.5, -30, 0.125), (2.5, 2, 0.25), (2.5, -32, 0.125), (2.5, 19, 0.5)),  # not finite above
    ]
    limits = {one.location for one in figure.renderers if hasattr(one, "location")}
    assert limits == {-24, -14, math.log2(65504)}
    single = gradient_panel(StepAxis.of(LoggedRun("one", RECORDS, [HISTOGRAM])))
    assert columns(single.figure, "top") == [[0.25, 0.5, 0.25]]
    assert gradient_panel(StepAxis.of(LoggedRun("none", RECORDS))) is None


def test_a_traced_step_has_a_row_for_each_rank_and_stage(tmp_path):
    (panel,) = timeline_panels(read_run(folder_of(tmp_path)))
    (lanes, _), (begins, _) = ((*columns(panel.figure, name), None) for name in ("lane", "left"))
    assert (lanes, begins) == ([0, 1, 1], [0, 2, 5])  # milliseconds from the first span on
    assert columns(panel.figure, "kind") == [["forward", "forward", "step"]]
    assert (columns(panel.figure, "x"), columns(panel.figure, "text")) == ([[1, 3]], [["0", "0"]])
    assert panel.figure.yaxis[0].major_label_overrides == {0: "rank 0 · stage 0", 1: "rank 1 · stage 1"}
    assert panel.note.startswith("1f1b; bubble 25.0% measured")
    assert [one.label for one in panel.legend] == ["forward", "step"]
    split = [*TRACE, SPAN | {"cat": "backward weight"}, SPAN | {"cat": "backward input"}]
    (tmp_path / "traces" / "step-2.json").write_text(json.dumps({"traceEvents": split}))
    (panel,) = timeline_panels(read_run(tmp_path))
    assert [one.label for one in panel.legend] == ["forward", "backward input", "backward weight", "step"]
    (tmp_path / "traces" / "step-2.json").write_text("[")
    assert timeline_panels(read_run(tmp_path)) == []


def test_the_tables_of_a_run():
    facts = dict(head(RUN))
    assert facts["layout"] == "one process"
    assert facts["state"] == "no end recorded"
    assert (facts["steps"], facts["loss"], facts["overflows"]) == ("4", "2.0000", "1 (25 %)")
    evaluated = [*RECORDS, {"step": 4, "val_loss": 2.0}]
    assert dict(head(LoggedRun("evaluated", evaluated)))["overflows"] == "1 (25 %)"  # of the steps
    assert duration(RUN) == "1 h 30 min"
    for seconds, shown in (60.0, "1 min 6 s"), (172700.0, "47 h 58 min"), (172794.0, "2 d 0 h"):
        assert duration(LoggedRun("timed", [{"step": 1, "step_seconds": seconds, "val_seconds": 5.5}])) == shown
    (first, error), (second, _) = launches(RUN).rows
    layout = "pp\N{NO-BREAK SPACE}2 · tp\N{NO-BREAK SPACE}2 · zero\N{NO-BREAK SPACE}1"
    assert first == [1, "2026-01-01 10:00:00", "start", "step 3", layout, 4, "16-mixed", "2.x", "RuntimeError"]
    assert error == "RuntimeError: <em>lost"
    assert (second[2], second[-1]) == ("step 3", "no end recorded")
    ((row, message),) = overflows(RUN).rows
    assert row == ["2", "blocks.1.up.<w>", "rank 3, stage 1 (pp 1, tp 1)", 0, "65,536", "blocks.1.up"]
    assert message == "backward overflow\n  in <w>"
    assert differences(RUN).rows == [(["4", "weight", "head", "1", "0, 2"], "")]
    assert replicas_text(RUN) == "Replicas were compared 2 times, after steps 2 to 4: they differed once."
    many = launches(LoggedRun("many", RUN.records, [LAUNCH] * 502))
    assert (len(many.rows), many.rows[0][0][0], many.left_out) == (500, 3, 2)


def test_the_page_is_one_file_that_loads_nothing(tmp_path, capsys):
    folder = folder_of(tmp_path / "run <one>")
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    html = (folder / "report.html").read_text()
    assert "/* BEGIN bokeh.min.js */" in html
    page = Text(html)
    assert page.loads == ["data:,"]  # the icon
    assert not {"b", "w", "em", "one"} & set(page.tags)
    text = "".join(page.words)
    for words in ("run <one>", "blocks.1.up.<w>", "<b>a", "<em>lost", "Gradients by exponent", "accuracy"):
        assert words in text
    assert "phase" not in text
    assert [path.name for path in folder.iterdir() if "new" in path.name] == []
    bare = folder_of(tmp_path / "bare", [{"step": 1, "loss": 2.0}], [])
    (bare / "events.jsonl").unlink()
    page = Text(page_of(read_run(bare)))
    assert page.tags.count("section") == 1
    assert page.tags.count("table") == 0


@family
@pytest.mark.parametrize("steps", [2500, pytest.param(100_000, marks=long)])
def test_a_long_run_has_a_small_page(steps):
    generator = np.random.default_rng(0)
    keys = ("loss", "grad_norm", "tokens_per_second", "step_seconds", "data_seconds", "memory_bytes", "lr", "mfu")
    table = generator.uniform(0.1, 1.0, (steps, len(keys))).tolist()
    records = [
        {"step": step, "loss_scale": 2.0 ** (step % 7), "skipped": int(step % 5 == 0)}
        | dict(zip(keys, row, strict=True))
        for step, row in enumerate(table, start=1)
    ]
    counts = {str(exponent): 1.0 for exponent in range(-40, 16)}
    events = [HISTOGRAM | {"step": step, "counts": counts} for step in range(1, steps, 5)]
    page = page_of(LoggedRun("long", records, events))
    assert len(page.encode()) < 5_000_000
    assert f"stands for {steps // 1000 + (steps % 1000 > 0)} steps" in page


def test_live_writes_until_the_run_has_ended(tmp_path, monkeypatch):
    folder = folder_of(tmp_path)

    waits = []

    def sleep(seconds):
        waits.append(seconds)
        assert waits == [5]
        with (folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": "end", "step": 4, "error": None}) + "\n")

    monkeypatch.setattr(run_page.time, "sleep", sleep)
    pages = [path.read_text() for path in report(folder, live=5)]
    assert ["const reload = 5" in page for page in pages] == [True, False]
    again = 'setInterval(() => document.getElementById("pause").checked || location.reload(), 1000 * reload)'
    assert all(f"if (reload) {{\n  {again}\n}}" in page for page in pages)
    assert ["loads again every 5 s" in page for page in pages] == [True, False]
    assert ["<dd>running</dd>" in page for page in pages] == [True, False]
    seconds = []
    monkeypatch.setattr(run_page, "report", lambda folder, live: seconds.append(live) or [])
    for given in ([], ["--live"], ["--live", "60"]):
        assert main(["report", str(folder), *given]) == 0
    assert seconds == [None, 10, 60]


def test_errors_are_one_line(tmp_path, capsys, monkeypatch):
    ended = EVENTS[:6]
    assert ended[-1]["event"] == "end"  # so that --live does not wait
    good = folder_of(tmp_path / "good", events=ended)
    for arguments, message in (
        ([str(tmp_path / "none")], "no folder"),
        ([str(good), "--live", "0"], "--live: got 0.0, expected a number of seconds, 1 or more"),
    ):
        assert main(["report", *arguments]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["report", str(good)]) == 2
    assert capsys.readouterr().err == 'error: report: bokeh is not installed; run pip install "paramp[report]"\n'


DAMAGED = {
    "not JSON": "\0" * 100,
    "not JSON: '{": '{"step": 2, "lo',
    "not JSON: '[": "[" * 100_000,
    "got [1], expected an object": "[1]",
    "step: got 1.0": '{"step": 1.0}',
    f"step: got {10**18}": f'{{"step": {10**18}}}',
    "step 5, accuracy: got 'high', expected a number or null": '{"step": 5, "accuracy": "high"}',
    "step 5, lr: got [1], expected a number or null": '{"step": 5, "lr": [1]}',
}
WRONG_EVENTS = {
    "expected an object with a string": {"step": 1},
    'a string as its "event"': [1],
    "step: got None": {"event": "overflow"},
    "histogram: counts: got None": {"event": "histogram", "step": 1},
    "histogram: counts: got {'a': 1}": HISTOGRAM | {"counts": {"a": 1}},
    "histogram: counts: got {'-1075': 1}": HISTOGRAM | {"counts": {"-1075": 1}},  # of no float64, as 1024
    "histogram: counts: got {'1024': 1}": HISTOGRAM | {"counts": {"1024": 1}},
    "launch: resumed_at: got 'x'": LAUNCH | {"resumed_at": "x"},
    "launch: settings: got ['a']": LAUNCH | {"settings": ["a"]},
    "launch: machine: got {'modes': {'a': 1}}": LAUNCH | {"machine": {"modes": {"a": 1}}},
    "end: step: got 'x'": {"event": "end", "step": "x"},
    "overflow: axes: got 3": OVERFLOW | {"axes": 3},
    "replicas: differences: got 'abc'": {"event": "replicas", "step": 1, "differences": "abc"},
    "trace: bubble: got 'x'": {"event": "trace", "step": 1, "bubble": "x"},
}


def test_what_cannot_be_read_is_left_out_and_named(tmp_path):
    """Alone beside a good step, whatever is left of each is a page; no value of a good line is lost."""
    good, shown = json.dumps(RECORDS[0]) + "\n", []
    for message, line in DAMAGED.items():
        folder_of(tmp_path, events=[])
        (tmp_path / "metrics.jsonl").write_text(f"{good}{line}\n{good}")
        run = read_run(tmp_path)
        (left_out,) = run.left_out
        assert message in left_out
        assert [one for one in run.records if one["step"] != 5] == [RECORDS[0]] * 2
        if run.records not in shown:
            shown.append(run.records)
            assert left_out in "".join(Text(page_of(run)).words)
    for message, event in WRONG_EVENTS.items():
        run = read_run(folder_of(tmp_path, events=[event, LAUNCH]))
        assert [message in text for text in run.left_out] == [True]
        assert run.events == [LAUNCH]
    page_of(run)


def test_numbers_beyond_fp32_count_as_not_finite_and_times_without_a_zone_are_local(tmp_path):
    huge = {"loss": 1e308, "grad_norm": 1e308, "step_seconds": 1e308, "val_seconds": math.nan, "n": 10**400}
    records = [{"step": step} | huge for step in range(1, 3000)]
    end = {"event": "end", "time": "2026-01-01T10:00:05", "step": 9, "error": None}
    run = read_run(folder_of(tmp_path, records, [LAUNCH, end]))
    page_of(run)
    ends = [{"step": 1, "loss": -(2.0**128)}, {"step": 2, "loss": float(np.finfo(np.float32).min)}]
    assert read_run(folder_of(tmp_path / "ends", ends, [])).records == [{"step": 1, "loss": None}, ends[1]]
    assert dict(head(run))["loss"] == "not finite"
    assert not np.isfinite(run.series("n")[1]).any()
    assert run.left_out == []


def test_metrics_of_any_loop_make_a_page(tmp_path):
    with metrics.Metrics(tmp_path, settings={"width": 3}) as log:
        log.write(1, loss=1.0, note="a string")
    text = "".join(Text(page_of(read_run(tmp_path))).words)
    assert "finished" in text
    assert "width" in text
