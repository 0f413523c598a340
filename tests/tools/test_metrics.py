"""The log of metrics that any loop writes."""

import argparse
import json
import math
import struct

import numpy as np
import pytest
import torch
from disk import files_of_at_most
from families import family, long

import paramp
from paramp.base.errors import ConfigError, ReplicaDrift, TrainingDiverged
from paramp.observe.grad_histogram import GradientHistogram
from paramp.observe.replica_check import Difference
from paramp.observe.timeline import RankSpans, Span, Timeline
from paramp.scaling.overflow_report import NonFiniteGradient, Origin, OverflowReport, RankCoordinates
from paramp.tools.metrics import Metrics
from paramp.tools.read_run import read_run


def test_a_loop_writes_metrics_of_its_own(tmp_path):
    folder, traces = tmp_path / "new" / "run", []
    for resumed_at in (None, 2):
        with Metrics(folder, resumed_at=resumed_at) as metrics:
            for step in range((resumed_at or 0) + 1, 4):
                metrics.write(step, loss=torch.tensor(0.5), grad_norm=math.inf, accuracy=step / 4, skipped=0)
            traces += [metrics.record(3, TIMELINE) for _ in range(2)]
    run = read_run(folder)  # as `paramp plot` does
    assert run.records == [
        {"step": step, "loss": 0.5, "grad_norm": None, "accuracy": step / 4, "skipped": 0} for step in (1, 2, 3)
    ]
    assert len((folder / "metrics.1.jsonl").read_text().splitlines()) == 3
    assert [path.name for path in traces] == ["step-3.json", "step-3.1.json", "step-3.2.json", "step-3.3.json"]
    for name, written in (("events.1.jsonl", traces[:2]), ("events.jsonl", traces[2:])):
        assert [folder / event["file"] for event in events(folder, name) if event["event"] == "trace"] == written

    for step, end in ((4, b""), (5, b'\n{"step": 4, "lo\xff\n')):  # a last line without its newline; a damaged one
        (folder / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes().rstrip(b"\n") + end)
        with Metrics(folder, resumed_at=step - 1) as metrics:
            metrics.write(step, loss=0.5)
    assert [record["step"] for record in read_run(folder).records] == [1, 2, 3, 4, 5]

    with Metrics(tmp_path / "none", enabled=False) as metrics:
        metrics.write(1, loss=0.5)
        assert metrics.record(1, TIMELINE) is None
    assert not (tmp_path / "none").exists()


def test_a_full_disk_is_an_error_with_the_file_and_leaves_the_log_as_it_was(tmp_path):
    def write(folder):
        with Metrics(folder) as metrics:
            for step in range(1, 2001):
                metrics.write(step, loss=0.5)

    write(tmp_path / "a")
    before = {path: path.read_text() for path in (tmp_path / "a").iterdir()}
    with files_of_at_most(2**15):
        with pytest.raises(ConfigError, match=r"folder: .*/a' cannot be written to: File too large; choose another"):
            Metrics(tmp_path / "a", resumed_at=2000)
        with pytest.raises(ConfigError, match=r"log: '.*/b/metrics\.jsonl' cannot be written to: File too large; make"):
            write(tmp_path / "b")
    assert {path: path.read_text() for path in (tmp_path / "a").iterdir()} == before
    assert "metrics.jsonl' cannot be written to" in events(tmp_path / "b")[-1]["error"]


PLACE = RankCoordinates(3, (("pp", 1), ("tp", 1)), 1)
FAR = NonFiniteGradient(name="a.weight", place=RankCoordinates(0), kind="NaN", count=4, size=4, largest=0.0)
NEAR = NonFiniteGradient(name="b.weight", place=PLACE, kind="inf", count=1, size=4, largest=60000.0)
REPORT = OverflowReport(
    8.0,
    (FAR, NEAR),
    Origin(during="backward", module="b", place=PLACE, kind="inf", call=0, microbatch=2, largest=60000.0),
)
HISTOGRAM = GradientHistogram({-25: 1.0, 3: 2.0}, 1.0, 0.0, 8.5, 8.0, torch.float16)
DRIFT = Difference("weight", "a", (1,), (0,), "the weight of 'a' on rank 1 differs from rank 0", ())
TIMELINE = Timeline("1f1b", [RankSpans("rank 0", [Span("forward", 0.0, 0.5, 0, 0)])], [[0]])


