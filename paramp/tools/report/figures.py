"""The parts that the page's figures share: colours, axes, hover texts. Bokeh draws them.

A colour is named by its value in light mode; the page's script replaces each by its value in dark mode where the reader
prefers that. So a value stands for one colour only.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

# Okabe and Ito's hues (2008), which colour-blind readers tell apart, with the contrast of either background.
BLUE, ORANGE, GREEN, PINK, YELLOW, GREY = "#0069a8", "#c94f00", "#00805f", "#a8487f", "#8f6a00", "#6e7781"
TEXT, GRID, SURFACE, LINE = "#1f2329", "#e7eaee", "#fefefe", "#c9ced6"
DARK = {
    BLUE: "#5db8f0",
    ORANGE: "#ff9147",
    GREEN: "#34d1a3",
    PINK: "#ec9cc8",
    YELLOW: "#e9c34f",
    GREY: "#98a2ae",
    TEXT: "#e8eaed",
    GRID: "#2a3038",
    SURFACE: "#14171b",
    LINE: "#3d4550",
}
"""A colour -> that in dark mode."""
FONT = "system-ui, sans-serif"
SUPERSCRIPT = "return '2' + String(tick).replace(/./g, c => '⁰¹²³⁴⁵⁶⁷⁸⁹'[c] ?? (c === '-' ? '⁻' : '·'))"
"""The label of a tick on an axis of exponents of 2, in JavaScript."""
SHORT = (
    "const size = Math.abs(tick); return size && (size < 1e-3 || size >= 1e5)"
    " ? tick.toExponential(2).replace(/\\.?0*e/, 'e').replace('e+', 'e') : String(Number(tick.toPrecision(6)))"
)
"""The label of a tick on any other axis: as short as it can be."""
LEFT = 64
"""The least width in pixels of what is left of a frame, so that figures over steps are aligned."""


def _ramp(*colours: str) -> list[str]:
    """A palette of 40 colours through ``colours``."""
    corners = np.array([[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in colours], float)
    places = np.linspace(0, len(colours) - 1, 40)
    channels = [np.interp(places, range(len(colours)), corner).round().astype(int) for corner in corners.T]
    return [f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in zip(*channels, strict=True)]


HEAT = _ramp("#eaf2fa", "#b5d4ea", "#6aaed6", "#2676b8", "#08336e")
"""Few to many elements."""
DARK |= zip(HEAT, _ramp("#17222e", "#1c456b", "#2a7ab5", "#6fb9e8", "#dff1ff"), strict=True)


@dataclass(frozen=True)
class Legend:
    """An entry of the legend above a figure."""

    label: str
    colour: str
    shape: str = "line"
    """``line``, ``band``, ``dot``, ``cross``, ``square`` or ``dashed``: a class of the page's style sheet."""


@dataclass(frozen=True)
class Panel:
    """A figure with its heading."""

    title: str
    figure: Any
    legend: Sequence[Legend] = ()
    note: str = ""


def columns_of(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> dict[str, list[Any]]:
    """The data of Bokeh's glyphs: ``rows`` by column."""
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for row in rows:
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    return columns


def new_figure(height: int, x_range: Any = None, **options: Any) -> Any:
    """An empty figure as wide as the page, with tools to zoom and to pan."""
    from bokeh.models import BoxZoomTool, CustomJSTickFormatter, PanTool, ResetTool, WheelZoomTool
    from bokeh.plotting import figure

    drag = BoxZoomTool()
    ranges = {} if x_range is None else {"x_range": x_range}
    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        tools=[drag, PanTool(), WheelZoomTool(), ResetTool()],
        active_drag=None,
        active_scroll=None,
        toolbar_location="above",
        background_fill_color=SURFACE,
        border_fill_color=SURFACE,
        outline_line_color=None,
        min_border_left=LEFT,
        min_border_right=12,
        **ranges,
        **options,
    )
    plot.toolbar.logo = None
    plot.toolbar.active_drag = drag
    plot.toolbar.autohide = True
    for axis in plot.axis:
        axis.axis_line_color = LINE
        axis.major_tick_line_color = LINE
        axis.minor_tick_line_color = None
        axis.major_label_text_color = GREY
        axis.axis_label_text_color = GREY
        axis.major_label_text_font = axis.axis_label_text_font = FONT
        axis.major_label_text_font_size = axis.axis_label_text_font_size = "12px"
        axis.axis_label_text_font_style = "normal"
    if options.get("y_axis_type") != "log":
        plot.yaxis.formatter = CustomJSTickFormatter(code=SHORT)
    plot.grid.grid_line_color = GRID
    plot.xgrid.grid_line_color = None
    return plot


def hover(
    plot: Any, renderers: Sequence[Any], rows: Sequence[tuple[str, str]], mode: Literal["mouse", "vline"] = "mouse"
) -> None:
    """Show ``rows``, labels and Bokeh's formats of columns, over ``renderers``; ``vline``: those at the same step."""
    from bokeh.models import HoverTool

    cells = "".join(f"<span style='opacity: 0.7'>{_plain(label)}</span><span>{value}</span>" for label, value in rows)
    content = (
        f"<div style='display: grid; grid-template-columns: auto auto; gap: 2px 12px; max-width: 320px;"
        f" font: 12px {FONT}; overflow-wrap: anywhere'>{cells}</div>"
    )
    tool = HoverTool(renderers=list(renderers), tooltips=content, mode=mode, visible=False)
    tool.point_policy = "snap_to_data" if mode == "vline" else "follow_mouse"
    plot.add_tools(tool)


def _plain(label: str) -> str:
    """``label`` in HTML, without Bokeh's signs for columns."""
    return html.escape(label).replace("@", "&#64;").replace("$", "&#36;")
