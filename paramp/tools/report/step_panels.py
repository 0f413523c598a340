"""The figures over steps: loss, loss scale, gradient norm, speed, memory, and what else a loop has logged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..read_run import NUMBERS, LoggedRun, Record
from .buckets import Array, Buckets, changes, in_buckets, width_of
from .figures import (
    BLUE,
    FONT,
    GREEN,
    GREY,
    ORANGE,
    SHORT,
    SUPERSCRIPT,
    SURFACE,
    TEXT,
    Legend,
    Panel,
    columns_of,
    hover,
    new_figure,
)

MOST_MARKS = 2000
"""Marks are drawn one by one up to here; then those of a bucket are one."""
MOST_POINTS = 4000
"""The loss scale is drawn exactly if it changes less often."""
MOST_OTHERS = 16
"""The most keys of a loop's own that are drawn."""
OWN_PANELS = NUMBERS - {"lr", "mfu", "val_seconds"}
"""Keys that have a panel of their own."""
STEPS = (
    "const unit = Math.max(...ticks) >= 1e4 && ticks.every(one => one % 1000 === 0) ? 1000 : 1;"
    " return (tick / unit).toLocaleString('en') + (unit > 1 && tick ? 'k' : '')"
)
"""The label of a step, in JavaScript: on a phone six labels such as ``100,000`` run into each other."""
NO_REPORT = "no report"
LONGEST_NAME = 25
"""Characters of a parameter's name in the figure, which fit on a phone; longer ones lose their beginning."""
WIDE = 100.0
"""A logarithmic axis where the highest value is more than this many times the median."""


@dataclass(frozen=True)
class StepAxis:
    """What the figures over steps share. The page's script joins their ranges: a zoom into one is one into all."""

    run: LoggedRun
    start: float
    width: int
    begin: float
    end: float
    """What a figure shows before a zoom."""
    resumed: Sequence[float]
    """Where launches begin that resumed the run, on the axis of steps."""

    @staticmethod
    def of(run: LoggedRun) -> StepAxis:
        """The axis of ``run``."""
        steps = [record["step"] for record in run.records]
        first, last = min(steps), max(steps)
        margin = max(0.5, 0.01 * (last - first))
        resumed = [one["resumed_at"] + 0.5 for one in run.of_kind("launch") if one.get("resumed_at")]
        return StepAxis(run, first, width_of(first, last), first - margin, last + margin, resumed[-200:])

    def buckets(self, key: str, unit: float = 1.0) -> Buckets:
        """The series ``key`` over ``unit``, in buckets."""
        steps, values = self.run.series(key)
        return in_buckets(steps, values / unit, self.start, self.width)

    def figure(self, height: int, y_label: str, **options: Any) -> Any:
        """An empty figure with this axis, and a dashed line where the run was resumed."""
        from bokeh.models import CustomJSTickFormatter, Range1d
        from bokeh.models.annotations import Span

        x_range = Range1d(start=self.begin, end=self.end, bounds=(self.begin, self.end), name="steps")
        plot = new_figure(height, x_range, x_axis_label="step", y_axis_label=y_label, **options)
        plot.xaxis.formatter = CustomJSTickFormatter(code=STEPS)
        plot.xaxis.ticker.min_interval = 1
        plot.xaxis.ticker.desired_num_ticks = 5
        for place in self.resumed:
            span = Span(location=place, dimension="height", line_color=GREY, line_dash=[4, 4], line_width=1)
            plot.add_layout(span)
        return plot

    def legend(self) -> list[Legend]:
        """The legend's entry of the dashed lines."""
        return [Legend("resumed", GREY, "dashed")] if self.resumed else []


def step_panels(axis: StepAxis) -> list[list[Panel]]:
    """The panels over steps, those of a section together; without those whose keys the run has not."""
    keys = {key for record in axis.run.records for key, value in record.items() if isinstance(value, (int, float))}
    keys |= {"loss", "grad_norm"} & {key for record in axis.run.records for key in record}
    sections = [
        [loss_panel(axis)] if keys & {"loss", "val_loss"} else [],
        [scale_panel(axis)] if "loss_scale" in keys else [],
        [norm_panel(axis)] if "grad_norm" in keys else [],
        [draw(axis) for key, draw in SPEED.items() if key in keys],
        [memory_panel(axis)] if "memory_bytes" in keys else [],
    ]
    others = sorted(keys - OWN_PANELS - {"step"})[:MOST_OTHERS]
    return [*sections, [line_panel(axis, key, key) for key in others]]


