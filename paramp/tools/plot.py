"""Figures of one or several runs from their ``metrics.jsonl``, and of a gradient histogram.

Four panels share the axis of steps: the training and validation loss, the loss scale with the skipped steps, the
gradient norm, and tokens per second with the percentage of time spent waiting for data.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..base.errors import ConfigError
from ..base.installed_packages import check_installed
from ..base.values_checked_by_type import user_path
from ..observe.grad_histogram import GradientHistogram
from .read_run import LoggedRun, read_run

# Okabe and Ito's palette (2008), which is safe for colour-blind readers; black marks skipped steps.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SECOND = "#D55E00"  # the second line in a panel of a single run
SKIPPED = "#000000"
FORMATS = (".png", ".svg", ".pdf")
RUN = "run"  # the gid of each run's line in the legend
LINES = ("-", "--", ":", "-.")  # with more runs than colours, the next line style
LEGEND: dict[str, Any] = {"fontsize": 9, "frameon": True, "framealpha": 0.85, "edgecolor": "none"}


def plot(log_dirs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Plot the runs in ``log_dirs`` into ``out``, by default ``metrics.png`` in the first folder. Returns its path.

    Raises:
        ConfigError: matplotlib is not installed, a run cannot be read, or the format or folder of ``out`` is wrong.
    """
    check_installed("matplotlib", "plot", "plot")
    runs = [read_run(folder) for folder in log_dirs]
    for run in runs:
        for text in run.left_out[:3]:
            print(f"{run.name}: left out: {text}", file=sys.stderr)
    if len({run.name for run in runs}) < len(runs):  # folders with the same name: label them by path
        runs = [LoggedRun(str(folder), run.records) for run, folder in zip(runs, log_dirs, strict=True)]
    figure = draw(runs)
    path = user_path(log_dirs[0]) / "metrics.png" if out is None else user_path(out)
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"plot: --out: got {str(path)!r}, expected a name that ends in {' or '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ConfigError(f"plot: --out: no folder {str(path.parent)!r}")
    figure.savefig(path, dpi=150)
    return path


def draw(runs: Sequence[LoggedRun]) -> Any:
    """The ``matplotlib`` figure of ``runs``: panels loss, loss scale, gradient norm, tokens/s."""
    from matplotlib.ticker import MaxNLocator

    figure = _empty_figure(11, 7)
    grid = figure.subplots(2, 2, sharex=True)
    panels = {
        "Loss": _draw_loss,
        "Loss scale": _draw_scale,
        "Gradient norm before clipping": _draw_norm,
        "Tokens per second": _draw_speed,
    }
    for axes, (title, draw_panel) in zip(grid.flat, panels.items(), strict=True):
        _frame(axes, title)
        axes.grid(color="0.9", linewidth=0.8)
        draw_panel(axes, runs)
    for axes in grid[1]:
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if len(runs) == 1:
        figure.suptitle(runs[0].name)
    else:
        handles, names = grid[0, 0].get_legend_handles_labels()
        of_runs = [(handle, name) for handle, name in zip(handles, names, strict=True) if handle.get_gid() == RUN]
        figure.legend(*zip(*of_runs, strict=True), loc="outside upper center", ncols=min(len(runs), 4), frameon=False)
    return figure


def _empty_figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _frame(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)


