"""``paramp report``: one page on a run, self-contained, drawn by Bokeh from what :class:`paramp.Metrics` wrote."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...base.errors import require
from ...base.installed_packages import check_installed
from ..read_run import LoggedRun, read_run
from . import tables
from .figures import DARK, Panel
from .gradient_panel import gradient_panel
from .step_panels import StepAxis, step_panels
from .timeline_panel import timeline_panels

NAME = "report.html"
TEMPLATES = Path(__file__).parent


def report(folder: str | Path, live: float | None = None) -> Iterator[Path]:
    """Write the page of the run in ``folder`` to ``report.html`` there, and yield its path.

    Args:
        live: seconds. The page is written again so often, and loads itself again in the browser, until the run has
            ended; each time the path is yielded. None: once.

    Raises:
        ConfigError: Bokeh is not installed, the run has no step that can be read, or ``live`` is less than 1.
    """
    check_installed("bokeh", "report", "report")
    require(live is None or live >= 1, "--live", live, "a number of seconds, 1 or more")
    while True:
        run = read_run(folder)
        ended = live is None or (bool(run.events) and run.events[-1]["event"] == "end")
        yield _write(run, None if ended else live)
        if ended or live is None:
            return
        time.sleep(live)


def finish(folder: str | Path) -> Path:
    """Write the page once more, so that it does not load itself again."""
    return _write(read_run(folder), None)


def _write(run: LoggedRun, reload: float | None) -> Path:
    path = run.folder / NAME
    draft = path.with_suffix(".html.new")  # so that a browser sees the whole page, the old one or the new one
    draft.write_text(page_of(run, reload), encoding="utf-8", errors="replace")  # a name may have half a character
    os.replace(draft, path)
    return path


def page_of(run: LoggedRun, reload: float | None = None) -> str:
    """The page as HTML; ``reload``: seconds after which the browser loads it again."""
    from bokeh.document import Document
    from bokeh.embed.util import standalone_docs_json_and_render_items
    from bokeh.resources import Resources
    from jinja2 import Environment, FileSystemLoader

    axis = StepAxis.of(run)
    sections = _sections(run, axis)
    roots = [panel.figure for section in sections for panel in section["panels"]]
    for root in roots:  # a document each, so that the page can draw one after the other
        Document().add_root(root)
    docs, items = standalone_docs_json_and_render_items(roots)
    elements = {root.id: root.elementid for item in items for root in item.roots}
    figures = {"docs": docs, "items": [item.to_json() for item in items], "dark": DARK}
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("page.html").render(
        name=run.name,
        head=tables.head(run),
        left_out=run.left_out,
        sections=sections,
        elements=elements,
        settings=tables.settings(run),
        machine=tables.machine(run),
        modes=tables.modes(run),
        width=axis.width,
        reload=reload,
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        figures=json.dumps(figures).replace("<", "\\u003c"),
        bokeh=Resources(mode="inline", components=["bokeh"]).js_raw[0],
        css=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
        script=(TEMPLATES / "page.js").read_text(encoding="utf-8"),
    )


def _sections(run: LoggedRun, axis: StepAxis) -> list[dict[str, Any]]:
    """The sections that the run has: a heading, panels, a sentence and a table each."""
    loss, scale, norm, speed, memory, *others = step_panels(axis)
    gradients = [panel for panel in [gradient_panel(axis)] if panel is not None]
    sections = [
        _section("Loss", loss),
        _section("Loss scale and overflows", scale, table=tables.overflows(run), text=_overflow_text(run)),
        _section("Gradient norm", norm),
        _section("Gradients by exponent", gradients),
        _section("Speed", speed),
        _section("Memory", memory),
        _section("A step over ranks and stages", timeline_panels(run)),
        _section("Replicas", [], table=tables.differences(run), text=tables.replicas_text(run)),
        _section("Launches", [], table=tables.launches(run)),
        _section("Other values", [panel for section in others for panel in section]),
    ]
    return [section for section in sections if section["panels"] or section["table"] or section["text"]]


def _section(title: str, panels: Sequence[Panel], table: tables.Table | None = None, text: str = "") -> dict[str, Any]:
    return {"title": title, "panels": panels, "table": table, "text": text}


def _overflow_text(run: LoggedRun) -> str:
    """How many of the skipped steps have a report."""
    skipped, reports = len(run.skipped()), len(run.of_kind("overflow"))
    if not skipped:
        return ""
    steps = f"{skipped:,} step{'s were' if skipped > 1 else ' was'} skipped"
    if not reports:
        return f"{steps}; none has a report, which engine.diagnose_overflow() makes (--trace-overflow)."
    return f"{steps}; {reports:,} ha{'ve' if reports > 1 else 's'} a report."