def line_panel(
    axis: StepAxis, key: str, title: str, y_label: str = "", unit: float = 1.0, form: str = "0.[0000]"
) -> Panel:
    """The values of one key: a line, or the mean in a band of the extremes; crosses for what is not finite."""
    found = axis.buckets(key, unit)
    plot = axis.figure(200, y_label, y_axis_type="log" if _is_wide(found) else "linear")
    draw_line(plot, found, BLUE, key, form)
    return Panel(title, plot, mark_missing(plot, found, key))


def loss_panel(axis: StepAxis) -> Panel:
    """Training and validation loss."""
    training = axis.buckets("loss")
    plot = axis.figure(300, "loss", y_axis_type="log" if _is_wide(training) else "linear")
    legend = []
    if len(training.first):
        legend = [*draw_line(plot, training, BLUE, "training", "0.0000"), *mark_missing(plot, training, "training")]
    steps, values = axis.run.series("val_loss")
    finite = np.isfinite(values)
    if finite.any():
        line = {"x": steps[finite], "y": values[finite]}
        plot.line(**line, line_color=ORANGE, line_width=1)
        dots = plot.scatter(**line, size=7 if len(steps) < 40 else 4, fill_color=ORANGE, line_color=None)
        hover(plot, [dots], [("step", "@x{0,0}"), ("validation", "@y{0.0000}")])
        legend.append(Legend("validation", ORANGE, "dot"))
    return Panel("Loss", plot, [*legend, *axis.legend()])


def norm_panel(axis: StepAxis) -> Panel:
    """The gradient norm before clipping; an overflow has none."""
    found = axis.buckets("grad_norm")
    positive = bool((found.low[np.isfinite(found.low)] > 0).all())
    plot = axis.figure(240, "norm before clipping", y_axis_type="log" if positive else "linear")
    if positive:
        label_decades(plot, found)
    legend = draw_line(plot, found, BLUE, "gradient norm", "0.0000") + mark_missing(plot, found, "gradient norm")
    return Panel("Gradient norm", plot, [*legend, *axis.legend()])


def label_decades(plot: Any, found: Buckets) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, where the values of a logarithmic axis are in few decades."""
    from bokeh.models import CustomJSTickFormatter

    finite = np.isfinite(found.high)
    if not finite.any():
        return
    low, high = np.log10(found.low[finite].min()), np.log10(found.high[finite].max())
    if high - low < 3:
        decades = range(int(low) - 2, int(high) + 2)
        plot.yaxis.ticker = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
        plot.yaxis.formatter = CustomJSTickFormatter(code=SHORT)


def draw_line(plot: Any, found: Buckets, colour: str, label: str, form: str) -> list[Legend]:
    """Draw ``found`` with hover texts in Bokeh's number format ``form``. Returns the entries of the legend."""
    from bokeh.models import ColumnDataSource

    middle = (found.first + found.last) / 2
    data = {"x": middle, "first": found.first, "last": found.last, "mean": found.mean.astype(np.float32)}
    rows = [("step", "@first{0,0}"), (label, f"@mean{{{form}}}")]
    legend = [Legend(label, colour)]
    if found.width > 1:
        data |= {"low": found.low.astype(np.float32), "high": found.high.astype(np.float32)}
        rows = [("steps", "@first{0,0} to @last{0,0}"), (f"{label}, mean", f"@mean{{{form}}}")]
        rows += [("lowest", f"@low{{{form}}}"), ("highest", f"@high{{{form}}}")]
        legend = [Legend(f"{label}, mean", colour), Legend("lowest to highest", colour, "band")]
    source = ColumnDataSource(data)
    if found.width > 1:
        plot.varea(x="x", y1="low", y2="high", source=source, fill_color=colour, fill_alpha=0.28)
    line = plot.line(x="x", y="mean", source=source, line_color=colour, line_width=1.5)
    hover(plot, [line], rows, "vline")
    if len(found.first) == 1:
        plot.scatter(x="x", y="mean", source=source, size=6, fill_color=colour, line_color=None)
    return legend


