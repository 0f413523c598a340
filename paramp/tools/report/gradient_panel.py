"""The figure of the histograms of gradients: by exponent over steps, against the limits of fp16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from ..read_run import Record
from .buckets import width_of
from .figures import (
    BLUE,
    FONT,
    GREY,
    HEAT,
    ORANGE,
    SUPERSCRIPT,
    SURFACE,
    TEXT,
    Legend,
    Panel,
    columns_of,
    hover,
    new_figure,
)
from .step_panels import StepAxis

MOST_COLUMNS = 250
"""The most histograms side by side; of more, those of neighbouring steps are added up."""
LIMITS = (
    (-24, "smallest subnormal of fp16, 2⁻²⁴", "dotted"),
    (-14, "smallest normal of fp16, 2⁻¹⁴", "dashed"),
    (math.log2(65504), "largest of fp16, 65,504", "solid"),
)
"""Their exponents of 2, names and line styles."""
LEAST = 1e-6
"""The fraction of the elements that has the palest colour; smaller ones have it too."""
ZEROS, NOT_FINITE = "zeros", "not finite"


def gradient_panel(axis: StepAxis) -> Panel | None:
    """The heat map of several histograms, the bars of one; None without any."""
    found = axis.run.of_kind("histogram")
    if not found:
        return None
    dtypes = {str(one.get("dtype", "float16")) for one in found}
    note = "Gradients carry the loss scale. Elements left of 2⁻²⁴ become zero in fp16, those beyond 65,504 overflow."
    if len(found) > 1:
        note = note.replace("left of", "below").replace("beyond", "above")
    if dtypes != {"float16"}:
        note += f" This run computes in {', '.join(sorted(dtypes))}; its own limits are others."
    plot, legend = _bars(found[0]) if len(found) == 1 else _heat_map(axis, found)
    return Panel("Gradients by exponent", plot, legend, note)


def _rows_of(found: Sequence[Record]) -> tuple[int, int]:
    """The lowest and the highest exponent to show: all those that have elements, and the limits."""
    exponents = [int(exponent) for one in found for exponent, count in one["counts"].items() if count]
    return min([*exponents, -25]), max([*exponents, 16])


def _heat_map(axis: StepAxis, found: Sequence[Record]) -> tuple[Any, list[Legend]]:
    from bokeh.models import ColumnDataSource, CustomJSTickFormatter, LogColorMapper, LogTicker
    from bokeh.models.annotations import ColorBar

    low, high = _rows_of(found)
    data = _cells(found, low, high)
    plot = axis.figure(420, "exponent of 2")
    mapper = LogColorMapper(palette=HEAT, low=LEAST, high=1.0)
    cells = plot.quad(
        left="left",
        right="right",
        bottom="bottom",
        top="top",
        source=ColumnDataSource(data),
        fill_color={"field": "fraction", "transform": mapper},
        line_color={"field": "fraction", "transform": mapper},
        line_width=0.7,
    )
    hover(
        plot,
        [cells],
        [("step", "@steps"), ("magnitude", "@what"), ("elements", "@fraction{0.0000%}"), ("loss scale", "@scale{0,0}")],
    )
    _draw_limits(plot, "width")
    plot.yaxis.formatter = CustomJSTickFormatter(code=SUPERSCRIPT)
    ticks = [tick for tick in range(-1088, 1024, 8 if high - low < 80 else 32) if low + 2 <= tick <= high]
    names = {}
    if data["what"].count(ZEROS):
        names[low - 2] = ZEROS
    if data["what"].count(NOT_FINITE):
        names[high + 3] = NOT_FINITE
    plot.yaxis.ticker = [*ticks, *(place + 0.5 for place in names)]
    plot.yaxis.major_label_overrides = {place + 0.5: name for place, name in names.items()}
    bar = ColorBar(
        color_mapper=mapper,
        title="fraction of the elements",
        orientation="horizontal",
        height=8,
        ticker=LogTicker(desired_num_ticks=7),
        background_fill_color=None,
        major_label_text_color=GREY,
        title_text_color=GREY,
        title_text_font_style="normal",
        major_label_text_font_size="12px",
        title_text_font_size="12px",
        title_text_font=FONT,
        major_label_text_font=FONT,
        bar_line_color=None,
        major_tick_line_color=None,
        padding=4,
    )
    plot.add_layout(bar, "below")
    return plot, [*_limit_legend(), *axis.legend()]


def _cells(found: Sequence[Record], low: int, high: int) -> dict[str, list[Any]]:
    """The columns of the map: a cell for each exponent with elements; zeros two rows below, the rest above."""
    steps = [one["step"] for one in found]
    width = width_of(min(steps), max(steps), MOST_COLUMNS)
    gap = min(np.diff(sorted(set(steps))), default=1)
    columns: dict[int, list[Record]] = {}
    for one in found:
        columns.setdefault((one["step"] - min(steps)) // width if width > gap else one["step"], []).append(one)
    cells: list[tuple[Any, ...]] = []
    for group in columns.values():
        first, last = group[0]["step"], group[-1]["step"]
        edges = (first - gap / 2, last + gap / 2)
        counts: dict[int, float] = {}
        for one in group:
            for exponent, count in one["counts"].items():
                counts[int(exponent)] = counts.get(int(exponent), 0.0) + count
        zeros, non_finite = (sum(one[key] for one in group) for key in ("zeros", "non_finite"))
        total = (sum(counts.values()) + zeros + non_finite) or 1.0
        rows = [(exponent, count, f"2^{exponent} to 2^{exponent + 1}") for exponent, count in sorted(counts.items())]
        rows += [(low - 2, zeros, ZEROS), (high + 3, non_finite, NOT_FINITE)]
        where = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        for bottom, count, what in rows:
            if count:
                cells.append((*edges, bottom, bottom + 1, count / total, what, where, group[-1]["scale"]))
    return columns_of(("left", "right", "bottom", "top", "fraction", "what", "steps", "scale"), cells)


def _bars(one: Record) -> tuple[Any, list[Legend]]:
    """The bars of a single histogram."""
    from bokeh.models import ColumnDataSource, CustomJSTickFormatter, NumeralTickFormatter

    low, high = _rows_of([one])
    cells = _cells([one], low, high)
    plot = new_figure(260, x_axis_label=f"exponent of 2, step {one['step']:,}", y_axis_label="of the elements")
    data = {"left": cells["bottom"], "right": cells["top"], "top": cells["fraction"], "what": cells["what"]}
    bars = plot.quad(
        left="left", right="right", bottom=0, top="top", source=ColumnDataSource(data), fill_color=BLUE, line_color=None
    )
    hover(plot, [bars], [("magnitude", "@what"), ("elements", "@top{0.00%}")])
    _draw_limits(plot, "height")
    plot.xaxis.formatter = CustomJSTickFormatter(code=SUPERSCRIPT)
    plot.xaxis.ticker = [tick for tick in range(-1088, 1024, 8 if high - low < 80 else 32) if low <= tick <= high]
    plot.yaxis.formatter = NumeralTickFormatter(format="0%")
    plot.y_range.start = 0
    return plot, [Legend("elements", BLUE, "square"), *_limit_legend()]


def _draw_limits(plot: Any, dimension: Literal["width", "height"]) -> None:
    from bokeh.models.annotations import Span

    for place, _, style in LIMITS:
        halo = Span(location=place, dimension=dimension, line_color=SURFACE, line_width=4, line_alpha=0.6)
        colour = ORANGE if style == "solid" else TEXT
        line = Span(location=place, dimension=dimension, line_color=colour, line_dash=style, line_width=1.5)
        plot.renderers.extend([halo, line])


def _limit_legend() -> list[Legend]:
    return [Legend(name, ORANGE if style == "solid" else TEXT, style) for _, name, style in reversed(LIMITS)]
