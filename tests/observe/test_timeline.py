"""The record of a step: what it covers, the trace written from it, and the arithmetic of its bubble."""

import json
import math
from collections import Counter

import pytest
import torch
from pool import on_ranks
from small_engines import engine_of, train_step
from torch import nn

import paramp
from paramp.config.pipeline_schedules import SCHEDULES
from paramp.observe.timeline import RankSpans, Span, Timeline

KINDS = {"forward", "loss", "backward", "backward input", "backward weight", "step"}


def hand_made():
    """Two ranks of one pipeline and one batch: 6 of 2 x 5 seconds busy; then a batch of which 2 of 2 x 2 are."""
    first = [Span("forward", 1, 2, 0, 0), Span("backward", 4, 6, 0, 0), Span("step", 9, 10)]
    second = [Span("forward", 2, 3, 1, 0), Span("loss", 3, 3.5, 1, 0), Span("backward", 3.5, 5, 1, 0)]
    first.append(Span("forward", 6, 7, 0, 0, call=1))
    second.append(Span("forward", 7, 8, 1, 0, call=1))
    ranks = [RankSpans("rank 0", first), RankSpans("rank 1", second)]
    return Timeline("by hand", ranks, [[0, 1]], theoretical_bubble=0.25)


def test_the_bubble_equals_hand_arithmetic():
    timeline = hand_made()
    assert timeline.bubble == pytest.approx(1 - 8 / 14)
    assert timeline.describe() == "by hand: bubble 42.9% measured, 25.0% in theory"
    other = [RankSpans("rank 2", [Span("forward", 0, 2, 0, 0)]), RankSpans("rank 3", [Span("forward", 2, 4, 1, 0)])]
    both = Timeline("two pipelines", [*timeline.ranks, *other], [[0, 1], [2, 3]])
    assert both.bubble == pytest.approx(1 - (8 + 4) / (14 + 8))
    assert both.describe().endswith("too few microbatches for one in theory")
    assert math.isnan(Timeline("nothing ran", [RankSpans("rank 0", [Span("step", 0, 1)])], [[0]]).bubble)


def test_the_chrome_trace_has_every_span(tmp_path):
    timeline = hand_made()
    timeline.save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == sum(len(own.spans) for own in timeline.ranks)
    times, place = {"ts": 4e6, "dur": 2e6}, {"pid": 0, "tid": 0, "args": {"stage": 0, "microbatch": 0, "call": 0}}
    assert spans[1] == {"ph": "X", "name": "backward 0", "cat": "backward", **times, **place}
    named = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    assert {(event["name"], event["pid"], event["tid"]): event["args"]["name"] for event in named} == {
        ("process_name", 0, 0): "rank 0",
        ("thread_name", 0, -1): "step",
        ("thread_name", 0, 0): "stage 0",
        ("process_name", 1, 0): "rank 1",
        ("thread_name", 1, 1): "stage 1",
    }
    assert trace["otherData"]["bubble"] == pytest.approx(6 / 14)


def record(parallel, accumulation=1):
    """The timeline of one step of a chain of eight layers, on four microbatches where there is a pipeline."""
    with paramp.launch_from_torch({"parallel": parallel, "gradient_accumulation": accumulation}) as context:
        engine, x = engine_of(nn.Sequential(*(nn.Linear(3, 3) for _ in range(8)))), torch.ones(8, 3)
        engine.forward_backward(x, x)  # unrecorded, and finds shapes
        engine.zero_grad()
        with engine.recording() as timeline:
            for _ in range(accumulation):
                train_step(engine, x)
        engine.forward_backward(x, x)
        return timeline, context.config.parallel.pipeline


@on_ranks(2)
def test_every_operation_of_every_schedule_is_recorded_once(world):
    for schedule, row in SCHEDULES.items():
        accumulation = 2 if schedule == "zbv" else 1
        layout = {"pipeline": {"size": 2, "schedule": schedule, "microbatches": 4}}
        timeline, pipeline = record(layout, accumulation)
        assert [own.name for own in timeline.ranks] == ["rank 0 (pp 0, dp 0, tp 0)", "rank 1 (pp 1, dp 0, tp 0)"]
        assert timeline.pipelines == [[0, 1]]
        assert timeline.theoretical_bubble == pipeline.theoretical_bubble
        assert 0 <= timeline.bubble < 1
        assert schedule in timeline.title
        spans = [item for own in timeline.ranks for item in own.spans]
        found = Counter((item.kind, item.stage, item.microbatch, item.call) for item in spans)
        steps = found.pop(("step", None, None, accumulation - 1))
        steps += found.pop(("step", None, None, 0), 0)
        assert steps == 2 * accumulation
        assert set(found.values()) == {1}
        assert {item.kind for item in spans} <= KINDS
        split = any(item.kind == "backward weight" for item in spans)
        assert split == row.splits_backward
        for call in range(accumulation):
            for microbatch in range(4):
                assert found["loss", pipeline.num_stages - 1, microbatch, call]
                for stage in range(pipeline.num_stages):
                    kinds = {kind for kind in KINDS - {"loss", "step"} if found[kind, stage, microbatch, call]}
                    assert kinds in ({"forward", "backward"}, {"forward", "backward input", "backward weight"})
        for rank, own in enumerate(timeline.ranks):
            assert {item.stage for item in own.spans} == {*pipeline.stages_of(rank), None}
            for before, after in zip(own.spans, own.spans[1:], strict=False):
                assert 0 <= before.begin <= before.end <= after.begin
        # The ranks' clocks are one: what a stage receives was computed before.
        when = {(item.kind, item.stage, item.microbatch, item.call): item for item in spans}
        for (kind, stage, microbatch, call), item in when.items():
            if kind == "forward" and stage > 0:
                assert when["forward", stage - 1, microbatch, call].end <= item.begin


@on_ranks(2)
def test_a_timeline_is_recorded_without_a_pipeline(world):
    timeline, _ = record({"data": 2})
    assert [[item.kind for item in own.spans] for own in timeline.ranks] == 2 * [
        ["forward", "loss", "backward", "step"]
    ]
    assert timeline.theoretical_bubble == 0
    assert timeline.pipelines == [[0], [1]]