def mark_missing(plot: Any, found: Buckets, label: str) -> list[Legend]:
    """Draw crosses at the top of the figure where values are not finite. Returns the entries of the legend."""
    from bokeh.models import ColumnDataSource

    where = found.missing > 0
    if not where.any():
        return []
    finite = found.high[np.isfinite(found.high)]
    top = finite.max() if len(finite) else 1.0
    first, last = found.first[where], found.last[where]
    data = {"x": (first + last) / 2, "y": np.full(len(first), top), "count": found.missing[where]}
    data |= {"first": first, "last": last}
    marks = plot.scatter(
        x="x", y="y", source=ColumnDataSource(data), marker="x", size=8, line_color=ORANGE, line_width=1.5
    )
    step = ("step", "@first{0,0}") if found.width == 1 else ("steps", "@first{0,0} to @last{0,0}")
    hover(plot, [marks], [step, (label, "not finite" + ("" if found.width == 1 else ": @count{0,0}"))])
    return [Legend("not finite", ORANGE, "cross")]


def _is_wide(found: Buckets) -> bool:
    """Whether the values are positive, and some much larger than most."""
    finite = np.isfinite(found.mean)
    if not finite.any() or found.low[finite].min() <= 0:
        return False
    return bool(found.high[finite].max() > WIDE * np.median(found.mean[finite]))


def scale_panel(axis: StepAxis) -> Panel:
    """The loss scale as a power of two, each skipped step marked, and named where there is a report."""
    from bokeh.models import ColumnDataSource, CustomJSTickFormatter

    steps, scales = axis.run.series("loss_scale")
    exponents = np.log2(np.where(scales > 0, scales, np.nan))
    x, y = changes(steps, exponents)
    plot = axis.figure(260, "loss scale")
    plot.yaxis.formatter = CustomJSTickFormatter(code=SUPERSCRIPT)
    plot.yaxis.ticker.min_interval = 1
    if len(x) <= MOST_POINTS:
        plot.step(x=x, y=y, mode="center", line_color=BLUE, line_width=1.5)
        legend = [Legend("loss scale", BLUE)]
    else:
        legend = draw_line(plot, in_buckets(steps, exponents, axis.start, axis.width), BLUE, "log2(loss scale)", "0.0")
    skipped = axis.run.skipped()
    if len(skipped):
        data = mark_skipped(axis, skipped, dict(zip(steps.tolist(), exponents.tolist(), strict=True)))
        marks = plot.scatter(
            x="x", y="y", source=ColumnDataSource(data), marker="x", size=10, line_color=ORANGE, line_width=2
        )
        rows = [("", "@what"), ("loss scale", "@scale"), ("parameter", "@parameter"), ("where", "@place")]
        hover(plot, [marks], rows)
        legend.append(Legend(f"skipped steps ({len(skipped):,})", ORANGE, "cross"))
        _name_overflows(axis, plot, data)
    if len(x) and y.max() - y.min() < 4:
        plot.y_range.start, plot.y_range.end = y.min() - 2, y.max() + 2
    return Panel("Loss scale and overflows", plot, [*legend, *axis.legend()])