def events(folder, name="events.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_what_was_found_is_kept_by_step_and_launch(tmp_path):
    with Metrics(tmp_path, settings={"lr": math.inf, "net": "<b>"}) as metrics:
        metrics.record(1, HISTOGRAM)
        metrics.record(1, REPORT)
        metrics.record(2, [])
        metrics.record(2, TIMELINE)
        metrics.write(3, loss=1.0)
        metrics.record(3, [])
    launch, histogram, overflow, replicas, trace, _, end = events(tmp_path)
    assert (launch["event"], launch["resumed_at"], launch["layout"], launch["mode"]) == ("launch", None, None, None)
    assert launch["settings"] == {"lr": None, "net": "<b>"}
    assert launch["machine"]["versions"]["torch"] == torch.__version__
    assert (histogram["counts"], histogram["zeros"], histogram["scale"]) == ({"-25": 1.0, "3": 2.0}, 1.0, 8.0)
    found = ("b.weight", "b", 3, 1, 2, {"pp": 1, "tp": 1})  # the gradient on the origin's rank, though it comes second
    assert tuple(overflow[key] for key in ("parameter", "module", "rank", "stage", "microbatch", "axes")) == found
    assert overflow["message"] == str(REPORT)
    assert replicas == {"event": "replicas", "step": 2, "differences": []}
    assert json.loads((tmp_path / trace["file"]).read_text())["traceEvents"][-1]["dur"] == 5e5
    assert (end["step"], end["error"]) == (3, None)

    drift = ReplicaDrift("replicas: differ", [DRIFT])
    with pytest.raises(ReplicaDrift), Metrics(tmp_path, resumed_at=2) as metrics:
        raise drift
    kinds = [(event["event"], event.get("step")) for event in events(tmp_path)]
    expected = ["launch", "histogram", "overflow", "replicas", "trace", "end", "launch", "replicas", "end"]
    steps = (None, 1, 1, 2, 2, 3, None, 2, 2)  # what was found at step 3 is gone
    assert kinds == list(zip(expected, steps, strict=True))
    *_, second, differing, end = events(tmp_path)
    assert (second["resumed_at"], end["error"]) == (2, "ReplicaDrift: replicas: differ")
    assert (differing["differences"][0]["parameter"], differing["differences"][0]["ranks"]) == ("a", [1])
    assert (tmp_path / trace["file"]).is_file()
    with pytest.raises(TrainingDiverged), Metrics(tmp_path) as metrics:
        raise TrainingDiverged("stopped", REPORT)
    assert [event["event"] for event in events(tmp_path)] == ["launch", "overflow", "end"]
    assert trace in events(tmp_path, "events.2.jsonl")
    with Metrics(tmp_path) as metrics:
        assert metrics.record(2, TIMELINE) == tmp_path / "traces" / "step-2.1.json"
    assert (tmp_path / trace["file"]).is_file()  # that of the first run, where its events name it
    with pytest.raises(ConfigError, match=r"got 'text', expected an OverflowReport"):
        Metrics(tmp_path, enabled=False).record(1, "text")
    with pytest.raises(ConfigError, match=r"folder: .*events\.jsonl/run' cannot be written to: Not a directory"):
        Metrics(tmp_path / "events.jsonl" / "run")


def test_a_launch_has_the_layout_and_the_settings_of_the_context(tmp_path):
    config = {"precision": "bf16-mixed", "BATCH": 7, "check_replicas_every": 2}
    with paramp.launch_from_torch(config, backend="gloo", device="cpu"), Metrics(tmp_path):
        model = torch.nn.Linear(2, 2)
        engine, *_ = paramp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), torch.nn.functional.mse_loss)
        found = []
        for _ in range(3):
            engine.forward_backward(torch.ones(2, 2), torch.ones(2, 2))
            engine.step()
            found.append(engine.replicas_found)
    (launch, _) = events(tmp_path)
    assert (launch["layout"], launch["world_size"], launch["mode"]) == ({"pp": 1, "dp": 1, "tp": 1}, 1, "bf16-mixed")
    assert launch["settings"]["BATCH"] == 7
    assert launch["settings"]["precision.grad_dtype"] == "float32"
    assert found == [None, [], None]