def _style(index: int) -> dict[str, Any]:
    kind = LINES[index // len(COLOURS) % len(LINES)]
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": kind, "linewidth": 1.3}


def _legend(axes: Any, *more: Any) -> None:
    """A legend of the named lines of ``axes`` and of the axes in ``more``."""
    parts = [panel.get_legend_handles_labels() for panel in (axes, *more)]
    handles, names = ([*itertools.chain(*lists)] for lists in zip(*parts, strict=True))
    if handles:
        # On the last axes, because axes on the right are drawn over the others.
        (more or (axes,))[-1].legend(handles, names, **LEGEND)


def _log_scale(axes: Any, runs: Sequence[LoggedRun], key: str, base: int) -> None:
    """A logarithmic axis, if any value is positive."""
    if any((run.series(key)[1] > 0).any() for run in runs):
        axes.set_yscale("log", base=base, nonpositive="mask")


def _draw_loss(axes: Any, runs: Sequence[LoggedRun]) -> None:
    single = len(runs) == 1
    for index, run in enumerate(runs):
        style = _style(index)
        axes.plot(*run.series("loss"), **style, label="training" if single else run.name, gid=RUN)
        steps, losses = run.series("val_loss")
        if len(steps):
            style |= {"marker": "o", "markersize": 5, "zorder": 3, "markeredgecolor": "white"}
            style |= {"color": SECOND} if single else {"linestyle": "none"}
            axes.plot(steps, losses, **style, label="validation" if single else f"val {run.name}")
    axes.set_ylabel("nats per token")
    if single:
        _legend(axes)
    elif any(len(run.series("val_loss")[0]) for run in runs):
        axes.text(0.98, 0.95, "dots: validation", transform=axes.transAxes, ha="right", va="top", fontsize=9)


def _draw_scale(axes: Any, runs: Sequence[LoggedRun]) -> None:
    _log_scale(axes, runs, "loss_scale", 2)
    mark: dict[str, Any] = {"linestyle": "none", "marker": "x", "markeredgewidth": 1.5}
    num_skipped = 0
    for index, run in enumerate(runs):
        steps, scales = run.series("loss_scale")
        axes.plot(steps, scales, **_style(index), drawstyle="steps-mid")
        skipped = np.array([bool(record.get("skipped")) for record in run.records if "loss_scale" in record], bool)
        if skipped.any():
            num_skipped += int(skipped.sum())
            colour = SKIPPED if len(runs) == 1 else _style(index)["color"]
            axes.plot(steps[skipped], scales[skipped], color=colour, **mark, zorder=3, label="_skipped")
    if num_skipped:
        from matplotlib.lines import Line2D

        axes.legend([Line2D([], [], color=SKIPPED, **mark)], [f"skipped steps ({num_skipped})"], **LEGEND)


def _draw_norm(axes: Any, runs: Sequence[LoggedRun]) -> None:
    _log_scale(axes, runs, "grad_norm", 10)
    for index, run in enumerate(runs):
        axes.plot(*run.series("grad_norm"), **_style(index))


def _draw_speed(axes: Any, runs: Sequence[LoggedRun]) -> None:
    from matplotlib.ticker import PercentFormatter, StrMethodFormatter

    single = len(runs) == 1
    for index, run in enumerate(runs):
        axes.plot(*run.series("tokens_per_second"), **_style(index), label="tokens/s" if single else "_run")
    axes.margins(y=0.25)  # room for the legend
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    waits = [run.waiting() for run in runs]
    if not any(len(steps) for steps, _ in waits):
        return
    right = axes.twinx()
    right.spines[["top", "left"]].set_visible(False)
    right.set_ylim(0, 100)
    right.set_ylabel("waiting for data")
    right.yaxis.set_major_formatter(PercentFormatter())
    for index, (steps, percentages) in enumerate(waits):
        style = _style(index) | {"linestyle": ":"} | ({"color": SECOND} if single else {})
        right.plot(steps, percentages, **style, label="waiting for data" if single else "_waiting")
    if single:
        _legend(axes, right)
    else:
        right.text(0.98, 0.95, "dotted: waiting for data", transform=axes.transAxes, ha="right", va="top", fontsize=9)


def plot_histogram(histogram: GradientHistogram, out: str | Path) -> None:
    """Plot ``histogram`` into the file ``out``; a ConfigError if matplotlib is not installed."""
    check_installed("matplotlib", "plot", "histogram")
    draw_histogram(histogram).savefig(user_path(out), dpi=150)


def draw_histogram(histogram: GradientHistogram) -> Any:
    """The ``matplotlib`` figure of a histogram: a bar for each exponent, one for zeros, and the limits of the dtype."""
    from matplotlib.ticker import PercentFormatter

    figure = _empty_figure(10, 4.5)
    axes = figure.subplots()
    info = torch.finfo(histogram.dtype)
    smallest = info.smallest_normal
    limits = {"smallest subnormal": smallest * info.eps, "smallest normal": smallest, "largest": info.max}
    total = histogram.total or 1.0
    exponents = np.array(sorted(histogram.counts), dtype=np.float64)
    fractions = np.array([histogram.counts[int(exponent)] / total for exponent in exponents])
    axes.bar(exponents, fractions, width=1.0, align="edge", color=COLOURS[0], edgecolor="white", linewidth=0.4)
    places = [math.log2(limit) for limit in limits.values()]
    left = min([*exponents, places[0] if histogram.dtype is torch.float16 else places[2]]) - 3
    axes.bar([left], [histogram.zeros / total], width=1.0, align="edge", color=SECOND, label="zeros")
    for (name, limit), place, line in zip(limits.items(), places, ("--", "-.", "-"), strict=True):
        if place > left:
            axes.axvline(place, color=SKIPPED, linewidth=1, linestyle=line, label=f"{name} ({limit:.3g})")
    _frame(axes, histogram.describe())
    axes.set_xlabel("exponent of 2 of the scaled gradient")
    axes.set_ylabel("fraction of the elements")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(fontsize=9, frameon=False)
    return figure