def _name_overflows(axis: StepAxis, plot: Any, marks: dict[str, list[Any]]) -> None:
    """Write the parameters beside the marks that have a report, as far apart as names need."""
    from bokeh.models.annotations import Label

    plot.y_range.range_padding = 0.15
    previous = -1.0
    for x, y, name in zip(marks["x"], marks["y"], marks["parameter"], strict=True):
        place = (x - axis.begin) / (axis.end - axis.begin)
        if name == NO_REPORT or place - previous < 0.45 or not np.isfinite(y):
            continue
        previous = place
        end = name[1 - LONGEST_NAME :]
        text = name if len(name) <= LONGEST_NAME else f"…{end.partition('.')[2] or end}"
        shown = Label(x=x, y=y, text=text, text_color=TEXT, text_font=FONT, text_font_size="11px")
        # The scale falls after the step, so there is room to the right of the mark at its height.
        shown.text_align, shown.x_offset = (
            ("left", 11) if place < 0.3 else ("right", 0) if place > 0.7 else ("center", 0)
        )
        shown.text_baseline, shown.y_offset = ("middle", 0) if place < 0.3 else ("bottom", 7)
        shown.background_fill_color, shown.background_fill_alpha = SURFACE, 0.75
        plot.add_layout(shown)


def mark_skipped(axis: StepAxis, skipped: Array, exponents: dict[float, float]) -> dict[str, list[Any]]:
    """The columns of the marks of skipped steps: one each, or one for those of a bucket if they are very many."""
    reports = {one["step"]: one for one in axis.run.of_kind("overflow")}
    width = 1 if len(skipped) <= MOST_MARKS else axis.width
    groups = np.split(skipped, np.flatnonzero(np.diff((skipped - axis.start) // width)) + 1)
    rows: list[tuple[Any, ...]] = []
    for group in groups:
        report: Record = next((reports[step] for step in group.tolist() if step in reports), {})
        step = report.get("step", group[0])
        what = (
            f"step {int(step):,} skipped"
            if len(group) == 1
            else f"{len(group):,} steps skipped from {int(group[0]):,} on"
        )
        exponent = exponents.get(float(step), float("nan"))
        parameter = report.get("parameter") or report.get("module") or NO_REPORT
        rows.append((step, exponent, what, scale_text(2.0**exponent), parameter, place_of(report)))
    return columns_of(("x", "y", "what", "scale", "parameter", "place"), rows)


def scale_text(scale: float) -> str:
    """``65,536``, or ``0.5``."""
    return f"{scale:,.0f}" if scale >= 1 and scale == round(scale) else f"{scale:g}"


def place_of(report: Record) -> str:
    """``rank 2, stage 1 (pp 1, tp 0)`` of an overflow's event; empty if it is not known."""
    parts = [f"{name} {report[name]}" for name in ("rank", "stage") if report.get(name) is not None]
    axes = ", ".join(f"{name} {place}" for name, place in (report.get("axes") or {}).items())
    return ", ".join(parts) + (f" ({axes})" if axes else "")


def speed_panel(axis: StepAxis) -> Panel:
    """Tokens per second of all ranks together."""
    from bokeh.models import NumeralTickFormatter

    found = axis.buckets("tokens_per_second")
    plot = axis.figure(220, "tokens/s")
    plot.yaxis.formatter = NumeralTickFormatter(format="0.[0]a")
    draw_line(plot, found, BLUE, "tokens/s", "0,0")
    return Panel("Tokens per second", plot, mark_missing(plot, found, "tokens/s"))


def seconds_panel(axis: StepAxis) -> Panel:
    """How long a step took, and how long it waited for data."""
    step, data = axis.buckets("step_seconds"), axis.buckets("data_seconds")
    plot = axis.figure(220, "seconds", y_axis_type="log" if _is_wide(step) and not len(data.first) else "linear")
    draw_line(plot, step, BLUE, "a step", "0.0000")
    if not len(data.first):
        return Panel("Seconds a step", plot)
    draw_line(plot, data, GREEN, "of it waiting for data", "0.0000")
    return Panel("Seconds a step", plot, [Legend("a step", BLUE), Legend("of it waiting for data", GREEN)])


def memory_panel(axis: StepAxis) -> Panel:
    """The peak memory of the rank with the most."""
    _, values = axis.run.series("memory_bytes")
    most = np.nanmax(values) if np.isfinite(values).any() else 0
    unit, name = (2.0**30, "GiB") if most >= 2**30 else (2.0**20, "MiB")
    return line_panel(axis, "memory_bytes", "Memory", f"most of a rank, {name}", unit, "0,0.00")


SPEED = {"tokens_per_second": speed_panel, "step_seconds": seconds_panel}
"""A key -> its panel."""
