"""The cells of the support matrix, and its table in the README."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paramp.precision import PRESETS, Precision

README = Path(__file__).parent.parent / "README.md"

LAYOUTS = {
    "1": (1, {}),
    "dp2": (2, {"data": 2}),
    "tp2": (2, {"tensor": 2}),
    "tp2 + sp": (2, {"tensor": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline": 2}),
    "pp2·tp2": (4, {"pipeline": 2, "tensor": 2}),
    "dp2·tp2": (4, {"data": 2, "tensor": 2}),
    "pp2·dp2": (4, {"pipeline": 2, "data": 2}),
    "pp2·dp2·tp2": (8, {"pipeline": 2, "data": 2, "tensor": 2}),
}
"""Name -> ranks, and the configuration's ``parallel``."""

MODES = list(PRESETS)


def from_small_scale(mode: str) -> Precision:
    """The mode, its loss scaling starting from 2**10: from 2**16 or 2**32 a short run would skip most of its steps."""
    precision = Precision.parse(mode)
    scaling = precision.scaling
    if scaling is None or scaling.min_scale == scaling.max_scale is not None:
        return precision
    return replace(precision, scaling=replace(scaling, init_scale=2.0**10))


START, END = "<!-- matrix: written by `make matrix` -->", "<!-- /matrix -->"


def table(green: set[tuple[str, str]]) -> str:
    """The table in Markdown: a row a mode, a column a layout, and a mark where the cell is in ``green``."""
    rows = [["mode", *LAYOUTS], ["---", *(":-:" for _ in LAYOUTS)]]
    rows += [[f"`{mode}`", *("✓" if (mode, layout) in green else "✗" for layout in LAYOUTS)] for mode in MODES]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def replace_table(text: str, green: set[tuple[str, str]]) -> str:
    """``text``, the README's, with the table of ``green`` between its two marks."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{table(green)}\n\n{END}{after}"