def wandb_log(folder):
    """The function of a real run that is not synced, and what is read of its file: LevelDB's log of one block."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    run = wandb.init(project="a", mode="offline", dir=folder, settings=wandb.Settings(console="off", silent=True))

    def read():
        run.finish()
        wandb.teardown()  # its service writes the last records after `finish` has returned
        (path,) = folder.glob("wandb/offline-run-*/*.wandb")
        data, start, rows = path.read_bytes(), 7, {}
        while start < len(data):
            _, length, kind = struct.unpack_from("<IHB", data, start)
            assert kind == 1  # a record that is whole
            record = Record.FromString(data[start + 7 : start + 7 + length])
            items = {"".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            if items:
                rows[items["_step"]] = {name: value for name, value in items.items() if not name.startswith("_")}
            start += 7 + length
        return rows

    return run.log, read


def tensorboard_log(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))

    def read():
        writer.close()
        events, rows = EventAccumulator(str(folder)), {}
        events.Reload()
        for tag in events.Tags()["scalars"]:
            for event in events.Scalars(tag):
                rows.setdefault(event.step, {})[tag] = event.value
        return rows

    return (lambda values, step: [writer.add_scalar(name, value, step) for name, value in values.items()]), read


@pytest.mark.parametrize("logger", [tensorboard_log, pytest.param(wandb_log, marks=[family, long])])
def test_hooks_of_other_loggers_write_what_they_are_given(tmp_path, logger):
    """Numbers that are finite alone, each step; nothing where the log is off."""
    log, read = logger(tmp_path)
    with Metrics(tmp_path / "run", hooks=[log]) as metrics, Metrics(tmp_path, enabled=False, hooks=[log]) as off:
        metrics.write(1, loss=torch.tensor(0.5), grad_norm=math.inf, note="first", skipped=1)
        metrics.write(2, loss=0.25, grad_norm=2.0, skipped=0)
        off.write(3, loss=1.0)
    assert read() == {1: {"loss": 0.5, "skipped": 1}, 2: {"loss": 0.25, "grad_norm": 2.0, "skipped": 0}}


async def send(values, step):
    """A hook that none awaits."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"hooks": hooks}, "hooks: got .*, expected a list of functions") for hooks in (print, ["print"], None)),
        ({"hooks": [send]}, "hooks: got .*send.*, expected a function that is not async"),
        ({"settings": 5}, r"settings: got 5, expected a dict, such as vars\(arguments\)"),
        ({"settings": argparse.Namespace(a=1)}, r"settings: got Namespace.*vars\(arguments\)"),
        *(({"resumed_at": step}, f"resumed_at: got {step!r}, expected a whole number") for step in ("3", 3.5)),
        *(({"folder": folder}, f"folder: got {folder!r}, expected a path") for folder in ("", 5)),
    ],
)
def test_wrong_arguments_are_an_error_on_every_rank(tmp_path, options, message):
    for enabled in (True, False):
        with pytest.raises(ConfigError, match=message):
            Metrics(**{"folder": tmp_path / "run", "enabled": enabled} | options)
    assert not (tmp_path / "run").exists()


def test_numbers_are_of_numpy_and_torch_too_and_a_generator_has_hooks(tmp_path):
    seen = []
    hooks = (lambda values, step, at=at: seen.append((at, step, values)) for at in range(2))
    with Metrics(tmp_path, hooks=hooks, resumed_at=np.int64(0)) as metrics:
        metrics.write(np.int64(1), loss=np.float32(0.5), n=np.int64(5), ok=np.bool_(True), zero=np.array(0.0))
        metrics.write(torch.tensor(2), loss=torch.tensor([0.25]), rates=[np.float32(0.5), math.nan], name="a")
    assert seen[:2] == [(at, 1, {"loss": 0.5, "n": 5, "ok": True, "zero": 0.0}) for at in range(2)]
    assert read_run(tmp_path).records[1] == {"step": 2, "loss": 0.25, "rates": [0.5, None], "name": "a"}


@pytest.mark.parametrize(
    ("step", "value", "message"),
    [
        *((step, 1.0, f"step: got {step!r}, expected a whole number") for step in (1.0, "1", True, 10**18)),
        (3, "high", "step 3, loss: got 'high', expected a number; write it under another key"),
        (3, [1.0], r"step 3, loss: got \[1.0\], expected a number"),
        (3, torch.ones(3), r"step 3, loss: got tensor.*, expected .*tensor of one element"),
        (3, object(), "step 3, loss: got <object.*, expected a number"),
        pytest.param(3, 10**400, "step 3, loss: got 1000.*, expected a number of fp64", id="huge"),
    ],
)
def test_what_no_page_could_show_is_refused_before_it_is_written(tmp_path, step, value, message):
    with Metrics(tmp_path) as metrics:
        with pytest.raises(ConfigError, match=message):
            metrics.write(step, loss=value)
        with pytest.raises(ConfigError, match="step: got 'x', expected a whole number"):
            metrics.record("x", [])
        metrics.write(4, mine=1.0, note="a", loss=None)
        for values in ({"mine": "a"}, {"note": 1.0}):
            with pytest.raises(ConfigError, match=r"expected .*number.*; write it under another key"):
                metrics.write(5, **values)
    assert [record["step"] for record in read_run(tmp_path).records] == [4]
    for call in (lambda: metrics.write(6, loss=1.0), lambda: metrics.record(6, [])):
        with pytest.raises(ConfigError, match="Metrics: closed; write inside the with block"):
            call()
