"""The figure of a traced step: what each rank did, stage by stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..read_run import LoggedRun, Record
from .figures import (
    BLUE,
    FONT,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SURFACE,
    YELLOW,
    Legend,
    Panel,
    columns_of,
    hover,
    new_figure,
)

KINDS = {
    "forward": BLUE,
    "loss": YELLOW,
    "backward": ORANGE,
    "backward input": ORANGE,
    "backward weight": PINK,
    "step": GREEN,
}
"""A kind of :class:`paramp.observe.timeline.Span` -> its colour."""
MOST_TRACES = 3
"""The newest traces that are drawn."""
MOST_LANES, MOST_SPANS = 64, 8000
NONE = "none"


def timeline_panels(run: LoggedRun) -> list[Panel]:
    """A panel for each of the newest traced steps whose file can be read."""
    panels = [timeline_panel(run.folder, one) for one in run.of_kind("trace")[-MOST_TRACES:]]
    return [panel for panel in panels if panel is not None]


def timeline_panel(folder: Path, event: Record) -> Panel | None:
    """The panel of the Chrome trace of ``event``; None if its file is gone or damaged."""
    from bokeh.models import ColumnDataSource

    try:
        events = json.loads((folder / str(event["file"])).read_text(encoding="utf-8"))["traceEvents"]
        names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
        spans = [one for one in events if one["ph"] == "X"]
        lanes = _lanes(spans)
        begin = min(one["ts"] for one in spans)
        data = _columns(spans, lanes, names, begin)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    plot = new_figure(70 + 26 * len(lanes), x_axis_label="ms", y_range=(len(lanes) - 0.4, -0.6))
    bars = plot.hbar(
        y="lane",
        left="left",
        right="right",
        height=0.78,
        source=ColumnDataSource(data),
        fill_color="colour",
        line_color=SURFACE,
        line_width=0.5,
    )
    _number_microbatches(plot, data)
    rows = [("", "@kind"), ("rank", "@rank"), ("stage", "@stage"), ("microbatch", "@microbatch")]
    hover(plot, [bars], [*rows, ("begins", "@left{0,0.000} ms"), ("takes", "@takes{0,0.000} ms")])
    plot.yaxis.ticker = list(lanes.values())
    plot.yaxis.major_label_overrides = {
        place: f"rank {rank}" + (f" · stage {stage}" if stage >= 0 else "") for (rank, stage), place in lanes.items()
    }
    plot.x_range.range_padding = 0.01
    legend = [Legend(kind, colour, "square") for kind, colour in KINDS.items() if kind in data["kind"]]
    return Panel(f"Step {event['step']:,} over ranks and stages", plot, legend, _note(event, names, lanes))


def _number_microbatches(plot: Any, data: dict[str, list[Any]]) -> None:
    """Write the microbatch on each bar that has room for it on a phone."""
    from bokeh.core.properties import value
    from bokeh.models import ColumnDataSource

    least = max(data["right"]) / 30
    wide = [at for at, takes in enumerate(data["takes"]) if takes > least and data["microbatch"][at] != NONE]
    middle = [(data["left"][at] + data["right"][at]) / 2 for at in wide]
    labels = {"x": middle, "y": [data["lane"][at] for at in wide], "text": [data["microbatch"][at] for at in wide]}
    plot.text(
        x="x",
        y="y",
        text="text",
        source=ColumnDataSource(labels),
        text_align="center",
        text_baseline="middle",
        text_color=SURFACE,
        text_font=value(FONT),
        text_font_size="11px",
    )


def _lanes(spans: list[Record]) -> dict[tuple[int, int], int]:
    """The row of each rank and stage; spans without a stage are in the first row of their rank."""
    pairs = {(one["pid"], one["tid"]) for one in spans if one["tid"] >= 0}
    alone = {(one["pid"], -1) for one in spans} if not pairs else set()
    return {pair: place for place, pair in enumerate(sorted(pairs | alone)[:MOST_LANES])}


def _columns(
    spans: list[Record], lanes: dict[tuple[int, int], int], names: dict[int, str], begin: float
) -> dict[str, list[Any]]:
    first = {rank: place for (rank, _), place in reversed(lanes.items())}
    rows: list[tuple[Any, ...]] = []
    for one in spans[:MOST_SPANS]:
        lane = lanes.get((one["pid"], one["tid"]), first.get(one["pid"]) if one["tid"] < 0 else None)
        if lane is None:
            continue
        left, takes, about = (one["ts"] - begin) / 1000, one["dur"] / 1000, one["args"]
        shown = [NONE if about[key] is None else str(about[key]) for key in ("stage", "microbatch")]
        kind = one["cat"]
        rows.append((lane, left, left + takes, takes, kind, KINDS.get(kind, GREY), names.get(one["pid"], ""), *shown))
    return columns_of(("lane", "left", "right", "takes", "kind", "colour", "rank", "stage", "microbatch"), rows)


def _note(event: Record, names: dict[int, str], lanes: dict[tuple[int, int], int]) -> str:
    bubble, theory = event.get("bubble"), event.get("theoretical_bubble")
    parts = [str(event.get("title", ""))]
    if bubble is not None:
        parts.append(f"bubble {bubble:.1%} measured" + ("" if theory is None else f", {theory:.1%} in theory"))
    shown = len({rank for rank, _ in lanes})
    if shown < len(names):
        parts.append(f"the first {shown} of {len(names)} ranks")
    parts.append("numbers are microbatches")
    return "; ".join(part for part in parts if part)
