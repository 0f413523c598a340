"""The cells of the support matrix, and its table in docs/tested.md."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from families import WHOLE

from paramp.precision.modes import PRESETS, Precision

PAGE = Path(__file__).parents[2] / "docs/tested.md"

Cells = set[tuple[str, str]]
"""A row and a column each."""

ALL_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "dp2": (2, {"data": 2}),
    "tp2": (2, {"tensor": 2}),
    "tp2 + sp": (2, {"tensor": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline": 2}),
    "pp2·tp2": (4, {"pipeline": 2, "tensor": 2}),
    "dp2·tp2": (4, {"data": 2, "tensor": 2}),
    "pp2·dp2": (4, {"pipeline": 2, "data": 2}),
    "dp2 + zero1": (2, {"data": 2, "zero": 1}),
    "pp2·dp2·tp2": (8, {"pipeline": 2, "data": 2, "tensor": 2}),
    "fsdp2": (2, {"data": {"shard": 2}}),
    "fsdp4": (4, {"data": {"shard": 4}}),
    "hsdp2x2": (4, {"data": {"replicate": 2, "shard": 2}}),
    "fsdp2·tp2": (4, {"data": {"shard": 2}, "tensor": 2}),
    "fsdp2·pp2": (4, {"data": {"shard": 2}, "pipeline": 2}),
    "fsdp2·tp2·pp2": (8, {"data": {"shard": 2}, "tensor": 2, "pipeline": 2}),
    # in the support matrix up to here
    "tp4": (4, {"tensor": 4}),
    "pp4": (4, {"pipeline": 4}),
    "dp4": (4, {"data": 4}),
    "pp2 interleaved": (2, {"pipeline": {"size": 2, "schedule": "interleaved-1f1b"}}),
    "pp2 zero-bubble": (2, {"pipeline": {"size": 2, "schedule": "interleaved-zero-bubble"}}),
    "pp2·fsdp2": (4, {"pipeline": 2, "data": {"shard": 2}}),
    "pp2·fsdp2 interleaved": (4, {"pipeline": {"size": 2, "schedule": "interleaved-1f1b"}, "data": {"shard": 2}}),
    "dp2·tp2 + zero1": (4, {"data": 2, "tensor": 2, "zero": 1}),
    "pp2·dp2 + zero1": (4, {"pipeline": 2, "data": 2, "zero": 1}),
    "dp2·tp2 + sp": (4, {"data": 2, "tensor": 2, "sequence_parallel": True}),
    "pp2·tp2 + sp": (4, {"pipeline": 2, "tensor": 2, "sequence_parallel": True}),
    "fsdp2·tp2 + sp": (4, {"data": {"shard": 2}, "tensor": 2, "sequence_parallel": True}),
}
"""Name -> ranks, and the configuration's ``parallel``."""
LAYOUTS = dict([*ALL_LAYOUTS.items()][:16])
MODES = list(PRESETS)


def from_small_scale(mode: str) -> Precision:
    """The mode, its loss scaling starting from 2**10: from 2**16 or 2**32 a short run would skip most of its steps."""
    precision = Precision.parse(mode)
    scaling = precision.scaling
    if scaling is None or scaling.min_scale == scaling.max_scale is not None:
        return precision
    return replace(precision, scaling=replace(scaling, init_scale=2.0**10))


ACROSS = {
    "dp2": "fp8-mixed",
    "tp2": "O2",
    "tp2 + sp": "bf16-mixed",
    "pp2": "32-true",
    "pp2·tp2": "O3",
    "dp2·tp2": "transformer-engine",
    "pp2·dp2": "transformer-engine-float16",
    "dp2 + zero1": "16-true",
    "pp2·dp2·tp2": "16-mixed",
    "fsdp2": "64-true",
    "fsdp4": "bf16-mixed",
    "hsdp2x2": "bf16-true",
    "fsdp2·tp2": "16-naive",
    "fsdp2·pp2": "bf16-naive",
    "fsdp2·tp2·pp2": "16-mixed",
}
"""Each layout of several ranks, with one mode; each mode is there."""
PART = {("1", mode) for mode in MODES} | {*ACROSS.items()}
"""The cells of ``make test``. It also trains those of several ranks with one rank's gradient halved."""

SCHEDULE_MODES = ("16-mixed", "16-naive", "bf16-mixed")
"""In which every schedule of a pipeline is compared."""


def table(name: str, rows: Iterable[str], columns: Sequence[str], green: Cells) -> str:
    """The table in Markdown, with a mark where the cell, a row and a column, is in ``green``."""
    lines = [[name, *columns], ["---", *(":-:" for _ in columns)]]
    lines += [[f"`{row}`", *("✓" if (row, column) in green else "✗" for column in columns)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _place(text: str, name: str) -> tuple[int, int]:
    """Where in ``text``, the page's, the table between the two marks of ``name`` begins and ends."""
    start = f"<!-- {name}: written by `make matrix` -->"
    begin = text.index(start) + len(start)
    return begin, text.index(f"<!-- /{name} -->", begin)


def marks_of(text: str, name: str) -> dict[tuple[str, str], str]:
    """By row and column, the marks of the page's table ``name``."""
    lines = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in text[slice(*_place(text, name))].strip().splitlines()
    ]
    return {
        (row.strip("`"), column): mark
        for row, *marks in lines[2:]
        for column, mark in zip(lines[0][1:], marks, strict=True)
    }


def check_table(
    page: Path, name: str, head: str, rows: Sequence[str], columns: Sequence[str], green: Cells, write: bool
) -> None:
    """That ``page`` has the table ``name`` of ``rows`` and ``columns``, with a mark in each cell of ``green``.

    What a run of every cell makes is compared as a whole; ``write``, which ``make matrix`` sets, writes it anew.
    """
    cells = [(row, column) for row in rows for column in columns]
    if write or (WHOLE and green.issuperset(cells)):
        text = page.read_text(encoding="utf-8")
        begin, end = _place(text, name)
        expected = f"{text[:begin]}\n\n{table(head, rows, columns, green)}\n\n{text[end:]}"
        if write:
            page.write_text(expected, encoding="utf-8")
        assert expected == page.read_text(encoding="utf-8"), "run `make matrix`, which writes the table anew"
    marks = marks_of(page.read_text(encoding="utf-8"), name)
    assert list(marks) == cells
    assert all(marks[cell] == "✓" for cell in green.intersection(cells))
